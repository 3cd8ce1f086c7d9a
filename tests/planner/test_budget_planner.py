"""What a plan promises: within the budget, within the band, never less for more time."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner_oracle import random_case
from planner.budget_planner import BudgetPlanner, BudgetPlannerConfig
from planner.cost_model import CostModel, PrefillShape
from planner.demand import DemandCurves, built_in_demand
from planner.demand_profile import DemandAnchor, DemandBucket, DemandProfile
from planner.policies import STATIC_POLICIES
from planner.recompute_planner import BudgetBand, PlanInput, SlackPlanner, SlackPlannerConfig
from planner.timeline import Link, arrivals_ms, layer_times, run_timeline
from planner.types import Deviation, Signal

COST = CostModel(
    num_layers=32,
    fixed_ms=10.0,
    row_ms=0.0012,
    pair_ms=4e-8,
    selected_pair_ms=7e-8,
    reuse_ms=2e-5,
)
STEEP, FLAT = (0.1, 0.5, 0.8, 0.95, 1.0), (0.0, 0.1, 0.3, 0.6, 1.0)


def bucket(enough, limit=None):
    return DemandBucket(
        max_context_tokens=limit,
        num_requests=20,
        coverages=(0.0, 0.05, 0.2, 0.5, 1.0),
        enough=enough,
    )


def anchor(signal, depth, *buckets, least_warmup=0):
    """Each bucket may be the last one's `enough` alone."""
    made = tuple(b if isinstance(b, DemandBucket) else bucket(b) for b in buckets)
    return DemandAnchor(
        signal=signal, warmup_depth=least_warmup, probe_len=depth - least_warmup, buckets=made
    )


def planner(*anchors, **config):
    profile = DemandProfile(model="m", task="t", gate="g", anchors=anchors)
    return BudgetPlanner(BudgetPlannerConfig(**{"reserve": 0.0, **config}), DemandCurves(profile))


def request(cached=4000, always=60, *, token_bytes=0.0):
    return PlanInput(
        shape=PrefillShape(num_cached=cached, num_always=always), layer_bytes=token_bytes * cached
    )


def timeline(case, plan):
    first = plan.requests[0]
    times = layer_times(
        [r.shape for r in case.requests],
        [r.coverage for r in plan.requests],
        signal=first.signal,
        warmup_depth=first.warmup_depth,
        probe_len=first.probe_len,
        cost=case.cost,
    )
    layer_bytes = sum(r.layer_bytes for r in case.requests)
    behind = case.cost.num_layers - first.warmup_depth
    return run_timeline(times, arrivals_ms([layer_bytes] * behind, case.link))


def of_case(case, **config):
    config = BudgetPlannerConfig(**{"band": case.band, "reserve": 0.0, **config})
    return BudgetPlanner(config, DemandCurves(case.profile))


def plan_case(case, budget_ms, requests=None, **config):
    return of_case(case, **config).plan(
        requests or case.requests, budget_ms=budget_ms, cost=case.cost, link=case.link
    )


SEEDS = st.integers(0, 10**9)


@given(SEEDS, st.floats(0.0, 0.5))
@settings(max_examples=80, deadline=None)
def test_a_plan_keeps_its_budget_and_its_band(seed, reserve):
    case = random_case(random.Random(seed))
    plan = plan_case(case, case.budget_ms, reserve=reserve)
    assert plan.expected_ms == pytest.approx(timeline(case, plan).total_ms)
    is_exact = plan.requests[0].warmup_depth == case.cost.num_layers
    floor_ms = of_case(case).floor_ms(case.requests, case.cost, case.link)
    assert plan.expected_ms == pytest.approx(floor_ms) or plan.expected_ms <= (
        1 - reserve
    ) * case.budget_ms * (1 + 1e-9)
    for made in plan.requests:
        if not is_exact:
            assert case.band.floor <= made.coverage <= case.band.saturation + 1e-12
        assert 0.0 <= made.pass_probability <= 1.0
        assert made.expected_ms == plan.expected_ms
    assert len({(r.signal, r.warmup_depth, r.probe_len) for r in plan.requests}) == 1
    assert plan.expected_passes == pytest.approx(sum(r.pass_probability for r in plan.requests))


@given(SEEDS)
@settings(max_examples=50, deadline=None)
def test_more_budget_never_lowers_what_is_expected(seed):
    rng = random.Random(seed)
    case = random_case(rng)
    budgets = sorted(case.budget_ms * rng.uniform(0.3, 2.0) for _ in range(8))
    passes = [plan_case(case, ms).expected_passes for ms in budgets]
    for less, more in pairwise(passes):
        assert more >= less - 1e-6


@given(SEEDS)
@settings(max_examples=40, deadline=None)
def test_permuting_the_requests_permutes_the_plan(seed):
    rng = random.Random(seed)
    case = random_case(rng)
    order = list(range(len(case.requests)))
    rng.shuffle(order)
    plan = plan_case(case, case.budget_ms)
    other = plan_case(case, case.budget_ms, [case.requests[i] for i in order])
    assert list(other.requests) == [plan.requests[i] for i in order]
    assert (other.expected_ms, other.expected_passes) == (plan.expected_ms, plan.expected_passes)


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_the_floors_time_is_the_least_that_a_plan_takes(seed):
    case = random_case(random.Random(seed))
    floor_ms = of_case(case).floor_ms(case.requests, case.cost, case.link)
    assert plan_case(case, -1.0).expected_ms <= floor_ms * (1 + 1e-9)
    assert plan_case(case, 1e12).expected_ms >= floor_ms * (1 - 1e-9)


@pytest.mark.parametrize("budget_ms", [-math.inf, -5.0, 0.0, 1.0])
def test_under_the_floors_time_the_cheapest_floor_runs(budget_ms):
    made = planner(anchor(Signal.QCI, 2, STEEP), anchor(Signal.QCI, 20, STEEP))
    plan = made.plan([request(), request(100)], budget_ms=budget_ms, cost=COST)
    assert [r.coverage for r in plan.requests] == [0.05, 0.05]
    assert plan.requests[0].warmup_depth + plan.requests[0].probe_len == 2
    assert plan.expected_ms == pytest.approx(made.floor_ms([request(), request(100)], COST))


def test_with_ample_time_the_saturation_runs_where_it_is_worth_most():
    made = planner(anchor(Signal.QCI, 4, FLAT), anchor(Signal.KV_DEV, 12, STEEP))
    for budget_ms in (1e6, math.inf):
        plan = made.plan([request(), request(100)], budget_ms=budget_ms, cost=COST)
        assert [r.coverage for r in plan.requests] == [0.5, 0.5]
        assert plan.requests[0].signal is Signal.KV_DEV
        assert plan.expected_passes == pytest.approx(1.9)


def test_coverage_goes_where_a_millisecond_buys_most():
    made = planner(anchor(Signal.QCI, 4, STEEP))
    requests = [request(8000), request(500)]
    budget_ms = made.floor_ms(requests, COST) + 8.0
    long, short = made.plan(requests, budget_ms=budget_ms, cost=COST).requests
    assert short.coverage > long.coverage


def test_depth_is_bought_with_time():
    made = planner(anchor(Signal.KV_DEV, 2, FLAT), anchor(Signal.KV_DEV, 16, STEEP))
    floor_ms = made.floor_ms([request()], COST)
    depths = []
    for factor in (1.0, 1.2, 2.0, 4.0):
        (plan,) = made.plan([request()], budget_ms=factor * floor_ms, cost=COST).requests
        depths.append(plan.warmup_depth + plan.probe_len)
    assert depths == sorted(depths) and depths[0] == 2 and depths[-1] == 16


def test_a_slow_link_is_hidden_behind_warm_up_and_a_fast_one_leaves_probing():
    """Numbers of our own: 8,000 stored tokens, 4 KiB a token and layer, one rank depth of 14."""
    made = planner(anchor(Signal.KV_DEV, 14, STEEP))
    splits = {}
    for gb_s in (3, 6, 50):
        link = Link(bytes_per_ms=gb_s * 1e6, latency_ms=1.0)
        batch = [request(8000, token_bytes=4096)]
        budget_ms = 1.001 * made.floor_ms(batch, COST, link)
        (plan,) = made.plan(batch, budget_ms=budget_ms, cost=COST, link=link).requests
        splits[gb_s] = (plan.warmup_depth, plan.probe_len)
    assert splits[3] == (13, 1)
    assert splits[3][0] > splits[6][0] > splits[50][0]
    assert splits[50] == (1, 13)
    fixed = planner(anchor(Signal.KV_DEV, 14, STEEP), choose_split=False)
    link = Link(bytes_per_ms=3e6, latency_ms=1.0)
    made_of = fixed.plan([request(8000, token_bytes=4096)], budget_ms=1e6, cost=COST, link=link)
    assert (made_of.requests[0].warmup_depth, made_of.requests[0].probe_len) == (1, 13)


def test_a_fixed_depth_is_the_only_one():
    made = planner(anchor(Signal.KV_DEV, 4, STEEP), anchor(Signal.KV_DEV, 14, STEEP), depth=9)
    for budget_ms in (0.0, 300.0, 1e6):
        plan = made.plan([request(8000)], budget_ms=budget_ms, cost=COST).requests[0]
        assert plan.warmup_depth + plan.probe_len in (9, COST.num_layers)


def test_full_prefill_runs_where_reuse_saves_nothing():
    made = planner(anchor(Signal.KV_DEV, 4, FLAT), reserve=0.1)
    dear = replace(COST, reuse_ms=0.01)  # stored KV costs more than a row through a layer
    short = [request(300), request(200)]
    for budget_ms in (0.0, 20.0, 1e4):
        plan = made.plan(short, budget_ms=budget_ms, cost=dear)
        for each in plan.requests:
            assert (each.warmup_depth, each.probe_len, each.coverage) == (32, 0, 1.0)
            assert each.band is None and each.pass_probability == 1.0
        assert plan.expected_passes == 2.0
        assert plan.expected_ms == made.floor_ms(short, dear)
    slow = Link(bytes_per_ms=1e6)
    far = [request(8000, token_bytes=4096)]
    assert made.plan(far, budget_ms=1e4, cost=COST, link=slow).requests[0].warmup_depth == 32
    assert made.plan(far, budget_ms=1e4, cost=COST).requests[0].warmup_depth < 32
    explained = made.explain(far, budget_ms=1e4, cost=COST, link=slow)
    assert explained.candidates[0].is_chosen and explained.candidates[0].stall_ms == 0.0


def test_no_plan_has_less_warm_up_than_what_was_measured():
    anchors = [
        anchor(Signal.KV_DEV, 6, FLAT, least_warmup=2),
        anchor(Signal.KV_DEV, 14, STEEP, least_warmup=12),
    ]
    made = planner(*anchors)
    seen = set()
    for budget_ms in np.linspace(1.0, 1.2, 30) * made.floor_ms([request()], COST):
        explained = made.explain([request()], budget_ms=budget_ms, cost=COST)
        for candidate in explained.candidates:
            if candidate.rank_depth == COST.num_layers:  # full prefill
                continue
            # halfway between two depths, as many as halfway between their WarmUps
            assert candidate.warmup_depth >= 2 + (candidate.rank_depth - 6) * 10 / 8
            seen.add(candidate.rank_depth)
    assert len(seen) > 3


def test_the_engine_may_raise_a_coverage_to_where_more_is_worth_nothing():
    made = planner(anchor(Signal.QCI, 4, (0.1, 0.6, 0.9, 0.9, 1.0)))
    for budget_ms, most in ((1.0, 0.2), (60.0, 0.2), (1e6, 0.5)):  # at last the saturation itself
        (plan,) = made.plan([request()], budget_ms=budget_ms, cost=COST).requests
        assert plan.band == (0.05, pytest.approx(most))
        assert plan.coverage <= plan.band[1]


def test_a_plan_for_a_slower_link_expects_less():
    made = planner(anchor(Signal.QCI, 4, STEEP), anchor(Signal.QCI, 14, STEEP))
    batch = [request(8000, token_bytes=4096), request(3000, token_bytes=4096)]
    passes = []
    for gb_s in (1, 2, 4, 8, 100):
        link = Link(bytes_per_ms=gb_s * 1e6)
        plan = made.plan(batch, budget_ms=300.0, cost=COST, link=link)
        passes.append(plan.expected_passes if plan.expected_ms <= 300.0 else 0.0)
    passes.append(made.plan(batch, budget_ms=300.0, cost=COST).expected_passes)
    assert passes == sorted(passes) and passes[0] < passes[-1]


def test_a_signal_without_anchors_is_never_chosen():
    made = planner(anchor(Signal.QCI, 4, FLAT))
    for budget_ms in (0.0, 60.0, 1e6):
        plan = made.plan([request()], budget_ms=budget_ms, cost=COST)
        assert plan.requests[0].signal is Signal.QCI
    with pytest.raises(ValueError, match="no anchors for kv_dev"):
        planner(anchor(Signal.QCI, 4, FLAT), signal=Signal.KV_DEV)
    with pytest.raises(ValueError, match="no anchors for kv_dev or qci"):
        planner(anchor(Signal.POSITION, 4, FLAT))
    with pytest.raises(ValueError, match="signal must be"):
        BudgetPlannerConfig(signal=Signal.POSITION)


def test_auto_is_left_to_the_engine_at_the_price_of_the_dearer():
    anchors = (anchor(Signal.KV_DEV, 4, STEEP), anchor(Signal.QCI, 4, FLAT))
    auto = planner(*anchors, signal=Signal.AUTO)
    plan = auto.plan([request()], budget_ms=1e6, cost=COST)
    assert plan.requests[0].signal is Signal.AUTO
    assert plan.expected_passes == pytest.approx(0.6)  # the lower curve
    floors = [
        planner(*anchors, signal=s).floor_ms([request()], COST) for s in (Signal.KV_DEV, Signal.QCI)
    ]
    assert auto.floor_ms([request()], COST) > max(floors)
    # the engine must not end with a signal that nobody has measured
    alone = planner(anchor(Signal.QCI, 4, FLAT), signal=Signal.AUTO)
    assert alone.plan([request()], budget_ms=50.0, cost=COST).requests[0].signal is Signal.QCI


def test_kv_dev_does_not_rank_at_layer_0():
    made = planner(anchor(Signal.KV_DEV, 6, STEEP))
    for budget_ms in np.linspace(20.0, 300.0, 15):
        (plan,) = made.plan([request()], budget_ms=budget_ms, cost=COST).requests
        assert plan.warmup_depth >= 1 and plan.warmup_depth + plan.probe_len == 6


def test_configurations_are_planned_as_the_slack_planner_does():
    made = planner(anchor(Signal.KV_DEV, 4, STEEP), deviation=Deviation.K)
    old = SlackPlanner(SlackPlannerConfig(reserve=0.0, deviation=Deviation.K))
    for name, config in STATIC_POLICIES.items():
        batch = [replace(request(n), policy=name, config=config) for n in (4000, 800)]
        plan = made.plan(batch, budget_ms=120.0, cost=COST)
        before = old.plan(batch, budget_ms=120.0, cost=COST)
        assert [replace(r, pass_probability=0.0) for r in plan.requests] == [*before.requests]
        assert 0.0 <= plan.expected_passes <= 2.0
        assert made.floor_ms(batch, COST) == pytest.approx(before.expected_ms)
    full = [replace(request(), config=STATIC_POLICIES["full_prefill"])]
    assert made.plan(full, budget_ms=1.0, cost=COST).expected_passes == 1.0
    linked = [
        replace(
            request(token_bytes=4096), policy="full_reuse", config=STATIC_POLICIES["full_reuse"]
        )
    ]
    slow = Link(bytes_per_ms=1e5)
    waiting = made.plan(linked, budget_ms=1.0, cost=COST, link=slow)
    assert waiting.expected_ms > made.plan(linked, budget_ms=1.0, cost=COST).expected_ms


def test_what_reuses_nothing_cannot_go_wrong():
    made = planner(anchor(Signal.KV_DEV, 4, FLAT))
    plan = made.plan([request(0, 500), request()], budget_ms=0.0, cost=COST)
    assert plan.requests[0].pass_probability == 1.0
    assert plan.expected_passes == pytest.approx(1.1)


def test_a_longer_context_is_judged_by_its_own_bucket():
    short, long = (0.5, 0.8, 0.9, 1.0, 1.0), (0.0, 0.1, 0.2, 0.3, 1.0)
    made = planner(anchor(Signal.QCI, 4, bucket(short, 1000), long))
    batch = [request(500), request(5000), replace(request(500), num_context_tokens=5000)]
    plan = made.plan(batch, budget_ms=0.0, cost=COST)
    assert [r.pass_probability for r in plan.requests] == pytest.approx([0.8, 0.1, 0.1])


def test_a_band_from_nothing_to_everything():
    made = planner(anchor(Signal.QCI, 4, STEEP), band=BudgetBand(floor=0.0, saturation=1.0))
    (bare,) = made.plan([request()], budget_ms=0.0, cost=COST).requests
    assert bare.coverage == 0.0
    (most,) = made.plan([request()], budget_ms=1e9, cost=COST).requests
    assert most.coverage == pytest.approx(1.0, abs=1e-5) and most.coverage <= 1.0
    assert most.pass_probability == pytest.approx(1.0, abs=1e-5)


def test_free_work_is_no_division_by_zero():
    free = CostModel(num_layers=8, fixed_ms=0, row_ms=0, pair_ms=0, selected_pair_ms=0, reuse_ms=0)
    made = planner(anchor(Signal.KV_DEV, 4, STEEP), anchor(Signal.QCI, 6, FLAT))
    for budget_ms in (-1.0, 0.0, 5.0):
        plan = made.plan([request(token_bytes=10.0)], budget_ms=budget_ms, cost=free)
        assert plan.expected_ms == 0.0
    link = Link(bytes_per_ms=1e4)
    plan = made.plan([request(token_bytes=10.0)], budget_ms=33.0, cost=free, link=link)
    assert plan.expected_ms <= 33.0


def test_bad_input_is_refused_in_words():
    made = planner(anchor(Signal.KV_DEV, 4, STEEP))
    with pytest.raises(ValueError, match="at least one request"):
        made.plan([], budget_ms=10.0, cost=COST)
    with pytest.raises(ValueError, match="at least one request"):
        made.floor_ms([], COST)
    with pytest.raises(ValueError, match="budget_ms must be a number"):
        made.plan([request()], budget_ms=math.nan, cost=COST)
    with pytest.raises(ValueError, match="within 3 layers"):
        made.plan([request()], budget_ms=10.0, cost=replace(COST, num_layers=3))
    with pytest.raises(ValueError, match="row_ms"):
        replace(COST, row_ms=math.nan)
    with pytest.raises(ValueError, match="layer_bytes"):
        request(token_bytes=math.nan)
    for field, value in (("reserve", 1.0), ("max_depths", 0), ("depth", 0)):
        with pytest.raises(ValueError, match=field):
            BudgetPlannerConfig(**{field: value})


def test_the_engine_may_solve_the_coverage_again_or_not():
    for resolve, band in ((True, (0.05, 0.5)), (False, None)):
        made = planner(anchor(Signal.KV_DEV, 4, STEEP), resolve=resolve, reserve=0.2)
        (plan,) = made.plan([request()], budget_ms=100.0, cost=COST).requests
        assert plan.band == band
        assert plan.target_ms == pytest.approx(80.0) and plan.budget_ms == 100.0
        assert plan.num_cached == 4000


@pytest.mark.parametrize("num_layers", [1, 2, 4, 32, 64])
def test_the_built_in_profile_plans_for_any_model(num_layers):
    made = BudgetPlanner(BudgetPlannerConfig(), DemandCurves(built_in_demand(num_layers)))
    cost = replace(COST, num_layers=num_layers)
    floor_ms = made.floor_ms([request()], cost)
    passes = [
        made.plan([request()], budget_ms=k * floor_ms, cost=cost).expected_passes
        for k in (0.5, 1.5, 3.0, 100.0)
    ]
    assert passes == sorted(passes)


def test_it_explains_itself():
    made = planner(
        anchor(Signal.KV_DEV, 4, FLAT),
        anchor(Signal.KV_DEV, 12, STEEP),
        anchor(Signal.QCI, 8, FLAT),
    )
    batch = [request(6000, token_bytes=4096), request(500, token_bytes=4096)]
    link = Link(bytes_per_ms=4e6)
    for factor in (0.5, 1.3, 100.0):
        budget_ms = factor * made.floor_ms(batch, COST, link)
        told = made.explain(batch, budget_ms=budget_ms, cost=COST, link=link)
        first = told.candidates[0]
        assert told.plan == made.plan(batch, budget_ms=budget_ms, cost=COST, link=link)
        assert [c.is_chosen for c in told.candidates].count(True) == 1 and first.is_chosen
        assert first.coverages == tuple(r.coverage for r in told.plan.requests)
        assert first.expected_ms == pytest.approx(told.plan.expected_ms)
        assert first.expected_passes == pytest.approx(told.plan.expected_passes)
        assert {(c.signal, c.rank_depth) for c in told.candidates} >= {(Signal.QCI, 8)}
        text = told.text()
        assert told.rule in text and len(text.splitlines()) == 2 + len(told.candidates)
    static = [replace(request(), config=STATIC_POLICIES["cacheblend"])]
    assert made.explain(static, budget_ms=50.0, cost=COST).candidates == ()
