"""Which names and addresses a run may use: one slot of a few, held by a file lock.

The lock goes with the process that holds it, however it ends. So a slot that is free but has files
was left by a killed run, and whoever takes it next cleans it up first.
"""

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from deploy.testbed.errors import TestbedError
from deploy.testbed.processes import kill, processes_titled

_ROOT = Path("/var/lib/cachesmith-testbed")
HOST_INIT = Path(__file__).with_name("host_init.sh")
NUM_SLOTS = 32
_NETWORKS = IPv4Network("10.213.0.0/16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Everything on the machine that a run calls by a name."""

    index: int

    @property
    def folder(self) -> Path:
        return _ROOT / f"slot-{self.index}"

    @property
    def network(self) -> IPv4Network:
        return list(_NETWORKS.subnets(new_prefix=24))[self.index]

    @property
    def name(self) -> str:
        """Of the Ray cluster, and the beginning of all other names."""
        return f"cstest{self.index}"

    @property
    def host_command(self) -> str:
        """What the first process of each of its hosts, and no other, has in its command line."""
        return f"{HOST_INIT.name} {self.folder}/"

    @property
    def bridge(self) -> str:
        return f"{self.name}br"

    @property
    def gateway(self) -> IPv4Address:
        return self.network[1]

    def namespace(self, number: int) -> str:
        return f"{self.name}-h{number}"

    def link(self, number: int) -> str:
        """The machine's end of the cable to a host; 15 characters at most."""
        return f"{self.name}h{number}"

    def address(self, number: int) -> str:
        return str(self.network[10 + number])


@contextmanager
def take_slot() -> Iterator[Slot]:
    """A slot of one's own, cleaned of what an earlier run left. Raises TestbedError."""
    _ROOT.mkdir(mode=0o700, parents=True, exist_ok=True)
    for index in range(NUM_SLOTS):
        slot = Slot(index=index)
        with (_ROOT / f"slot-{index}.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            remove_leftovers(slot)
            if any(slot.network.overlaps(network) for network in _taken_networks()):
                continue
            slot.folder.mkdir(mode=0o700)
            try:
                yield slot
            finally:
                remove_leftovers(slot)
            return
    raise TestbedError(f"all {NUM_SLOTS} slots in {_ROOT} are in use")


def remove_leftovers(slot: Slot, *, timeout_s: float = 60.0) -> None:
    """End the slot's hosts, and remove their links, namespaces and files."""
    deadline = time.monotonic() + timeout_s
    while left := processes_titled(slot.host_command):
        for process in left:
            kill(process.pid)
        if time.monotonic() > deadline:
            raise TestbedError(f"processes of an earlier run do not end: {left}")
        time.sleep(0.05)
    for name in _namespaces():
        if name.startswith(f"{slot.name}-h"):
            subprocess.run(["ip", "netns", "del", name], check=False)
    for link in _links():
        if link == slot.bridge or link.startswith(f"{slot.name}h"):
            subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)
    shutil.rmtree(slot.folder, ignore_errors=True)


def _namespaces() -> list[str]:
    folder = Path("/run/netns")
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _links() -> list[str]:
    return [link["ifname"] for link in _ip_json("link", "show")]


def _taken_networks() -> set[IPv4Network]:
    """Networks that the machine has a route to, so that it must not be given to another."""
    routes = [route["dst"] for route in _ip_json("route", "show")]
    return {IPv4Network(dst, strict=False) for dst in routes if dst != "default"}


def _ip_json(*words: str) -> list[dict[str, str]]:
    output = subprocess.run(["ip", "-json", *words], check=True, capture_output=True, text=True)
    return json.loads(output.stdout)
