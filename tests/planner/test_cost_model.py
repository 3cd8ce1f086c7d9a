import random

import pytest

from planner.cost_model import (
    PRICES,
    CostModel,
    PrefillShape,
    Work,
    phase_works,
    prefill_work,
)
from planner.types import Signal


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


def random_plan(rng):
    num_layers = rng.randint(2, 12)
    w = rng.randint(0, num_layers)
    shapes = [
        PrefillShape(num_cached=rng.randint(0, 3000), num_always=rng.randint(1, 300))
        for _ in range(rng.randint(1, 4))
    ]
    return {
        "shapes": shapes,
        "coverages": [rng.choice((0.0, rng.random(), 1.0)) for _ in shapes],
        "signal": rng.choice(list(Signal)),
        "warmup_depth": w,
        "probe_len": rng.randint(0, num_layers - w),
        "num_layers": num_layers,
    }


def test_phases_sum_to_the_prefill():
    rng = random.Random(0)
    for _ in range(200):
        plan = random_plan(rng)
        phases, whole = phase_works(**plan), prefill_work(**plan)
        assert list(phases) == ["warmup", "probe", "patch", "fixed"]
        sums = [sum(counts) for counts in zip(*(w.counts for w in phases.values()), strict=True)]
        assert sums == pytest.approx(whole.counts)
        assert (phases["fixed"].prefills, phases["fixed"].requests) == (1, len(plan["shapes"]))
        assert phases["warmup"].layers == plan["warmup_depth"]
        assert phases["patch"].layers == plan["num_layers"] - plan["warmup_depth"]


def test_a_filtering_probe_compares_what_the_layer_before_kept():
    probe = phase_works(
        [PrefillShape(num_cached=900, num_always=100)],
        [0.25],
        signal=Signal.KV_DEV,
        warmup_depth=1,
        probe_len=2,
        num_layers=8,
    )["probe"]
    kept = 100 + 0.5 * 900  # the square root of the coverage, after one layer of two
    assert probe.compared == pytest.approx(1000 + kept)
    assert probe.rows == pytest.approx(kept)
    assert probe.selected_pairs == pytest.approx(kept * 1000 / 2)
    assert probe.reused == 2 * 900
    assert (probe.layers, probe.filters) == (1, 1)  # the last one walks nothing


def test_works_are_priced_one_by_one():
    cost = CostModel(num_layers=4, **{name: 2.0**idx for idx, name in enumerate(PRICES)}, scale=3.0)
    for idx, counted in enumerate(PRICES.values()):
        assert cost.work_ms(Work(**{counted: 5.0})) == 3.0 * 5.0 * 2.0**idx
    assert cost.batch_fixed_ms(4) == cost.work_ms(Work(prefills=1, requests=4))
    assert cost.stitched_layer_ms(4) == cost.work_ms(Work(layers=1, members=4))


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
    good = dict.fromkeys(PRICES, 1.0)
    for name in good:
        for bad in (float("nan"), float("inf"), -1.0):
            with pytest.raises(ValueError, match=name):
                CostModel(num_layers=8, **{**good, name: bad})
