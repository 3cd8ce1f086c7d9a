"""Damaged chunks, aborts, missing members, a dead engine: recomputed or refused, never wrong."""

import asyncio
import math
import os
import random
import signal
from dataclasses import replace

import psutil
import pytest
import pytest_asyncio
import torch

from kv_tier.arena_view import ArenaView
from kv_tier.layout import pack_header
from kv_tier.store import ChunkQuery
from planner.types import SamplingOptions, Signal
from replicas.interface import EngineDeadError, PromptTooLongError
from tests.replicas.vllm_harness import (
    NUM_LAYERS,
    ask,
    ask_batch,
    assert_idle,
    assert_same,
    held,
    make_request,
    make_ticket,
    running_engine,
    store,
    tokens,
    until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(tmp_path_factory):
    # blocks for 8 requests of 1,000 tokens and little more: a leak would be felt
    async with running_engine(
        tmp_path_factory.mktemp("model"), inspected=True, kv_cache_memory_bytes=9 * 1024 * 2048
    ) as engine:
        yield engine


def location_in(engine, chunk, salt=""):
    """Where a stored chunk is; the lease is given back."""
    query = ChunkQuery(key=engine._keys.key(chunk, cache_salt=salt), token_ids=chunk)
    (lease,) = engine._tier.lookup([query])
    engine._tier.release([lease])
    return lease.location


def arena_of(engine) -> ArenaView:
    return ArenaView(engine._tier.config.directory, engine._tier.config.layout)


def flip_a_byte(engine, location, layer: int) -> None:
    k, _ = arena_of(engine).read_layer(location, layer, 0, 1)
    k[0, 0, 0] += 1.0


def store_nan(engine, location, layer: int, part: str) -> None:
    """NaN as if it had been computed: the checksums are right."""
    arena = arena_of(engine)
    num_heads = engine._tier.config.layout.num_kv_heads
    k, v = (x.clone() for x in arena.read_layer(location, layer, 0, num_heads))
    {"k": k, "v": v}[part][-1, 7] = math.nan
    arena.write_layer(location, layer, 0, k, v)


def foreign_header(engine, location, chunk) -> None:
    """What an engine with another layout would have left there, whole."""
    header = pack_header(
        replace(engine._tier.config.layout, head_dim=64), location.key, location.num_tokens
    )
    arena_of(engine).mapping[location.offset : location.offset + len(header)] = torch.frombuffer(
        bytearray(header), dtype=torch.uint8
    )


def other_entry(engine, location, chunk) -> None:
    """Another chunk's intact entry of the same size."""
    other = location_in(engine, chunk)
    mapping = arena_of(engine).mapping
    mapping[location.offset : location.offset + location.nbytes] = mapping[
        other.offset : other.offset + other.nbytes
    ].clone()


async def start_decode(engine, rng, length: int = 20) -> asyncio.Task:
    """A request that decodes until it is stopped."""
    endless = SamplingOptions(max_tokens=1500, temperature=0.0, ignore_eos=True)
    decoding = engine.load().num_running
    task = asyncio.create_task(ask(engine, make_request(rng, [length], sampling=endless)))
    await until(lambda: engine.load().num_running == decoding + 1)
    return task


async def stop(task: asyncio.Task) -> None:
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


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


@pytest.mark.parametrize("put", [foreign_header, other_entry], ids=lambda put: put.__name__)
async def test_what_is_not_this_chunk_in_this_layout_is_never_used(engine, put):
    rng = random.Random(f"foreign {put.__name__}")
    requests = [make_request(rng, [60, 61]) for _ in range(2)]
    plain = await ask(engine, requests[0])
    for request in requests:
        await store(engine, request)
    beside = await ask(engine, requests[1], make_ticket(coverage=0.3))
    put(engine, location_in(engine, requests[0].chunks[0]), requests[1].chunks[0])
    answers = await ask_batch(engine, requests, 20, [{"coverage": 0.3}] * 2)
    assert [a.result.recovered for a in answers] == [True, False]
    assert_same(answers[0], plain)
    assert_same(answers[1], beside)
    assert engine._tier.contains([engine._keys.key(requests[0].chunks[0])]) == [False]
    await assert_idle(engine)


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("layer", [1, 3])  # WarmUp computes layer 0
@pytest.mark.parametrize("signal", list(Signal), ids=str)
async def test_stored_nan_reaches_no_answer(engine, signal, layer, part):
    """Right checksums over KV that is not finite: recomputed or as if it were not there."""
    rng = random.Random(f"nan {signal} {layer} {part}")
    requests = [make_request(rng, [50, 40 + i]) for i in range(3)]
    plans = [{"coverage": 0.3, "signal": signal}] * 3
    plain = await ask(engine, requests[1])
    await engine.ingest(requests[1].chunks[1])
    missing = await ask(engine, requests[1], make_ticket(**plans[1]))
    for request in requests:
        await store(engine, request)
    alone = [await ask(engine, r, make_ticket(**p)) for r, p in zip(requests, plans, strict=True)]
    store_nan(engine, location_in(engine, requests[1].chunks[0]), layer, part)
    answers = await ask_batch(engine, requests, 21, plans)
    assert_same(answers[0], alone[0])
    assert_same(answers[2], alone[2])
    assert_same(answers[1], plain if answers[1].result.recovered else missing)
    # all rows computed anew: what is stored is of no account
    assert_same(await ask(engine, requests[1], make_ticket(coverage=1.0, signal=signal)), plain)
    await assert_idle(engine)


async def test_nan_in_vllms_blocks_reaches_nobody_who_gets_them_next(engine):
    rng = random.Random("nan blocks")
    poisoned = [make_request(rng, [300, 300, 300]) for _ in range(6)]
    for request in poisoned:
        await store(engine, request)
        for chunk in request.chunks:
            store_nan(engine, location_in(engine, chunk), 3, "v")
    later = [make_request(rng, [250 + 40 * i, 111, 222]) for i in range(6)]
    plains = await asyncio.gather(*(ask(engine, r) for r in later))
    await asyncio.gather(*(ask(engine, r, make_ticket(coverage=0.0)) for r in poisoned))
    for ticket in (None, make_ticket(coverage=1.0)):
        answers = await asyncio.gather(
            *(ask(engine, r) if ticket is None else ask(engine, r, ticket) for r in later)
        )
        for answer, plain in zip(answers, plains, strict=True):
            assert_same(answer, plain)
    await assert_idle(engine)


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


async def test_an_operator_sees_verifies_and_removes_what_the_engine_stored(engine):
    stored = await engine.ingest(tokens(random.Random(6), 30))
    page = await engine.cache.entries("host", 1000)  # beside what other tests' misses left
    assert [e.num_tokens for e in page.entries if e.content_id == stored.chunk_id] == [30]
    assert engine.tier_report().host.num_entries >= 1
    assert (await engine.cache.verify("host", repair=False)).damaged == ()
    assert await engine.cache.discard(stored.chunk_id)
    assert engine.find_chunk(stored.chunk_id) is None


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


@pytest.mark.parametrize("leaver", [0, 1, 2], ids="member{}".format)
async def test_an_abort_between_two_slices_leaves_the_others_right(engine, leaver):
    """Beside a decode each step has one layer, so that the abort comes in the middle."""
    rng = random.Random(f"slices {leaver}")
    requests = [make_request(rng, [200, 70 + i, 90]) for i in range(3)]
    plans = [{"coverage": r, "warmup_depth": 2} for r in (1.0, 0.4, 1.0)]
    for request in requests:
        await store(engine, request)
    alone = [await ask(engine, r, make_ticket(**p)) for r, p in zip(requests, plans, strict=True)]
    decode = await start_decode(engine, rng)
    tasks = [
        asyncio.create_task(ask(engine, r, make_ticket(30 + leaver, 3, **p)))
        for r, p in zip(requests, plans, strict=True)
    ]
    while not (now := await held(engine))["running"]:
        assert not any(task.done() for task in tasks)
    assert (now["prefilling"], now["decoding"]) == (3, 1)
    tasks[leaver].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[leaver], asyncio.CancelledError)
    for idx, answer in enumerate(answers):
        if idx != leaver:
            assert_same(answer, alone[idx])
            assert answer.result.batch_size == 3  # it walked with the leaver's rows to the end
            assert answer.result.coverage == alone[idx].result.coverage
    await stop(decode)
    await assert_idle(engine)


async def test_an_aborted_member_writes_nothing_into_blocks_that_others_have_now(engine):
    """Its rows walk on with the batch while prompts of vLLM's own prefill fill every block."""
    rng = random.Random("blocks")
    cache = engine._engine.vllm_config.cache_config
    deep = {"signal": Signal.QCI, "warmup_depth": 0, "probe_len": NUM_LAYERS, "coverage": 0.5}
    requests = [make_request(rng, [200, 150, 100]) for _ in range(2)]
    for request in requests:
        await store(engine, request)
    alone = await ask(engine, requests[0], make_ticket(**deep))
    decodes = [await start_decode(engine, rng, length=1700) for _ in range(3)]
    tasks = [asyncio.create_task(ask(engine, r, make_ticket(50, 2, **deep))) for r in requests]
    while not (before := await held(engine))["running"]:
        assert not any(task.done() for task in tasks)
    tasks[1].cancel()
    while (now := await held(engine))["blocks"] >= before["blocks"]:
        assert not tasks[0].done()
    assert now["running"] == 1  # the Probe still; the Patch writes
    num_free = cache.num_gpu_blocks - 1 - now["blocks"]
    lengths = [cache.block_size * (num_free // 2) - 60, cache.block_size * (-(-num_free // 2)) - 60]
    fill = [make_request(rng, [n]) for n in lengths]
    filled = await asyncio.gather(*(ask(engine, r) for r in fill))
    assert_same(await tasks[0], alone)
    for decode in decodes:
        await stop(decode)
    for answer, request in zip(filled, fill, strict=True):
        assert_same(answer, await ask(engine, request))
    await assert_idle(engine)


async def test_a_preempted_request_is_computed_again_and_right(engine):
    """Eight answers outgrow the blocks: vLLM takes them from requests that were prefilled by reuse,
    and computes these prompts itself when it has blocks again."""
    rng = random.Random("preempted")
    long = SamplingOptions(max_tokens=180, temperature=0.0, ignore_eos=True, logprobs=True)
    requests = [make_request(rng, [400, 300, 270], sampling=long) for _ in range(8)]
    plains = await asyncio.gather(*(ask(engine, r) for r in requests[:4]))
    plains += await asyncio.gather(*(ask(engine, r) for r in requests[4:]))
    for request in requests:
        await store(engine, request)
    reusing = asyncio.gather(
        *(ask(engine, r, make_ticket(40 + i, coverage=1.0)) for i, r in enumerate(requests))
    )
    num_preempted = 0
    while not reusing.done():
        num_preempted = max(num_preempted, (await held(engine))["preempted"])
    assert num_preempted > 0
    for answer, plain in zip(await reusing, plains, strict=True):
        assert_same(answer, plain)
        assert answer.result.cached_tokens["host"] > 0  # its first prefill was by reuse
    await assert_idle(engine)


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
