import numpy as np
import pytest

from planner import DemandAnchor, DemandBucket, DemandCurves, DemandProfile, Signal
from planner.simulator.belief import believed_profile
from planner.simulator.demand_truth import (
    DIFFICULTIES,
    AssumedDemand,
    AssumedTruth,
    MeasuredTruth,
)

LAYERS = 36
PUBLISHED = AssumedTruth(AssumedDemand(qci_share=1.0, gap=0.0), LAYERS)


def needed(truth, signal, depth, difficulty, taste=0.5):
    return truth.needed(signal, depth, difficulty=difficulty, taste=taste, num_context=8_000)


@pytest.mark.parametrize(
    ("depth", "quantile", "coverage"), [(1, 0.5, 0.2), (1, 0.9, 0.65), (6, 0.5, 0.1), (6, 0.9, 0.3)]
)
def test_assumed_demand_goes_through_the_published_numbers(depth, quantile, coverage):
    assert needed(PUBLISHED, Signal.QCI, depth, quantile) == pytest.approx(coverage, abs=0.003)


def test_within_a_depth_demand_spans_from_nothing_to_more_than_four_fifths():
    assert needed(PUBLISHED, Signal.QCI, 1, 0.01) == 0.0
    assert needed(PUBLISHED, Signal.QCI, 1, 0.99) > 0.8


@pytest.mark.parametrize("signal", [Signal.KV_DEV, Signal.QCI])
@pytest.mark.parametrize("taste", [0.1, 0.9])
def test_a_deeper_ranking_never_needs_more_for_the_same_request(signal, taste):
    truth = AssumedTruth(AssumedDemand(spread_scale=2.0), LAYERS)
    for difficulty in (0.02, 0.3, 0.6, 0.97):
        found = [needed(truth, signal, d, difficulty, taste) for d in range(LAYERS + 1)]
        assert found == sorted(found, reverse=True)


def test_the_ranking_that_suits_a_request_needs_less():
    truth = AssumedTruth(AssumedDemand(qci_share=0.3), LAYERS)
    assert needed(truth, Signal.QCI, 4, 0.5, taste=0.2) < needed(
        truth, Signal.KV_DEV, 4, 0.5, taste=0.2
    )
    assert needed(truth, Signal.KV_DEV, 4, 0.5, taste=0.4) < needed(
        truth, Signal.QCI, 4, 0.5, taste=0.4
    )


def test_a_belief_in_the_task_itself_is_what_its_requests_draw():
    truth = AssumedTruth(AssumedDemand(), LAYERS)
    profile = believed_profile([(1.0, truth)], num_layers=LAYERS, task="t")
    curves = DemandCurves(profile)
    rng = np.random.default_rng(0)
    draws = rng.random((2, 4_000))
    for signal in (Signal.KV_DEV, Signal.QCI):
        for depth in curves.anchor_depths(signal):
            found = np.array([needed(truth, signal, depth, u, v) for u, v in draws.T])
            for coverage in (0.05, 0.2, 0.5):
                believed = curves.enough(signal, depth, 8_000, coverage)
                assert (found <= coverage).mean() == pytest.approx(believed, abs=0.03)


def test_measured_demand_draws_from_the_measured_curve():
    bucket = DemandBucket(
        max_context_tokens=None, num_requests=9, coverages=(0.0, 0.2, 1.0), enough=(0.1, 0.6, 1.0)
    )
    anchors = tuple(
        DemandAnchor(signal=signal, warmup_depth=1, probe_len=1, buckets=(bucket,))
        for signal in (Signal.KV_DEV, Signal.QCI)
    )
    profile = DemandProfile(model="m", task="t", gate="g", anchors=anchors)
    truth = MeasuredTruth(profile, LAYERS)
    found = np.array([needed(truth, Signal.KV_DEV, 2, u) for u in DIFFICULTIES])
    for coverage, enough in ((0.0, 0.1), (0.1, 0.35), (0.2, 0.6), (0.6, 0.8)):
        assert (found <= coverage).mean() == pytest.approx(enough, abs=0.002)
    assert needed(truth, Signal.POSITION, 0, 0.9) == needed(truth, Signal.QCI, 2, 0.9)


def test_a_late_choice_is_as_good_as_the_entropies_are():
    demand, coverages = AssumedDemand(qci_share=0.5), np.array([0.05, 0.2, 0.5])
    of = {
        accuracy: AssumedTruth(demand, LAYERS, entropy_accuracy=accuracy).enough(
            Signal.AUTO, 6, coverages, 8_000
        )
        for accuracy in (0.5, 0.8, 1.0)
    }
    blind = AssumedTruth(demand, LAYERS).enough(Signal.QCI, 6, coverages, 8_000)
    assert of[0.5] == pytest.approx(blind)  # a coin, where either suits half of the requests
    assert (of[0.5] < of[0.8]).all() and (of[0.8] < of[1.0]).all()
    curves = DemandCurves(
        believed_profile(
            [(1.0, AssumedTruth(demand, LAYERS, entropy_accuracy=0.8))], num_layers=LAYERS, task="t"
        )
    )
    believed = [curves.enough(Signal.AUTO, 6, 8_000, r) for r in coverages]
    assert believed == pytest.approx(of[0.8].tolist(), abs=0.02)
