import random

import pytest

from planner import CostModel, PrefillShape, Signal, fit_cost_model, prefill_work


def work_of(cached, always, coverage, *, w=1, p=1, num_layers=8, signal=Signal.KV_DEV):
    return prefill_work(
        [PrefillShape(num_cached=cached, num_always=always)],
        [coverage],
        signal=signal,
        warmup_depth=w,
        probe_len=p,
        num_layers=num_layers,
    )


def test_full_warmup_counts_every_token_layer_and_reuses_nothing():
    work = work_of(900, 100, 0.0, w=8, p=0)
    assert work.rows == 1000 * 8
    assert work.pairs == 1000 * 1000 / 2 * 8
    assert work.reused == 0


def test_coverage_one_costs_the_rows_and_pairs_of_full_prefill():
    patched, full = work_of(900, 100, 1.0), work_of(900, 100, 0.0, w=8, p=0)
    assert (patched.rows, patched.pairs) == (full.rows, full.pairs)
    assert patched.selected_pairs == 0


@pytest.mark.parametrize("signal", list(Signal))
def test_work_grows_with_coverage(signal):
    rows = [work_of(1000, 50, r / 20, signal=signal).rows for r in range(1, 20)]
    assert rows == sorted(rows)
    assert rows[0] < rows[-1]


def test_a_probe_that_cannot_change_anything_is_free():
    assert work_of(1000, 50, 0.0, p=4) == work_of(1000, 50, 0.0, p=0)
    assert work_of(1000, 50, 1.0, p=4) == work_of(1000, 50, 1.0, p=0)
    assert work_of(1000, 50, 0.5, p=4).rows > work_of(1000, 50, 0.5, p=0).rows


def test_auto_is_priced_as_the_dearer_of_its_two_ways():
    by = {s: work_of(1000, 50, 0.2, p=2, signal=s) for s in Signal}
    auto = by[Signal.AUTO]
    assert auto.rows == pytest.approx(by[Signal.KV_DEV].rows + 50)
    assert all(auto.rows >= by[s].rows for s in (Signal.KV_DEV, Signal.QCI))


def test_a_batchs_work_is_the_sum_of_its_requests():
    shapes = [
        PrefillShape(num_cached=300, num_always=20),
        PrefillShape(num_cached=90, num_always=7),
    ]
    together = prefill_work(
        shapes, [0.2, 0.4], signal=Signal.QCI, warmup_depth=2, probe_len=1, num_layers=8
    )
    alone = [
        prefill_work([s], [r], signal=Signal.QCI, warmup_depth=2, probe_len=1, num_layers=8)
        for s, r in zip(shapes, [0.2, 0.4], strict=True)
    ]
    assert together.rows == sum(w.rows for w in alone)
    assert together.selected_pairs == pytest.approx(sum(w.selected_pairs for w in alone))


def random_works(rng, count):
    return [
        work_of(rng.randint(0, 3000), rng.randint(1, 300), rng.random(), w=rng.randint(0, 8), p=0)
        for _ in range(count)
    ]


def test_fit_recovers_the_prices():
    rng = random.Random(0)
    true = CostModel(
        num_layers=8,
        fixed_ms=12.0,
        row_ms=0.02,
        pair_ms=3e-6,
        selected_pair_ms=3e-6,
        reuse_ms=0.001,
    )
    works = random_works(rng, 20)
    fitted = fit_cost_model(works, [true.work_ms(w) for w in works], num_layers=8)
    for work in random_works(rng, 20):
        assert fitted.work_ms(work) == pytest.approx(true.work_ms(work), rel=1e-6)
    assert fitted.relative_error < 1e-6


def test_fit_never_gives_negative_prices_under_noise():
    rng = random.Random(1)
    for _ in range(50):
        works = random_works(rng, 6)
        times = [(5 + 0.01 * w.rows) * rng.uniform(0.5, 2.0) for w in works]
        fitted = fit_cost_model(works, times, num_layers=8)  # refuses negative prices itself
        assert fitted.relative_error >= 0


@pytest.mark.parametrize("times", [[1.0], [1.0, float("nan")], [1.0, -2.0], [0.0, 1.0]])
def test_fit_refuses_times_that_cannot_be(times):
    works = random_works(random.Random(2), len(times))
    with pytest.raises(ValueError, match=r"samples|finite and positive"):
        fit_cost_model(works, times, num_layers=8)


COST = CostModel(
    num_layers=8, fixed_ms=1.0, row_ms=1.0, pair_ms=0.0, selected_pair_ms=0.0, reuse_ms=0.0
)


@pytest.mark.parametrize("members", [1, 4, 8])
@pytest.mark.parametrize("batches_on_their_way", [0, 1, 2, 5])
def test_observations_move_the_scale_to_the_truth_and_stay_there(members, batches_on_their_way):
    """The machine takes twice what the prices say; plans are made before earlier ones are seen."""
    cost, planned, scales = COST, [], []
    for _ in range(100):
        planned.append(cost.scale)
        if len(planned) > batches_on_their_way:
            plan_scale = planned.pop(0)
            for _ in range(members):
                cost = cost.observed(
                    100.0 * plan_scale, 200.0, plan_scale=plan_scale, weight=0.2 / members
                )
        scales.append(cost.scale)
    assert cost.scale == pytest.approx(2.0, rel=1e-3)
    assert scales == sorted(scales)  # no overshooting


def test_wild_observations_are_bounded():
    once = COST.observed(100.0, 1e9, plan_scale=1.0, weight=0.2)
    assert once.scale == pytest.approx(1.0 + 0.2 * 3)
    assert COST.observed(0.0, 10.0, plan_scale=1.0, weight=0.2) == COST
    assert COST.observed(10.0, 0.0, plan_scale=1.0, weight=0.2) == COST


def test_costs_that_are_not_numbers_are_refused_by_name():
    good = {
        "fixed_ms": 1.0,
        "row_ms": 1.0,
        "pair_ms": 0.0,
        "selected_pair_ms": 0.0,
        "reuse_ms": 0.0,
    }
    for name in good:
        for bad in (float("nan"), float("inf"), -1.0):
            with pytest.raises(ValueError, match=name):
                CostModel(num_layers=8, **{**good, name: bad})
