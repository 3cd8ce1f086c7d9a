"""Eviction plans against brute force."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kv_tier.extents import (
    BATCH_CHOICE,
    Victim,
    extent_bytes_for,
    plan_batch,
    plan_eviction,
)


def longest_run(free: list[tuple[int, int]]) -> int:
    merged: list[tuple[int, int]] = []
    for offset, size in sorted(free):
        if merged and sum(merged[-1]) == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((offset, size))
    return max((size for _, size in merged), default=0)


@st.composite
def arenas(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[Victim]]:
    """Free extents, coalesced, and victims in any order; what is neither can not move."""
    cuts = sorted(draw(st.sets(st.integers(0, 40), min_size=2, max_size=14)))
    free: list[tuple[int, int]] = []
    victims = []
    for start, end in pairwise(cuts):
        kind = draw(st.sampled_from(["free", "victim", "leased"]))
        if kind == "free" and not (free and sum(free[-1]) == start):
            free.append((start, end - start))
        elif kind == "victim":
            victims.append(Victim(entry_id=start, offset=start, extent_bytes=end - start))
    return free, draw(st.permutations(victims))


@given(arenas(), st.integers(1, 40))
def test_a_plan_makes_room_and_is_found_if_there_is_one(
    arena: tuple[list[tuple[int, int]], list[Victim]], wanted: int
) -> None:
    free, victims = arena
    if longest_run(free) >= wanted:
        return  # no plan is asked for
    everything = free + [(v.offset, v.extent_bytes) for v in victims]
    plan = plan_eviction(free, victims, wanted)
    if plan is None:
        assert longest_run(everything) < wanted
        return
    assert longest_run(free + [(v.offset, v.extent_bytes) for v in plan]) >= wanted
    # the cheapest prefix that suffices, and never an entry that it does not hold
    for length in range(len(victims)):
        shorter = [(v.offset, v.extent_bytes) for v in victims[:length]]
        if longest_run(free + shorter) >= wanted:
            assert set(plan) <= set(victims[:length])
            break


def test_victims_away_from_the_run_are_spared() -> None:
    far, near, next_to_it = (
        Victim(entry_id=i, offset=offset, extent_bytes=10) for i, offset in enumerate((0, 100, 110))
    )
    plan = plan_eviction([(50, 5)], [far, near, next_to_it], 20)
    assert plan == [near, next_to_it]


@given(arenas(), st.integers(-5, 60))
def test_a_batch_is_large_enough_and_of_the_least_valuable(
    arena: tuple[list[tuple[int, int]], list[Victim]], wanted: int
) -> None:
    free, victims = arena
    plan = plan_batch(free, iter(victims), wanted)
    sizes = [victim.extent_bytes for victim in plan]
    assert len(set(plan)) == len(plan) and set(plan) <= set(victims)
    if sum(sizes) < wanted:
        assert set(plan) == set(victims)
    else:
        assert sum(sizes[:-1]) < max(wanted, 1)  # the last one was needed
    for victim in plan:
        before = sum(v.extent_bytes for v in victims[: victims.index(victim)])
        assert before < BATCH_CHOICE * wanted


def test_a_batch_prefers_neighbours() -> None:
    far, near, next_to_it, too_good = (
        Victim(entry_id=i, offset=offset, extent_bytes=10)
        for i, offset in enumerate((0, 100, 110, 40))
    )
    assert plan_batch([(50, 5)], [far, near, next_to_it, too_good], 15) == [near, next_to_it]
    assert plan_batch([(50, 5)], [far, too_good, near, next_to_it], 10) == [too_good]


def test_extents_are_whole_granules() -> None:
    assert [extent_bytes_for(n) for n in (1, 4096, 4097)] == [4096, 4096, 8192]
