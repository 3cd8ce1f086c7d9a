"""The contract of a chunk store, and the values that travel between processes.

A scheduler-side process looks chunks up, reserves and commits. Worker processes get a
`ChunkLocation`, and read or write the bytes themselves.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkQuery:
    """One chunk that is wanted."""

    key: bytes
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLocation:
    """Where a value is, for any process that maps the arena."""

    key: bytes
    offset: int  # of the entry's header, from the start of the arena
    nbytes: int  # header, checksum table and payload
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The entry stays readable at its location until the lease is released."""

    lease_id: str
    location: ChunkLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Space to write one entry. Nobody sees it before the commit."""

    reservation_id: str
    location: ChunkLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryInfo:
    """What a store knows about a resident entry, for listings."""

    key: bytes
    content_id: str
    num_tokens: int
    nbytes: int
    recompute_ms: float
    uses: int
    num_leases: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyDelta:
    """How the set of resident content ids changed since a cursor."""

    cursor: int  # pass it to the next call
    is_full: bool  # `added` is the whole set: forget what was known before
    added: tuple[str, ...]
    removed: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Levels now, and counts since the arena was made, over all processes that share it."""

    capacity_bytes: int
    used_bytes: int  # resident, being written, and discarded but still leased
    largest_free_bytes: int  # longest run without eviction
    num_entries: int  # resident
    num_leases: int
    num_reservations: int
    num_retired: int  # discarded or cleared, waiting for their last lease or writer
    num_owners: int  # processes that have the store open
    hits: int
    misses: int
    collisions: int  # misses of a key that holds other tokens
    evictions: int
    refused: int  # reservations that found no room


class ChunkStore(Protocol):
    """A bounded store of chunk KV, shared by processes. A miss is None, never an exception."""

    def lookup(self, wanted: Sequence[ChunkQuery]) -> list[Lease | None]:
        """Lease what is resident, in one transaction; None where it is not.

        A key whose stored tokens differ from the wanted ones is a miss. A hit counts as a use.
        """
        ...

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are resident now. Takes no lease and counts no use."""
        ...

    def reserve(
        self,
        key: bytes,
        token_ids: Sequence[int],
        *,
        recompute_ms: float = 0.0,
        content_id: str = "",
    ) -> Reservation | None:
        """Make room to write one entry, evicting others if that gives enough room.

        Whenever there is room, a store may evict ahead for the reservations to come.

        recompute_ms: time that a hit saves, the weight against eviction; 0 is the first to go.
        content_id: public id, for `find` and the change feed; "" hides the entry from both.
        returns: None if the key is resident or being written by a live writer, if it has no tokens
        or could never fit, or if what is leased and being written leaves no room.
        """
        ...

    def commit(self, reservation: Reservation) -> bool:
        """Make a written entry visible. False if it was discarded meanwhile, or ended before."""
        ...

    def lease_unfinished(self, wanted: Sequence[ChunkQuery]) -> list[Lease | None]:
        """Lease what is resident, or still being written: who writes it, or how far, is not said.

        The bytes of an entry in writing stay this chunk's until the lease ends, also if its writer
        gives up. `ArenaView.arrival` tells how far one that is fetched has come. Counts no use.
        """
        ...

    def abort(self, reservation: Reservation) -> None:
        """Give the space back. Does nothing if the reservation has ended."""
        ...

    def release(self, leases: Iterable[Lease]) -> None:
        """End leases. A lease that has ended already is ignored."""
        ...

    def discard(self, key: bytes) -> bool:
        """Hide the entry from every later lookup; free it when its last lease or writer ends.

        returns: whether there was such an entry.
        """
        ...

    def discard_content(self, content_id: str) -> int:
        """`discard` every entry of a public chunk id, also those that are being written.

        returns: how many there were
        """
        ...

    def clear(self) -> None:
        """Discard every entry."""
        ...

    def find(self, content_id: str) -> list[EntryInfo]:
        """Resident entries of a public chunk id: several, if more than one model stored it."""
        ...

    def entries(self, limit: int | None = None) -> list[EntryInfo]:
        """Resident entries, the most recently used first; those without a content id too."""
        ...

    def hold(self, key: bytes) -> Lease | None:
        """Lease what is resident, whatever its tokens, to inspect it: neither a hit nor a use."""
        ...

    def resident_since(self, cursor: int) -> ResidencyDelta:
        """Content ids that became resident or left since the cursor; 0 asks for all.

        A cursor that is too old, or of another arena, is answered with all of them.
        """
        ...

    def stats(self) -> TierStats: ...

    def check_integrity(self) -> list[str]:
        """Problems in the store's own accounts; an empty list when it is sound."""
        ...

    def close(self) -> None:
        """End this process's leases and reservations. The entries stay. May be called twice."""
        ...
