"""Stored KV that is still being fetched: read as it arrives, and done without when it does not."""

import random
from dataclasses import replace

import pytest
import torch

from kv_tier.arena_view import ArenaView
from kv_tier.redis.entry_memory import EntryMemory
from planner.types import Signal
from replicas import front_fill
from replicas.arrivals import ArenaArrivals
from replicas.batch import ArrivalTerms, BatchJob
from tests.fakes.fake_clock import FakeClock
from tests.kv_tier.arena_cases import LAYOUT, kv_of, open_tier, query, reserve
from tests.replicas.harness import (
    MemorySource,
    full_kv,
    make_job,
    random_tokens,
    run,
    tiny_model,
    worst_difference,
)

ANCHOR = [1, 2]
RANKS = ((0, 2), (2, 2))
LAYER_BYTES = LAYOUT.layer_bytes(7)


class Fetched:
    """A chunk of the arena that arrives when a test says so."""

    def __init__(self, tier, view, chunk):
        reservation = reserve(tier, chunk)
        self.chunk, self.location = chunk, reservation.location
        self.entry = EntryMemory(memoryview(view.mapping.numpy()), self.location, LAYOUT)
        self.entry.begin_arrival()

    def arrive(self, layer):
        kv = kv_of(self.chunk, layer, self.location.num_tokens).contiguous()
        self.entry.layer(layer)[:] = kv.view(torch.uint8).numpy().reshape(-1).data
        self.entry.put_checksums(layer, self.entry.found_checksums(layer))


@pytest.fixture
def tier(tmp_path):
    with open_tier(tmp_path) as opened:
        yield opened


@pytest.fixture
def view(tier):
    return ArenaView(tier.config.directory, LAYOUT)


def arrivals_of(view, chunks, *, clock=None, heads=RANKS[0], first_layer=0, **options):
    clock = clock or FakeClock()
    terms = ArrivalTerms(bytes_per_ms=LAYER_BYTES / 8.0, deadline_ms=clock.now_ms() + 100.0)
    return ArenaArrivals(
        view,
        [chunk.location for chunk in chunks],
        heads,
        terms,
        clock,
        first_layer=first_layer,
        **options,
    )


@pytest.mark.parametrize("heads", RANKS)
def test_a_layer_is_ready_when_all_chunks_have_it(tier, view, heads):
    chunks = [Fetched(tier, view, 1), Fetched(tier, view, 2)]
    arrivals = arrivals_of(view, chunks, heads=heads)
    assert arrivals.expected_ms(1) == 32.0  # two layers of two chunks
    chunks[0].arrive(0)
    assert not arrivals.is_ready(0)
    assert arrivals.expected_ms(1) == 24.0
    chunks[1].arrive(0)
    assert arrivals.is_ready(0) and not arrivals.is_ready(1)
    assert [arrivals.expected_ms(layer) for layer in (0, 1)] == [0.0, 16.0]
    for chunk in chunks:
        chunk.arrive(1)
        chunk.entry.write_header()
    assert arrivals.is_ready(1)
    assert arrivals.have_missed() == [False, False]


def test_chunks_that_two_requests_share_are_waited_for_once(tier, view):
    chunk = Fetched(tier, view, 1)
    arrivals = arrivals_of(view, [chunk, chunk])
    assert arrivals.keys == (query(1).key,)
    assert arrivals.expected_ms(0) == 8.0


def test_a_fetch_that_failed_is_seen_on_every_rank(tier, view):
    chunks = [Fetched(tier, view, 1), Fetched(tier, view, 2)]
    chunks[0].arrive(0)
    chunks[1].entry.fail_arrival()
    for heads in RANKS:
        arrivals = arrivals_of(view, chunks, heads=heads)
        assert arrivals.have_missed() == [False, True]
        assert not arrivals.is_ready(0)
        arrivals.do_without({chunks[1].location.key})
        assert arrivals.have_missed() == [False]
        assert arrivals.is_ready(0)


def test_space_that_is_another_chunk_s_by_now_has_missed(tier, view):
    chunk = Fetched(tier, view, 1)
    arrivals = arrivals_of(view, [chunk])
    other = replace(chunk.location, key=query(2).key)
    view.write_header(other)
    assert arrivals.have_missed() == [True]


def test_what_is_not_there_at_the_deadline_has_missed(tier, view):
    chunks = [Fetched(tier, view, 1), Fetched(tier, view, 2)]
    for layer in range(LAYOUT.num_layers):
        chunks[0].arrive(layer)
    chunks[0].entry.write_header()
    clock = FakeClock()
    arrivals = arrivals_of(view, chunks, clock=clock)
    assert arrivals.have_missed() == [False, False]
    clock.advance(100.0)
    assert arrivals.have_missed() == [False, True]


@pytest.mark.parametrize("how", ["arrives", "fails", "nothing"])
def test_a_wait_ends_with_the_layer_with_the_fetch_or_with_its_time(tier, view, how):
    clock, chunk, slept = FakeClock(), Fetched(tier, view, 1), []

    def sleep(seconds):
        slept.append(seconds)
        clock.advance(seconds * 1e3)
        if len(slept) == 3 and how == "arrives":
            chunk.arrive(0)
        if len(slept) == 3 and how == "fails":
            chunk.entry.fail_arrival()

    arrivals = arrivals_of(view, [chunk], clock=clock, sleep_s=sleep)
    arrivals.wait(0, timeout_ms=5.0)
    assert sum(slept) * 1e3 == pytest.approx(5.0 if how == "nothing" else 1.5)


# ---- a chunk that does not come ----


class MissingLater:
    """Everything is there, until some chunks turn out not to come."""

    def __init__(self, keys, after):
        self.keys = tuple(keys)
        self._after = after
        self._looks = 0

    def have_missed(self):
        self._looks += 1
        return [self._looks > self._after] * len(self.keys)

    def do_without(self, keys):
        self.keys = tuple(key for key in self.keys if key not in keys)

    def is_ready(self, layer):
        return True

    def expected_ms(self, layer):
        return 0.0

    def wait(self, layer, timeout_ms):
        raise AssertionError("everything is there")


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def two_jobs(model, source, coverage, *, missing):
    rng = random.Random(5)
    return [
        make_job(
            model,
            source,
            random_tokens(rng, 2, 6),
            [random_tokens(rng, 5, 20) for _ in range(3)],
            random_tokens(rng, 2, 6),
            coverage=coverage,
            anchor=ANCHOR,
            missing=frozenset(missing) if i == 0 else frozenset(),
            request_id=f"r{i}",
        )
        for i in range(2)
    ]


@pytest.mark.parametrize("signal", list(Signal))
@pytest.mark.parametrize(("w", "p"), [(0, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("after", [0, 1])
def test_a_chunk_that_does_not_come_is_as_if_it_had_not_been_there(model, signal, w, p, after):
    source = MemorySource()
    jobs = two_jobs(model, source, 0.3, missing=())
    key = jobs[0].segments[1].location.key
    arrivals = MissingLater([key], after)
    found, trace = run(model, source, jobs, signal, w, p, arrivals=arrivals)
    without = two_jobs(model, source, 0.3, missing=[1])
    wanted, wanted_trace = run(model, source, without, signal, w, p)
    assert trace.missed == {key}
    assert trace.num_selected == wanted_trace.num_selected
    assert trace.failed == set()
    for a, b in zip(found, wanted, strict=True):
        assert worst_difference(a, b) == 0.0


@pytest.mark.parametrize("signal", [Signal.KV_DEV, Signal.QCI])
def test_coverage_one_stays_exact_without_the_chunk(model, signal):
    source = MemorySource()
    jobs = two_jobs(model, source, 1.0, missing=())
    keys = [segment.location.key for segment in jobs[0].segments]
    found, trace = run(model, source, jobs, signal, 1, 1, arrivals=MissingLater(keys, 2))
    assert trace.missed == set(keys)
    for job, kv in zip(jobs, found, strict=True):
        assert worst_difference(kv, full_kv(model, job.token_ids)) < 2e-4


def test_a_prefill_that_computes_everything_waits_for_nothing(model):
    source = MemorySource()
    jobs = two_jobs(model, source, 0.3, missing=())
    key = jobs[0].segments[0].location.key
    arrivals = MissingLater([key], 0)
    found, trace = run(model, source, jobs, Signal.KV_DEV, model.num_layers, 0, arrivals=arrivals)
    assert trace.missed == set()
    for job, kv in zip(jobs, found, strict=True):
        assert worst_difference(kv, full_kv(model, job.token_ids)) < 2e-4


def test_segments_without_stored_kv_are_not_arriving_either(model):
    source = MemorySource()
    (job, _) = two_jobs(model, source, 0.3, missing=())
    job = replace(job, segments=[replace(s, is_arriving=True) for s in job.segments])
    keys = frozenset({job.segments[0].location.key, job.segments[2].location.key})
    batch = BatchJob(batch_id=0, signal=Signal.KV_DEV, warmup_depth=1, probe_len=1, jobs=[job])
    left = batch.without_stored(keys).jobs[0].segments
    assert [(s.location is None, s.is_arriving) for s in left] == [
        (True, False),
        (False, True),
        (True, False),
    ]


class LateThenMissing(MissingLater):
    """The first layers are late, so that the wait recomputes the front; then a chunk is missing."""

    def is_ready(self, layer):
        return self._looks > self._after


@pytest.mark.parametrize("signal", list(Signal))
@pytest.mark.parametrize("num_waits", [1, 6, 12, 18, 24, 30])
def test_a_chunk_that_misses_behind_a_recomputed_front(model, signal, num_waits, monkeypatch):
    """The front may have passed all that is left to rank, of one request or of both."""
    monkeypatch.setattr(front_fill, "BLOCK_ROWS", 9)
    source = MemorySource()
    jobs = [replace(job, band=(0.1, 0.5)) for job in two_jobs(model, source, 0.3, missing=())]
    keys = [segment.location.key for segment in jobs[0].segments[1:]]

    def resolve(demands, arrivals_ms):
        return [demand.planned for demand in demands]

    arrivals = LateThenMissing(keys, num_waits)
    found, trace = run(model, source, jobs, signal, 1, 1, arrivals=arrivals, resolver=resolve)
    assert sum(trace.num_filled) > 0 or num_waits == 1
    assert trace.failed == set()
    for job, kv, num_filled in zip(jobs, found, trace.num_filled, strict=True):
        is_gone = {s.location.key for s in job.segments} & trace.missed
        stored = [
            t for s in job.segments if s.location.key not in is_gone for t in range(s.start, s.end)
        ]
        front = stored[num_filled - 1] + 1 if num_filled else 1
        exact = full_kv(model, job.token_ids)
        shorter = [[(k[:front], v[:front]) for k, v in layers] for layers in (kv, exact)]
        assert worst_difference(*shorter) < 2e-4
