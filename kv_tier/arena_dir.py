"""The folder of an arena: its files, the lock around opening, and their making and removal."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kv_tier.errors import ArenaInUseError, ArenaUnavailableError
from kv_tier.owners import live_owner_ids, open_private


@dataclass(frozen=True, slots=True)
class ArenaDir:
    """Paths of one arena. Constructing it does no I/O."""

    root: Path

    @property
    def arena(self) -> Path:
        return self.root / "arena.bin"

    @property
    def index(self) -> Path:
        return self.root / "index.sqlite3"

    @property
    def owners(self) -> Path:
        return self.root / "owners"

    @property
    def opening(self) -> Path:
        return self.root / "opening.lock"

    @property
    def handover(self) -> Path:
        """Locked by the process that copies the node's chunks to Redis before it ends."""
        return self.root / "handover.lock"

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """One process at a time opens, recreates or destroys. Makes the folders."""
        with self._locked_file():
            yield

    def arena_bytes(self) -> int:
        """Size of the arena file, 0 if there is none."""
        return self.arena.stat().st_size if self.arena.exists() else 0

    def allocate(self, capacity_bytes: int) -> None:
        """Make a new arena file whose every page exists.

        All at once, not at each reservation: a folder that is too small (a container's 64 MiB
        /dev/shm) then fails at the start, with a clear error, and no process that touches the
        mapping can ever be killed by SIGBUS. A GPU process locks every page anyway.
        """
        self.arena.unlink(missing_ok=True)  # not truncated: an old mapping must stay valid
        try:
            fd = os.open(self.arena, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, capacity_bytes)
            finally:
                os.close(fd)
        except OSError as exc:
            self.arena.unlink(missing_ok=True)
            raise ArenaUnavailableError(
                f"can not allocate an arena of {capacity_bytes} bytes in {self.root}: {exc};"
                f" {_free_bytes(self.root)} bytes are free there"
            ) from exc

    def make_index(self) -> None:
        """An empty file, closed to other users. What SQLite puts beside it has its mode."""
        try:
            open_private(self.index).close()
        except OSError as exc:
            raise ArenaUnavailableError(f"can not make the index {self.index}: {exc}") from exc

    def remove_index(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self.index.with_name(self.index.name + suffix).unlink(missing_ok=True)

    def remove_dead_owners(self) -> None:
        """Clear lock files that no process holds. Call it where nobody else can be opening."""
        live = set(live_owner_ids(self.owners))
        for path in self.owners.iterdir():
            if path.suffix == ".new" or (path.suffix == ".lock" and path.stem not in live):
                path.unlink(missing_ok=True)

    def _locked_file(self) -> IO[bytes]:
        while True:
            try:
                # Closed to other users: KV tells what the prompts were.
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
                _check_owner(self.root)
                self.owners.mkdir(mode=0o700, exist_ok=True)
                file = open_private(self.opening)
            except FileNotFoundError:
                continue  # destroyed by another process between two of these lines
            except OSError as exc:
                raise ArenaUnavailableError(f"can not use the folder {self.root}: {exc}") from exc
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_same_file(file, self.opening):
                return file
            file.close()  # who held it before has destroyed the folder


def destroy_arena(directory: Path, *, force: bool = False) -> None:
    """Remove an arena. Refuses while processes have it open, unless forced.

    Processes that have it open keep their mapping, and share nothing with a later arena.
    """
    folder = ArenaDir(directory)
    if not directory.exists():
        return
    with folder.exclusive():
        live = live_owner_ids(folder.owners)
        if live and not force:
            raise ArenaInUseError(f"{len(live)} processes have the arena in {directory} open")
        folder.remove_index()
        folder.arena.unlink(missing_ok=True)
        for path in folder.owners.glob("*.*"):
            path.unlink(missing_ok=True)
        folder.owners.rmdir()
        folder.handover.unlink(missing_ok=True)
        folder.opening.unlink()
    with suppress(OSError):  # it holds other files, or another process opens it again
        directory.rmdir()


def _check_owner(root: Path) -> None:
    """Anybody may make a folder in /dev/shm before us, or a link: who owns it can read and replace
    what is in it. Raises ArenaUnavailableError."""
    for found in (root.lstat(), root.stat()):
        if found.st_uid not in (os.geteuid(), 0):
            raise ArenaUnavailableError(f"the folder {root} belongs to user {found.st_uid}")


def _is_same_file(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _free_bytes(directory: Path) -> int:
    usage = os.statvfs(directory)
    return usage.f_bavail * usage.f_frsize
