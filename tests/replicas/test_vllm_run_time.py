"""The real engine: prompts without KV blocks, a slow store, open coverages, timelines."""

import asyncio
import random
from dataclasses import replace

import pytest

from planner.auto_signal import AutoRule
from planner.types import Signal
from tests.replicas.vllm_harness import (
    GREEDY,
    NUM_LAYERS,
    ask,
    assert_same,
    make_request,
    make_ticket,
    running_engine,
    store,
)

pytestmark = pytest.mark.vllm

# blocks for little more than one prompt of the longest kind
SMALL = {"kv_cache_memory_bytes": 7 << 19, "max_model_len": 1664}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


async def test_prompts_without_blocks_have_their_first_token_at_once(model_folder):
    """Long answers hold the blocks; whoever comes then is prefilled into host memory."""
    rng = random.Random(0)
    async with running_engine(model_folder, **SMALL) as engine:
        capacity = engine._capacity_tokens
        long_answers = replace(GREEDY, max_tokens=capacity // 4)
        first = [
            make_request(rng, [capacity // 8] * 2, sampling=long_answers) for _ in range(2)
        ]
        late = [make_request(rng, [capacity // 8, 20, capacity // 8]) for _ in range(4)]
        for request in (*first, *late):
            await store(engine, request)
        plain = [await ask(engine, request) for request in (*first, *late)]
        running = [asyncio.create_task(ask(engine, r, make_ticket())) for r in first]
        while engine.load().num_running < len(first):
            await asyncio.sleep(0.01)
        answers = await asyncio.gather(*(ask(engine, r, make_ticket()) for r in late))
        answers = [*(await asyncio.gather(*running)), *answers]
        for answer, exact in zip(answers, plain, strict=True):
            assert_same(answer, exact)
        parked = [a.result for a in answers if a.result.parked]
        assert parked
        assert all(r.timings.block_wait_ms > 0 and r.timings.write_ms > 0 for r in parked)
        assert engine._room.resident_tokens == engine._room.parked_tokens == 0
        await assert_everything_is_free(engine, rng, capacity)


async def test_parked_prompts_that_are_given_up_leave_nothing(model_folder):
    rng = random.Random(1)
    async with running_engine(model_folder, **SMALL) as engine:
        capacity = engine._capacity_tokens
        holder = make_request(
            rng, [capacity // 2], sampling=replace(GREEDY, max_tokens=capacity // 4)
        )
        given_up = [make_request(rng, [capacity // 2]) for _ in range(4)]
        for request in (holder, *given_up):
            await store(engine, request)
        running = asyncio.create_task(ask(engine, holder, make_ticket()))
        while engine.load().num_running < 1:
            await asyncio.sleep(0.01)

        async def give_up(request, num_deltas):
            deltas = engine.generate(request, make_ticket())
            for _ in range(num_deltas):
                await anext(deltas)
            await deltas.aclose()

        await asyncio.gather(*(give_up(r, 1) for r in given_up[:3]))
        assert len(engine._abandoned) == 3
        task = asyncio.create_task(ask(engine, given_up[3], make_ticket()))
        await asyncio.sleep(0)
        task.cancel()
        await running
        assert engine._room.resident_tokens == engine._room.parked_tokens == 0
        await ask(engine, given_up[0], make_ticket())  # takes the list of them along
        assert engine._abandoned == []
        await assert_everything_is_free(engine, rng, capacity)


async def assert_everything_is_free(engine, rng, capacity):
    """A prompt that takes nearly all blocks is answered; no lease is left."""
    whole = make_request(rng, [SMALL["max_model_len"] - 60])
    assert whole.num_prompt_tokens > 0.8 * capacity
    assert len((await ask(engine, whole, make_ticket())).token_ids) == GREEDY.max_tokens
    assert engine._tier.stats().num_leases == 0


@pytest.mark.parametrize("tp", [1, 2])
async def test_a_slow_store_is_waited_for_exactly(model_folder, tp):
    rng = random.Random(2)
    options = {"tensor_parallel_size": tp, "load_bandwidth_mb_s": 1.0}
    async with running_engine(model_folder, **options) as engine:
        request = make_request(rng, [150, 90])
        plain = await ask(engine, request)
        await store(engine, request)
        for coverage, signal in ((1.0, Signal.KV_DEV), (1.0, Signal.QCI)):
            answer = await ask(engine, request, make_ticket(coverage=coverage, signal=signal))
            assert_same(answer, plain)
            assert answer.result.num_filled_tokens > 0
            assert answer.result.timings.fill_ms > 0
        reused = await ask(engine, request, make_ticket(coverage=0.1))
        assert reused.result.num_recomputed_tokens >= reused.result.num_filled_tokens > 0


@pytest.mark.parametrize("tp", [1, 2])
async def test_auto_open_coverage_and_timeline(model_folder, tp):
    rng = random.Random(3)
    options = {"tensor_parallel_size": tp, "auto_rule": AutoRule(threshold=1.0)}
    async with running_engine(model_folder, **options) as engine:
        request = make_request(rng, [80, 60, 70])
        plain = await ask(engine, request)
        await store(engine, request)
        exact = await ask(engine, request, make_ticket(signal=Signal.AUTO, coverage=1.0))
        assert_same(exact, plain)
        by_auto = await ask(engine, request, make_ticket(signal=Signal.AUTO, coverage=0.2))
        by_name = await ask(engine, request, make_ticket(signal=Signal.QCI, coverage=0.2))
        assert by_auto.result.signal is Signal.QCI
        assert_same(by_auto, by_name)

        generous = make_ticket(coverage=0.2, band=(0.05, 1.0), target_ms=1e6)
        hopeless = make_ticket(coverage=0.2, band=(0.05, 1.0), target_ms=0.0)
        assert_same(await ask(engine, request, generous), plain)
        floor = await ask(engine, request, hopeless)
        assert floor.result.coverage == pytest.approx(0.05, abs=0.005)

        seen = await ask(engine, replace(request, wants_timeline=True), make_ticket(coverage=0.2))
        timeline = seen.result.timeline
        assert [s.layer for s in timeline if s.phase == "write"] == list(range(NUM_LAYERS))
        assert all(s.start_ms >= 0 and s.duration_ms >= 0 for s in timeline)
        assert timeline[-1].start_ms < seen.result.timings.first_token_ms
