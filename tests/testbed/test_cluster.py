"""The testbed itself, as root: a whole run with every fault, and runs that are ended early.

Everything here is the command line in a process of its own, and what it leaves on the machine.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from deploy.testbed.fault_plan import DEFAULT_PLAN, FaultKind, load_plan
from deploy.testbed.processes import namespace_of, processes_in, processes_titled
from deploy.testbed.report import RunResult
from deploy.testbed.slots import Slot, take_slot

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

REPO = Path(__file__).resolve().parents[2]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "deploy.cli", "testbed", *words]


def names_on_the_machine(slot: Slot) -> list[str]:
    """The slot's links and network namespaces."""
    links = os.listdir("/sys/class/net")
    namespaces = os.listdir("/run/netns") if Path("/run/netns").is_dir() else []
    return [name for name in (*links, *namespaces) if name.startswith(slot.name)]


def test_every_fault_at_20_requests_a_second(tmp_path: Path):
    words = ("--engine", "emulated", "--rate", "20", "--seconds", "150", "--out", str(tmp_path))
    done = subprocess.run(command(*words), cwd=REPO, check=False)
    result = RunResult.model_validate_json((tmp_path / "result.json").read_text())
    assert result.failures == []
    assert done.returncode == 0
    assert result.tally.sent >= 20 * 150
    assert result.tally.unverified == 0
    assert [fault.kind for fault in result.faults] == [
        fault.kind for fault in load_plan(DEFAULT_PLAN).faults
    ]
    assert all(fault.recovered_s is not None for fault in result.faults)
    seen = {fault.kind for fault in result.faults if fault.detected_s is not None}
    assert seen >= {
        FaultKind.KILL_REPLICA,
        FaultKind.KILL_RANK,
        FaultKind.KILL_SCHEDULER,
        FaultKind.KILL_INGRESS,
        FaultKind.CRASH_HOST,
        FaultKind.RESTART_HEAD,
    }
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"h1", "h2", "h3"}


class Started:
    """A run whose hosts are up."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            command("--engine", "emulated", "--out", str(folder)),
            cwd=REPO,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line)
            if line == "ray up\n":
                break
        text = "".join(self.lines)
        found = re.search(r"^cstest(\d+): ", text, re.MULTILINE)
        assert found, text
        self.slot = Slot(index=int(found[1]))
        outer = processes_titled(self.slot.host_command)
        own = namespace_of(os.getpid())
        self.namespaces = {namespace_of(process.pid) for process in outer} - {own}
        assert len(self.namespaces) == 3

    def num_processes(self) -> int:
        return sum(len(processes_in(namespace)) for namespace in self.namespaces)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=120)
        return self.process.returncode


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    run = Started(tmp_path)
    yield run
    if run.process.poll() is None:
        run.end(signal.SIGKILL)  # the next run cleans up


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_end_leaves_nothing(started: Started, number: signal.Signals):
    assert started.num_processes() >= 6
    assert names_on_the_machine(started.slot)
    assert started.end(number) == 130
    assert started.num_processes() == 0
    assert names_on_the_machine(started.slot) == []
    assert not started.slot.folder.exists()


def test_a_killed_runs_hosts_end_and_the_next_run_cleans_up(started: Started):
    started.end(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while started.num_processes():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert names_on_the_machine(started.slot)
    with ExitStack() as stack:
        # the first free one, unless somebody else's run has ended since
        while (slot := stack.enter_context(take_slot())).index != started.slot.index:
            pass
        assert names_on_the_machine(slot) == []
        assert list(slot.folder.iterdir()) == []
