"""Damaged chunks, aborts, missing members, a dead engine: recomputed or refused, never wrong."""

import asyncio
import os
import random
import signal
from dataclasses import replace

import psutil
import pytest
import pytest_asyncio

from kv_tier.arena_view import ArenaView
from kv_tier.store import ChunkQuery
from planner.types import SamplingOptions
from replicas.interface import EngineDeadError, PromptTooLongError
from tests.replicas.vllm_harness import (
    ask,
    ask_batch,
    assert_same,
    make_request,
    make_ticket,
    running_engine,
    store,
    tokens,
)

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(tmp_path_factory):
    # blocks for 8 requests of 1,000 tokens and little more: a leak would be felt
    async with running_engine(
        tmp_path_factory.mktemp("model"), kv_cache_memory_bytes=9 * 1024 * 2048
    ) as engine:
        yield engine


async def until(condition, seconds: float = 10.0) -> None:
    """Wait for something that happens on another process's time."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def location_in(engine, chunk, salt=""):
    """Where a stored chunk is; the lease is given back."""
    query = ChunkQuery(key=engine._keys.key(chunk, cache_salt=salt), token_ids=chunk)
    (lease,) = engine._tier.lookup([query])
    engine._tier.release([lease])
    return lease.location


def flip_a_byte(engine, location, layer: int) -> None:
    arena = ArenaView(engine._tier.config.directory, engine._tier.config.layout)
    k, _ = arena.read_layer(location, layer, 0, 1)
    k[0, 0, 0] += 1.0


async def test_a_damaged_chunk_is_recomputed_and_thrown_out(engine):
    rng = random.Random(1)
    request = make_request(rng, [80, 90])
    plain = await ask(engine, request)
    await store(engine, request)
    flip_a_byte(engine, location_in(engine, request.chunks[1]), layer=2)
    recovered = await ask(engine, request, make_ticket(coverage=0.1))
    assert_same(recovered, plain)
    assert recovered.result.recovered
    assert recovered.result.coverage == 1.0
    key = engine._keys.key(request.chunks[1])
    assert engine._tier.contains([key]) == [False] or not recovered.result.recovered
    await store(engine, request)  # computed anew
    again = await ask(engine, request, make_ticket(coverage=1.0))
    assert not again.result.recovered
    assert_same(again, plain)


async def test_the_others_of_a_batch_do_not_feel_a_damaged_chunk(engine):
    rng = random.Random(2)
    requests = [make_request(rng, [60, 50 + i]) for i in range(3)]
    plans = [{"coverage": 0.3}] * 3
    for request in requests:
        await store(engine, request)
    clean = [await ask(engine, r, make_ticket(**p)) for r, p in zip(requests, plans, strict=True)]
    plain = await ask(engine, requests[1])
    flip_a_byte(engine, location_in(engine, requests[1].chunks[0]), layer=1)
    answers = await ask_batch(engine, requests, 5, plans)
    assert [a.result.recovered for a in answers] == [False, True, False]
    assert_same(answers[0], clean[0])
    assert_same(answers[1], plain)
    assert_same(answers[2], clean[2])


async def test_missed_chunks_are_stored_when_the_engine_is_idle(engine):
    rng = random.Random(3)
    request = make_request(rng, [70, 40])
    cold = await ask(engine, request, make_ticket(coverage=0.2))
    assert cold.result.num_miss_tokens == 110
    await until(lambda: all(engine._tier.contains([engine._keys.key(c) for c in request.chunks])))
    await until(lambda: engine.load().num_ingest_backlog == 0)
    warm = await ask(engine, request, make_ticket(coverage=1.0))
    assert warm.result.num_miss_tokens == 0
    assert_same(warm, await ask(engine, request))
    # another tenant does not see them
    other = await ask(engine, replace(request, cache_salt="tenant"), make_ticket(coverage=0.2))
    assert other.result.num_miss_tokens == 110


async def test_chunk_listing_and_deletion(engine):
    chunk = tokens(random.Random(4), 30)
    stored = await engine.ingest(chunk)
    assert engine.find_chunk(stored.chunk_id) == stored
    assert stored.num_tokens == 30
    assert await engine.ingest(chunk) == stored  # again: nothing to do
    update = engine.residency_update()
    assert stored.chunk_id in update.added
    assert engine.delete_chunk(stored.chunk_id)
    assert engine.find_chunk(stored.chunk_id) is None
    assert not engine.delete_chunk(stored.chunk_id)
    assert stored.chunk_id in engine.residency_update().removed


async def test_the_same_chunk_asked_for_many_times_at_once_is_stored_once(engine):
    chunk = tokens(random.Random(5), 50)
    stored = await asyncio.gather(*(engine.ingest(chunk) for _ in range(5)))
    assert len(set(stored)) == 1
    assert len(engine._tier.find(stored[0].chunk_id)) == 1
    await until(lambda: engine._tier.stats().num_reservations == 0)


async def test_chunks_that_cannot_be_stored_are_refused(engine):
    with pytest.raises(ValueError, match="at least one token"):
        await engine.ingest(())
    with pytest.raises(ValueError, match="does not fit"):
        await engine.ingest(tokens(random.Random(6), 2048))


async def test_too_long_prompts_are_refused_with_both_lengths(engine):
    request = make_request(random.Random(7), [1000, 1100])
    with pytest.raises(PromptTooLongError, match=r"2121 tokens.*2048"):
        await ask(engine, request)


async def test_max_tokens_is_cut_to_the_models_length(engine):
    request = make_request(
        random.Random(8),
        [1000, 1000],
        sampling=SamplingOptions(max_tokens=500, temperature=0.0, ignore_eos=True),
    )
    answer = await ask(engine, request, make_ticket(coverage=0.1))
    assert len(answer.token_ids) == 2048 - request.num_prompt_tokens


async def test_aborts_at_any_time_leak_nothing(engine):
    """More blocks are aborted than there are; then everything still fits."""
    rng = random.Random(9)
    shared = make_request(rng, [300, 300, 300])
    await store(engine, shared)

    async def aborted(delay_s: float, plan: dict):
        request = replace(shared, suffix_ids=tokens(rng, 20))
        task = asyncio.create_task(ask(engine, request, make_ticket(**plan)))
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for _ in range(6):
        await asyncio.gather(
            *(aborted(rng.random() * 0.15, {"coverage": rng.random()}) for _ in range(6))
        )
    # a batch that lost a member is not held for it
    ask_alone = ask(engine, shared, make_ticket(11, 2, coverage=1.0))
    member = asyncio.create_task(aborted(0.005, {"batch_id": 11, "batch_size": 2}))
    assert (await asyncio.wait_for(ask_alone, 10)).result.num_miss_tokens == 0
    await member
    fill = [make_request(rng, [300, 300, 300]) for _ in range(7)]
    answers = await asyncio.wait_for(
        asyncio.gather(*(ask(engine, r, make_ticket(coverage=1.0)) for r in fill)), 60
    )
    assert len(answers) == 7
    await until(lambda: engine.load().num_ingest_backlog == 0, 30)
    await until(lambda: engine._tier.stats().num_leases == 0)
    await until(lambda: engine._tier.stats().num_reservations == 0)
    assert engine._tier.check_integrity() == []
    assert engine.load().num_running == engine.load().num_waiting == 0


async def test_a_store_smaller_than_its_use_evicts(engine):
    rng = random.Random(10)
    before = engine._tier.stats().evictions
    capacity = engine._tier.config.capacity_bytes
    one = engine._tier.config.layout.entry_bytes(1000)
    for _ in range(capacity // one + 3):
        await engine.ingest(tokens(rng, 1000))
    stats = engine._tier.stats()
    assert stats.evictions > before
    assert stats.used_bytes <= capacity
    assert engine._tier.check_integrity() == []


async def test_a_batch_whose_member_never_comes_goes_on(engine):
    request = make_request(random.Random(11), [40])
    answer = await asyncio.wait_for(ask(engine, request, make_ticket(12, 3, coverage=1.0)), 10)
    assert answer.result.batch_size == 1
    assert answer.result.timings.hold_ms >= 50.0  # EngineConfig.batch_hold_ms


async def test_zz_a_dead_engine_is_an_error_not_a_hang(engine):
    """Last in the module: it ends the engine."""
    long = make_request(
        random.Random(12),
        [100],
        sampling=SamplingOptions(max_tokens=1500, temperature=0.0, ignore_eos=True),
    )
    task = asyncio.create_task(ask(engine, long, make_ticket(coverage=1.0)))
    await until(lambda: engine.load().num_running == 1)
    cores = [
        p for p in psutil.Process().children(recursive=True) if "EngineCore" in p.name()
    ] or psutil.Process().children()
    os.kill(cores[0].pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(task, 30)
    with pytest.raises(EngineDeadError):
        await engine.check_health()
