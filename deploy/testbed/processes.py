"""The machine's processes, by their command line or the pid namespace that they live in."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    pid: int  # as this process sees it
    title: str


def processes_in(namespace: str) -> list[Process]:
    """Processes of a pid namespace ("pid:[4026532…]"), zombies left out."""
    found = []
    for process in _processes():
        with suppress(OSError):
            if namespace_of(process.pid) == namespace:
                found.append(process)
    return found


def processes_titled(words: str) -> list[Process]:
    """Processes with these words in their command line."""
    return [process for process in _processes() if words in process.title]


def namespace_of(pid: int) -> str:
    return os.readlink(_PROC / str(pid) / "ns/pid")


def children_of(pid: int) -> list[int]:
    return [int(child) for child in (_PROC / f"{pid}/task/{pid}/children").read_text().split()]


def kill(pid: int) -> None:
    """End a process at once; one that has ended already is fine."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _processes() -> Iterator[Process]:
    for pid in sorted(int(name) for name in os.listdir(_PROC) if name.isdigit()):
        with suppress(OSError):
            line = (_PROC / str(pid) / "cmdline").read_bytes()
            if line:  # a zombie has none
                yield Process(pid, line.replace(b"\0", b" ").decode(errors="replace").strip())
