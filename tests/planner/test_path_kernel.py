"""The compiled walk along the paths against its plain reference, on random batches."""

from dataclasses import fields

import numpy as np
import pytest

from planner.budget_planner import BudgetPlanner, BudgetPlannerConfig
from planner.cost_model import CostModel, PrefillShape
from planner.coverage_shift import make_paths, make_paths_ref
from planner.demand import DemandCurves, built_in_demand
from planner.recompute_planner import BudgetBand, PlanInput
from planner.timeline import Link
from planner.types import Signal

EXACT = 1e-12  # relative: sums in another order
COST = CostModel(
    num_layers=24,
    fixed_ms=10.0,
    row_ms=0.003,
    pair_ms=1.5e-7,
    selected_pair_ms=2.5e-7,
    reuse_ms=5e-5,
)


@pytest.mark.parametrize("seed", range(40))
def test_the_walk_is_its_reference(seed):
    rng = np.random.default_rng(seed)
    signal = [Signal.KV_DEV, Signal.QCI, Signal.AUTO][seed % 3]
    config = BudgetPlannerConfig(signal=signal, band=BudgetBand(floor=rng.choice([0.0, 0.05])))
    planner = BudgetPlanner(config, DemandCurves(built_in_demand(24, signal)))
    link = Link(bytes_per_ms=1e6, latency_ms=0.5) if rng.random() < 0.5 else None
    requests = [
        PlanInput(
            shape=PrefillShape(num_cached=int(cached), num_always=int(rng.integers(1, 500))),
            layer_bytes=int(cached) * 4096,
        )
        for cached in rng.integers(0, 8_000, rng.integers(1, 9)) * (rng.random() < 0.95)
    ]
    case = planner._case(requests, float(rng.uniform(0.0, 3_000.0)), COST, link)
    chosen = np.sort(rng.permutation(len(case.floor_ms))[: rng.integers(1, 9)])
    made, expected = (
        make(
            case.candidates,
            case.times,
            chosen,
            case.buckets,
            ends=case.ends,
            floor_ms=case.floor_ms,
            target_ms=case.target_ms,
        )
        for make in (make_paths, make_paths_ref)
    )
    for field in fields(made):
        if field.name != "ends":
            one, other = getattr(made, field.name), getattr(expected, field.name)
            assert one.shape == other.shape
            np.testing.assert_allclose(one, other, rtol=EXACT, atol=EXACT, err_msg=field.name)
