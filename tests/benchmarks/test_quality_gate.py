"""The gate: on a model that can be wrong the phases keep the answers, a choice by lot does not.

The synthetic model of the repository answers right under full prefill and wrong under full reuse.
A stated configuration keeps at least 0.95 of its accuracy at a stated coverage; the same coverage
drawn by lot does not. A bug in stitching, rotation, ranking or attention shows here.
"""

from dataclasses import replace

import pytest

from benchmarks.bench_quality import measured
from benchmarks.quality.curves import FULL_PREFILL, FULL_REUSE, bounds, kv_dev, random_choice
from benchmarks.quality.stats import accuracies
from benchmarks.quality.suites import SYNTHETIC, SYNTHETIC_MODEL
from benchmarks.quality.walked_answers import walked_answers

NUM_QUESTIONS = 40
NUM_DOCUMENTS = 16
COVERAGE = 0.35
WARMUP_DEPTH = 5
KEEP = 0.95


@pytest.fixture(scope="module")
def outcomes():
    curves = [
        *bounds(),
        kv_dev(WARMUP_DEPTH, coverages=(COVERAGE,)),
        replace(random_choice(WARMUP_DEPTH), coverages=(COVERAGE,)),
    ]
    found = {}
    with walked_answers(SYNTHETIC_MODEL, SYNTHETIC.form, dtype="float32") as answers:
        for task in ("vt", "pr"):
            questions = list(SYNTHETIC.questions(task, NUM_DOCUMENTS, 5, NUM_QUESTIONS))
            found[task] = accuracies(measured(answers, questions, curves, None))
    return found


@pytest.mark.parametrize("task", ["vt", "pr"])
def test_recomputing_what_matters_keeps_the_answers(outcomes, task):
    full = outcomes[task][FULL_PREFILL, "r=1"].gold
    kept = outcomes[task][f"kv_dev w={WARMUP_DEPTH} p=1", f"r={COVERAGE:g}"]
    assert full >= 0.9
    assert kept.gold >= KEEP * full
    assert kept.share < 0.6


@pytest.mark.parametrize("task", ["vt", "pr"])
def test_full_reuse_and_a_choice_by_lot_lose_them(outcomes, task):
    full = outcomes[task][FULL_PREFILL, "r=1"].gold
    assert outcomes[task][FULL_REUSE, "r=0"].gold < 0.5 * full
    by_lot = outcomes[task][f"random w={WARMUP_DEPTH}", f"r={COVERAGE:g}"]
    assert by_lot.gold < KEEP * full
