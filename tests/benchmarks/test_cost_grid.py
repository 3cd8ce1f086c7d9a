"""Which batches are measured, what is kept of them, and the prices that come of it."""

import random
from dataclasses import replace

import pytest

from benchmarks.profiling.cost_grid import (
    GridPoint,
    GridRequest,
    MeasuredPoint,
    PointTimes,
    cost_profile,
    grid,
    merged,
)
from planner import CostModel, Signal
from tests.fakes.costs import every_price

NUM_LAYERS = 8
MACHINE = {"device": "none", "num_threads": 1, "tensor_parallel_size": 1, "dtype": "float32"}
TRUE = every_price(NUM_LAYERS)


def measured_by(cost: CostModel, point: GridPoint) -> MeasuredPoint:
    times = {f"{phase}_ms": cost.work_ms(w) for phase, w in point.works(NUM_LAYERS).items()}
    run = PointTimes(**times, load_ms=2.0, loaded_bytes=200.0)
    return MeasuredPoint(point=point, num_layers=NUM_LAYERS, runs=(run,))


@pytest.mark.parametrize("num_layers", [2, 3, 4, 5, 7, 12, 16, 30, 33, 64])
@pytest.mark.parametrize("max_model_len", [34, 100, 512, 2048, 131072])
def test_every_point_can_be_run(num_layers, max_model_len):
    points = grid(num_layers, max_model_len)
    assert 40 <= len(points) <= 60
    assert len({point.key for point in points}) == len(points)
    assert points == grid(num_layers, max_model_len)
    for point in points:
        assert point.warmup_depth + point.probe_len <= num_layers
        assert sum(r.shape.num_tokens for r in point.requests) < max_model_len
        for request in point.requests:
            assert request.num_always >= 1 and min(request.chunks) >= 1
            assert request.shape.num_tokens > 1


def test_the_grid_has_all_kinds():
    points = grid(16, 4096)
    assert {len(p.requests) for p in points} == {1, 2, 4}
    assert {p.coverage for p in points} == {0.0, 0.05, 0.2, 0.5, 1.0}
    for signal in (Signal.KV_DEV, Signal.QCI):
        mine = [p for p in points if p.signal is signal and p.warmup_depth < 16]
        assert {p.warmup_depth for p in mine} == {0, 1, 4, 8}
        assert len({p.probe_len for p in mine}) >= 3
    assert sum(p.warmup_depth == 16 for p in points) == 6
    tokens = [sum(r.shape.num_tokens for r in p.requests) for p in points]
    assert min(tokens) < 300 and max(tokens) > 2000


@pytest.mark.parametrize(("num_layers", "max_model_len"), [(1, 4096), (16, 20)])
def test_a_model_that_is_too_small_is_refused(num_layers, max_model_len):
    with pytest.raises(ValueError, match="need 2 layers"):
        grid(num_layers, max_model_len)


def test_known_prices_come_back():
    profile = cost_profile([measured_by(TRUE, p) for p in grid(NUM_LAYERS, 4096)], **MACHINE)
    assert profile.cost.prices == pytest.approx(TRUE.prices, rel=1e-6)
    assert [fit.phase for fit in profile.fits] == ["warmup", "probe", "patch", "fixed"]
    assert all(fit.worst_error < 1e-6 for fit in profile.fits)
    assert sum(fit.num_samples for fit in profile.fits) == len(profile.samples)
    assert profile.host_bytes_per_ms == 100.0
    assert profile.machine == ("none", 1, 1, "float32")


def test_the_median_run_of_a_phase_counts():
    """Each round is disturbed somewhere else."""
    rng = random.Random(0)
    rounds = []
    for _ in range(5):
        busy = replace(TRUE, scale=2.0)
        rounds += [
            measured_by(busy if rng.random() < 0.25 else TRUE, point)
            for point in grid(NUM_LAYERS, 4096)
        ]
    assert {len(one.runs) for one in merged(rounds)} == {5}
    profile = cost_profile(rounds, **MACHINE)
    assert profile.cost.row_ms == pytest.approx(TRUE.row_ms, rel=0.05)


def test_measurements_that_cannot_be_are_refused():
    point = grid(NUM_LAYERS, 4096)[0]
    good = measured_by(TRUE, point)
    with pytest.raises(ValueError, match="no point"):
        cost_profile([], **MACHINE)
    other = measured_by(TRUE, grid(NUM_LAYERS, 4096)[1]).model_copy(update={"num_layers": 9})
    with pytest.raises(ValueError, match="numbers of layers"):
        cost_profile([good, other], **MACHINE)
    with pytest.raises(ValueError, match="finite and positive"):
        cost_profile([good.model_copy(update={"runs": (PointTimes(),)})], **MACHINE)
    for bad in (float("nan"), -1.0, float("inf")):
        with pytest.raises(ValueError, match="patch_ms"):
            PointTimes(patch_ms=bad)


def test_a_measured_point_is_json():
    for point in grid(NUM_LAYERS, 4096):
        measured = measured_by(TRUE, point)
        assert MeasuredPoint.model_validate_json(measured.model_dump_json()) == measured


def test_a_point_knows_its_shapes():
    request = GridRequest(chunks=(256, 100), num_always=32)
    assert (request.shape.num_cached, request.shape.num_always) == (356, 32)
