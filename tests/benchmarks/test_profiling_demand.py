"""From requests to a demand profile: which requests count, what is found, what is refused."""

import io
from dataclasses import replace

import pytest

from benchmarks.profiling.demand import (
    COVERAGES,
    DemandOptions,
    Qualification,
    anchor_curves,
    measure_demand,
    questions_of,
    usual_options,
)
from benchmarks.profiling.partial import PartialFile
from benchmarks.profiling.progress import Progress
from benchmarks.quality.coverage_search import CoverageSearch
from benchmarks.quality.curves import kv_dev
from benchmarks.quality.suites import ENGLISH, SYNTHETIC
from planner import Signal
from tests.benchmarks.profiling_answers import NUM_LAYERS, FakeAnswers

OPTIONS = DemandOptions(tasks=(("pr",),), sizes=(8, 16), num_requests=20)


def measured(tmp_path, answers, options=OPTIONS, suite=SYNTHETIC):
    partial = PartialFile(tmp_path / "partial.jsonl", {"options": str(options)})
    try:
        return measure_demand(
            answers, suite, options, partial, Progress(io.StringIO()), model="fake"
        )
    finally:
        partial.close()


def index_of(question) -> int:
    return int(question.question_id.rpartition("/")[2])


def test_requests_that_full_prefill_fails_do_not_count(tmp_path):
    answers = FakeAnswers(
        is_right=lambda question: index_of(question) % 5 != 0,
        demand=lambda question, curve: 0.3 if len(question.documents) == 16 else 0.05,
    )
    found = measured(tmp_path, answers)
    assert found.profile is not None and found.note == ""
    assert "32 of 40" in found.profile.gate and found.profile.task == "pr"
    assert len(answers.asked) == 40 + 32
    for anchor in found.profile.anchors:
        short, long = anchor.buckets
        assert (short.num_requests, long.num_requests) == (16, 16)
        assert short.max_context_tokens == (8 * 30 + 16 * 30) // 2
        assert dict(zip(short.coverages, short.enough, strict=True))[0.05] == 1.0
        assert dict(zip(long.coverages, long.enough, strict=True))[0.2] == 0.0


@pytest.mark.parametrize(
    ("answers", "reason", "num_asked"),
    [
        # no more is asked once too few can be right
        (FakeAnswers(is_right=lambda q: False), "full prefill answered 0 of 21", 21),
        (FakeAnswers(is_right=lambda q: index_of(q) < 9), "full prefill answered 18 of 39", 39),
        (FakeAnswers(is_reused=lambda q: True), "full reuse answered 40 of the 40", 40),
    ],
)
def test_a_task_that_tells_nothing_gives_no_demand(answers, reason, num_asked, tmp_path):
    found = measured(tmp_path, answers)
    assert found.profile is None and reason in found.note
    assert len(answers.asked) == num_asked  # and nothing is searched for


def test_the_first_task_that_qualifies_is_measured(tmp_path):
    options = replace(OPTIONS, tasks=(("pr",), ("ref", "vt1")))
    answers = FakeAnswers(is_reused=lambda question: question.task == "pr")
    found = measured(tmp_path, answers, options, ENGLISH)
    assert found.profile is not None and found.profile.task == "ref+vt1"
    assert {question.partition("-")[0] for question in answers.asked} == {"pr", "ref", "vt1"}


def test_the_reasons_of_all_tasks_are_told(tmp_path):
    options = replace(OPTIONS, tasks=(("pr",), ("ref", "vt1")))
    found = measured(tmp_path, FakeAnswers(is_right=lambda question: False), options, ENGLISH)
    assert found.profile is None
    assert "of pr right" in found.note and "of ref+vt1 right" in found.note


def test_fifteen_right_requests_are_too_few():
    counts = {"task": "pr", "num_asked": 16, "num_reused": 0}
    assert Qualification(num_right=15, **counts).refusal
    assert Qualification(num_right=16, **counts).refusal is None


@pytest.mark.parametrize("patience", [1, 39, 40, 55])
def test_an_interrupted_run_ends_as_one_that_was_not(patience, tmp_path):
    def demand(question, curve):
        return COVERAGES[index_of(question) % len(COVERAGES)]

    (tmp_path / "whole").mkdir()
    whole = measured(tmp_path / "whole", FakeAnswers(demand=demand))
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, FakeAnswers(demand=demand, patience=patience))
    rest = FakeAnswers(demand=demand)
    assert measured(tmp_path, rest) == whole
    assert len(rest.asked) == 80 - patience


def test_three_anchors_for_each_signal_within_the_model():
    for num_layers in (1, 2, 4, 8, 16, 30, 80):
        curves = anchor_curves(num_layers)
        splits = {(c.config.signal, *c.config.depths(num_layers)) for c in curves}
        assert len(splits) == len(curves)
        for _, w, p in splits:
            assert p >= 1 and w + p <= num_layers
        if num_layers >= 8:
            assert len(curves) == 6
        assert all(curve.coverages == COVERAGES for curve in curves)
    at_16 = [(c.config.signal, *c.config.depths(16)) for c in anchor_curves(NUM_LAYERS)]
    assert at_16[:3] == [(Signal.KV_DEV, 1, 1), (Signal.KV_DEV, 4, 3), (Signal.KV_DEV, 7, 3)]
    assert at_16[3:] == [(Signal.QCI, 0, 4), (Signal.QCI, 0, 8), (Signal.QCI, 0, 16)]


def test_tasks_take_turns_within_the_number_of_requests():
    found = questions_of(SYNTHETIC, ("pr", "vt"), replace(OPTIONS, num_requests=5))
    assert [question.task for question in found] == 2 * (3 * ["pr"] + 2 * ["vt"])
    assert usual_options(ENGLISH, num_requests=3).tasks[0] == ("pr",)


def test_a_question_that_can_not_be_made_is_an_error_and_no_endless_search():
    with pytest.raises(ValueError, match="vt1 has no question over 4 documents"):
        next(ENGLISH.questions("vt1", 4, 0, 1))


@pytest.mark.parametrize("demand", [*COVERAGES, 1.0])
def test_the_search_finds_the_smallest_sufficient_coverage(demand):
    search = CoverageSearch(kv_dev(4, coverages=COVERAGES))
    tried = 0
    while search.point is not None:
        search.saw(passed=search.point.config.coverage >= demand)
        tried += 1
    assert search.coverage == demand
    assert tried <= 4
