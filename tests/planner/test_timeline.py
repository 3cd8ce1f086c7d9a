"""The recurrence by hand, and against the cost model's sum where nothing is waited for."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.batch_times import BatchTimes, Splits
from planner.cost_model import CostModel, PrefillShape, prefill_work
from planner.coverage_resolver import layer_budget_ms
from planner.timeline import LayerTimes, Link, arrivals_ms, layer_times, run_timeline, total_ms
from planner.types import Signal

PRICE = st.floats(0.0, 0.02)
SHAPES = st.lists(
    st.builds(
        PrefillShape,
        num_cached=st.one_of(st.just(0), st.integers(1, 5000)),
        num_always=st.integers(1, 300),
    ),
    min_size=1,
    max_size=4,
)
COVERAGE = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.001, 0.999))


@st.composite
def costs(draw):
    return CostModel(
        num_layers=draw(st.integers(1, 12)),
        fixed_ms=draw(st.floats(0.0, 30.0)),
        request_ms=draw(st.floats(0.0, 5.0)),
        layer_ms=draw(st.floats(0.0, 2.0)),
        member_ms=draw(st.floats(0.0, 1.0)),
        filter_ms=draw(st.floats(0.0, 5.0)),
        row_ms=draw(PRICE),
        compare_ms=draw(PRICE),
        pair_ms=draw(PRICE) * 1e-4,
        selected_pair_ms=draw(PRICE) * 1e-4,
        reuse_ms=draw(PRICE) * 1e-2,
        scale=draw(st.floats(0.2, 3.0)),
    )


@st.composite
def plans(draw):
    cost = draw(costs())
    shapes = draw(SHAPES)
    w = draw(st.integers(0, cost.num_layers))
    return {
        "shapes": shapes,
        "coverages": [draw(COVERAGE) for _ in shapes],
        "signal": draw(st.sampled_from(list(Signal))),
        "warmup_depth": w,
        "probe_len": draw(st.integers(0, cost.num_layers - w)),
        "cost": cost,
    }


def test_phases_wait_for_what_they_need():
    times = LayerTimes(
        num_layers=4, warmup_depth=2, warmup_ms=10.0, probe_ms=(1.0,), patch_ms=3.0, fixed_ms=5.0
    )
    made = run_timeline(times, [12.0, 40.0])
    # WarmUp to 20, Probe of layer 2 to 21, Patch of 2 to 24, then layer 3 arrives at 40
    assert (made.warmup_end_ms, made.probe_end_ms, made.patch_end_ms) == (20.0, 21.0, 43.0)
    assert made.total_ms == 48.0 and made.stall_ms == 16.0
    assert [(s.phase, s.layer) for s in made.spans] == [
        ("warmup", 0),
        ("warmup", 1),
        ("probe", 2),
        ("patch", 2),
        ("stall", 3),
        ("patch", 3),
    ]


def test_probe_waits_too_and_patch_finds_its_layers_there():
    times = LayerTimes(
        num_layers=3, warmup_depth=0, warmup_ms=9.0, probe_ms=(1.0, 1.0, 1.0), patch_ms=2.0
    )
    made = run_timeline(times, [5.0, 10.0, 15.0])
    assert (made.warmup_end_ms, made.probe_end_ms, made.patch_end_ms) == (0.0, 16.0, 22.0)
    assert made.stall_ms == 5.0 + 4.0 + 4.0


def test_a_question_alone_waits_for_the_last_layer_only():
    cost = CostModel(
        num_layers=3, fixed_ms=0, row_ms=1.0, pair_ms=0, selected_pair_ms=0, reuse_ms=0
    )
    times = layer_times(
        [PrefillShape(num_cached=10, num_always=2)],
        [0.5],
        signal=Signal.QCI_FINAL,
        warmup_depth=0,
        probe_len=0,
        cost=cost,
    )
    made = run_timeline(times, [1.0, 2.0, 100.0])
    assert [s.layer for s in made.spans if s.phase == "probe"] == [0, 1, 2]
    assert made.probe_end_ms == 102.0


@given(plans())
@settings(max_examples=60, deadline=None)
def test_without_waits_it_is_the_cost_models_sum(plan):
    times, cost = layer_times(**plan), plan.pop("cost")
    shapes, coverages = plan.pop("shapes"), plan.pop("coverages")
    expected = cost.work_ms(prefill_work(shapes, coverages, num_layers=cost.num_layers, **plan))
    assert run_timeline(times).total_ms == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert total_ms(times) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(plans(), st.lists(st.floats(0.0, 500.0), min_size=12, max_size=12))
@settings(max_examples=60, deadline=None)
def test_spans_are_gapless_and_the_fast_total_agrees(plan, gaps):
    times = layer_times(**plan)
    behind = plan["cost"].num_layers - plan["warmup_depth"]
    arrivals = np.cumsum(gaps)[:behind].tolist()
    made = run_timeline(times, arrivals)
    assert total_ms(times, arrivals) == pytest.approx(made.total_ms)
    assert made.warmup_end_ms <= made.probe_end_ms <= made.patch_end_ms <= made.total_ms
    for before, after in pairwise(made.spans):
        assert after.start_ms == pytest.approx(before.start_ms + before.duration_ms)
    stalls = sum(span.duration_ms for span in made.spans if span.phase == "stall")
    assert stalls == pytest.approx(made.stall_ms)
    assert made.total_ms >= run_timeline(times).total_ms - 1e-6
    # Patch by itself: the closed form that the engine solves coverages with
    if behind:
        left = [max(0.0, arrival - made.probe_end_ms) for arrival in arrivals]
        longest = layer_budget_ms(made.patch_end_ms - made.probe_end_ms, left)
        assert times.patch_ms <= longest + 1e-6


@given(plans(), st.floats(0.0, 1e6), st.floats(1e2, 1e6), st.floats(0.0, 20.0))
@settings(max_examples=80, deadline=None)
def test_the_closed_form_is_the_recurrence(plan, layer_bytes, bytes_per_ms, latency_ms):
    signal = plan["signal"]
    if signal not in (Signal.KV_DEV, Signal.QCI, Signal.AUTO) or plan["probe_len"] == 0:
        return
    coverages = np.minimum(plan["coverages"], 0.9)
    plan["coverages"] = coverages.tolist()
    link = Link(bytes_per_ms=bytes_per_ms, latency_ms=latency_ms)
    w, p, cost = plan["warmup_depth"], plan["probe_len"], plan["cost"]
    times = BatchTimes(plan["shapes"], layer_bytes, cost=cost, link=link)
    splits = Splits.of([(signal, w, p)])
    expected = total_ms(
        layer_times(**plan), arrivals_ms([layer_bytes] * (cost.num_layers - w), link)
    )
    planned = times.planned_ms(splits, times.ends(splits), 0, coverages)
    assert planned == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_arrivals_are_in_order_and_nothing_to_load_is_there():
    link = Link(bytes_per_ms=10.0, latency_ms=2.0)
    assert arrivals_ms([100.0, 50.0], link) == [12.0, 17.0]
    assert arrivals_ms([0.0, 50.0], link) == [0.0, 7.0]
    assert arrivals_ms([100.0, 50.0], None) == arrivals_ms([100.0, 50.0], Link()) == [0.0, 0.0]


@pytest.mark.parametrize("bytes_per_ms", [0.0, -1.0, math.nan])
def test_an_impossible_link_is_refused(bytes_per_ms):
    with pytest.raises(ValueError, match="bytes_per_ms"):
        Link(bytes_per_ms=bytes_per_ms)
    with pytest.raises(ValueError, match="latency_ms"):
        Link(latency_ms=-1.0)


def test_impossible_input_is_refused_by_name():
    with pytest.raises(ValueError, match="layer_bytes"):
        arrivals_ms([math.nan], None)
    times = LayerTimes(num_layers=4, warmup_depth=2, warmup_ms=1.0, patch_ms=1.0)
    with pytest.raises(ValueError, match="arrivals of 2 layers"):
        run_timeline(times, [1.0])
    with pytest.raises(ValueError, match="warmup_depth"):
        LayerTimes(num_layers=4, warmup_depth=5, warmup_ms=1.0, patch_ms=1.0)
    with pytest.raises(ValueError, match="finite"):
        LayerTimes(num_layers=4, warmup_depth=1, warmup_ms=math.nan, patch_ms=1.0)
    with pytest.raises(ValueError, match="Probe layers"):
        LayerTimes(num_layers=4, warmup_depth=2, warmup_ms=1.0, patch_ms=1.0, probe_ms=(1.0,) * 3)
