"""The connector's bookkeeping, over a real host tier in a temporary folder."""

import json
from dataclasses import replace

import pytest

from kv_tier.arena_view import ArenaView
from kv_tier.host_tier import HostTier, HostTierConfig
from kv_tier.keys import KeySpace
from kv_tier.layout import KvLayout
from planner.cost_model import CostModel
from planner.types import Deviation, PhaseSpan, PrefillTimings, Signal
from replicas.batch import CoverageTerms, SegmentKind
from replicas.connector_scheduler import SchedulerSide, SliceConfig
from replicas.connector_types import (
    JobReport,
    RequestParams,
    ResultParams,
    SegmentSpan,
    WorkerReport,
)
from replicas.parking import FirstTokenSampling, ParkOrder
from tests.fakes.fake_clock import FakeClock
from tests.fakes.records import prefill_result

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32")
KEYS = KeySpace(fingerprint="f", kv_dtype="float32", anchor_ids=(1,))
PROMPT = list(range(100, 130))  # prefix 0-5, chunks 5-12 and 12-20, suffix 20-30
SPANS = [
    SegmentSpan(kind=SegmentKind.PREFIX, start=0, end=5),
    SegmentSpan(kind=SegmentKind.CHUNK, start=5, end=12),
    SegmentSpan(kind=SegmentKind.CHUNK, start=12, end=20),
]


@pytest.fixture
def tier(tmp_path):
    config = HostTierConfig(directory=tmp_path / "tier", capacity_bytes=1 << 20, layout=LAYOUT)
    with HostTier(config) as tier:
        yield tier


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def side(tier, clock):
    return SchedulerSide(tier, KEYS, SliceConfig(decoding=1, idle=8, hold_ms=50.0), clock)


def store(tier, span):
    tokens = PROMPT[span.start : span.end]
    key = KEYS.key(tokens, anchored=span.kind is SegmentKind.CHUNK)
    reservation = tier.reserve(key, tokens)
    ArenaView(tier.config.directory, LAYOUT).write_header(reservation.location)
    assert tier.commit(reservation)
    return key


def params(**values):
    return RequestParams(**{"segments": SPANS, "coverage": 0.25, **values})


def arrive(side, name="r", **values):
    side.arrived(name, params(**values), num_prompt_tokens=len(PROMPT))


def allocate(side, name="r"):
    side.allocated(name, PROMPT, [3, 4])


def report(name="r", *, failed=False, damaged=(), selected=2):
    job = JobReport(
        num_selected=selected,
        failed=failed,
        damaged=list(damaged),
        batch_size=1,
        timings=PrefillTimings(load_ms=1.0, compute_ms=9.0),
    )
    return WorkerReport({name: job})


def test_one_request_from_arrival_to_result(side, tier, clock):
    store(tier, SPANS[1])
    arrive(side)
    clock.advance(7.0)
    assert side.external_tokens("r", 0) == (29, True)
    allocate(side)
    (batch,) = side.step(decoding=False).batches
    (job,) = batch.jobs
    assert [s.location is not None for s in job.segments] == [False, True, False]
    assert job.block_ids == [3, 4]
    assert job.coverage == 0.25
    assert tier.stats().num_leases == 1
    assert side.step(decoding=False).batches == []
    side.received({"r"}, report())
    assert tier.stats().num_leases == 0
    answer = side.finished("r")
    assert answer.missing == [0, 2]
    result = answer.result
    assert result.num_context_tokens == 15
    assert result.num_miss_tokens == 8
    assert result.coverage == (8 + 2) / 15
    assert result.cached_tokens == {"host": 7}
    assert result.num_recomputed_tokens == 30 - 7 + 2
    assert result.timings.hold_ms == 7.0
    assert result.timings.load_ms == 1.0
    assert side.finished("r") is None


def test_requests_that_are_not_ours_are_left_alone(side):
    side.arrived("plain", None, num_prompt_tokens=10)
    assert side.external_tokens("plain", 0) == (0, False)
    assert side.finished("plain") is None


def test_a_prompt_of_one_token_is_left_to_vllm(side):
    side.arrived("r", params(segments=[]), num_prompt_tokens=1)
    assert side.external_tokens("r", 0) == (0, False)
    assert side.finished("r") is None


def test_slices_are_short_beside_decodes(side):
    assert side.step(decoding=True).num_layers == 1
    assert side.step(decoding=False).num_layers == 8


def test_a_failed_prefill_is_left_to_vllm_and_its_chunk_discarded(side, tier):
    keys = [store(tier, span) for span in SPANS[1:]]
    arrive(side)
    side.external_tokens("r", 0)
    allocate(side)
    side.received({"r"}, report(failed=True, damaged=[keys[0]]))
    assert side.external_tokens("r", 0) == (0, False)
    assert tier.contains(keys) == [False, True]
    result = side.finished("r").result
    assert result.recovered
    assert result.coverage == 1.0
    assert result.cached_tokens == {"host": 0}
    assert result.num_recomputed_tokens == len(PROMPT)


def test_a_preempted_request_is_left_to_vllm(side):
    arrive(side)
    side.external_tokens("r", 0)
    allocate(side)
    side.received({"r"}, report())
    assert side.external_tokens("r", 0) == (0, False)


def test_a_batch_is_held_for_its_members(side, clock):
    arrive(side, "a", batch_id=7, batch_size=2)
    assert side.external_tokens("a", 0) == (None, False)
    arrive(side, "b", batch_id=7, batch_size=2)
    assert side.external_tokens("a", 0) == (29, True)
    assert side.external_tokens("b", 0) == (29, True)
    allocate(side, "a")
    allocate(side, "b")
    (batch,) = side.step(decoding=False).batches
    assert [j.request_id for j in batch.jobs] == ["a", "b"]


def test_a_batch_is_not_held_for_ever(side, clock):
    arrive(side, "a", batch_id=7, batch_size=2)
    assert side.external_tokens("a", 0) == (None, False)
    clock.advance(50.0)
    assert side.external_tokens("a", 0) == (29, True)
    # the late member goes alone, at once
    arrive(side, "b", batch_id=7, batch_size=2)
    assert side.external_tokens("b", 0) == (29, True)


def test_a_batch_is_not_held_for_a_member_that_was_aborted(side):
    arrive(side, "a", batch_id=7, batch_size=2)
    arrive(side, "b", batch_id=7, batch_size=3)
    side.finished("b")
    assert side.external_tokens("a", 0) == (29, True)


def test_an_abort_keeps_the_leases_until_the_ranks_have_dropped_it(side, tier):
    store(tier, SPANS[1])
    arrive(side)
    side.external_tokens("r", 0)
    allocate(side)
    assert side.finished("r") is None  # no result: it never got to its first token
    assert tier.stats().num_leases == 1
    side.received({"r"}, None)
    assert tier.stats().num_leases == 0
    assert side.finished("r") is None


def ingest(side, name="i"):
    side.arrived(
        name, params(segments=[SPANS[2]], ingest_content_id="c"), num_prompt_tokens=len(PROMPT)
    )
    side.external_tokens(name, 0)
    allocate(side, name)
    return side.step(decoding=False).batches[0].jobs[0]


def test_an_ingest_is_committed_when_every_rank_has_written(side, tier):
    job = ingest(side)
    (capture,) = job.captures
    assert (capture.start, capture.end) == (12, 20)
    assert tier.find("c") == []
    ArenaView(tier.config.directory, LAYOUT).write_header(capture.location)
    side.received({"i"}, report("i"))
    assert side.finished("i").stored
    assert tier.find("c")[0].num_tokens == 8
    # once more: nothing to write
    assert ingest(side, "again").captures == []


def test_an_ingest_and_a_request_never_share_a_batch(side):
    arrive(side, "r", batch_id=-1)
    side.external_tokens("r", 0)
    side.arrived(
        "i",
        params(segments=[SPANS[2]], ingest_content_id="c", batch_id=-1),
        num_prompt_tokens=len(PROMPT),
    )
    side.external_tokens("i", 0)
    allocate(side, "r")
    allocate(side, "i")
    batches = side.step(decoding=False).batches
    assert [(b.is_ingest, len(b.jobs)) for b in batches] == [(False, 1), (True, 1)]


def test_a_rank_that_reports_late_is_not_forgotten(side, tier):
    ingest(side)
    side.received(set(), report("i", failed=True))
    side.received({"i"}, report("i"))
    assert not side.finished("i").stored
    assert tier.find("c") == []


@pytest.mark.parametrize("outcome", ["failed", "aborted"])
def test_an_ingest_that_did_not_finish_stores_nothing(side, tier, outcome):
    ingest(side)
    if outcome == "failed":
        side.received({"i"}, report("i", failed=True))
        assert not side.finished("i").stored
    else:
        side.finished("i")
        side.received({"i"}, None)
    assert tier.find("c") == []
    assert tier.stats().num_reservations == 0
    assert tier.stats().used_bytes == 0


def test_a_store_that_cannot_be_read_is_a_miss(side, tier, caplog):
    store(tier, SPANS[1])
    arrive(side)
    side.external_tokens("r", 0)
    tier.close()
    allocate(side)
    (job,) = side.step(decoding=False).batches[0].jobs
    assert all(s.location is None for s in job.segments)
    side.received({"r"}, report())
    assert side.finished("r").missing == [0, 1, 2]
    assert "cannot be read" in caplog.text


def test_reports_of_two_ranks_are_one():
    merged = report(damaged=[b"x"]).aggregate(report(failed=True, damaged=[b"y"]))
    assert merged.jobs["r"].failed
    assert merged.jobs["r"].damaged == [b"x", b"y"]
    both = report("a").aggregate(report("b"))
    assert set(both.jobs) == {"a", "b"}


def test_params_and_results_survive_the_wire():
    original = params(policy="x", batch_id=3, cache_salt="s")
    assert RequestParams.from_wire(original.to_wire()) == original
    assert RequestParams.from_wire(None) is None
    assert RequestParams.from_wire({"other": 1}) is None


# ---- parked prefills ----

PARK = ParkOrder(park_id="park-1", sampling=FirstTokenSampling())


def test_a_parked_prefill_is_of_its_own_prompt_and_has_no_blocks(side, tier):
    store(tier, SPANS[1])
    side.arrived("a", params(park=PARK, park_token_ids=PROMPT), num_prompt_tokens=2)
    assert side.external_tokens("a", 0) == (1, True)
    side.allocated("a", [0, 0], [9])
    (batch,) = side.step(decoding=False).batches
    (job,) = batch.jobs
    assert (job.token_ids, job.block_ids, job.park) == (PROMPT, [], PARK)
    assert job.segments[1].location is not None
    told = report("a")
    told.jobs["a"] = replace(told.jobs["a"], first_token=17, first_logprob=-0.5)
    side.received({"a"}, told)
    answer = side.finished("a")
    assert (answer.first_token, answer.first_logprob) == (17, -0.5)
    assert answer.result.parked and answer.result.num_prompt_tokens == 30
    assert tier.stats().num_leases == 0


def test_going_on_restores_all_of_the_prompt(side):
    side.arrived("b", RequestParams(restore_id="park-1"), num_prompt_tokens=31)
    assert side.external_tokens("b", 0) == (30, True)
    side.allocated("b", [*PROMPT, 17], [3, 4])
    meta = side.step(decoding=True)
    assert meta.batches == [] and side.step(decoding=True).restores == []
    (restore,) = meta.restores
    assert (restore.park_id, restore.num_tokens, restore.block_ids) == ("park-1", 30, [3, 4])
    side.received({"b"}, report("b"))
    assert side.finished("b") is None  # the parked request has told all


# ---- what a batch shares ----


def test_a_batchs_deadline_is_its_first_members(side):
    cost = CostModel(num_layers=2, fixed_ms=1, row_ms=1, pair_ms=0, selected_pair_ms=0, reuse_ms=0)
    for name, deadline in (("a", None), ("b", 50.0), ("c", 20.0), ("d", 30.0)):
        terms = None if deadline is None else CoverageTerms(deadline_ms=deadline, cost=cost)
        band = None if deadline is None else (0.1, 0.5)
        arrive(side, name, batch_id=7, batch_size=4, terms=terms, band=band)
    for name in "abcd":
        assert side.external_tokens(name, 0) == (29, True)
        allocate(side, name)
    (batch,) = side.step(decoding=False).batches
    assert batch.terms.deadline_ms == 20.0
    assert [job.band for job in batch.jobs] == [None, (0.1, 0.5), (0.1, 0.5), (0.1, 0.5)]


def test_requests_with_another_deviation_walk_apart(side):
    for name, deviation in (("a", Deviation.K), ("b", Deviation.V), ("c", Deviation.K)):
        arrive(side, name, deviation=deviation)
        side.external_tokens(name, 0)
        allocate(side, name)
    batches = side.step(decoding=False).batches
    assert [[j.request_id for j in b.jobs] for b in batches] == [["a", "c"], ["b"]]
    assert [b.deviation for b in batches] == [Deviation.K, Deviation.V]


def test_everything_survives_the_wire():
    cost = CostModel(num_layers=2, fixed_ms=1, row_ms=1, pair_ms=0, selected_pair_ms=0, reuse_ms=0)
    sent = params(
        signal=Signal.AUTO,
        deviation=Deviation.V,
        band=(0.1, 0.5),
        terms=CoverageTerms(deadline_ms=12.5, cost=cost),
        park=PARK,
        park_token_ids=[1, 2],
        wants_timeline=True,
    )
    assert RequestParams.from_wire(json.loads(json.dumps(sent.to_wire()))) == sent
    answer = ResultParams(
        result=prefill_result(
            signal=Signal.QCI,
            timings=PrefillTimings(fill_ms=1.0),
            timeline=(PhaseSpan(phase="patch", layer=1, start_ms=0.5, duration_ms=2.0),),
        ),
        first_token=4,
    )
    assert ResultParams.from_wire(json.loads(json.dumps(answer.to_wire()))) == answer
