"""The real engine: prompts without KV blocks, a slow store, open coverages, timelines."""

import asyncio
import random
from dataclasses import replace

import pytest
import pytest_asyncio

from planner.auto_signal import AutoRule
from planner.types import Signal
from tests.replicas.vllm_harness import (
    GREEDY,
    NUM_LAYERS,
    ask,
    assert_idle,
    assert_same,
    make_request,
    make_ticket,
    running_engine,
    store,
    until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

# blocks for little more than one prompt of the longest kind
SMALL = {"kv_cache_memory_bytes": 7 << 19, "max_model_len": 1664}


SLOW = {"load_bandwidth_mb_s": 0.5, "auto_rule": AutoRule(threshold=1.0)}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def small_engine(tmp_path_factory):
    async with running_engine(tmp_path_factory.mktemp("m"), inspected=True, **SMALL) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=[1, 2], ids=["tp1", "tp2"])
async def slow_engine(request, tmp_path_factory):
    options = {"tensor_parallel_size": request.param, **SLOW}
    async with running_engine(tmp_path_factory.mktemp("m"), **options) as engine:
        yield engine


# ---- prompts without KV blocks ----


async def test_prompts_without_blocks_have_their_first_token_at_once(small_engine):
    """Long answers hold the blocks; whoever comes then is prefilled into host memory."""
    engine, rng = small_engine, random.Random(0)
    capacity = engine._capacity_tokens
    long_answers = replace(GREEDY, max_tokens=capacity // 4)
    first = [make_request(rng, [capacity // 8] * 2, sampling=long_answers) for _ in range(2)]
    late = [make_request(rng, [capacity // 8, 20, capacity // 8]) for _ in range(4)]
    for request in (*first, *late):
        await store(engine, request)
    plain = [await ask(engine, request) for request in (*first, *late)]
    running = [asyncio.create_task(ask(engine, r, make_ticket())) for r in first]
    await until(lambda: engine.load().num_running == len(first))
    answers = await asyncio.gather(*(ask(engine, r, make_ticket()) for r in late))
    answers = [*(await asyncio.gather(*running)), *answers]
    for answer, exact in zip(answers, plain, strict=True):
        assert_same(answer, exact)
    parked = [a.result for a in answers if a.result.parked]
    assert parked
    assert all(r.timings.block_wait_ms > 0 and r.timings.write_ms > 0 for r in parked)
    assert engine._room.resident_tokens == engine._room.parked_tokens == 0
    await assert_everything_is_free(engine, rng)


async def test_parked_prompts_that_are_given_up_leave_nothing(small_engine):
    engine, rng = small_engine, random.Random(1)
    capacity = engine._capacity_tokens
    long_answer = replace(GREEDY, max_tokens=capacity // 4)
    holder = make_request(rng, [capacity // 2], sampling=long_answer)
    given_up = [make_request(rng, [capacity // 2]) for _ in range(4)]
    for request in (holder, *given_up):
        await store(engine, request)
    running = asyncio.create_task(ask(engine, holder, make_ticket()))
    await until(lambda: engine.load().num_running == 1)

    async def give_up(request, num_deltas):
        deltas = engine.generate(request, make_ticket())
        for _ in range(num_deltas):
            await anext(deltas)
        await deltas.aclose()

    await asyncio.gather(*(give_up(r, 1) for r in given_up[:3]))
    task = asyncio.create_task(ask(engine, given_up[3], make_ticket()))
    await asyncio.sleep(0)
    task.cancel()
    await running
    assert engine._room.resident_tokens == engine._room.parked_tokens == 0
    await assert_everything_is_free(engine, rng)


async def assert_everything_is_free(engine, rng):
    """Nothing is held by anybody, and a prompt that takes nearly all blocks is answered."""
    await assert_idle(engine)
    whole = make_request(rng, [SMALL["max_model_len"] - 60])
    assert whole.num_prompt_tokens > 0.8 * engine._capacity_tokens
    assert len((await ask(engine, whole, make_ticket())).token_ids) == GREEDY.max_tokens


# ---- a slow store, and what a running batch decides ----


async def test_a_slow_store_is_waited_for_exactly(slow_engine):
    engine, rng = slow_engine, random.Random(2)
    request = make_request(rng, [150, 90])
    plain = await ask(engine, request)
    await store(engine, request)
    for signal in (Signal.KV_DEV, Signal.QCI, Signal.AUTO):
        answer = await ask(engine, request, make_ticket(coverage=1.0, signal=signal))
        assert_same(answer, plain)
        assert answer.result.num_filled_tokens > 0
        assert answer.result.timings.fill_ms > 0
    reused = await ask(engine, request, make_ticket(coverage=0.1))
    assert reused.result.num_recomputed_tokens >= reused.result.num_filled_tokens > 0


async def test_auto_says_what_it_took(slow_engine):
    """The threshold makes every request a peaked one."""
    request = make_request(random.Random(3), [80, 60, 70])
    await store(slow_engine, request)
    answer = await ask(slow_engine, request, make_ticket(signal=Signal.AUTO, coverage=0.2))
    assert answer.result.signal is Signal.QCI


async def test_an_open_coverage_follows_the_time_that_is_left(slow_engine):
    request = make_request(random.Random(4), [80, 60, 70])
    plain = await ask(slow_engine, request)
    await store(slow_engine, request)
    plan = {"coverage": 0.2, "band": (0.05, 1.0)}
    generous = await ask(slow_engine, request, make_ticket(target_ms=1e6, **plan))
    assert_same(generous, plain)
    assert generous.result.coverage == 1.0
    hopeless = await ask(slow_engine, request, make_ticket(target_ms=0.0, **plan))
    filled = hopeless.result.num_filled_tokens
    assert hopeless.result.num_recomputed_tokens <= 21 + filled + -(-210 // 20)


async def test_a_timeline_covers_every_layer(slow_engine):
    request = make_request(random.Random(5), [80, 60, 70])
    await store(slow_engine, request)
    seen = await ask(slow_engine, replace(request, wants_timeline=True), make_ticket(coverage=0.2))
    timeline = seen.result.timeline
    assert [s.layer for s in timeline if s.phase == "write"] == list(range(NUM_LAYERS))
    assert {s.phase for s in timeline} >= {"load", "warmup", "probe", "patch", "write", "fill"}
    assert all(s.start_ms >= 0 and s.duration_ms >= 0 for s in timeline)
    assert timeline[-1].start_ms < seen.result.timings.first_token_ms
    assert (await ask(slow_engine, request, make_ticket(coverage=0.2))).result.timeline == ()
