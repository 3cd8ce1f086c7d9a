"""What time is worth to a request, against the planner that the curves stand for."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.batch_choice import CacheSmithConfig
from planner.budget_planner import BudgetPlanner, BudgetPlannerConfig
from planner.demand import DemandCurves, built_in_demand
from planner.pass_curves import CurveBook, planned_passes
from planner.policies import FULL_PREFILL, STATIC_POLICIES
from planner.scheduler import plan_input
from planner.slo_scheduler import CacheSmithScheduler
from planner.types import ChunkRef
from tests.planner.scheduler_worlds import (
    COST,
    ConcavePlanner,
    linked,
    profile,
    replica,
    slack_planner,
)

PLANNER = ConcavePlanner()
QUICK = replace(COST, row_ms=0.0025, pair_ms=5e-7, selected_pair_ms=5e-7)
BUDGETS = BudgetPlanner(BudgetPlannerConfig(), DemandCurves(built_in_demand(COST.num_layers)))


def partly_stored(tokens, hot):
    return profile(
        "q",
        chunks=(
            ChunkRef(chunk_id="hot", num_tokens=hot),
            ChunkRef(chunk_id="cold", num_tokens=tokens - hot),
        ),
    )


def times_on(state, asked, planner):
    """The request's curve as a scheduler sees it that has met the replica, in which nothing fits"""
    queue = CacheSmithScheduler(CacheSmithConfig(), planner)
    queue.submit(asked, now_ms=0.0)
    assert queue.next_batch([replace(state, free_kv_tokens=1)], now_ms=0.0) is None
    return queue._table.queue(0.0).times(queue._pace(state))


def passes_at(times, ms):
    left = ms - times.floor_ms[0]
    if left < 0.0:
        return 0.0
    passes = times.floor_passes[0]
    for length, gain in zip(times.segment_ms[:, 0], times.segment_passes[:, 0], strict=True):
        passes += gain * min(1.0, max(0.0, left) / length if length else 1.0)
        left -= length
    return passes


def test_curves_follow_the_planner():
    book = CurveBook(PLANNER, planned_passes, COST, reserve=0.0)
    for tokens, cached in ((650, 600), (3050, 3000), (3050, 1500), (7777, 7000)):
        curve = book.curve(tokens, cached, policy="adaptive", config=None)
        asked = partly_stored(tokens - 50, cached)
        request = [plan_input(asked, replica(resident=frozenset(["hot"])))]
        floor = PLANNER.plan(request, budget_ms=0.0, cost=COST)
        most = PLANNER.plan(request, budget_ms=1e9, cost=COST)
        assert curve.floor_ms == pytest.approx(floor.expected_ms, rel=0.01)
        assert curve.rise_ms == pytest.approx(most.expected_ms - floor.expected_ms, rel=0.03)
        assert curve.floor_passes == pytest.approx(floor.expected_passes)
        slopes = [gain / ms for ms, gain in curve.segments]
        assert slopes == sorted(slopes, reverse=True)
    before = PLANNER.num_plans
    book.curve(3051, 3000, policy="adaptive", config=None)
    assert PLANNER.num_plans == before  # of a length like an earlier one


@pytest.mark.parametrize("name", ["cacheblend", "full_reuse", "prophetkv"])
def test_floors_of_configurations_hold_for_a_few_stored_tokens(name):
    config, dearer = STATIC_POLICIES[name], replace(COST, selected_pair_ms=3 * COST.pair_ms)
    book = CurveBook(BUDGETS, planned_passes, dearer, reserve=0.0)
    for tokens, cached in ((9_001, 1), (9_001, 100), (9_001, 450), (9_001, 4_000), (1_003, 900)):
        curve = book.curve(tokens, cached, policy=name, config=config)
        asked = profile(
            "q",
            chunks=partly_stored(tokens - 50, cached).chunks,
            policy=name,
            config=config,
        )
        request = [plan_input(asked, replica(resident=frozenset(["hot"])))]
        floor = BUDGETS.plan(request, budget_ms=0.0, cost=dearer)
        assert curve.floor_ms == pytest.approx(floor.expected_ms, rel=0.03)
        assert not math.isnan(curve.exact_ms)


def test_nobody_passes_more_than_once():
    book = CurveBook(BUDGETS, planned_passes, QUICK, reserve=0.0)
    for cached in (0, 1, 300, 1500, 2999, 3000):
        curve = book.curve(3050, cached, policy="adaptive", config=None)
        assert curve.floor_passes + sum(gain for _, gain in curve.segments) <= 1.0 + 1e-9
    assert book.curve(3050, 0, policy="adaptive", config=None).floor_passes == 1.0


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_without_deeper_warmups_the_curves_are_never_below_the_timeline(seed):
    """Floor and saturation of single requests, on machines of any speed."""
    rng = random.Random(seed)
    tokens, share = rng.choice([300, 1500, 6000]), rng.choice([0.3, 1.0])
    asked = partly_stored(tokens, int(share * tokens))
    state = linked(
        ms_per_kilotoken=rng.choice([1.0, 30.0, 300.0]),
        cost=replace(COST, scale=rng.choice([0.3, 1.0, 3.0])),
        resident=frozenset(["hot"]),
    )
    times = times_on(state, asked, PLANNER)
    floor, most = (
        PLANNER.plan([plan_input(asked, state)], budget_ms=budget, cost=state.cost, link=state.link)
        for budget in (0.0, 1e9)
    )
    assert times.floor_ms[0] >= floor.expected_ms * (1 - 1e-6)
    assert times.floor_ms[0] + times.segment_ms.sum() >= most.expected_ms * (1 - 1e-3)
    passes = times.floor_passes[0] + times.segment_passes.sum()
    assert passes == pytest.approx(most.expected_passes)
    assert times.floor_ms[0] <= 1.35 * floor.expected_ms  # and not far above


@given(st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_over_a_link_they_are_about_what_the_planner_makes(seed):
    """Also where a deeper WarmUp hides the loading, and where full prefill is faster."""
    rng = random.Random(seed)
    tokens = int(2 ** rng.uniform(8.0, 13.0))
    asked = partly_stored(tokens, int(rng.choice([0.3, 0.7, 1.0]) * tokens))
    state = linked(
        ms_per_kilotoken=10 ** rng.uniform(-0.5, 4.5),
        cost=replace(rng.choice([COST, QUICK]), scale=rng.choice([0.3, 1.0, 3.0])),
        resident=frozenset(["hot"]),
    )
    request = [plan_input(asked, state)]
    times = times_on(state, asked, BUDGETS)
    least = BUDGETS.plan(request, budget_ms=0.0, cost=state.cost, link=state.link)
    assert 0.95 * least.expected_ms <= times.floor_ms[0] <= 1.15 * least.expected_ms
    for more in (1.2, 1.5, 2.0):
        budget_ms = more * times.floor_ms[0]
        # a little earlier and a little later: what passes may rise steeply in between
        low, high = (
            BUDGETS.plan(
                request, budget_ms=some * budget_ms / 0.85, cost=state.cost, link=state.link
            ).expected_passes
            for some in (0.85, 1.15)
        )
        assert low - 0.15 <= passes_at(times, budget_ms) <= high + 0.15


@pytest.mark.parametrize("ms_per_kilotoken", [250.0, 1e5])
def test_over_a_slow_link_a_request_is_on_time_with_full_prefill(ms_per_kilotoken):
    asked = profile("q", tokens=4000, slo=700.0)
    state = linked(ms_per_kilotoken=ms_per_kilotoken, cost=QUICK)
    full = BUDGETS.plan([plan_input(asked, state)], budget_ms=700.0, cost=QUICK, link=state.link)
    assert full.requests[0].warmup_depth == COST.num_layers
    times = times_on(state, asked, BUDGETS)
    assert times.floor_ms[0] == pytest.approx(full.expected_ms, rel=1e-3)
    assert times.floor_passes[0] == 1.0

    queue = CacheSmithScheduler(CacheSmithConfig(refuse_hopeless=True), BUDGETS)
    queue.submit(asked, now_ms=0.0)
    queue.next_batch([replace(state, free_kv_tokens=1)], now_ms=0.0)
    assert list(queue.take_refused(now_ms=0.0)) == []
    decision = queue.next_batch([state], now_ms=0.0)
    assert decision.judged  # as one that can be on time
    assert decision.plan.expected_ms <= 700.0
    assert decision.plan.expected_passes == 1.0


def test_planners_that_never_turn_to_full_prefill_wait_for_the_link():
    asked, state = profile("q", tokens=4000), linked(ms_per_kilotoken=1e4, cost=QUICK)
    for planner in (PLANNER, slack_planner()):
        times = times_on(state, asked, planner)
        assert times.floor_ms[0] > 4e4 * (1 - 1 / COST.num_layers)
        assert times.floor_passes[0] <= 1.0


def test_plans_of_full_prefill_have_no_last_patch_layer():
    book = CurveBook(BUDGETS, planned_passes, COST, reserve=0.0)
    whole = book.curve(3050, 3000, policy="adaptive", config=STATIC_POLICIES[FULL_PREFILL])
    assert whole.last_ms == whole.loaded == whole.probed == 0.0
    some = book.curve(3050, 3000, policy="adaptive", config=None)
    assert 0.0 < some.last_ms - COST.fixed_ms < some.exact_ms / COST.num_layers
