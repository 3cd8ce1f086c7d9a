"""The host tier: one arena of KV a node, shared by the engine processes of its replicas.

The bytes are in one memory-mapped file, normally under /dev/shm; what is where is in a SQLite
index beside it. Both outlive the processes, so a restarted replica finds the arena warm.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from sqlite3 import Connection
from types import TracebackType
from typing import Self

from kv_tier import entry_table
from kv_tier.arena_dir import ArenaDir, destroy_arena
from kv_tier.arena_open import open_index
from kv_tier.change_feed import read_changes
from kv_tier.entry_table import EntryRow, Eviction
from kv_tier.extents import GRANULE_BYTES, extent_bytes_for, num_free_bytes, take_extent
from kv_tier.index_db import RESIDENT
from kv_tier.integrity import index_problems
from kv_tier.keys import KEY_BYTES, token_bytes, token_ids_of
from kv_tier.layout import KvLayout
from kv_tier.owners import OwnerLock, bury_owner, is_owner_alive
from kv_tier.store import (
    ChunkLocation,
    ChunkQuery,
    EntryInfo,
    Lease,
    Reservation,
    ResidencyDelta,
    TierStats,
)

RECLAIM_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTierConfig:
    directory: Path  # normally below /dev/shm
    capacity_bytes: int  # rounded down to whole granules
    layout: KvLayout
    eviction: Eviction = "cost"  # cost: recompute time and use per byte, aged; lru: recency alone
    # Shares of the capacity. A reservation that would fill more than the high one evicts, beyond
    # what it needs itself, down to the low one: the next ones find their room made.
    high_watermark: float = 0.97
    low_watermark: float = 0.93

    def __post_init__(self) -> None:
        if self.capacity_bytes < GRANULE_BYTES:
            raise ValueError(f"capacity_bytes must be at least {GRANULE_BYTES}, got {self}")
        if self.eviction not in ("cost", "lru"):
            raise ValueError(f"eviction must be cost or lru, got {self.eviction!r}")
        if not 0.0 < self.low_watermark <= self.high_watermark <= 1.0:
            raise ValueError(
                "need 0 < low_watermark <= high_watermark <= 1,"
                f" got {self.low_watermark} and {self.high_watermark}"
            )


class HostTier:
    """A `ChunkStore` on an arena that processes of one node share. Thread-safe; not fork-safe.

    Opening creates the arena if there is none, or if the one there has another layout or size and
    no live owner. A process that dies gives up its leases and reservations: the others find out
    by its owner lock, when they open, when they need space, and every few seconds of use.
    """

    def __init__(
        self, config: HostTierConfig, *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self._folder = ArenaDir(config.directory)
        self._capacity_bytes = config.capacity_bytes // GRANULE_BYTES * GRANULE_BYTES
        self._monotonic_s = monotonic_s
        self._reclaimed_at_s = monotonic_s()
        self._serial = count()
        self._closed = False
        with self._folder.exclusive():
            self._db = open_index(self._folder, config.layout, self._capacity_bytes)
            self._owner = OwnerLock(self._folder.owners)
            with self._db.transaction() as tx:
                tx.execute("INSERT INTO owners VALUES (?)", (self._owner.owner_id,))
                self._reclaim(tx)
            self._folder.remove_dead_owners()

    @staticmethod
    def destroy(directory: Path, *, force: bool = False) -> None:
        """Remove an arena and its files; refuses while processes have it open, unless forced."""
        destroy_arena(directory, force=force)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End this process's leases and reservations. The entries stay. May be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            with self._db.transaction() as tx:
                entry_table.drop_owner(tx, self._owner.owner_id)
        finally:
            self._owner.release()
            self._db.close()

    def lookup(self, wanted: Sequence[ChunkQuery]) -> list[Lease | None]:
        tokens = [token_bytes(query.token_ids) for query in wanted]
        leases: list[Lease | None] = []
        hit_ids: list[int] = []
        num_collisions = 0
        with self._db.transaction() as tx:
            self._reclaim_if_due(tx)
            for query, wanted_bytes in zip(wanted, tokens, strict=True):
                row = entry_table.find_by_key(tx, query.key)
                if row is None or row.state != RESIDENT:
                    leases.append(None)
                elif row.token_bytes != wanted_bytes:
                    num_collisions += 1
                    leases.append(None)
                else:
                    hit_ids.append(row.entry_id)
                    leases.append(self._lease(tx, query.key, row))
            entry_table.touch(tx, hit_ids)
            tx.execute(
                "UPDATE counters SET hits = hits + ?, misses = misses + ?,"
                " collisions = collisions + ?",
                (len(hit_ids), len(wanted) - len(hit_ids), num_collisions),
            )
        return leases

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        query = "SELECT 1 FROM entries WHERE key = ? AND state < 2 AND state = 1"
        with self._db.snapshot() as tx:
            return [tx.execute(query, (key,)).fetchone() is not None for key in keys]

    def reserve(
        self,
        key: bytes,
        token_ids: Sequence[int],
        *,
        recompute_ms: float = 0.0,
        content_id: str = "",
    ) -> Reservation | None:
        num_tokens = len(token_ids)
        if len(key) != KEY_BYTES or not 0.0 <= recompute_ms < float("inf"):
            raise ValueError(
                f"need a {KEY_BYTES}-byte key and a finite recompute_ms >= 0,"
                f" got {key!r} and {recompute_ms}"
            )
        tokens = token_bytes(token_ids)
        extent_bytes = extent_bytes_for(self.config.layout.entry_bytes(num_tokens))
        if num_tokens == 0:
            return None
        with self._db.transaction() as tx:
            self._reclaim_if_due(tx)
            if self._is_taken(tx, key):
                return None
            offset = self._make_room(tx, extent_bytes)
            if offset is None:
                tx.execute("UPDATE counters SET refused = refused + 1")
                return None
            entry_id = entry_table.add_writing(
                tx,
                key=key,
                content_id=content_id,
                token_bytes=tokens,
                num_tokens=num_tokens,
                offset=offset,
                extent_bytes=extent_bytes,
                recompute_ms=recompute_ms,
            )
            reservation = Reservation(
                reservation_id=self._new_id(), location=self._location(key, offset, num_tokens)
            )
            tx.execute(
                "INSERT INTO reservations VALUES (?, ?, ?)",
                (reservation.reservation_id, entry_id, self._owner.owner_id),
            )
        return reservation

    def commit(self, reservation: Reservation) -> bool:
        with self._db.transaction() as tx:
            entry_id = _end_reservation(tx, reservation)
            if entry_id is None:
                return False
            if entry_table.publish(tx, entry_id):
                return True
            entry_table.free_if_unused(tx, entry_id)
            return False

    def lease_unfinished(self, wanted: Sequence[ChunkQuery]) -> list[Lease | None]:
        leases: list[Lease | None] = []
        with self._db.transaction() as tx:
            for query in wanted:
                row = entry_table.find_by_key(tx, query.key)
                if row is None or row.token_bytes != token_bytes(query.token_ids):
                    leases.append(None)
                else:
                    leases.append(self._lease(tx, query.key, row))
        return leases

    def abort(self, reservation: Reservation) -> None:
        with self._db.transaction() as tx:
            entry_id = _end_reservation(tx, reservation)
            if entry_id is not None:
                entry_table.retire(tx, entry_id)  # its key is free, whoever still reads it

    def release(self, leases: Iterable[Lease]) -> None:
        with self._db.transaction() as tx:
            for lease in leases:
                row = tx.execute(
                    "DELETE FROM leases WHERE lease_id = ? RETURNING entry_id", (lease.lease_id,)
                ).fetchone()
                if row is not None:
                    entry_table.free_if_unused(tx, row[0])

    def discard(self, key: bytes) -> bool:
        with self._db.transaction() as tx:
            row = entry_table.find_by_key(tx, key)
            if row is not None:
                entry_table.retire(tx, row.entry_id)
        return row is not None

    def discard_content(self, content_id: str) -> int:
        if not content_id:
            return 0  # entries without an id have nothing in common
        with self._db.transaction() as tx:
            rows = tx.execute(
                "SELECT entry_id FROM entries WHERE content_id = :id AND state = 1"
                " UNION ALL SELECT entry_id FROM reservations JOIN entries USING (entry_id)"
                " WHERE content_id = :id AND state = 0",
                {"id": content_id},
            ).fetchall()
            for (entry_id,) in rows:
                entry_table.retire(tx, entry_id)
        return len(rows)

    def clear(self) -> None:
        with self._db.transaction() as tx:
            rows = tx.execute("SELECT entry_id FROM entries WHERE state < 2").fetchall()
            for (entry_id,) in rows:
                entry_table.retire(tx, entry_id)

    def find(self, content_id: str) -> list[EntryInfo]:
        return self._entry_infos("AND content_id = ? ORDER BY entry_id", (content_id,))

    def entries(self, limit: int | None = None) -> list[EntryInfo]:
        most = -1 if limit is None else limit  # SQLite's word for no limit
        return self._entry_infos("ORDER BY last_used DESC, entry_id DESC LIMIT ?", (most,))

    def hold(self, key: bytes) -> Lease | None:
        found = self.hold_with_tokens(key)
        return None if found is None else found[0]

    def hold_with_tokens(self, key: bytes) -> tuple[Lease, list[int]] | None:
        """As `hold`, and the entry's token ids."""
        with self._db.transaction() as tx:
            row = entry_table.find_by_key(tx, key)
            if row is None or row.state != RESIDENT:
                return None
            return self._lease(tx, key, row), token_ids_of(row.token_bytes)

    def resident_since(self, cursor: int) -> ResidencyDelta:
        with self._db.snapshot() as tx:
            return read_changes(tx, cursor)

    def stats(self) -> TierStats:
        with self._db.snapshot() as tx:
            hits, misses, collisions, evictions, refused = tx.execute(
                "SELECT hits, misses, collisions, evictions, refused FROM counters"
            ).fetchone()
            free_bytes, largest_free_bytes = tx.execute(
                "SELECT coalesce(sum(extent_bytes), 0), coalesce(max(extent_bytes), 0)"
                " FROM free_extents"
            ).fetchone()
            return TierStats(
                capacity_bytes=self._capacity_bytes,
                used_bytes=self._capacity_bytes - free_bytes,
                largest_free_bytes=largest_free_bytes,
                num_entries=_count(tx, "entries WHERE state = 1"),
                num_leases=_count(tx, "leases"),
                num_reservations=_count(tx, "reservations"),
                num_retired=_count(tx, "entries WHERE state = 2"),
                num_owners=_count(tx, "owners"),
                hits=hits,
                misses=misses,
                collisions=collisions,
                evictions=evictions,
                refused=refused,
            )

    def check_integrity(self) -> list[str]:
        with self._db.snapshot() as tx:
            problems = index_problems(tx, self.config.layout, self._capacity_bytes)
        if (found_bytes := self._folder.arena_bytes()) != self._capacity_bytes:
            problems.append(f"the arena has {found_bytes} bytes of {self._capacity_bytes}")
        return problems

    def reclaim_dead_owners(self) -> int:
        """End what dead processes hold. Returns how many were found dead."""
        with self._db.transaction() as tx:
            return self._reclaim(tx)

    def _reclaim_if_due(self, tx: Connection) -> None:
        if self._monotonic_s() - self._reclaimed_at_s >= RECLAIM_INTERVAL_S:
            self._reclaim(tx)

    def _reclaim(self, tx: Connection) -> int:
        self._reclaimed_at_s = self._monotonic_s()
        others = tx.execute(
            "SELECT owner_id FROM owners WHERE owner_id != ?", (self._owner.owner_id,)
        ).fetchall()
        owners_dir = self._folder.owners
        dead = [owner_id for (owner_id,) in others if not is_owner_alive(owners_dir, owner_id)]
        for owner_id in dead:
            entry_table.drop_owner(tx, owner_id)
            bury_owner(owners_dir, owner_id)
        return len(dead)

    def _entry_infos(self, which: str, values: tuple[str | int, ...]) -> list[EntryInfo]:
        """Resident entries. which: the rest of the query, with its values."""
        with self._db.snapshot() as tx:
            rows = tx.execute(
                "SELECT key, content_id, num_tokens, recompute_ms, uses, (SELECT count(*)"
                " FROM leases WHERE leases.entry_id = entries.entry_id)"
                f" FROM entries WHERE state = 1 {which}",
                values,
            ).fetchall()
        return [
            EntryInfo(
                key=key,
                content_id=content_id,
                num_tokens=num_tokens,
                nbytes=self.config.layout.entry_bytes(num_tokens),
                recompute_ms=recompute_ms,
                uses=uses,
                num_leases=num_leases,
            )
            for key, content_id, num_tokens, recompute_ms, uses, num_leases in rows
        ]

    def _is_taken(self, tx: Connection, key: bytes) -> bool:
        """Whether the key is resident, or being written by a process that lives."""
        row = entry_table.find_by_key(tx, key)
        if row is None or row.state == RESIDENT:
            return row is not None
        self._reclaim(tx)
        return entry_table.find_by_key(tx, key) is not None

    def _make_room(self, tx: Connection, extent_bytes: int) -> int | None:
        """Offset of a new extent. Nothing is evicted unless that makes enough room.

        Where it makes room, more may be evicted: see the watermarks.
        """
        if extent_bytes > self._capacity_bytes:
            return None
        offset = take_extent(tx, extent_bytes)
        if offset is None and self._reclaim(tx):
            offset = take_extent(tx, extent_bytes)
        free_bytes = num_free_bytes(tx) - (extent_bytes if offset is None else 0)
        if offset is None and entry_table.evict_for(tx, extent_bytes, self.config.eviction):
            offset = take_extent(tx, extent_bytes)
        high_watermark = self.config.high_watermark
        is_high = high_watermark < 1.0 and free_bytes < self._share(1.0 - high_watermark)
        if offset is not None and is_high:
            wanted_bytes = self._share(1.0 - self.config.low_watermark)
            entry_table.evict_ahead(tx, wanted_bytes, self.config.eviction)
        return offset

    def _lease(self, tx: Connection, key: bytes, entry: EntryRow) -> Lease:
        location = self._location(key, entry.offset, entry.num_tokens)
        lease = Lease(lease_id=self._new_id(), location=location)
        row = (lease.lease_id, entry.entry_id, self._owner.owner_id)
        tx.execute("INSERT INTO leases VALUES (?, ?, ?)", row)
        return lease

    def _share(self, share: float) -> int:
        """That part of the capacity, rounded to bytes."""
        return round(share * self._capacity_bytes)

    def _location(self, key: bytes, offset: int, num_tokens: int) -> ChunkLocation:
        nbytes = self.config.layout.entry_bytes(num_tokens)
        return ChunkLocation(key=key, offset=offset, nbytes=nbytes, num_tokens=num_tokens)

    def _new_id(self) -> str:
        return f"{self._owner.owner_id}-{next(self._serial)}"


def _end_reservation(tx: Connection, reservation: Reservation) -> int | None:
    """Remove the reservation, if it has not ended. Returns its entry's id."""
    row = tx.execute(
        "DELETE FROM reservations WHERE reservation_id = ? RETURNING entry_id",
        (reservation.reservation_id,),
    ).fetchone()
    return None if row is None else int(row[0])


def _count(tx: Connection, rows: str) -> int:
    (num_rows,) = tx.execute(f"SELECT count(*) FROM {rows}").fetchone()
    return int(num_rows)
