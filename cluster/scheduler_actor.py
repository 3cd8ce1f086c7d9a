"""The Ray actor around SchedulerService: detached, named, pinned to the head node."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from cluster.config import SchedulerAddress, SchedulerConfig
from cluster.messages import Refusal, ReplicaReport, ReportAck, SchedulerStatus
from cluster.metrics import ServerMetrics
from cluster.scheduler_service import SchedulerService, build_planning
from planner import LoadSignal, MonotonicClock, RequestProfile, Ticket

log = logging.getLogger(__name__)

Message = tuple[Any, ...]  # a method of the service and its arguments

_MAX_CONCURRENCY = 10_000  # admissions wait inside their call
_TELL_TIMEOUT_S = 5.0


class SchedulerActor:
    """Forwards calls to the service; built and run inside the actor's own event loop."""

    def __init__(self, config: SchedulerConfig) -> None:
        """config: `for_model`, so that there is a demand to plan with"""
        self._config = config
        self._service = SchedulerService(
            *build_planning(config), config, MonotonicClock(), ServerMetrics()
        )
        self._asked_at = time.monotonic()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._service.run()), loop.create_task(self._end_unused())]

    async def adopt(self, config: SchedulerConfig) -> None:
        """Go on under this configuration, unless that of a newer deployment is here.

        config: `for_model`
        """
        if config != self._config and config.generation >= self._config.generation:
            self._service.reconfigure(config)
            self._config = config

    async def admit(self, profile: RequestProfile, ingress_id: str) -> Ticket | Refusal:
        self._asked_at = time.monotonic()
        return await self._service.admit(profile, ingress_id=ingress_id)

    async def tell(self, messages: Sequence[Message]) -> None:
        """Calls of the service without an answer, in order."""
        for method, *arguments in messages:
            getattr(self._service, method)(*arguments)

    async def sync_replicas(self, router_id: str, replica_ids: Sequence[str]) -> None:
        self._service.sync_replicas(router_id, replica_ids)

    async def report(self, report: ReplicaReport) -> ReportAck:
        return self._service.report(report)

    async def status(self, ingress_id: str | None = None) -> SchedulerStatus:
        """ingress_id: who asks, and is alive; None: an onlooker"""
        self._asked_at = time.monotonic()
        if ingress_id is not None:
            self._service.heard(ingress_id)
        return self._service.status()

    async def signal(self) -> LoadSignal:
        return self._service.signal()

    async def metrics_text(self) -> bytes:
        return self._service.metrics_text()

    async def _end_unused(self) -> None:
        """End for good when no ingress asks any more: the application has been removed.

        Serve removes applications without telling us. Who comes later starts a new scheduler.
        """
        while time.monotonic() - self._asked_at < self._config.unused_s:
            await asyncio.sleep(min(5.0, self._config.unused_s / 4))
        log.warning("scheduler_unused unused_s=%.0f", self._config.unused_s)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def get_or_create(address: SchedulerAddress, config: SchedulerConfig) -> ActorHandle[Any]:
    """The application's scheduler, started if there is none. Blocks: call it in a thread.

    `num_cpus=0` alone would let it land on a worker node; the head's own resource pins it.
    """
    actor = ray.remote(SchedulerActor).options(
        name=address.name,
        namespace=address.namespace,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources={"node:__internal_head__": 0.001},
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=_MAX_CONCURRENCY,
    )
    return actor.remote(config)


def join(address: SchedulerAddress, config: SchedulerConfig) -> ActorHandle[Any]:
    """The application's scheduler, under this config or that of a newer deployment.

    One from an earlier deployment goes on under this config, with all that waits in it.
    """
    handle = get_or_create(address, config)
    try:
        ray.get(handle.adopt.remote(config), timeout=60)
    except RayTaskError as exc:  # it runs another version of this code
        log.warning("scheduler_replaced reason=%s", str(exc.cause).partition("\n")[0])
        ray.kill(handle, no_restart=True)  # the ingresses admit again what waits in it
        return get_or_create(address, config)
    return handle


def find(address: SchedulerAddress) -> ActorHandle[Any]:
    """The running scheduler. Raises ValueError if there is none. Blocks: call it in a thread."""
    return ray.get_actor(address.name, namespace=address.namespace)


async def tell(handle: ActorHandle[Any], messages: Sequence[Message]) -> None:
    """What is lost with the actor, reports and expiry make good."""
    with suppress(RayError, TimeoutError):
        await asyncio.wait_for(handle.tell.remote(messages), _TELL_TIMEOUT_S)


def stop(address: SchedulerAddress) -> None:
    """End the application's scheduler for good; nothing happens if there is none."""
    try:
        ray.kill(find(address), no_restart=True)
    except ValueError:
        return
