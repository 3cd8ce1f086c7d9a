import random

import pytest

from planner import (
    ADAPTIVE,
    STATIC_POLICIES,
    BudgetBand,
    CostModel,
    Deviation,
    PlanInput,
    PrefillShape,
    RecomputeConfig,
    RequestPlan,
    Signal,
    SlackPlanner,
    SlackPlannerConfig,
)

COST = CostModel(
    num_layers=30,
    fixed_ms=20.0,
    row_ms=0.02,
    pair_ms=1e-6,
    selected_pair_ms=1e-6,
    reuse_ms=0.0005,
)
PLANNER = SlackPlanner(SlackPlannerConfig(band=BudgetBand(floor=0.05, saturation=0.5), reserve=0.0))


def adaptive(cached=2000, always=60):
    return PlanInput(shape=PrefillShape(num_cached=cached, num_always=always))


def plan(requests, budget_ms):
    return PLANNER.plan(requests, budget_ms=budget_ms, cost=COST)


def test_the_budget_is_used_and_not_exceeded():
    rng = random.Random(0)
    for _ in range(200):
        requests = [
            adaptive(rng.randint(10, 4000), rng.randint(1, 200)) for _ in range(rng.randint(1, 6))
        ]
        floor_ms = plan(requests, 0.0).expected_ms
        most_ms = plan(requests, 1e9).expected_ms
        budget = rng.uniform(floor_ms, most_ms)
        made = plan(requests, budget)
        assert made.expected_ms <= budget * (1 + 1e-9)
        assert made.expected_ms == pytest.approx(budget, rel=1e-6)


def test_a_reserve_is_kept_back():
    planner = SlackPlanner(SlackPlannerConfig(reserve=0.25))
    made = planner.plan([adaptive()], budget_ms=800.0, cost=COST)
    assert made.expected_ms == pytest.approx(600.0)
    assert made.budget_ms == 800.0
    with pytest.raises(ValueError, match="reserve"):
        SlackPlannerConfig(reserve=1.0)


def test_more_budget_never_lowers_the_coverage():
    coverages = [plan([adaptive()], ms).requests[0].coverage for ms in range(0, 3000, 50)]
    assert coverages == sorted(coverages)
    assert coverages[0] == 0.05
    assert coverages[-1] == 0.5


@pytest.mark.parametrize("budget_ms", [-1e6, 0.0, 1.0])
def test_under_the_floors_cost_it_runs_the_floor(budget_ms):
    (request,) = plan([adaptive()], budget_ms).requests
    assert request.coverage == 0.05
    assert request.budget_ms == budget_ms


@pytest.mark.parametrize("band", [BudgetBand(floor=0.0, saturation=1.0), BudgetBand()])
def test_the_budget_holds_for_bands_that_end_at_nothing_and_everything(band):
    planner = SlackPlanner(SlackPlannerConfig(band=band, reserve=0.0))
    for budget in range(0, 2500, 20):
        made = planner.plan([adaptive()], budget_ms=budget, cost=COST)
        at_floor = made.requests[0].coverage == band.floor
        assert at_floor or made.expected_ms <= budget * (1 + 1e-6)


def test_nothing_stored_leaves_nothing_to_choose():
    costs = {plan([adaptive(cached=0, always=500)], ms).expected_ms for ms in (1.0, 1e9)}
    assert len(costs) == 1


def test_static_configurations_keep_their_coverage_and_depths():
    for name, config in STATIC_POLICIES.items():
        (request,) = plan(
            [PlanInput(shape=adaptive().shape, policy=name, config=config)], 1.0
        ).requests
        assert request.policy == name
        assert request.coverage == config.coverage
        assert (request.warmup_depth, request.probe_len) == config.depths(30)


def test_adaptive_requests_share_the_depths_of_a_static_one_and_fit_around_it():
    config = RecomputeConfig(signal=Signal.QCI, warmup_depth=3, probe_len=2, coverage=0.9)
    static = PlanInput(shape=adaptive().shape, policy="custom", config=config)
    made = plan([adaptive(), static], 1200.0)
    assert [r.coverage for r in made.requests][1] == 0.9
    assert {(r.signal, r.warmup_depth, r.probe_len) for r in made.requests} == {(Signal.QCI, 3, 2)}


def test_depths_are_cut_to_the_model():
    assert RecomputeConfig(warmup_depth=None, probe_len=4).depths(8) == (8, 0)
    assert RecomputeConfig(warmup_depth=2, probe_len=None).depths(8) == (2, 6)
    assert RecomputeConfig(warmup_depth=40, probe_len=40).depths(8) == (8, 0)


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="at least one request"):
        plan([], 10.0)


@pytest.mark.parametrize("band", [(0.5, 0.5), (0.6, 0.5), (-0.1, 0.5), (0.1, 1.1)])
def test_impossible_bands_are_refused(band):
    with pytest.raises(ValueError, match="floor"):
        BudgetBand(floor=band[0], saturation=band[1])


@pytest.mark.parametrize(
    "bad", [{"warmup_depth": -1}, {"probe_len": -1}, {"coverage": 1.5}, {"coverage": -0.1}]
)
def test_impossible_configurations_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        RecomputeConfig(**bad)


def test_the_default_policy_is_adaptive():
    assert adaptive().policy == ADAPTIVE


def test_what_the_engine_may_solve_again():
    fixed = PlanInput(
        shape=PrefillShape(num_cached=100, num_always=10),
        policy="cacheblend",
        config=STATIC_POLICIES["cacheblend"],
    )
    planner = SlackPlanner(SlackPlannerConfig(reserve=0.25))
    own, static = planner.plan([adaptive(), fixed], budget_ms=800.0, cost=COST).requests
    assert own.band == (0.05, 0.5) and static.band is None
    assert own.target_ms == static.target_ms == 600.0
    closed = SlackPlanner(SlackPlannerConfig(resolve=False))
    assert closed.plan([adaptive()], budget_ms=800.0, cost=COST).requests[0].band is None


def test_the_deviation_is_the_configs_or_the_servers():
    planner = SlackPlanner(SlackPlannerConfig(deviation=Deviation.K))
    assert planner.plan([adaptive()], budget_ms=1.0, cost=COST).requests[0].deviation == "k"
    config = RecomputeConfig(deviation=Deviation.V)
    request = PlanInput(shape=PrefillShape(num_cached=9, num_always=1), config=config)
    assert planner.plan([request], budget_ms=1.0, cost=COST).requests[0].deviation == "v"


def test_a_config_is_a_plan_by_itself():
    config = RecomputeConfig(
        signal=Signal.QCI, warmup_depth=2, probe_len=None, coverage=0.3, deviation=Deviation.V
    )
    made = RequestPlan.of_config("custom", config, num_layers=8)
    assert (made.signal, made.warmup_depth, made.probe_len) == (Signal.QCI, 2, 6)
    assert (made.coverage, made.deviation, made.band) == (0.3, Deviation.V, None)
