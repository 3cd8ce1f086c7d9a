"""A replica's link follows what its batches see, and is told when that is news."""

import pytest

from planner.link_tracker import LinkTracker
from planner.timeline import Link

LINK = Link(bytes_per_ms=100.0, latency_ms=2.0)


def test_it_follows_the_link_and_the_share_that_comes_over_it():
    tracker = LinkTracker(LINK)
    assert (tracker.link, tracker.loaded_share) == (LINK, 1.0)
    for _ in range(50):
        tracker.observe(loaded=25, stored=100, bytes_per_ms=50.0, latency_ms=4.0)
    assert tracker.link.bytes_per_ms == pytest.approx(50.0, rel=0.03)
    assert tracker.link.latency_ms == pytest.approx(4.0, rel=0.05)
    assert tracker.loaded_share == pytest.approx(0.25, rel=0.03)


def test_small_changes_are_not_told():
    tracker = LinkTracker(LINK)
    tracker.observe(loaded=1, stored=1, bytes_per_ms=105.0)
    assert tracker.link is LINK
    for _ in range(20):
        tracker.observe(loaded=1, stored=1, bytes_per_ms=105.0)
    assert tracker.link.bytes_per_ms > 102.0  # small steps in one direction are


def test_batches_without_stored_tokens_say_nothing():
    tracker = LinkTracker(LINK)
    tracker.observe(loaded=0, stored=0, bytes_per_ms=1.0)
    assert (tracker.link, tracker.loaded_share) == (LINK, 1.0)


def test_a_guess_gives_way_to_the_first_batch_that_sees_the_link():
    tracker = LinkTracker(LINK, is_guess=True)
    tracker.observe(loaded=0, stored=10)
    tracker.observe(loaded=10, stored=10, bytes_per_ms=7.0, latency_ms=1.0)
    assert tracker.link == Link(bytes_per_ms=7.0, latency_ms=1.0)
    tracker.observe(loaded=10, stored=10, bytes_per_ms=14.0)
    assert tracker.link.bytes_per_ms == pytest.approx(7.0 + 0.3 * 7.0)
