"""Known prices come back from the times that they make, with noise and without."""

import random
from statistics import median

import pytest

from planner.cost_fit import fit_cost_model, fit_phases
from planner.cost_model import PrefillShape, Work, phase_works, prefill_work
from planner.types import Signal
from tests.fakes.costs import every_price

NUM_LAYERS = 12
TRUE = every_price(NUM_LAYERS)


def random_plan(rng):
    w = rng.randint(0, NUM_LAYERS)
    shapes = [
        PrefillShape(num_cached=rng.randint(50, 2000), num_always=rng.randint(1, 300))
        for _ in range(rng.randint(1, 4))
    ]
    return {
        "shapes": shapes,
        "coverages": [rng.choice((0.0, 0.1, rng.random(), 1.0)) for _ in shapes],
        "signal": rng.choice((Signal.KV_DEV, Signal.QCI)),
        "warmup_depth": w,
        "probe_len": rng.randint(0, NUM_LAYERS - w),
        "num_layers": NUM_LAYERS,
    }


def phases_of(rng, plan, noise=0.0):
    return [
        (work, TRUE.work_ms(work) * (1 + noise * rng.random()))
        for work in phase_works(**plan).values()
        if any(work.counts)
    ]


def test_phases_tell_all_prices():
    rng = random.Random(0)
    batches = [phases_of(rng, random_plan(rng)) for _ in range(40)]
    fitted = fit_phases(batches, num_layers=NUM_LAYERS)
    assert fitted.prices == pytest.approx(TRUE.prices, rel=1e-6)
    assert fitted.relative_error < 1e-6


def test_whole_prefills_predict_others():
    rng = random.Random(0)
    works = [prefill_work(**random_plan(rng)) for _ in range(60)]
    fitted = fit_cost_model(works, [TRUE.work_ms(w) for w in works], num_layers=NUM_LAYERS)
    for _ in range(20):
        work = prefill_work(**random_plan(rng))
        assert fitted.work_ms(work) == pytest.approx(TRUE.work_ms(work), rel=1e-6)


def test_a_few_disturbed_batches_hardly_matter():
    """One in five took two to four times as long."""
    rng = random.Random(1)
    batches = []
    for idx in range(60):
        times = rng.uniform(2.0, 4.0) if idx % 5 == 0 else 1.0
        plan = phases_of(rng, random_plan(rng), noise=0.02)
        batches.append([(work, ms * times) for work, ms in plan])
    fitted = fit_phases(batches, num_layers=NUM_LAYERS)
    works = [prefill_work(**random_plan(rng)) for _ in range(60)]
    errors = [abs(fitted.work_ms(work) / TRUE.work_ms(work) - 1) for work in works]
    assert median(errors) < 0.06


def test_prices_are_never_negative_under_noise():
    rng = random.Random(2)
    for _ in range(50):
        works = [prefill_work(**random_plan(rng)) for _ in range(6)]
        times = [(5 + 0.01 * w.rows) * rng.uniform(0.5, 2.0) for w in works]
        fitted = fit_cost_model(works, times, num_layers=8)  # refuses negative prices itself
        assert fitted.relative_error >= 0


def test_what_no_sample_has_is_free():
    works = [Work(prefills=1, rows=rows) for rows in (10.0, 20.0, 30.0)]
    fitted = fit_cost_model(works, [6.0, 11.0, 16.0], num_layers=8)
    assert (fitted.fixed_ms, fitted.row_ms) == pytest.approx((1.0, 0.5))
    assert fitted.pair_ms == fitted.reuse_ms == 0.0


@pytest.mark.parametrize("times", [[1.0], [1.0, float("nan")], [1.0, -2.0], [0.0, 1.0]])
def test_times_that_cannot_be_are_refused(times):
    works = [Work(prefills=1, rows=10.0 * idx) for idx in range(len(times))]
    with pytest.raises(ValueError, match=r"samples|finite and positive"):
        fit_cost_model(works, times, num_layers=8)
    with pytest.raises(ValueError, match=r"samples|finite and positive"):
        fit_phases([list(zip(works, times, strict=True))], num_layers=8)


def test_an_error_base_that_cannot_be_is_refused():
    works = [Work(prefills=1, rows=10.0), Work(prefills=1, rows=20.0)]
    for bases in ([1.0], [1.0, 0.0], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="error_base_ms"):
            fit_cost_model(works, [1.0, 2.0], num_layers=8, error_base_ms=bases)
