"""Cores near GPUs, on machines that are folders in the form of /sys."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from replicas.core_pinning import cores_near, parse_cpulist

REPO = Path(__file__).resolve().parents[2]
ALL = frozenset(range(64))


def machine(root: Path, gpus: dict[str, tuple[int, str]], *, threads_apart: int = 0) -> Path:
    """gpus: address → NUMA node and cores near; threads_apart: between a core's two threads."""
    for address, (node, cores) in gpus.items():
        device = root / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        (device / "local_cpulist").write_text(f"{cores}\n")
    for cpu in range(2 * threads_apart):
        topology = root / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        first = cpu % threads_apart
        (topology / "thread_siblings_list").write_text(f"{first},{first + threads_apart}\n")
    return root


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3\n", {0, 1, 2, 3}),
        ("5", {5}),
        ("0-1,8,10-11\n", {0, 1, 8, 10, 11}),
        ("", set()),
        ("\n", set()),
    ],
)
def test_cpu_lists(text, cpus):
    assert parse_cpulist(text) == cpus


@pytest.mark.parametrize("text", ["a", "-1", "1-b", "1 2"])
def test_what_is_no_cpu_list_is_refused(text):
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpulist(text)


def test_the_gpus_of_a_node_share_its_cores_evenly(tmp_path):
    near = {f"0000:{bus}:00.0": (0, "0-9") for bus in ("3b", "5e", "86")}
    sysfs = machine(tmp_path, {**near, "0001:3b:00.0": (1, "10-19")})
    gpus = ["00000000:3B:00.0", "00000000:5E:00.0", "00000000:86:00.0", "00000001:3B:00.0"]
    shares = [cores_near(gpu, gpus, allowed=ALL, sysfs=sysfs) for gpu in gpus]
    assert shares == [{0, 1, 2}, {3, 4, 5}, {6, 7, 8, 9}, set(range(10, 20))]


def test_threads_of_a_core_stay_together(tmp_path):
    gpus = ["00000000:3B:00.0", "00000000:5E:00.0"]
    near = {"0000:3b:00.0": (0, "0-3,8-11"), "0000:5e:00.0": (0, "0-3,8-11")}
    sysfs = machine(tmp_path, near, threads_apart=8)
    shares = [cores_near(gpu, gpus, allowed=ALL, sysfs=sysfs) for gpu in gpus]
    assert shares == [{0, 1, 8, 9}, {2, 3, 10, 11}]


def test_only_allowed_cores_are_taken(tmp_path):
    gpus = ["00000000:3B:00.0", "00000000:5E:00.0"]
    near = {"0000:3b:00.0": (0, "0-7"), "0000:5e:00.0": (0, "0-7")}
    sysfs = machine(tmp_path, near)
    allowed = frozenset({1, 2, 5, 6, 40})
    shares = [cores_near(gpu, gpus, allowed=allowed, sysfs=sysfs) for gpu in gpus]
    assert shares == [{1, 2}, {5, 6}]
    # less than a core for each: all of them use what there is; none: it can not be done
    one = [cores_near(gpu, gpus, allowed=frozenset({3}), sysfs=sysfs) for gpu in gpus]
    assert one == [{3}, {3}]
    assert cores_near(gpus[0], gpus, allowed=frozenset({40}), sysfs=sysfs) == set()


def test_nothing_is_chosen_where_nothing_is_known(tmp_path):
    sysfs = machine(tmp_path, {"0000:3b:00.0": (-1, "0-63")})
    for gpu in ("00000000:3B:00.0", "00000000:99:00.0"):
        assert cores_near(gpu, [gpu], allowed=ALL, sysfs=sysfs) == set()


PINNED = """
import os, threading
from replicas.core_pinning import pin_process

core = max(os.sched_getaffinity(0))
go, seen = threading.Event(), []

def look():
    go.wait(30.0)
    seen.append(os.sched_getaffinity(0))

threads = [threading.Thread(target=look) for _ in range(2)]
threads[0].start()
pin_process({core})
threads[1].start()
go.set()
for thread in threads:
    thread.join()
assert seen == [{core}, {core}] and os.sched_getaffinity(0) == {core}, seen
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_pinned_process_keeps_all_its_threads_there():
    subprocess.run([sys.executable, "-c", PINNED], check=True, cwd=REPO, timeout=60)
