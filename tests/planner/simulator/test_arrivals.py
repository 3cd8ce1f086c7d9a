import numpy as np
import pytest

from planner.simulator.arrivals import (
    BurstArrivals,
    GammaArrivals,
    PoissonArrivals,
    StepArrivals,
    arrival_times_ms,
)
from planner.simulator.random_streams import Purpose, stream

COUNT = 40_000


def times(pattern, rate_per_s=20.0):
    rng = stream(1, Purpose.ARRIVALS)
    return arrival_times_ms(pattern, count=COUNT, rate_per_s=rate_per_s, rng=rng)


@pytest.mark.parametrize(
    ("pattern", "cv"),
    [
        (PoissonArrivals(), 1.0),
        (GammaArrivals(kind="gamma", cv=1.5), 1.5),
        (GammaArrivals(kind="gamma", cv=3.0), 3.0),
        (GammaArrivals(kind="gamma", cv=0.5), 0.5),
    ],
)
def test_gaps_have_the_rate_and_the_variation_that_were_asked_for(pattern, cv):
    gaps = np.diff(times(pattern))
    assert gaps.mean() == pytest.approx(50.0, rel=4 * cv / np.sqrt(COUNT))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)


@pytest.mark.parametrize(
    "pattern",
    [
        StepArrivals(kind="step"),
        BurstArrivals(kind="burst", num_bursts=3),
        BurstArrivals(kind="burst", num_bursts=3, cv=1.5),
    ],
)
def test_changing_rates_keep_the_mean(pattern):
    found = times(pattern)
    assert (np.diff(found) >= 0).all()
    assert found[-1] == pytest.approx(COUNT * 50.0, rel=0.03)


def test_a_step_changes_the_rate_by_its_factor():
    found = times(StepArrivals(kind="step", factor=3.0, at=0.5))
    before = (found < COUNT * 25.0).sum()
    assert before / COUNT == pytest.approx(0.25, abs=0.01)


def test_a_burst_has_its_share_of_the_requests():
    found = times(BurstArrivals(kind="burst", factor=9.0, share=0.1, num_bursts=1))
    assert (found > 0.9 * COUNT * 50.0).mean() == pytest.approx(0.5, abs=0.01)


def test_a_burst_of_gamma_gaps_is_more_bursty_than_poissons():
    def spread(cv):
        found = times(BurstArrivals(kind="burst", factor=10.0, share=0.3, num_bursts=1, cv=cv))
        quiet = np.diff(found[found < 0.7 * COUNT * 50.0])
        return quiet.std() / quiet.mean()

    assert spread(1.0) == pytest.approx(1.0, rel=0.06)
    assert spread(3.0) == pytest.approx(3.0, rel=0.15)


def test_streams_of_different_purposes_are_different_and_repeat():
    def first(seed, purpose):
        return stream(seed, purpose).random()

    assert first(1, Purpose.ARRIVALS) == first(1, Purpose.ARRIVALS)
    assert first(1, Purpose.ARRIVALS) != first(1, Purpose.REQUESTS)
    assert first(1, Purpose.ARRIVALS) != first(2, Purpose.ARRIVALS)
