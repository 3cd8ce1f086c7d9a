"""Waiting for stored KV: what the wait recomputes is exact, and the rest is as without it."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from planner.types import Signal
from replicas import front_fill
from replicas.arrivals import PacedArrivals
from replicas.batch import BatchJob, PackedBatch
from replicas.parking import FirstTokenSampling, ParkOrder
from replicas.phase_clock import Phase
from tests.fakes.fake_clock import FakeClock
from tests.replicas.harness import (
    MemorySource,
    full_kv,
    make_job,
    random_tokens,
    run,
    tiny_model,
    worst_difference,
)

TOLERANCE = 2e-4
ANCHOR = [1, 2]
PARKED = ParkOrder(park_id="p", sampling=FirstTokenSampling())
SIGNALS = list(Signal)


class LateLayers:
    """Each layer is there after it was asked for so many times."""

    keys: tuple[bytes, ...] = ()

    def __init__(self, polls: int | list[int]) -> None:
        self._polls = polls
        self._asked: dict[int, int] = {}
        self.waits = 0

    def _needed(self, layer: int) -> int:
        return self._polls if isinstance(self._polls, int) else self._polls[layer]

    def is_ready(self, layer: int) -> bool:
        self._asked[layer] = self._asked.get(layer, 0) + 1
        return self._asked[layer] > self._needed(layer)

    def expected_ms(self, layer: int) -> float:
        return float(self._needed(layer))

    def have_missed(self) -> list[bool]:
        return []

    def wait(self, layer: int, timeout_ms: float) -> None:
        self.waits += 1


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(front_fill, "BLOCK_ROWS", 9)


def ragged_jobs(model, source, rng, coverages):
    return [
        make_job(
            model,
            source,
            random_tokens(rng, 0, 6),
            [random_tokens(rng, 1, 20) for _ in range(rng.randint(1, 4))],
            random_tokens(rng, 1, 6),
            coverage=coverage,
            anchor=ANCHOR,
            missing=frozenset({0} if rng.random() < 0.3 else ()),
            cached_prefix=rng.random() < 0.5,
            request_id=f"r{i}",
        )
        for i, coverage in enumerate(coverages)
    ]


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize(("w", "p"), [(0, 1), (1, 2)])
@pytest.mark.parametrize("polls", [1, 7, [0, 0, 9, 0], [0, 0, 0, 30]])
def test_coverage_one_stays_exact_however_late_the_layers_are(model, signal, w, p, polls):
    rng = random.Random(repr((w, p, polls)))
    source = MemorySource()
    jobs = ragged_jobs(model, source, rng, [1.0, 1.0, 1.0])
    kvs, _ = run(model, source, jobs, signal, w, p, arrivals=LateLayers(polls))
    for job, kv in zip(jobs, kvs, strict=True):
        assert worst_difference(kv, full_kv(model, job.token_ids)) < TOLERANCE


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("coverage", [0.0, 0.3])
@pytest.mark.parametrize("polls", [2, 13, [0, 0, 0, 25]])
def test_filled_rows_are_exact_and_the_front_of_each_request(model, signal, coverage, polls):
    rng = random.Random(repr((coverage, polls)))
    source = MemorySource()
    jobs = ragged_jobs(model, source, rng, [coverage] * 3)
    kvs, trace = run(model, source, jobs, signal, 1, 2, arrivals=LateLayers(polls))
    assert sum(trace.num_filled) > 0
    for i, (job, kv) in enumerate(zip(jobs, kvs, strict=True)):
        stored = [
            t
            for s in job.segments
            if s.location is not None and s.kind == "chunk"
            for t in range(s.start, s.end)
        ]
        if trace.num_filled[i] == 0:
            continue
        front = stored[trace.num_filled[i] - 1] + 1
        exact = full_kv(model, job.token_ids)
        assert (
            worst_difference(
                [(k[:front], v[:front]) for k, v in kv], [(k[:front], v[:front]) for k, v in exact]
            )
            < TOLERANCE
        )


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_wait_that_is_long_enough_recomputes_everything(model, signal):
    rng, source = random.Random(3), MemorySource()
    jobs = ragged_jobs(model, source, rng, [0.0, 0.2])
    arrivals = LateLayers(2_000)
    kvs, trace = run(model, source, jobs, signal, 1, 1, arrivals=arrivals)
    for job, kv in zip(jobs, kvs, strict=True):
        assert worst_difference(kv, full_kv(model, job.token_ids)) < TOLERANCE
    assert arrivals.waits == 0  # when nothing is left to recompute, nothing stored is needed
    totals = trace.clock.totals_s()
    assert totals[Phase.FILL] > 0 and Phase.STALL not in totals


def test_blocks_grow_with_the_front_and_stay_exact(model, monkeypatch):
    monkeypatch.setattr(front_fill, "BLOCK_ROWS", 4)
    monkeypatch.setattr(front_fill, "LONGEST_BLOCK_ROWS", 16)
    rng, source = random.Random(8), MemorySource()
    chunks = [random_tokens(rng, 30, 30) for _ in range(3)]
    job = make_job(model, source, [], chunks, [5, 6], coverage=0.0, anchor=ANCHOR)
    made = BatchJob(batch_id=1, signal=Signal.KV_DEV, warmup_depth=0, probe_len=1, jobs=[job])
    batch = PackedBatch(made, model.device)
    fronts = [0]
    with torch.inference_mode():
        fill = front_fill.FrontFill(model, batch, 0, model.embed(batch.token_ids))
        while fill.has_work:
            fill.step()
            fronts += [fill.fronts[0]] if fill.fronts[0] > fronts[-1] else []
    sizes = [end - start for start, end in pairwise(fronts)]
    assert sizes == [4, 4, 4, 6, 9, 13, 16, 16, 16, 3]  # half of the front, within 4 and 16
    filled = [fill.between(layer, 0, 0, fronts[-1]) for layer in range(model.num_layers)]
    assert worst_difference(filled, full_kv(model, job.token_ids)) < TOLERANCE


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_wait_that_is_not_filled_changes_nothing_either(model, signal):
    rng, source = random.Random(7), MemorySource()
    jobs = ragged_jobs(model, source, rng, [0.3, 0.3])
    plain, plain_trace = run(model, source, jobs, signal, 1, 1)
    arrivals = LateLayers(13)
    waited, trace = run(model, source, jobs, signal, 1, 1, arrivals=arrivals, fill_stalls=False)
    for a, b in zip(plain, waited, strict=True):
        assert worst_difference(a, b) == 0.0
    assert trace.num_selected == plain_trace.num_selected and trace.num_filled == [0, 0]
    assert arrivals.waits > 0
    totals = trace.clock.totals_s()
    assert Phase.FILL not in totals and totals[Phase.STALL] > 0


def test_without_a_wait_nothing_changes(model):
    rng, source = random.Random(4), MemorySource()
    jobs = ragged_jobs(model, source, rng, [0.3, 0.3])
    plain, plain_trace = run(model, source, jobs, Signal.KV_DEV, 1, 1)
    prompt, trace = run(model, source, jobs, Signal.KV_DEV, 1, 1, arrivals=LateLayers(0))
    for a, b in zip(plain, prompt, strict=True):
        assert worst_difference(a, b) == 0.0
    assert trace.num_selected == plain_trace.num_selected
    assert trace.num_filled == [0, 0]


def test_a_paced_link_delivers_one_layer_after_another():
    clock = FakeClock()
    slept: list[float] = []
    link = PacedArrivals(
        clock, first_layer=2, layer_bytes=100, bytes_per_ms=10.0, sleep_s=slept.append
    )
    assert link.is_ready(1)
    assert [link.expected_ms(layer) for layer in (2, 3, 4)] == [10.0, 20.0, 30.0]
    clock.advance(20.0)
    assert link.is_ready(3) and not link.is_ready(4)
    link.wait(4, timeout_ms=3.0)
    link.wait(4, timeout_ms=50.0)
    assert slept == [3e-3, 10e-3]


def test_a_model_of_several_ranks_waits_for_the_slowest(model, monkeypatch):
    """`all_ready` decides, not the rank's own view."""
    answers = iter([False, False, True])
    monkeypatch.setattr(model, "all_ready", lambda ready: [next(answers, True)])
    rng, source = random.Random(5), MemorySource()
    jobs = ragged_jobs(model, source, rng, [0.2])
    _, trace = run(model, source, jobs, Signal.KV_DEV, 1, 1, arrivals=LateLayers(0))
    assert [s.phase for s in trace.clock.spans()].count(Phase.FILL) == 2


def test_logits_of_a_parked_request_are_the_models_own(model):
    rng, source = random.Random(6), MemorySource()
    for signal, w, p in [(Signal.KV_DEV, 1, 1), (Signal.QCI, 0, 2), (Signal.KV_DEV, 4, 0)]:
        jobs = ragged_jobs(model, source, rng, [1.0, 1.0, 1.0])
        parked = [torch.tensor(j.token_ids) for j in jobs]
        jobs = [j if i == 1 else replace(j, park=PARKED) for i, j in enumerate(jobs)]
        _, trace = run(model, source, jobs, signal, w, p)
        assert sorted(trace.logits) == [0, 2]
        for i, logits in trace.logits.items():
            with torch.inference_mode():
                exact = model.model(parked[i][None]).logits[0, -1]
            difference = logits.log_softmax(-1) - exact.log_softmax(-1)
            assert float(difference.abs().max()) < 1e-4
