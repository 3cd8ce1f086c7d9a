"""Carries out a plan's faults on the running hosts."""

import asyncio
from dataclasses import dataclass

from deploy.app import APP_NAME
from deploy.testbed.errors import TestbedError
from deploy.testbed.fault_plan import Fault, FaultKind
from deploy.testbed.hosts import Host
from deploy.testbed.processes import Process, kill
from deploy.testbed.ray_cluster import RayCluster
from deploy.testbed.redis_server import HostRedis

_TITLES = {
    FaultKind.KILL_REPLICA: (f"ray::ServeReplica:{APP_NAME}:Replica",),
    FaultKind.KILL_INGRESS: (f"ray::ServeReplica:{APP_NAME}:Ingress",),
    FaultKind.KILL_SCHEDULER: ("ray::SchedulerActor",),
    FaultKind.KILL_RANK: ("VLLM::Worker", "emulated_rank.py"),
}
_BOOT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """A fault that happened: when, and on which host."""

    fault: Fault
    at_s: float
    host: str


class Faults:
    """Everything that can be broken."""

    def __init__(self, cluster: RayCluster, kv_redis: HostRedis) -> None:
        self._cluster = cluster
        self._kv_redis = kv_redis

    async def strike(self, fault: Fault) -> str:
        """Do it; returns the host that it hit. Raises TestbedError when there is nothing to hit."""
        host = None if fault.host is None else self._cluster.hosts[fault.host - 1]
        match fault.kind:
            case FaultKind.CRASH_HOST:
                assert host is not None
                host.crash()
            case FaultKind.BOOT_HOST:
                assert host is not None
                host.start()
                async with asyncio.timeout(_BOOT_TIMEOUT_S):
                    while not host.is_ready:
                        await asyncio.sleep(0.05)
            case FaultKind.CUT_HOST:
                assert host is not None
                host.cut()
            case FaultKind.REJOIN_HOST:
                assert host is not None
                host.rejoin()
            case FaultKind.STOP_REDIS:
                self._kv_redis.stop()
            case FaultKind.START_REDIS:
                await asyncio.to_thread(self._kv_redis.start)
            case FaultKind.RESTART_HEAD:
                self._cluster.kill_head()
                await self._cluster.start_head()
            case _:
                return self._kill(fault.kind, host)
        return self._cluster.head.name if host is None else host.name

    def _kill(self, kind: FaultKind, host: Host | None) -> str:
        for candidate in reversed(self._cluster.hosts if host is None else [host]):
            found = [p for p in candidate.processes() if _is(p, kind)]
            if found:
                kill(found[-1].pid)
                return candidate.name
        raise TestbedError(f"{kind}: there is no such process")


def _is(process: Process, kind: FaultKind) -> bool:
    return any(title in process.title for title in _TITLES[kind])
