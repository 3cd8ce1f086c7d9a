"""Cores near a rank's GPU: which they are, by what the kernel says, and staying on them.

vLLM's own `numa_bind` needs `numactl`, does nothing in a container that has not all cores, and
gives all ranks of a NUMA node the same cores.
"""

import logging
import os
from collections.abc import Iterable, Set
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

PIN_CORES = "cachesmith_pin_cores"  # in vLLM's `additional_config`
SYSFS = Path("/sys")


def pin_to_gpu(local_rank: int) -> None:
    """Keep this process on its share of the cores near its GPU. Where they are unknown, as it is.

    local_rank: of the GPUs that the process sees
    """
    from vllm.platforms import current_platform

    try:
        gpus = current_platform.get_all_gpu_pci_bus_ids()  # also those of other replicas
        own = gpus[int(current_platform.device_id_to_physical_device_id(local_rank))]
    except Exception as exc:  # no NVML, a slice of a GPU, a platform without bus ids
        log.warning("cores_not_pinned rank=%d reason=%s", local_rank, exc)
        return
    cores = cores_near(own, gpus.values(), allowed=os.sched_getaffinity(0))
    if cores:
        pin_process(cores)
        log.info("cores_pinned rank=%d gpu=%s num_cores=%d", local_rank, own, len(cores))


def cores_near(
    gpu: str, gpus: Iterable[str], *, allowed: Set[int], sysfs: Path = SYSFS
) -> frozenset[int]:
    """A GPU's share of its NUMA node's cores, in equal parts for all GPUs there.

    gpu, gpus: PCI bus ids, as NVML writes them; gpus: all of the machine
    allowed: cores that the process may use
    returns: hyperthreads of one core stay together; empty where nothing is known, or allowed
    """
    node = _numa_node(gpu, sysfs)
    if node is None:
        return frozenset()
    text = _read(sysfs / "bus/pci/devices" / _address(gpu) / "local_cpulist")
    cores = sorted(
        {_siblings(cpu, sysfs) & allowed for cpu in parse_cpulist(text) & allowed}, key=min
    )
    sharing = sorted({_address(g) for g in [*gpus, gpu] if _numa_node(g, sysfs) == node})
    place = sharing.index(_address(gpu))
    if len(cores) < len(sharing):
        return frozenset().union(*cores)
    start, end = (len(cores) * i // len(sharing) for i in (place, place + 1))
    return frozenset().union(*cores[start:end])


def parse_cpulist(text: str) -> frozenset[int]:
    """`0-2,8` → {0, 1, 2, 8}. Raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def pin_process(cores: Set[int]) -> None:
    """All threads of this process, and those that they will start."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)


def _numa_node(gpu: str, sysfs: Path) -> int | None:
    """None on machines with one node, which say -1."""
    text = _read(sysfs / "bus/pci/devices" / _address(gpu) / "numa_node").strip()
    return int(text) if text and int(text) >= 0 else None


def _siblings(cpu: int, sysfs: Path) -> frozenset[int]:
    text = _read(sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return parse_cpulist(text) or frozenset((cpu,))


def _address(gpu: str) -> str:
    """NVML's `00000000:3B:00.0` as the kernel writes it, `0000:3b:00.0`."""
    domain, rest = gpu.lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
