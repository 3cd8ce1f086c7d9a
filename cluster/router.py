"""Serve's router for the replicas: the ticket names the replica, and the router obeys.

It also tells the scheduler twice a second which replicas it can reach, which is how a scheduler
that restarted learns them again.
"""

import asyncio
import uuid
import weakref
from contextlib import suppress
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster import scheduler_actor
from cluster.config import SchedulerAddress

_PUSH_PERIOD_S = 0.5


class TicketRouter(RequestRouter):
    """Sends a call to the replica that its first argument names (`replica_id`).

    A call without such a name, or whose replica is gone, goes to the least loaded one. There is no
    FIFO mixin on purpose: it may hand the chosen replica to another pending request.
    """

    def initialize_state(self, name: str, namespace: str) -> None:
        self._address = SchedulerAddress(name=name, namespace=namespace)
        self._router_id = uuid.uuid4().hex
        self._replicas_changed = asyncio.Event()
        self._pushing: asyncio.Task[None] | None = None

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._replicas_changed.set()
        if self._pushing is None:
            pushing = _push_for_ever(weakref.ref(self), self._address, self._replicas_changed)
            self._pushing = asyncio.get_running_loop().create_task(pushing)

    def running_ids(self) -> list[str]:
        return [replica_id.unique_id for replica_id in self.curr_replicas]

    @property
    def router_id(self) -> str:
        return self._router_id

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        wanted = None
        if pending_request is not None:
            # without it Serve would try again at once, for ever, while all replicas are full
            pending_request.routing_context.should_backoff = True
            if pending_request.args:
                wanted = getattr(pending_request.args[0], "replica_id", None)
        named = [r for r in candidate_replicas if r.replica_id.unique_id == wanted]
        return [named or sorted(candidate_replicas, key=self._queue_len)]

    def _queue_len(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


async def _push_for_ever(
    router: "weakref.ref[TicketRouter]", address: SchedulerAddress, changed: asyncio.Event
) -> None:
    """Tell the scheduler the router's replicas, at every change and period, until it is garbage."""
    handle: ActorHandle[Any] | None = None
    while (alive := router()) is not None:
        changed.clear()
        router_id, replica_ids = alive.router_id, alive.running_ids()
        del alive
        try:
            if handle is None:
                handle = await asyncio.to_thread(scheduler_actor.find, address)
            await asyncio.wait_for(handle.sync_replicas.remote(router_id, replica_ids), 5.0)
        except (RayError, ValueError, TimeoutError):
            handle = None  # restarting, or replaced by a new deployment's
        with suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), _PUSH_PERIOD_S)
