"""A process that watches its parent ends with it."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

from replicas.parent_watch import end_with_parent

SPAWN = multiprocessing.get_context("spawn")


def grandchild(pids: Connection) -> None:
    end_with_parent()
    pids.send(os.getpid())
    time.sleep(600.0)


def child(pids: Connection) -> None:
    SPAWN.Process(target=grandchild, args=(pids,)).start()
    time.sleep(600.0)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_parents_child_ends():
    ours, theirs = SPAWN.Pipe()
    parent = SPAWN.Process(target=child, args=(theirs,))
    parent.start()
    assert ours.poll(60.0)
    pid = ours.recv()
    assert is_running(pid)
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    deadline = time.monotonic() + 60.0
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_of_its_own_is_left_alone():
    end_with_parent()
    assert multiprocessing.parent_process() is None
