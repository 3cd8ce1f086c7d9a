"""What must hold in the index between any two transactions."""

from collections.abc import Iterator
from itertools import pairwise
from sqlite3 import Connection

from kv_tier.extents import extent_bytes_for
from kv_tier.layout import KvLayout

# Each query lists offenders; none is expected.
_NO_ROWS = {
    "lease without an entry": (
        "SELECT lease_id FROM leases WHERE entry_id NOT IN (SELECT entry_id FROM entries)"
    ),
    "lease of an unknown owner": (
        "SELECT lease_id FROM leases WHERE owner_id NOT IN (SELECT owner_id FROM owners)"
    ),
    "reservation without an entry": (
        "SELECT reservation_id FROM reservations"
        " WHERE entry_id NOT IN (SELECT entry_id FROM entries)"
    ),
    "reservation on a resident entry": (
        "SELECT reservation_id FROM reservations JOIN entries USING (entry_id) WHERE state = 1"
    ),
    "reservation of an unknown owner": (
        "SELECT reservation_id FROM reservations"
        " WHERE owner_id NOT IN (SELECT owner_id FROM owners)"
    ),
    "writing entry without a reservation": (
        "SELECT entry_id FROM entries WHERE state = 0"
        " AND entry_id NOT IN (SELECT entry_id FROM reservations)"
    ),
    "retired entry that nobody holds": (
        "SELECT entry_id FROM entries WHERE state = 2"
        " AND entry_id NOT IN (SELECT entry_id FROM leases)"
        " AND entry_id NOT IN (SELECT entry_id FROM reservations)"
    ),
    "entry without its token ids": (
        "SELECT entry_id FROM entries LEFT JOIN entry_tokens USING (entry_id)"
        " WHERE token_bytes IS NULL OR length(token_bytes) != 4 * num_tokens"
    ),
    "token ids without an entry": (
        "SELECT entry_id FROM entry_tokens WHERE entry_id NOT IN (SELECT entry_id FROM entries)"
    ),
}


def index_problems(tx: Connection, layout: KvLayout, capacity_bytes: int) -> list[str]:
    """Every broken invariant in words; an empty list when the index is sound."""
    problems = [
        f"{what}: {offender}"
        for what, query in _NO_ROWS.items()
        for (offender,) in tx.execute(query)
    ]
    problems += _extent_problems(tx, capacity_bytes)
    for entry_id, num_tokens, extent_bytes in tx.execute(
        "SELECT entry_id, num_tokens, extent_bytes FROM entries"
    ):
        if extent_bytes != extent_bytes_for(layout.entry_bytes(num_tokens)):
            problems.append(f"entry {entry_id} of {num_tokens} tokens has {extent_bytes} bytes")
    return problems


def _extent_problems(tx: Connection, capacity_bytes: int) -> Iterator[str]:
    """Free and used extents must tile the arena, and no two free ones may touch."""
    extents = tx.execute(
        "SELECT offset, extent_bytes, 'free' FROM free_extents"
        " UNION ALL SELECT offset, extent_bytes, 'entry ' || entry_id FROM entries ORDER BY offset"
    ).fetchall()
    for offset, extent_bytes, name in extents:
        if extent_bytes <= 0:
            yield f"{name} at {offset} has {extent_bytes} bytes"
    bounded = [(0, 0, "start"), *extents, (capacity_bytes, 0, "end")]
    for (offset, extent_bytes, name), (next_offset, _, next_name) in pairwise(bounded):
        end = offset + extent_bytes
        if end != next_offset:
            kind = "overlaps" if end > next_offset else "leaves a gap to"
            yield f"{name} ends at {end}, {kind} {next_name} at {next_offset}"
        elif name == next_name == "free":
            yield f"free extents at {offset} and {next_offset} are not merged"
