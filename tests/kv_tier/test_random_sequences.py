"""Any sequence of calls by two processes' stores keeps the accounts right."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_tier import ChunkLocation, HostTier, Lease, Reservation
from kv_tier.extents import GRANULE_BYTES, extent_bytes_for
from tests.kv_tier.arena_cases import key_of, open_tier, query, reserve, resident

NUM_GRANULES = 6
CHUNKS = range(8)

chunks = st.sampled_from(CHUNKS)
sides = st.sampled_from([0, 1])


def size_of(chunk: int) -> int:
    return 1 + chunk % 4


class SharedArena(RuleBasedStateMachine):
    """Two open stores on one arena, and what their users hold."""

    watermarks = (1.0, 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.tiers = [self.open(), self.open()]
        self.leases: list[tuple[int, Lease]] = []
        self.reservations: list[tuple[int, Reservation, int]] = []
        self.committed: set[int] = set()  # may be resident: whatever else is must not be

    def open(self) -> HostTier:
        low, high = self.watermarks
        return open_tier(
            self.directory, num_granules=NUM_GRANULES, low_watermark=low, high_watermark=high
        )

    def teardown(self) -> None:
        for tier in self.tiers:
            tier.close()
        shutil.rmtree(self.directory)

    @rule(side=sides, chunk=chunks, recompute_ms=st.sampled_from([0.0, 1.0, 50.0]))
    def reserve(self, side: int, chunk: int, recompute_ms: float) -> None:
        before = resident(self.tiers[0], CHUNKS)
        got = reserve(self.tiers[side], chunk, size_of(chunk), recompute_ms=recompute_ms)
        if got is None:
            assert resident(self.tiers[0], CHUNKS) == before  # nothing was evicted for nothing
        else:
            assert chunk not in before
            self.reservations.append((side, got, chunk))

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), keep=st.booleans())
    def end_reservation(self, data: st.DataObject, keep: bool) -> None:
        at = data.draw(st.integers(0, len(self.reservations) - 1))
        side, reservation, chunk = self.reservations.pop(at)
        if not keep:
            self.tiers[side].abort(reservation)
        elif self.tiers[side].commit(reservation):
            self.committed.add(chunk)
            assert chunk in resident(self.tiers[1 - side], CHUNKS)

    @rule(side=sides, wanted=st.lists(chunks, max_size=4))
    def lookup(self, side: int, wanted: list[int]) -> None:
        present = resident(self.tiers[0], CHUNKS)
        found = self.tiers[side].lookup([query(chunk, size_of(chunk)) for chunk in wanted])
        for chunk, lease in zip(wanted, found, strict=True):
            assert (lease is not None) == (chunk in present)
            if lease is not None:
                assert lease.location.key == key_of(chunk)
                self.leases.append((side, lease))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.leases) - 1))
        side, lease = self.leases.pop(at)
        self.tiers[side].release([lease])

    @rule(side=sides, chunk=chunks)
    def discard(self, side: int, chunk: int) -> None:
        self.tiers[side].discard(key_of(chunk))
        self.committed.discard(chunk)
        assert chunk not in resident(self.tiers[0], CHUNKS)

    @rule(side=sides)
    def reopen(self, side: int) -> None:
        self.tiers[side].close()
        self.tiers[side] = self.open()
        self.leases = [held for held in self.leases if held[0] != side]
        self.reservations = [held for held in self.reservations if held[0] != side]

    @invariant()
    def accounts_are_right(self) -> None:
        tier = self.tiers[0]
        assert tier.check_integrity() == []
        assert resident(tier, CHUNKS) <= self.committed
        stats = tier.stats()
        assert stats.used_bytes <= stats.capacity_bytes == NUM_GRANULES * GRANULE_BYTES
        assert stats.num_leases == len(self.leases)
        assert stats.num_reservations == len(self.reservations)
        assert stats.num_owners == 2

    @invariant()
    def what_is_held_shares_no_byte(self) -> None:
        held: set[ChunkLocation] = {lease.location for _, lease in self.leases}
        held |= {reservation.location for _, reservation, _ in self.reservations}
        granules: set[int] = set()
        for location in held:
            extent = range(
                location.offset, location.offset + extent_bytes_for(location.nbytes), GRANULE_BYTES
            )
            assert granules.isdisjoint(extent)
            granules.update(extent)


TestSharedArena = SharedArena.TestCase
TestSharedArena.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


class MarkedArena(SharedArena):
    """The same, with room made ahead."""

    watermarks = (0.4, 0.8)


TestMarkedArena = MarkedArena.TestCase
TestMarkedArena.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
