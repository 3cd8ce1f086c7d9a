"""Space in the arena: free extents that coalesce, best fit, and which victims make room.

Every extent is half-open, [offset, offset + extent_bytes), in whole granules.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from sqlite3 import Connection

GRANULE_BYTES = 4096
# A batch is chosen from so many times its bytes of the least valuable victims. With one, its holes
# lie scattered, and most reservations find no run in them; with four, what goes is worth too much.
BATCH_CHOICE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """An entry that may be evicted."""

    entry_id: int
    offset: int
    extent_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.extent_bytes


def extent_bytes_for(nbytes: int) -> int:
    """Whole granules that hold nbytes."""
    return -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES


def num_free_bytes(tx: Connection) -> int:
    """In all free extents together."""
    (free_bytes,) = tx.execute("SELECT coalesce(sum(extent_bytes), 0) FROM free_extents").fetchone()
    return int(free_bytes)


def take_extent(tx: Connection, extent_bytes: int) -> int | None:
    """Cut from the smallest free extent that is large enough. Returns the offset."""
    best = tx.execute(
        "SELECT offset, extent_bytes FROM free_extents WHERE extent_bytes >= ?"
        " ORDER BY extent_bytes, offset LIMIT 1",
        (extent_bytes,),
    ).fetchone()
    if best is None:
        return None
    offset, found_bytes = int(best[0]), int(best[1])
    tx.execute("DELETE FROM free_extents WHERE offset = ?", (offset,))
    if found_bytes > extent_bytes:
        rest = (offset + extent_bytes, found_bytes - extent_bytes)
        tx.execute("INSERT INTO free_extents VALUES (?, ?)", rest)
    return offset


def give_back_extent(tx: Connection, offset: int, extent_bytes: int) -> None:
    """Free an extent, merged with its free neighbours."""
    start, end = offset, offset + extent_bytes
    before = tx.execute(
        "SELECT offset, extent_bytes FROM free_extents WHERE offset < ?"
        " ORDER BY offset DESC LIMIT 1",
        (offset,),
    ).fetchone()
    if before is not None and before[0] + before[1] == start:
        start = before[0]
    after = tx.execute("SELECT extent_bytes FROM free_extents WHERE offset = ?", (end,)).fetchone()
    if after is not None:
        end += after[0]
    tx.execute("DELETE FROM free_extents WHERE offset >= ? AND offset < ?", (start, end))
    tx.execute("INSERT INTO free_extents VALUES (?, ?)", (start, end - start))


def plan_eviction(
    free: Iterable[tuple[int, int]], victims: Iterable[Victim], extent_bytes: int
) -> list[Victim] | None:
    """The victims that make one contiguous run of extent_bytes, or None if all do not.

    free: (offset, extent_bytes), coalesced
    victims: least valuable first; read only as far as needed. Those that were passed on the way
    but do not lie in the run that came out are spared.
    """
    start_of = {offset + size: offset for offset, size in free}  # by the end of the free run
    end_of = {start: end for end, start in start_of.items()}
    passed: list[Victim] = []
    for victim in victims:
        passed.append(victim)
        start = start_of.pop(victim.offset, victim.offset)
        end = end_of.pop(victim.end, victim.end)
        start_of[end], end_of[start] = start, end
        if end - start >= extent_bytes:
            # No run was long enough without this victim, so every window holds a part of it.
            from_left = _overlapping(passed, start, start + extent_bytes)
            from_right = _overlapping(passed, end - extent_bytes, end)
            return min(from_left, from_right, key=len)
    return None


def plan_batch(
    free: Iterable[tuple[int, int]], victims: Iterable[Victim], num_bytes: int
) -> list[Victim]:
    """The victims of at least num_bytes that leave the longest free runs; all, if they have less.

    free: (offset, extent_bytes), coalesced
    victims: least valuable first; those beyond `BATCH_CHOICE` times num_bytes are spared
    """
    if num_bytes <= 0:
        return []
    candidates: list[Victim] = []
    choice_bytes = BATCH_CHOICE * num_bytes
    for victim in victims:
        candidates.append(victim)
        choice_bytes -= victim.extent_bytes
        if choice_bytes <= 0:
            break
    plan: list[Victim] = []
    for _, members in sorted(_runs(free, candidates), key=lambda run: -run[0]):
        for victim in members:
            if num_bytes <= 0:
                return plan
            plan.append(victim)
            num_bytes -= victim.extent_bytes
    return plan


def _runs(
    free: Iterable[tuple[int, int]], victims: Iterable[Victim]
) -> list[tuple[int, list[Victim]]]:
    """(length, victims in it) of each run that would be free without the victims."""
    pieces: list[tuple[int, int, list[Victim]]] = [(offset, size, []) for offset, size in free]
    pieces += [(victim.offset, victim.extent_bytes, [victim]) for victim in victims]
    runs: list[tuple[int, list[Victim]]] = []
    last_end = None
    for offset, size, members in sorted(pieces, key=lambda piece: piece[0]):
        if offset == last_end:
            length, before = runs[-1]
            runs[-1] = (length + size, [*before, *members])
        else:
            runs.append((size, members))
        last_end = offset + size
    return runs


def _overlapping(victims: Iterable[Victim], start: int, end: int) -> list[Victim]:
    return [victim for victim in victims if victim.offset < end and victim.end > start]
