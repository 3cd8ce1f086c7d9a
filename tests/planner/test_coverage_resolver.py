"""Coverages for the time that is left: bands kept, the time kept, scores heeded."""

import random
from dataclasses import replace

import numpy as np
import pytest

from planner.auto_signal import AutoRule
from planner.cost_model import CostModel
from planner.coverage_resolver import PatchDemand, layer_budget_ms, resolve_coverages
from planner.types import Signal

COST = CostModel(
    num_layers=10,
    fixed_ms=5.0,
    request_ms=0.5,
    layer_ms=0.1,
    member_ms=0.05,
    row_ms=0.01,
    pair_ms=1e-6,
    selected_pair_ms=2e-6,
    reuse_ms=1e-4,
)
OPEN = PatchDemand(
    num_cached=1000, num_always=50, num_keys=1050, planned=0.05, floor=0.05, saturation=0.5
)


def patch_ms(demands, coverages, arrivals_ms, cost=COST):
    """The timeline, layer by layer: starts when the one before is done and its KV is there."""
    layer_ms = cost.scale * sum(
        cost.member_ms
        + (cost.row_ms + cost.selected_pair_ms * d.num_keys / 2) * (d.num_always + r * d.num_cached)
        + cost.reuse_ms * d.num_cached
        for d, r in zip(demands, coverages, strict=True)
    )
    now = 0.0
    for arrival in arrivals_ms:
        now = max(now, arrival) + layer_ms + cost.scale * cost.layer_ms
    return now + cost.scale * (cost.fixed_ms + cost.request_ms * len(demands))


@pytest.mark.parametrize("seed", range(40))
def test_the_deadline_is_met_or_the_floor_runs_and_time_is_used_up(seed):
    rng = random.Random(seed)
    np_rng = np.random.default_rng(seed)
    demands = []
    for _ in range(rng.randint(1, 5)):
        floor = rng.uniform(0.0, 0.3)
        saturation = rng.uniform(floor, 1.0)
        num_cached = rng.randint(1, 2000)
        scored = rng.random() < 0.5
        demands.append(
            PatchDemand(
                num_cached=num_cached,
                num_always=rng.randint(1, 100),
                num_keys=num_cached + 150,
                planned=rng.uniform(floor, saturation),
                floor=floor,
                saturation=saturation,
                scores=np_rng.exponential(size=num_cached) if scored else None,
            )
        )
    arrivals = sorted(rng.uniform(0, 100) for _ in range(rng.randint(1, 9)))
    left = rng.uniform(1.0, 600.0)
    cost = replace(COST, scale=rng.uniform(0.5, 2.0))
    solved = resolve_coverages(demands, time_left_ms=left, arrivals_ms=arrivals, cost=cost)
    floors, tops = [d.floor for d in demands], [d.saturation for d in demands]
    assert all(f <= r <= t for f, r, t in zip(floors, solved, tops, strict=True))
    took = patch_ms(demands, solved, arrivals, cost)
    if took > left + 1e-6:
        # the floors, or what else loading hides: then only the last layer ends behind it
        least = patch_ms(demands, floors, arrivals, cost)
        layer_ms = patch_ms(demands, solved, [0.0], cost) - cost.scale * cost.fixed_ms
        assert least > left
        assert took == pytest.approx(
            least
            if solved == pytest.approx(floors)
            else arrivals[-1] + layer_ms + cost.scale * cost.fixed_ms
        )
    elif solved != pytest.approx(tops):
        # what one more token of each would take: the time is used up
        slack = sum(1 / d.num_cached for d in demands) + 0.02
        more = [min(t, r + slack) for t, r in zip(tops, solved, strict=True)]
        assert patch_ms(demands, more, arrivals, cost) > left


def test_less_time_never_means_more_coverage():
    times = [10.0, 40.0, 60.0, 90.0, 150.0]
    solved = [
        resolve_coverages([OPEN], time_left_ms=t, arrivals_ms=[0.0] * 9, cost=COST)[0]
        for t in times
    ]
    assert solved == sorted(solved)
    assert solved[0] == OPEN.floor and solved[-1] == OPEN.saturation
    assert len(set(solved)) > 2


def test_what_was_planned_runs_if_there_is_just_the_time_for_it():
    peaked, flat = np.full(1000, 1e-3), np.full(1000, 1.0)
    peaked[:200] = 10.0
    demands = [
        replace(OPEN, planned=0.1, scores=peaked),  # by its scores it would get more
        replace(OPEN, planned=0.4, scores=flat),
    ]
    arrivals = [0.0] * 9
    as_planned = patch_ms(demands, [0.1, 0.4], arrivals)
    for left, compare in ((as_planned, pytest.approx), (as_planned - 8.0, float)):
        solved = resolve_coverages(demands, time_left_ms=left, arrivals_ms=arrivals, cost=COST)
        assert solved[0] == compare(0.1)  # what is missing is taken from the flat one
    assert solved[1] < 0.4
    more = resolve_coverages(
        demands, time_left_ms=as_planned + 8.0, arrivals_ms=arrivals, cost=COST
    )
    assert more[0] > 0.1 and more[1] == pytest.approx(0.4)


def test_a_late_layer_costs_coverage():
    on_time = resolve_coverages([OPEN], time_left_ms=60.0, arrivals_ms=[0.0] * 9, cost=COST)
    late = resolve_coverages([OPEN], time_left_ms=60.0, arrivals_ms=[0.0] * 8 + [52.0], cost=COST)
    assert late[0] < on_time[0]


def test_what_runs_while_stored_kv_is_waited_for_is_free():
    arrivals = [0.0] * 8 + [200.0]
    for left in (1.0, 100.0, 190.0):  # late at any coverage
        (solved,) = resolve_coverages([OPEN], time_left_ms=left, arrivals_ms=arrivals, cost=COST)
        assert solved == OPEN.saturation
        took, least = (patch_ms([OPEN], [r], arrivals) for r in (solved, OPEN.floor))
        assert took - least < least / 10  # one layer of nine
    (solved,) = resolve_coverages([OPEN], time_left_ms=1.0, arrivals_ms=[0.0] * 9, cost=COST)
    assert solved == OPEN.floor


def test_a_fixed_coverage_stays():
    fixed = replace(OPEN, planned=0.3, floor=0.3, saturation=0.3)
    for left in (1.0, 1e6):
        solved = resolve_coverages(
            [fixed, OPEN], time_left_ms=left, arrivals_ms=[0.0] * 9, cost=COST
        )
        assert solved[0] == 0.3
    assert solved[1] == OPEN.saturation


def test_tokens_go_to_the_request_whose_scores_are_concentrated():
    peaked, flat = np.full(1000, 1e-3), np.full(1000, 1.0)
    peaked[:200] = 10.0
    demands = [replace(OPEN, scores=peaked), replace(OPEN, scores=flat)]
    first, second = resolve_coverages(demands, time_left_ms=45.0, arrivals_ms=[0.0] * 9, cost=COST)
    assert first == pytest.approx(0.2, abs=0.02) and second < first


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_do_no_harm(bad):
    scores = np.ones(1000)
    scores[3] = bad
    demands = [replace(OPEN, scores=scores), replace(OPEN, scores=np.full(1000, bad))]
    for left in (10.0, 60.0, 1e5):
        solved = resolve_coverages(demands, time_left_ms=left, arrivals_ms=[0.0] * 9, cost=COST)
        assert all(0.05 <= r <= 0.5 for r in solved)


def test_a_request_without_stored_tokens_is_no_obstacle():
    empty = replace(OPEN, num_cached=0, scores=np.empty(0))
    solved = resolve_coverages([empty, OPEN], time_left_ms=1e5, arrivals_ms=[0.0] * 9, cost=COST)
    assert solved[1] == 0.5


def test_the_layer_budget_is_the_timelines():
    rng = random.Random(1)
    for _ in range(50):
        arrivals = [rng.uniform(0, 50) for _ in range(rng.randint(1, 8))]
        budget = layer_budget_ms(100.0, arrivals)
        now = 0.0
        for arrival in arrivals:
            now = max(now, arrival) + budget
        assert now == pytest.approx(100.0)


def test_auto_rule_counts_votes():
    rule = AutoRule(threshold=0.8)
    assert rule.choose([0.5, 0.7, 0.9]) is Signal.QCI
    assert rule.choose([0.5, 0.9]) is Signal.KV_DEV  # a tie
    assert rule.choose([]) is Signal.KV_DEV
    other = AutoRule(threshold=0.8, qci_when_peaked=False)
    assert other.choose([0.5, 0.9, 0.9]) is Signal.QCI
    with pytest.raises(ValueError, match="threshold"):
        AutoRule(threshold=1.5)
