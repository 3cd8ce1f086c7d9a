"""CPU time of this process' descendants by what they are. Ray names its processes; Linux only."""

import os
from collections import defaultdict
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_UTIME, _STIME, _PARENT = 11, 12, 1  # of /proc/PID/stat, behind the name


def descendants_cpu_s() -> dict[str, float]:
    """Seconds since each process started, summed over those of one title."""
    stats = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                stats[int(path.name)] = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
    found: dict[str, float] = defaultdict(float)
    for pid, fields in stats.items():
        if _descends(pid, os.getpid(), stats):
            ticks = int(fields[_UTIME]) + int(fields[_STIME])
            found[_title(pid)] += ticks / _TICKS_PER_S
    return dict(found)


def _descends(pid: int, ancestor: int, stats: dict[int, list[str]]) -> bool:
    while pid in stats:
        pid = int(stats[pid][_PARENT])
        if pid == ancestor:
            return True
    return False


def _title(pid: int) -> str:
    """As "ray::ServeReplica:app:Ingress": a path's name, without the method that runs now."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").split()
    except OSError:
        return ""
    return os.path.basename(words[0].decode()).partition(".")[0] if words else ""
