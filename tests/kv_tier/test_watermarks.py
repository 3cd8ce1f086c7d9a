"""Room that is made ahead: when, how much, and of whom."""

import random
from pathlib import Path

import pytest

from kv_tier import HostTier, HostTierConfig
from kv_tier.extents import BATCH_CHOICE, GRANULE_BYTES
from tests.kv_tier.arena_cases import LAYOUT, lease, open_tier, reserve, resident, store

NUM_GRANULES = 100
HIGH, LOW = 0.9, 0.8


def open_marked(directory: Path, eviction: str = "cost") -> HostTier:
    return open_tier(
        directory,
        num_granules=NUM_GRANULES,
        eviction=eviction,
        high_watermark=HIGH,
        low_watermark=LOW,
    )


def used_granules(tier: HostTier) -> int:
    return tier.stats().used_bytes // GRANULE_BYTES


@pytest.mark.parametrize("eviction", ["cost", "lru"])
@pytest.mark.parametrize("seed", range(4))
def test_reservations_of_any_size_leave_the_arena_below_the_high_mark(
    tmp_path: Path, eviction: str, seed: int
) -> None:
    choose = random.Random(seed)
    num_ahead = num_stored = 0
    with open_marked(tmp_path, eviction) as tier:
        for chunk in range(300):
            size = choose.randint(1, 8)
            used, evictions = used_granules(tier), tier.stats().evictions
            has_run = tier.stats().largest_free_bytes >= size * GRANULE_BYTES
            store(tier, chunk, size, recompute_ms=choose.uniform(0.0, 50.0))
            num_stored += 1
            if used + size > HIGH * NUM_GRANULES:
                num_ahead += 1
                # the entry that tipped the balance is at most 8 granules
                assert LOW * NUM_GRANULES - 8 < used_granules(tier) <= LOW * NUM_GRANULES
            elif has_run:
                assert tier.stats().evictions == evictions
            assert used_granules(tier) <= HIGH * NUM_GRANULES
            assert chunk in resident(tier, range(300))
            if choose.random() < 0.5:
                other = choose.randrange(chunk + 1)
                tier.release(filter(None, [lease(tier, other, 1)]))
        assert tier.check_integrity() == []
    assert 0 < num_ahead < num_stored / 3


@pytest.mark.parametrize("eviction", ["cost", "lru"])
def test_what_is_held_stays_and_fails_no_reservation(tmp_path: Path, eviction: str) -> None:
    with open_marked(tmp_path, eviction) as tier:
        for chunk in range(45):
            store(tier, chunk, recompute_ms=1.0)
        held = [lease(tier, chunk) for chunk in range(45)]
        writing = [reserve(tier, chunk) for chunk in range(45, 90)]
        assert all(held) and all(writing)
        for chunk in range(90, 100):  # above the high mark, with nothing that may go
            assert reserve(tier, chunk) is not None
        assert used_granules(tier) == NUM_GRANULES
        assert resident(tier, range(100)) == set(range(45))
        assert tier.stats().evictions == 0
        assert reserve(tier, 100) is None
        tier.release(filter(None, held))
        assert reserve(tier, 100) is not None
        assert used_granules(tier) == LOW * NUM_GRANULES
        assert tier.check_integrity() == []


@pytest.mark.parametrize("eviction", ["cost", "lru"])
def test_what_goes_ahead_is_among_the_least_valuable(tmp_path: Path, eviction: str) -> None:
    with open_marked(tmp_path, eviction) as tier:
        order = list(range(90))
        random.Random(1).shuffle(order)  # in the arena not in the order of their value
        for chunk in order:
            store(tier, chunk, recompute_ms=1.0 + chunk)
        for chunk in range(90):
            tier.release(filter(None, [lease(tier, chunk)]))
        store(tier, 90, recompute_ms=1000.0)
        gone = set(range(91)) - resident(tier, range(91))
        assert len(gone) == 11
        assert max(gone) < BATCH_CHOICE * 11


def test_a_refused_reservation_evicts_nothing_ahead(tmp_path: Path) -> None:
    with open_marked(tmp_path) as tier:
        for chunk in range(90):
            store(tier, chunk)
        held = [lease(tier, chunk) for chunk in range(0, 90, 2)]
        assert all(held)
        assert reserve(tier, 100, 20) is None
        assert resident(tier, range(90)) == set(range(90))


def test_most_reservations_find_their_room_made(tmp_path: Path) -> None:
    def foreground(directory: Path, high: float, low: float) -> int:
        choose = random.Random(5)
        found = 0
        with open_tier(directory, num_granules=300, high_watermark=high, low_watermark=low) as tier:
            for chunk in range(600):
                size = choose.randint(1, 6)
                found += tier.stats().largest_free_bytes < size * GRANULE_BYTES
                store(tier, chunk, size, recompute_ms=choose.uniform(0.0, 50.0))
        return found

    without = foreground(tmp_path / "without", 1.0, 1.0)
    assert foreground(tmp_path / "with", HIGH, LOW) < without / 10


@pytest.mark.parametrize(
    ("high", "low"), [(1.1, 0.9), (0.8, 0.9), (0.9, 0.0), (0.9, -0.1), (float("nan"), 0.5)]
)
def test_marks_out_of_order_are_refused_by_name(tmp_path: Path, high: float, low: float) -> None:
    with pytest.raises(ValueError, match="low_watermark <= high_watermark"):
        HostTierConfig(
            directory=tmp_path,
            capacity_bytes=1 << 20,
            layout=LAYOUT,
            high_watermark=high,
            low_watermark=low,
        )
