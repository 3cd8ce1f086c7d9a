"""Which content ids became resident or left, in order, in a bounded table.

Several entries may carry one content id. The feed tells when the first comes and the last goes.
"""

from sqlite3 import Connection

from kv_tier.store import ResidencyDelta

MAX_CHANGES = 65_536


def note_added(tx: Connection, entry_id: int, content_id: str) -> None:
    """Call it when the entry has become resident."""
    if not content_id:
        return
    other = tx.execute(
        "SELECT 1 FROM entries WHERE content_id = ? AND state = 1 AND entry_id != ?",
        (content_id, entry_id),
    ).fetchone()
    if other is None:
        _append(tx, content_id, added=True)


def note_removed(tx: Connection, content_id: str) -> None:
    """Call it when an entry of this id is resident no more."""
    if not content_id:
        return
    other = tx.execute(
        "SELECT 1 FROM entries WHERE content_id = ? AND state = 1", (content_id,)
    ).fetchone()
    if other is None:
        _append(tx, content_id, added=False)


def read_changes(tx: Connection, cursor: int) -> ResidencyDelta:
    """Net changes after the cursor, or everything if the table does not reach back that far."""
    (newest,) = tx.execute("SELECT change_seq FROM counters").fetchone()
    (oldest,) = tx.execute("SELECT min(seq) FROM changes").fetchone()
    if cursor == newest:
        return ResidencyDelta(cursor=newest, is_full=False, added=(), removed=())
    if cursor > newest or oldest is None or cursor < oldest - 1:
        rows = tx.execute(
            "SELECT DISTINCT content_id FROM entries WHERE state = 1 AND content_id != ''"
            " ORDER BY content_id"
        )
        everything = tuple(content_id for (content_id,) in rows)
        return ResidencyDelta(cursor=newest, is_full=True, added=everything, removed=())
    rows = tx.execute("SELECT content_id, added FROM changes WHERE seq > ? ORDER BY seq", (cursor,))
    is_resident = dict(rows.fetchall())  # the last change of an id wins
    return ResidencyDelta(
        cursor=newest,
        is_full=False,
        added=tuple(content_id for content_id, now in is_resident.items() if now),
        removed=tuple(content_id for content_id, now in is_resident.items() if not now),
    )


def _append(tx: Connection, content_id: str, *, added: bool) -> None:
    (seq,) = tx.execute(
        "UPDATE counters SET change_seq = change_seq + 1 RETURNING change_seq"
    ).fetchone()
    tx.execute("INSERT INTO changes VALUES (?, ?, ?)", (seq, content_id, added))
    tx.execute("DELETE FROM changes WHERE seq <= ?", (seq - MAX_CHANGES,))
