"""Demand curves: between anchors, between coverages, and their concave envelopes."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.demand import DemandCurves, built_in_demand, concave_envelope
from planner.demand_profile import DemandAnchor, DemandBucket, DemandProfile
from planner.types import Signal

SHALLOW, DEEP = (0.0, 0.2, 0.8, 1.0), (0.2, 0.6, 1.0, 1.0)


def anchor(w, enough, *, signal=Signal.KV_DEV, p=1, limits=(None,)):
    return DemandAnchor(
        signal=signal,
        warmup_depth=w,
        probe_len=p,
        buckets=tuple(
            DemandBucket(
                max_context_tokens=limit,
                num_requests=10,
                coverages=(0.0, 0.1, 0.5, 1.0),
                enough=enough,
            )
            for limit in limits
        ),
    )


def curves(*anchors):
    return DemandCurves(DemandProfile(model="m", task="t", gate="g", anchors=anchors))


def test_it_is_linear_in_the_coverage_and_in_the_depth():
    made = curves(anchor(1, SHALLOW), anchor(5, DEEP))
    assert made.enough(Signal.KV_DEV, 2, 100, 0.3) == pytest.approx(0.5)
    assert made.enough(Signal.KV_DEV, 6, 100, 0.3) == pytest.approx(0.8)
    assert made.enough(Signal.KV_DEV, 4, 100, 0.3) == pytest.approx(0.65)
    assert made.anchor_depths(Signal.KV_DEV) == (2, 6)


def test_outside_the_anchors_the_nearest_one_counts():
    made = curves(anchor(1, SHALLOW), anchor(5, DEEP))
    assert made.enough(Signal.KV_DEV, 1, 100, 0.1) == 0.2
    assert made.enough(Signal.KV_DEV, 30, 100, 0.1) == 0.6


def test_buckets_are_cut_where_any_anchor_cuts():
    made = curves(anchor(1, SHALLOW, limits=(100, None)), anchor(5, DEEP, limits=(50, None)))
    assert made.num_buckets == 3
    assert [made.bucket(n) for n in (1, 50, 51, 100, 101)] == [0, 0, 1, 1, 2]


def test_two_splits_of_a_depth_count_as_the_lower():
    made = curves(anchor(3, SHALLOW), anchor(1, DEEP, p=3))
    assert made.enough(Signal.KV_DEV, 4, 10, 0.1) == 0.2


def test_a_curve_holds_for_as_much_warm_up_as_its_anchors_had():
    made = curves(anchor(1, SHALLOW), anchor(5, DEEP, p=3), anchor(2, DEEP, signal=Signal.QCI))
    least = [made.least_warmup(Signal.KV_DEV, depth) for depth in (1, 2, 3, 5, 8, 20)]
    assert least == [1, 1, 2, 3, 5, 5]  # 4 more for 6 of depth, rounded up
    assert made.least_warmup(Signal.AUTO, 8) == 5  # it may end as either
    with pytest.raises(ValueError, match="no anchors for qci"):
        curves(anchor(1, SHALLOW)).least_warmup(Signal.QCI, 4)


def test_auto_is_the_lower_of_the_two_where_both_are_known():
    both = curves(anchor(1, DEEP), anchor(3, SHALLOW, signal=Signal.QCI))
    assert both.anchor_depths(Signal.AUTO) == (4,)
    assert both.enough(Signal.AUTO, 4, 10, 0.1) == 0.2
    assert Signal.AUTO not in curves(anchor(1, DEEP)).signals


def test_what_has_no_anchors_has_no_curve():
    made = curves(anchor(1, SHALLOW), anchor(4, DEEP, signal=Signal.QCI, p=0))
    assert made.signals == (Signal.KV_DEV,)  # without a Probe nothing is ranked
    with pytest.raises(ValueError, match="no anchors for qci"):
        made.enough(Signal.QCI, 4, 10, 0.1)


@pytest.mark.parametrize("coverage", [-0.1, 1.1, float("nan")])
def test_a_coverage_is_a_fraction(coverage):
    with pytest.raises(ValueError, match="coverage"):
        curves(anchor(1, SHALLOW)).enough(Signal.KV_DEV, 2, 10, coverage)


@given(st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_an_envelope_is_concave_and_above_its_curve(seed):
    rng = random.Random(seed)
    coverages = sorted({round(rng.random(), 2) for _ in range(rng.randint(2, 9))} | {0.0, 1.0})
    chances = sorted(rng.choice([rng.random(), 0.5]) for _ in coverages)
    segments = concave_envelope(coverages, chances)
    slopes = [s.gain / s.coverage for s in segments]
    assert slopes == sorted(slopes, reverse=True)
    assert all(s.gain > 0 and s.coverage > 0 for s in segments)
    assert sum(s.gain for s in segments) == pytest.approx(chances[-1] - chances[0])
    corners = np.cumsum([chances[0], *(s.gain for s in segments)])
    at = [coverages[0], *(s.start + s.coverage for s in segments)]
    assert np.all(np.interp(coverages, at, corners) >= np.array(chances) - 1e-12)


def test_an_envelope_is_cut_to_the_band():
    made = curves(anchor(1, SHALLOW))
    envelope = made.envelope(Signal.KV_DEV, 2, 0, floor=0.05, saturation=0.3)
    assert envelope[0].start == 0.05
    assert sum(s.coverage for s in envelope) == pytest.approx(0.25)
    assert sum(s.gain for s in envelope) == pytest.approx(0.5 - 0.1)


@pytest.mark.parametrize("num_layers", [1, 2, 4, 32, 80])
def test_the_built_in_profile_fits_every_model(num_layers):
    made = DemandCurves(built_in_demand(num_layers))
    depths = made.anchor_depths(Signal.KV_DEV)
    assert depths[-1] <= num_layers
    chances = [made.enough(Signal.KV_DEV, depths[0], 1000, r / 20) for r in range(21)]
    assert chances == sorted(chances) and chances[0] == 0.0 and chances[-1] == 1.0
    assert made.signals == (Signal.KV_DEV,)
    with pytest.raises(ValueError, match="num_layers"):
        built_in_demand(0)
