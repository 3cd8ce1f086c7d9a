"""The three phases inside vLLM, float32, against plain vLLM: tensor parallelism 1 and 2."""

import asyncio
import random
from dataclasses import replace

import pytest
import pytest_asyncio

from planner.policies import STATIC_POLICIES
from planner.types import RequestPlan, SamplingOptions, Signal
from replicas import vllm_args
from tests.replicas.vllm_harness import (
    ANCHOR,
    GREEDY,
    NUM_LAYERS,
    Answer,
    ask,
    ask_batch,
    assert_same,
    make_request,
    make_ticket,
    running_engine,
    store,
)

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

LENGTHS = [[40], [127, 1], [128, 60, 77], [1, 1, 300], [250, 250, 250]]
EXACT = [
    {"coverage": 1.0},
    {"coverage": 1.0, "warmup_depth": 0, "probe_len": 0},
    {"coverage": 1.0, "warmup_depth": 2, "probe_len": 2, "signal": Signal.QCI},
    {"coverage": 0.0, "warmup_depth": NUM_LAYERS, "probe_len": 0},
]

SHORT = replace(GREEDY, max_tokens=4)
# (w, p): none, a Probe alone, one layer, a deep Probe, a late one, all layers, and no Probe
DEPTHS = [(0, 0), (0, 1), (1, 1), (1, 3), (3, 1), (0, NUM_LAYERS), (2, 0), (NUM_LAYERS, 0)]


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=[1, 2], ids=["tp1", "tp2"])
async def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    async with running_engine(folder, tensor_parallel_size=request.param) as engine:
        yield engine


def anchor_of(engine) -> tuple[int, ...]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engine._config.model_dir)
    return tuple(tokenizer.encode(ANCHOR, add_special_tokens=False))


async def each_alone(engine, request, plans: list[dict]) -> list[Answer]:
    """One request under several plans at once, each a batch of its own."""
    tickets = [make_ticket(100 + i, **plan) for i, plan in enumerate(plans)]
    return await asyncio.gather(*(ask(engine, request, ticket) for ticket in tickets))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
async def test_exact_configurations_answer_as_plain_vllm(engine, lengths):
    request = make_request(random.Random(str(lengths)), lengths)
    plain = await ask(engine, request)
    assert plain.result.full_prefill
    cold = await ask(engine, request, make_ticket(coverage=0.3))  # nothing stored: all is missing
    assert_same(cold, plain)
    assert cold.result.num_miss_tokens == sum(lengths)
    await store(engine, request)
    for plan in EXACT:
        warm = await ask(engine, request, make_ticket(**plan))
        assert_same(warm, plain)
        assert warm.result.num_miss_tokens == 0
        assert warm.result.cached_tokens["host"] >= sum(lengths)
        assert warm.result.coverage == 1.0


@pytest.mark.parametrize("signal", list(Signal), ids=str)
async def test_recomputing_everything_is_exact_with_every_signal(engine, signal):
    """All coverage behind every kind of (w, p), and WarmUp through all layers at any coverage."""
    request = make_request(random.Random(f"all {signal}"), [60, 1, 90], sampling=SHORT)
    plain = await ask(engine, request)
    await store(engine, request)
    plans = [{"coverage": 1.0, "warmup_depth": w, "probe_len": p} for w, p in DEPTHS]
    plans += [{"coverage": r, "warmup_depth": NUM_LAYERS, "probe_len": 0} for r in (0.0, 0.3)]
    answers = await each_alone(engine, request, [{**plan, "signal": signal} for plan in plans])
    for answer in answers:
        assert_same(answer, plain)
        assert answer.result.num_miss_tokens == 0
        assert answer.result.coverage == 1.0
        assert not answer.result.recovered


@pytest.mark.parametrize("signal", list(Signal), ids=str)
async def test_a_chunk_behind_its_own_prefix_is_exact_with_every_signal(engine, signal):
    """At no coverage nothing is recomputed; at some, tokens become what they were before."""
    request = make_request(
        random.Random(f"own {signal}"), [130], prefix=anchor_of(engine), sampling=SHORT
    )
    plain = await ask(engine, request)
    await store(engine, request)
    plans = [
        {"coverage": r, "warmup_depth": w, "probe_len": p, "signal": signal}
        for w, p in DEPTHS
        for r in (0.0, 0.25)
    ]
    for plan, answer in zip(plans, await each_alone(engine, request, plans), strict=True):
        assert_same(answer, plain)
        if plan["coverage"] == 0.0:
            share = plan["warmup_depth"] == NUM_LAYERS
            assert answer.result.coverage == share


@pytest.mark.parametrize("signal", list(Signal), ids=str)
async def test_a_request_is_answered_alone_as_among_others_with_every_signal(engine, signal):
    rng = random.Random(f"batch {signal}")
    requests = [make_request(rng, lengths, sampling=SHORT) for lengths in LENGTHS]
    for request in requests:
        await store(engine, request)
    for batch_id, (w, p) in enumerate([(0, 1), (1, 1), (0, NUM_LAYERS), (2, 0)], start=200):
        plans = [
            {"coverage": r, "warmup_depth": w, "probe_len": p, "signal": signal}
            for r in (0.3, 0.0, 0.5, 1.0, 0.2)
        ]
        # all of the last one's chunks are missing: a tenant's first request
        asked = [*requests[:-1], replace(requests[-1], cache_salt=f"together {batch_id}")]
        together = await ask_batch(engine, asked, batch_id, plans)
        asked[-1] = replace(requests[-1], cache_salt=f"alone {batch_id}")
        for request, plan, member in zip(asked, plans, together, strict=True):
            alone = await ask(engine, request, make_ticket(**plan))
            assert_same(member, alone)
            assert member.result.coverage == alone.result.coverage
            assert (member.result.batch_size, alone.result.batch_size) == (len(requests), 1)


@pytest.mark.parametrize("signal", list(Signal), ids=str)
async def test_chunks_may_change_places_and_come_back_with_every_signal(engine, signal):
    request = make_request(random.Random(f"order {signal}"), [50, 70, 30, 9], sampling=SHORT)
    turned = replace(request, chunks=request.chunks[2:] + request.chunks[:2])
    await store(engine, request)
    some = make_ticket(coverage=0.3, signal=signal)
    before = await ask(engine, request, some)
    between = await ask(engine, turned, some)
    after = await ask(engine, request, some)
    assert_same(after, before)
    assert after.result.coverage == before.result.coverage
    assert between.result.num_miss_tokens == 0
    assert abs(between.logprobs[0] - before.logprobs[0]) > 1e-3  # the order does matter
    everything = make_ticket(coverage=1.0, signal=signal)
    for asked in (turned, request):
        assert_same(await ask(engine, asked, everything), await ask(engine, asked))


async def test_one_chunk_behind_its_own_anchor_needs_no_recomputation(engine):
    anchor = anchor_of(engine)
    rng = random.Random(1)
    for length in (1, 100, 400):
        request = make_request(rng, [length], prefix=anchor)
        plain = await ask(engine, request)
        await store(engine, request)
        for plan in (
            {"coverage": 0.0},
            {"coverage": 0.0, "warmup_depth": 0, "probe_len": 0},
            {"coverage": 0.2, "signal": Signal.QCI, "warmup_depth": 0, "probe_len": NUM_LAYERS},
        ):
            reused = await ask(engine, request, make_ticket(**plan))
            assert_same(reused, plain)


async def test_nothing_but_the_last_token_to_compute(engine):
    """A prompt of one stored chunk and one token: the Patch has no row at all."""
    request = make_request(random.Random(8), [60], prefix=0, suffix=1)
    await store(engine, request)
    for plan in ({"coverage": 0.0, "warmup_depth": 0, "probe_len": 0}, {"coverage": 0.0}):
        answer = await ask(engine, request, make_ticket(**plan))
        assert answer.result.num_recomputed_tokens == 1
    assert_same(await ask(engine, request, make_ticket(coverage=1.0)), await ask(engine, request))


async def test_full_reuse_of_several_chunks_is_not_exact(engine):
    """The control of the tests above: reused KV really is used."""
    rng = random.Random(2)
    request = make_request(rng, [100, 100, 100])
    plain = await ask(engine, request)
    await store(engine, request)
    reused = await ask(engine, request, make_ticket(coverage=0.0))
    assert abs(reused.logprobs[0] - plain.logprobs[0]) > 1e-3
    assert reused.result.coverage == 0.0


async def test_every_baseline_runs_and_its_coverage_is_what_it_says(engine):
    lengths = [100, 60, 80]
    request = make_request(random.Random(9), lengths)
    await store(engine, request)
    for name, policy in STATIC_POLICIES.items():
        config = policy.for_chunks(lengths)
        plan = RequestPlan.of_config(name, config, num_layers=NUM_LAYERS)
        ticket = replace(make_ticket(), plan=plan)
        result = (await ask(engine, request, ticket)).result
        assert result.policy == name
        assert not result.recovered
        assert result.full_prefill == (name == "full_prefill")
        assert result.coverage == pytest.approx(config.coverage, abs=1 / sum(lengths))


async def test_a_ragged_batch_answers_as_each_request_alone(engine):
    rng = random.Random(3)
    requests = [make_request(rng, lengths) for lengths in LENGTHS]
    plains = [await ask(engine, r) for r in requests]
    for request in requests[1:]:  # one of them all misses
        await store(engine, request)
    exact = [{"coverage": 1.0}] * len(requests)
    for answer, plain in zip(await ask_batch(engine, requests, 77, exact), plains, strict=True):
        assert_same(answer, plain)
        assert answer.result.batch_size == len(requests)
    # different coverages, not exact: still the same alone and together
    plans = [{"coverage": r} for r in (0.3, 0.0, 0.5, 1.0, 0.2)]
    await store(engine, requests[0])
    alone = [await ask(engine, r, make_ticket(**p)) for r, p in zip(requests, plans, strict=True)]
    together = await ask_batch(engine, requests, 78, plans)
    for one, other in zip(together, alone, strict=True):
        assert_same(one, other)
        assert one.result.coverage == other.result.coverage


async def test_sliced_beside_a_running_decode(engine):
    rng = random.Random(4)
    request = make_request(rng, [200, 150])
    plain = await ask(engine, request)
    await store(engine, request)
    long = make_request(
        rng, [20], sampling=SamplingOptions(max_tokens=600, temperature=0.0, ignore_eos=True)
    )
    decoding = asyncio.Event()
    gaps: list[int] = []

    async def decode():
        async for delta in engine.generate(long, make_ticket(policy="full_prefill")):
            gaps.append(delta.num_generated)
            decoding.set()

    decoder = asyncio.create_task(decode())
    await decoding.wait()
    before = len(gaps)
    sliced = await ask(engine, request, make_ticket(coverage=1.0))
    assert not decoder.done()
    assert len(gaps) > before + NUM_LAYERS - 1  # the decode went on between the layers
    assert_same(sliced, plain)
    decoder.cancel()
    await asyncio.gather(decoder, return_exceptions=True)


async def test_chunks_in_another_order_and_place_hit(engine):
    rng = random.Random(5)
    first = make_request(rng, [60, 90, 30])
    await store(engine, first)
    moved = replace(first, chunks=first.chunks[::-1], prefix_ids=first.prefix_ids * 3)
    answer = await ask(engine, moved, make_ticket(coverage=1.0))
    assert answer.result.num_miss_tokens == 0
    assert_same(answer, await ask(engine, moved))
    # a chunk more than once in a prompt
    doubled = replace(first, chunks=first.chunks[:1] * 3)
    assert_same(await ask(engine, doubled, make_ticket(coverage=1.0)), await ask(engine, doubled))


async def test_unwritten_kv_is_noticed(tmp_path_factory, monkeypatch):
    """The negative control: a connector that computes, but writes no page of vLLM's cache."""
    monkeypatch.setattr(vllm_args, "CONNECTOR_MODULE", "tests.replicas.unwritten_connector")
    rng = random.Random(6)
    async with running_engine(tmp_path_factory.mktemp("control")) as engine:
        for lengths in LENGTHS[2:]:
            request = make_request(rng, lengths)
            plain = await ask(engine, request)
            broken = await ask(engine, request, make_ticket(coverage=1.0))
            assert abs(broken.logprobs[0] - plain.logprobs[0]) > 1e-3
