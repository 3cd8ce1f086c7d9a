"""The life of an entry in the index: written, resident, retired, freed.

    add_writing → publish → retire → free_if_unused
                     └ touch, lease

Each function is one step inside the caller's transaction.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from sqlite3 import Connection
from typing import Literal

from kv_tier.change_feed import note_added, note_removed
from kv_tier.extents import Victim, give_back_extent, plan_batch, plan_eviction
from kv_tier.index_db import RESIDENT, RETIRED, WRITING

Eviction = Literal["cost", "lru"]

_VICTIM_ORDER = {"cost": "score, last_used", "lru": "last_used"}


@dataclass(frozen=True, slots=True)
class EntryRow:
    """The entry that a key names now."""

    entry_id: int
    state: int
    num_tokens: int
    offset: int
    token_bytes: bytes


def find_by_key(tx: Connection, key: bytes) -> EntryRow | None:
    """The resident or writing entry of a key: there is at most one."""
    row = tx.execute(
        "SELECT entry_id, state, num_tokens, offset, token_bytes"
        " FROM entries JOIN entry_tokens USING (entry_id) WHERE key = ? AND state < 2",
        (key,),
    ).fetchone()
    return None if row is None else EntryRow(*row)


def add_writing(
    tx: Connection,
    *,
    key: bytes,
    content_id: str,
    token_bytes: bytes,
    num_tokens: int,
    offset: int,
    extent_bytes: int,
    recompute_ms: float,
) -> int:
    """Returns the new entry's id."""
    entry_id = tx.execute(
        "INSERT INTO entries (key, content_id, num_tokens, offset, extent_bytes, recompute_ms,"
        " uses, score, last_used, state) VALUES (?, ?, ?, ?, ?, ?, 0, 0.0, 0, ?)",
        (key, content_id, num_tokens, offset, extent_bytes, recompute_ms, WRITING),
    ).lastrowid
    assert entry_id is not None
    tx.execute("INSERT INTO entry_tokens VALUES (?, ?)", (entry_id, token_bytes))
    return entry_id


def publish(tx: Connection, entry_id: int) -> bool:
    """Make a writing entry resident. False if it was retired meanwhile."""
    row = tx.execute(
        "UPDATE entries SET state = ? WHERE entry_id = ? AND state = ? RETURNING content_id",
        (RESIDENT, entry_id, WRITING),
    ).fetchone()
    if row is None:
        return False
    note_added(tx, entry_id, row[0])
    touch(tx, [entry_id])
    return True


def touch(tx: Connection, entry_ids: Sequence[int]) -> None:
    """Count one use each. score: GreedyDual, what a byte of it saves, over the clock."""
    tx.execute("UPDATE counters SET tick = tick + 1")
    tick, clock = tx.execute("SELECT tick, clock FROM counters").fetchone()
    tx.executemany(
        "UPDATE entries SET uses = uses + 1, last_used = ?,"
        " score = ? + recompute_ms * (uses + 1) / extent_bytes WHERE entry_id = ?",
        [(tick, clock, entry_id) for entry_id in entry_ids],
    )


def retire(tx: Connection, entry_id: int) -> None:
    """Hide an entry from lookups, and free it if nobody reads or writes it."""
    state, content_id = tx.execute(
        "SELECT state, content_id FROM entries WHERE entry_id = ?", (entry_id,)
    ).fetchone()
    tx.execute("UPDATE entries SET state = ? WHERE entry_id = ?", (RETIRED, entry_id))
    if state == RESIDENT:
        note_removed(tx, content_id)
    free_if_unused(tx, entry_id)


def free_if_unused(tx: Connection, entry_id: int) -> None:
    """Free an entry that is not resident and that nobody reads or writes."""
    row = tx.execute(
        "DELETE FROM entries WHERE entry_id = :id AND state != 1"
        " AND NOT EXISTS (SELECT 1 FROM leases WHERE leases.entry_id = :id)"
        " AND NOT EXISTS (SELECT 1 FROM reservations WHERE reservations.entry_id = :id)"
        " RETURNING offset, extent_bytes",
        {"id": entry_id},
    ).fetchone()
    if row is not None:
        tx.execute("DELETE FROM entry_tokens WHERE entry_id = ?", (entry_id,))
        give_back_extent(tx, row[0], row[1])


def evict_for(tx: Connection, extent_bytes: int, eviction: Eviction) -> bool:
    """Evict until extent_bytes are free in one run. If that can not be: False, nothing evicted."""
    free = tx.execute("SELECT offset, extent_bytes FROM free_extents")
    victims = plan_eviction(free, _victims(tx, eviction), extent_bytes)
    if victims is None:
        return False
    _evict(tx, victims)
    return True


def evict_ahead(tx: Connection, free_bytes: int, eviction: Eviction) -> None:
    """Evict until free_bytes are free in all, or nothing is left that may go."""
    free = tx.execute("SELECT offset, extent_bytes FROM free_extents").fetchall()
    missing_bytes = free_bytes - sum(size for _, size in free)
    _evict(tx, plan_batch(free, _victims(tx, eviction), missing_bytes))


def drop_owner(tx: Connection, owner_id: str) -> None:
    """End what an owner holds: its leases, and what it was writing."""
    held = tx.execute("SELECT entry_id FROM leases WHERE owner_id = ?", (owner_id,)).fetchall()
    written = tx.execute(
        "SELECT entry_id FROM reservations WHERE owner_id = ?", (owner_id,)
    ).fetchall()
    tx.execute("DELETE FROM leases WHERE owner_id = ?", (owner_id,))
    tx.execute("DELETE FROM reservations WHERE owner_id = ?", (owner_id,))
    tx.execute("DELETE FROM owners WHERE owner_id = ?", (owner_id,))
    for (entry_id,) in written:
        retire(tx, entry_id)
    for (entry_id,) in held:
        free_if_unused(tx, entry_id)


def _evict(tx: Connection, victims: Sequence[Victim]) -> None:
    for victim in victims:
        tx.execute(
            "UPDATE counters SET evictions = evictions + 1, clock ="
            " max(clock, (SELECT score FROM entries WHERE entry_id = ?))",
            (victim.entry_id,),
        )
        retire(tx, victim.entry_id)


def _victims(tx: Connection, eviction: Eviction) -> Iterator[Victim]:
    rows = tx.execute(
        "SELECT entry_id, offset, extent_bytes FROM entries WHERE state = 1"
        " AND NOT EXISTS (SELECT 1 FROM leases WHERE leases.entry_id = entries.entry_id)"
        f" ORDER BY {_VICTIM_ORDER[eviction]}"
    )
    for entry_id, offset, extent_bytes in rows:
        yield Victim(entry_id=entry_id, offset=offset, extent_bytes=extent_bytes)
