"""Open the index of an arena folder, or make the arena anew where nobody uses what is there."""

import time
from dataclasses import asdict
from typing import Any

from kv_tier.arena_dir import ArenaDir
from kv_tier.errors import ArenaUnavailableError, LayoutMismatchError
from kv_tier.index_db import SCHEMA_VERSION, IndexDb
from kv_tier.integrity import index_problems
from kv_tier.keys import LAYOUT_VERSION
from kv_tier.layout import KvLayout
from kv_tier.owners import live_owner_ids


def arena_identity(layout: KvLayout, capacity_bytes: int) -> dict[str, Any]:
    """What processes must agree on to share an arena. capacity_bytes: a multiple of granules."""
    return {
        "layout_version": LAYOUT_VERSION,
        "schema_version": SCHEMA_VERSION,
        "capacity_bytes": capacity_bytes,
        **asdict(layout),
    }


def held_identity(folder: ArenaDir) -> dict[str, Any] | None:
    """What the arena there is, None if there is none that can be read."""
    db = _open_or_none(folder) if folder.index.exists() else None
    if db is None:
        return None
    try:
        return db.identity()
    finally:
        db.close()


def open_index(folder: ArenaDir, layout: KvLayout, capacity_bytes: int) -> IndexDb:
    """Call it inside `folder.exclusive()`.

    An arena of the same layout, size and index schema is taken as it is. Any other, or a damaged
    one, is made anew if no live process has it open, and refused otherwise.
    """
    wanted = arena_identity(layout, capacity_bytes)
    num_live = len(live_owner_ids(folder.owners))
    held: dict[str, Any] | None = None
    if folder.index.exists():
        db = _open_or_none(folder)
        if db is not None:
            held = db.identity()
            if held == wanted and (num_live or _is_sound(db, folder, layout, capacity_bytes)):
                return db
            db.close()
    if num_live and held is not None:
        raise LayoutMismatchError(
            f"the arena in {folder.root} is in use by {num_live} processes with {held},"
            f" this one wants {wanted}"
        )
    if num_live:
        raise ArenaUnavailableError(
            f"the index in {folder.root} can not be read, and {num_live} processes use it"
        )
    return _make_anew(folder, wanted, capacity_bytes)


def _open_or_none(folder: ArenaDir) -> IndexDb | None:
    try:
        return IndexDb(folder.index)
    except ArenaUnavailableError:
        return None


def _is_sound(db: IndexDb, folder: ArenaDir, layout: KvLayout, capacity_bytes: int) -> bool:
    """Nobody has it open: the last user may have died with the machine, so look closely."""
    if folder.arena_bytes() != capacity_bytes:
        return False
    try:
        with db.snapshot() as tx:
            return not index_problems(tx, layout, capacity_bytes)
    except ArenaUnavailableError:
        return False


def _make_anew(folder: ArenaDir, identity: dict[str, Any], capacity_bytes: int) -> IndexDb:
    folder.remove_index()
    folder.allocate(capacity_bytes)
    folder.make_index()
    db = IndexDb(folder.index)
    # Change numbers start at the time, so that a cursor of an earlier arena is always too old.
    first_seq = time.time_ns() // 1000
    db.create(identity, capacity_bytes=capacity_bytes, first_seq=first_seq)
    return db
