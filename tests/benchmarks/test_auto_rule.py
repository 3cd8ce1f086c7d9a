"""Whether entropy tells the better signal: on made-up requests where it does, or does not."""

import math
import random

import pytest

from benchmarks.quality.auto_rule import (
    Contest,
    best_rule,
    chosen,
    contests,
    pass_rate,
    picked_better,
)
from planner import Signal
from planner.auto_signal import AutoRule
from tests.benchmarks.test_quality_results import outcome


def contest(entropy: float, kv_dev: int, qci: int, of: int = 4) -> Contest:
    def passing(count: int) -> tuple[bool, ...]:
        return tuple(i >= of - count for i in range(of))

    return Contest(
        question_id="q", task="t", entropy=entropy, kv_dev=passing(kv_dev), qci=passing(qci)
    )


def test_the_best_rule_finds_threshold_and_direction():
    rng = random.Random(0)
    flat_wants_qci = [contest(rng.uniform(0.7, 0.9), 1, 4) for _ in range(30)]
    flat_wants_qci += [contest(rng.uniform(0.3, 0.5), 4, 1) for _ in range(30)]
    rule = best_rule(flat_wants_qci, 1, [0])
    assert not rule.qci_when_peaked
    assert 0.5 <= rule.threshold <= 0.7
    picks = chosen(flat_wants_qci, rule, 1, 0)
    assert pass_rate(flat_wants_qci, picks) == 1.0
    assert picked_better(flat_wants_qci, picks) == 1.0
    wrong = chosen(flat_wants_qci, AutoRule(threshold=0.6, qci_when_peaked=True), 1, 0)
    assert picked_better(flat_wants_qci, wrong) == 0.0


def test_a_batch_shares_its_signal():
    some = [contest(0.8, 1, 4), contest(0.8, 1, 4), contest(0.4, 4, 1)]
    rule = AutoRule(threshold=0.6, qci_when_peaked=False)
    assert set(chosen(some, rule, 3, 0)) == {Signal.QCI}
    assert chosen(some, rule, 1, 0) == [Signal.QCI, Signal.QCI, Signal.KV_DEV]


def test_requests_that_are_served_alike_do_not_count_as_picks():
    assert math.isnan(picked_better([contest(0.5, 2, 2)], [Signal.QCI]))


def test_contests_pair_the_outcomes_of_both_curves():
    outcomes = []
    for question, gold in ((0, 1.0), (1, 0.0)):
        outcomes.append(outcome(question, "full_prefill", "r=1", 1.0))
        for point in ("r=0", "r=0.1", "r=0.3"):
            outcomes.append(outcome(question, "kv", point, gold))
            outcomes.append(outcome(question, "qci", point, 1.0 - gold, entropy=0.4 + question))
    outcomes.append(outcome(2, "kv", "r=0.1", 1.0))  # full prefill is not known
    first, second = contests(outcomes, "kv", "qci")
    assert (first.kv_dev, first.qci, first.entropy) == ((True, True), (False, False), 0.4)
    assert (second.kv_dev, second.qci) == ((False, False), (True, True))


def test_a_curve_without_entropy_is_refused():
    outcomes = [
        outcome(0, "full_prefill", "r=1", 1.0),
        outcome(0, "kv", "r=0.1", 1.0),
        outcome(0, "qci", "r=0.1", 1.0),
    ]
    with pytest.raises(ValueError, match="no entropy"):
        contests(outcomes, "kv", "qci")
