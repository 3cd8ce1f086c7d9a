"""The comparison itself: a machine that does what the timeline says has no errors."""

import random

import pytest

from benchmarks.bench_timeline import compare, predict, random_plan, summary
from benchmarks.profiling.cost_points import MeasuredPoint, PointTimes
from planner import EngineInfo, Link
from tests.fakes.costs import every_price

COST = every_price(12)
INFO = EngineInfo(
    model="none",
    fingerprint="none",
    num_layers=COST.num_layers,
    max_model_len=4096,
    kv_capacity_tokens=1 << 16,
    max_num_seqs=8,
    tensor_parallel_size=1,
    kv_token_bytes=100.0,
)
LINK = Link(bytes_per_ms=500.0)


def test_plans_can_be_run():
    rng = random.Random(0)
    for _ in range(300):
        plan = random_plan(rng, INFO)
        assert plan.warmup_depth + plan.probe_len <= INFO.num_layers
        assert sum(r.shape.num_tokens for r in plan.requests) < INFO.max_model_len
        assert all(r.num_always >= 1 and sum(r.chunks) >= 1 for r in plan.requests)


@pytest.mark.parametrize("link", [None, LINK])
def test_a_machine_that_keeps_to_the_timeline_has_no_errors(link):
    rng = random.Random(1)
    compared = []
    for _ in range(30):
        plan = random_plan(rng, INFO)
        made = predict(plan, COST, INFO, link=link)
        times = {f"{phase}_ms": ms for phase, ms in made.phases.items()}
        run = PointTimes(**times, stall_ms=made.stall_ms)
        measured = MeasuredPoint(point=plan, num_layers=INFO.num_layers, runs=(run,) * 2)
        compared.append(compare(measured, COST, INFO, link=link))
    rows = {row["group"]: row for row in summary(compared)}
    assert all(row["worst"] == pytest.approx(0.0, abs=1e-9) for row in rows.values())
    assert rows["all"]["count"] == 30
    assert ("behind a link" in rows) is (link is not None)


def test_a_link_costs_waits_and_nothing_else():
    rng = random.Random(2)
    for _ in range(50):
        plan = random_plan(rng, INFO)
        bare, linked = (predict(plan, COST, INFO, link=link) for link in (None, LINK))
        assert bare.stall_ms == 0.0 and linked.phases == bare.phases
        assert linked.total_ms == pytest.approx(bare.total_ms + linked.stall_ms)
