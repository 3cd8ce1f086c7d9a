"""What the phases decide while they run: the signal of `auto`, and the coverages."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from planner.auto_signal import AutoRule
from planner.types import Deviation, Signal
from replicas.model import Hidden
from replicas.probe import normalised_entropy
from replicas.scores import kv_deviation
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
ALWAYS_PEAKED, NEVER_PEAKED = AutoRule(threshold=1.0), AutoRule(threshold=0.0)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def request_of(model, source, seed, coverage, *, band=None):
    rng = random.Random(seed)
    chunks = [random_tokens(rng, 5, 20) for _ in range(4)]
    job = make_job(model, source, [9, 8], chunks, [3, 4, 5], coverage=coverage, anchor=ANCHOR)
    return job if band is None else replace(job, band=band)


# ---- auto ----


@pytest.mark.parametrize(
    ("rule", "taken"),
    [
        (ALWAYS_PEAKED, Signal.QCI),
        (NEVER_PEAKED, Signal.KV_DEV),
        (AutoRule(threshold=1.0, qci_when_peaked=False), Signal.KV_DEV),
        (AutoRule(threshold=0.0, qci_when_peaked=False), Signal.QCI),
    ],
)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_auto_is_exactly_the_signal_it_takes(model, rule, taken, p):
    source = MemorySource()
    jobs = [request_of(model, source, seed, 0.25) for seed in range(3)]
    by_rule, trace = run(model, source, jobs, Signal.AUTO, 1, p, auto_rule=rule)
    named, named_trace = run(model, source, jobs, taken, 1, p)
    assert trace.signal is taken
    for i in range(3):
        assert trace.selected[i].tolist() == named_trace.selected[i].tolist()
        assert worst_difference(by_rule[i], named[i]) < 2e-4


def test_the_majority_of_a_batch_decides(model):
    source = MemorySource()
    jobs = [request_of(model, source, seed, 0.25) for seed in range(3)]
    entropies = sorted(first_layer_entropy(model, source, job) for job in jobs)
    between = [AutoRule(threshold=(a + b) / 2) for a, b in pairwise(entropies)]
    taken = [
        run(model, source, jobs, Signal.AUTO, 1, 1, auto_rule=rule)[1].signal for rule in between
    ]
    assert taken == [Signal.KV_DEV, Signal.QCI]  # one of three peaked, then two of three


def first_layer_entropy(model, source, job):
    """From a plain computation: the suffix's attention at layer 1 onto the stored keys."""
    with torch.inference_mode():
        hidden = model.model.model(
            torch.tensor([job.token_ids]), output_hidden_states=True
        ).hidden_states[1][0]
        projected = model.project(1, Hidden(hidden))
        q = model.rotate(1, torch.arange(len(hidden)), projected.q)[job.segments[-1].end :]
        keys = torch.cat(
            [
                model.rotate(1, torch.arange(s.start, s.end), source.values[s.location.key][1][0])
                for s in job.segments
            ]
        )
        scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(2, dim=1)) * model.scale
        return normalised_entropy(scores.softmax(-1).sum((0, 1)))


def test_entropy_is_zero_for_one_token_and_one_for_all_alike():
    assert normalised_entropy(torch.tensor([0.0, 5.0, 0.0])) == pytest.approx(0.0, abs=1e-6)
    assert normalised_entropy(torch.full((7,), 2.0)) == pytest.approx(1.0)
    assert normalised_entropy(torch.tensor([1.0, 1.0, float("nan"), 0.0])) == pytest.approx(0.5)
    assert normalised_entropy(torch.zeros(3)) == pytest.approx(0.0, abs=1e-6)


# ---- kv_dev's parts ----


@pytest.mark.parametrize("deviation", list(Deviation))
def test_kv_dev_compares_what_it_is_told_to(model, deviation):
    source = MemorySource()
    job = request_of(model, source, 11, 0.2)
    _, trace = run(model, source, [job], Signal.KV_DEV, 2, 1, deviation=deviation)
    with torch.inference_mode():
        hidden = model.model.model(torch.tensor([job.token_ids]), output_hidden_states=True)
        exact = model.project(2, Hidden(hidden.hidden_states[2][0]))
        at = torch.cat([torch.arange(s.start, s.end) for s in job.segments])
        stored = [source.values[s.location.key][2] for s in job.segments]
        scores = kv_deviation(
            model.rotate(2, at, torch.cat([k for k, _ in stored])),
            torch.cat([v for _, v in stored]),
            model.rotate(2, at, exact.k[at]),
            exact.v[at],
            parts=deviation,
        )
    best = at[scores.argsort(descending=True)[: -(-len(at) // 5)]]
    assert trace.selected[0].tolist() == sorted(best.tolist())


def test_keys_and_values_alone_rank_differently(model):
    """The negative control: the choice is not ignored."""
    source = MemorySource()
    job = request_of(model, source, 12, 0.3)
    chosen = {
        d: run(model, source, [job], Signal.KV_DEV, 2, 1, deviation=d)[1].selected[0].tolist()
        for d in Deviation
    }
    assert chosen[Deviation.K] != chosen[Deviation.V]


# ---- coverage ----


def test_coverage_is_solved_after_warmup_and_again_with_the_scores(model):
    source, asked = MemorySource(), []

    def resolver(demands, arrivals_ms):
        asked.append((demands, arrivals_ms))
        return [0.5, 0.25] if len(asked) == 1 else [0.1, 0.25]

    jobs = [
        request_of(model, source, 1, 0.3, band=(0.05, 0.5)),
        request_of(model, source, 2, 0.25),
    ]
    _, trace = run(model, source, jobs, Signal.QCI, 1, 2, resolver=resolver)
    (before, arrivals_ms), (after, _) = asked
    assert [(d.floor, d.saturation) for d in before] == [(0.05, 0.5), (0.25, 0.25)]
    assert all(d.scores is None for d in before)
    assert arrivals_ms == [0.0, 0.0, 0.0]  # layers 1 to 3
    num_context = [sum(s.end - s.start for s in job.segments) for job in jobs]
    assert [len(d.scores) for d in after] == num_context
    assert all(np.isfinite(d.scores).all() for d in after)
    assert trace.coverages == [0.1, 0.25]
    assert trace.num_selected == [-(-num_context[0] // 10), -(-num_context[1] // 4)]


@pytest.mark.parametrize("signal", list(Signal))
@pytest.mark.parametrize("solved", [[0.0, 0.0], [0.4, 1.0], [1.0, 0.2]])
def test_a_solved_coverage_is_the_same_as_a_planned_one(model, signal, solved):
    source = MemorySource()
    open_jobs = [request_of(model, source, i, 0.3, band=(0.0, 1.0)) for i in range(2)]
    planned = [request_of(model, source, i, r) for i, r in enumerate(solved)]
    # at every solve: before the Probe, so that it ranks for the coverage that is used
    kvs, trace = run(
        model, source, open_jobs, signal, 1, 1, resolver=lambda demands, arrivals: list(solved)
    )
    wanted, wanted_trace = run(model, source, planned, signal, 1, 1)
    assert trace.num_selected == wanted_trace.num_selected
    for kv, want, job, r in zip(kvs, wanted, planned, solved, strict=True):
        assert worst_difference(kv, want) < 2e-4
        if r == 1.0:
            assert worst_difference(kv, full_kv(model, job.token_ids)) < 2e-4


def test_a_plan_without_a_band_is_never_solved_again(model):
    source = MemorySource()

    def resolver(demands, arrivals_ms):
        raise AssertionError("nothing is open")

    _, trace = run(
        model, source, [request_of(model, source, 3, 0.2)], Signal.KV_DEV, 1, 1, resolver=resolver
    )
    assert trace.coverages == [0.2]


def test_the_first_ranks_coverages_are_everybodys(model, monkeypatch):
    source = MemorySource()
    monkeypatch.setattr(model, "agree", lambda values: torch.full_like(values, 0.5))
    job = request_of(model, source, 4, 0.3, band=(0.0, 1.0))
    _, trace = run(
        model, source, [job], Signal.KV_DEV, 1, 1, resolver=lambda demands, arrivals: [0.1]
    )
    assert trace.coverages == [0.5]


# ---- stored values ----


def test_a_stored_value_of_another_shape_fails_its_request_alone(model):
    source = MemorySource()
    jobs = [request_of(model, source, seed, 0.2) for seed in (5, 6)]
    alone, _ = run(model, source, [jobs[1]], Signal.KV_DEV, 1, 1)
    key = jobs[0].segments[2].location.key
    source.values[key] = [(k[:-1], v) for k, v in source.values[key]]
    kvs, trace = run(model, source, jobs, Signal.KV_DEV, 1, 1)
    assert trace.failed == {0}
    assert worst_difference(kvs[1], alone[0]) < 2e-4
