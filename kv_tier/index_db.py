"""The arena's index: one SQLite file beside it, shared by every process that has it open.

WAL with synchronous=OFF survives the death of any process at any instant, which is what is needed:
the file normally lives in memory, and does not outlive the machine.
"""

import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kv_tier.errors import ArenaUnavailableError

BUSY_TIMEOUT_S = 5.0  # a process that hangs inside a transaction costs the others this much

# entries.state. A writing entry has a reservation. A retired one is hidden from lookups and waits
# for its last lease or its writer. The literals 1 and 2 stand in the partial indexes and in the
# queries that use them.
WRITING, RESIDENT, RETIRED = 0, 1, 2

SCHEMA_VERSION = 2  # another one makes the arena anew
_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE counters (
    id INTEGER PRIMARY KEY CHECK (id = 0),
    tick INTEGER NOT NULL DEFAULT 0,        -- recency, one per lookup or commit
    clock REAL NOT NULL DEFAULT 0.0,        -- GreedyDual's inflation: score of the last victim
    change_seq INTEGER NOT NULL,            -- of the newest row that `changes` ever had
    hits INTEGER NOT NULL DEFAULT 0,
    misses INTEGER NOT NULL DEFAULT 0,
    collisions INTEGER NOT NULL DEFAULT 0,
    evictions INTEGER NOT NULL DEFAULT 0,
    refused INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE owners (owner_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE entries (
    entry_id INTEGER PRIMARY KEY,
    key BLOB NOT NULL,
    content_id TEXT NOT NULL,
    num_tokens INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    extent_bytes INTEGER NOT NULL,
    recompute_ms REAL NOT NULL,
    uses INTEGER NOT NULL,
    score REAL NOT NULL,
    last_used INTEGER NOT NULL,
    state INTEGER NOT NULL
);
CREATE UNIQUE INDEX entries_by_key ON entries (key) WHERE state < 2;
CREATE INDEX entries_by_content ON entries (content_id) WHERE state = 1;
CREATE INDEX entries_by_score ON entries (score, last_used) WHERE state = 1;
CREATE INDEX entries_by_age ON entries (last_used) WHERE state = 1;
-- Apart from entries, so that a hit does not rewrite them.
CREATE TABLE entry_tokens (entry_id INTEGER PRIMARY KEY, token_bytes BLOB NOT NULL);
CREATE TABLE free_extents (offset INTEGER PRIMARY KEY, extent_bytes INTEGER NOT NULL);
CREATE INDEX free_by_size ON free_extents (extent_bytes, offset);
CREATE TABLE leases (
    lease_id TEXT PRIMARY KEY, entry_id INTEGER NOT NULL, owner_id TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX leases_by_entry ON leases (entry_id);
CREATE INDEX leases_by_owner ON leases (owner_id);
CREATE TABLE reservations (
    reservation_id TEXT PRIMARY KEY, entry_id INTEGER NOT NULL UNIQUE, owner_id TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE changes (seq INTEGER PRIMARY KEY, content_id TEXT NOT NULL, added INTEGER NOT NULL);
"""


class IndexDb:
    """Two connections to one index file, each used by one thread at a time: who only reads does not
    wait for who waits to write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pid = os.getpid()
        self._writer = _Connection(path)
        self._reader = _Connection(path)

    def create(self, identity: dict[str, Any], *, capacity_bytes: int, first_seq: int) -> None:
        """Fill a new file: an empty arena of one free extent. All or nothing.

        first_seq: change numbers start here; higher than those of any earlier arena.
        """
        with self.transaction() as tx:
            for statement in _SCHEMA.split(";"):
                tx.execute(statement)
            tx.execute("INSERT INTO meta VALUES ('identity', ?)", (json.dumps(identity),))
            tx.execute("INSERT INTO counters (id, change_seq) VALUES (0, ?)", (first_seq,))
            tx.execute("INSERT INTO free_extents VALUES (0, ?)", (capacity_bytes,))

    def identity(self) -> dict[str, Any] | None:
        """What `create` was given, or None if the file is not a whole index."""
        try:
            with self.snapshot() as tx:
                if tx.execute("PRAGMA quick_check").fetchone() != ("ok",):
                    return None
                row = tx.execute("SELECT value FROM meta WHERE name = 'identity'").fetchone()
        except ArenaUnavailableError:
            return None
        found = json.loads(row[0]) if row else None
        return found if isinstance(found, dict) else None

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Read and write alone, over all processes; nothing is kept if the body raises."""
        with self._begun(self._writer, "BEGIN IMMEDIATE") as tx:
            yield tx

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Read one consistent state, without stopping writers."""
        with self._begun(self._reader, "BEGIN") as tx:
            yield tx

    def close(self) -> None:
        for held in (self._writer, self._reader):
            with held.lock:
                if held.connection is not None:
                    held.connection.close()
                    held.connection = None

    @contextmanager
    def _begun(self, held: "_Connection", begin: str) -> Iterator[sqlite3.Connection]:
        if os.getpid() != self._pid:
            raise ArenaUnavailableError(f"the index {self._path} was opened before a fork")
        with held.lock:
            connection = held.connection
            if connection is None:
                raise ArenaUnavailableError(f"the index {self._path} was closed")
            try:
                connection.execute(begin)
                yield connection
                connection.execute("COMMIT")
            except sqlite3.Error as exc:
                raise ArenaUnavailableError(f"the index {self._path} failed: {exc}") from exc
            finally:
                if connection.in_transaction:
                    connection.rollback()


class _Connection:
    """None once it was closed."""

    def __init__(self, path: Path) -> None:
        self.lock = threading.Lock()
        self.connection: sqlite3.Connection | None = _connect(path)


def _connect(path: Path) -> sqlite3.Connection | None:
    try:
        connection = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = OFF")
        except sqlite3.Error:
            connection.close()
            raise
    except sqlite3.Error as exc:
        raise ArenaUnavailableError(f"can not open the index {path}: {exc}") from exc
    return connection
