"""Who has an arena open: every opened store holds a file lock of its own.

The kernel drops the lock when the process dies, however it dies, and a lock needs no process ids,
so this works across PID namespaces (containers that share /dev/shm). A child that is forked while
a store is open shares the lock: fork before opening.
"""

import fcntl
import os
import uuid
from pathlib import Path
from typing import IO


def open_private(path: Path) -> IO[bytes]:
    """To write; closed to other users, if it is new."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


class OwnerLock:
    """This process's mark of being alive, until `release`."""

    def __init__(self, owners_dir: Path) -> None:
        self.owner_id = uuid.uuid4().hex
        self._path = _lock_path(owners_dir, self.owner_id)
        unlocked_path = self._path.with_suffix(".new")
        self._file = open_private(unlocked_path)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        # Locked before it has its name: nobody can find it by name and think it dead.
        os.rename(unlocked_path, self._path)

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()


def is_owner_alive(owners_dir: Path, owner_id: str) -> bool:
    return _is_locked(_lock_path(owners_dir, owner_id))


def bury_owner(owners_dir: Path, owner_id: str) -> None:
    """Remove the lock file of a dead owner."""
    _lock_path(owners_dir, owner_id).unlink(missing_ok=True)


def live_owner_ids(owners_dir: Path) -> list[str]:
    return sorted(path.stem for path in owners_dir.glob("*.lock") if _is_locked(path))


def _lock_path(owners_dir: Path, owner_id: str) -> Path:
    return owners_dir / f"{owner_id}.lock"


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            # Shared, so that two processes that probe at once do not take each other for the owner.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
