"""The gateway's ports on Ray: the scheduler actor, and the replicas behind a Serve handle."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from contextvars import Context
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from cluster import scheduler_actor
from cluster.cache_messages import CacheCommand
from cluster.config import SchedulerAddress, SchedulerConfig
from cluster.errors import ReplicaLostError, SchedulerGoneError
from cluster.messages import (
    AnsweredBy,
    IngestResult,
    Refusal,
    ReplicaAddress,
    RequestOutcome,
    SchedulerStatus,
)
from cluster.outbox import Outbox
from planner import RagRequest, RequestProfile, Ticket
from replicas.interface import EngineDeadError, GenerationDelta, StoredChunk

log = logging.getLogger(__name__)

T = TypeVar("T")

_WATCH_PERIOD_S = 0.5
_RETRY_S = 0.1


class RayScheduler:
    """Calls to the scheduler actor that survive its restart.

    `watch` asks for its status twice a second; the answers are what health and the bounds of
    admission go by.
    """

    def __init__(
        self, address: SchedulerAddress, config: SchedulerConfig, *, gone_after_s: float
    ) -> None:
        self._address = address
        self._config = config
        self._gone_after_s = gone_after_s
        self._ingress_id = uuid.uuid4().hex
        self._handle: ActorHandle[Any] | None = None
        self._finding: asyncio.Task[ActorHandle[Any]] | None = None
        self._answered_at = time.monotonic()
        self._status: SchedulerStatus | None = None
        self._outbox = Outbox(self._tell)

    async def start(self) -> None:
        """Find or start the actor, and bring it to this config or a newer one."""
        self._handle = await asyncio.to_thread(scheduler_actor.join, self._address, self._config)

    @property
    def status(self) -> SchedulerStatus | None:
        """The latest status; None while the scheduler has not answered for too long."""
        return None if self._silent_s() > self._gone_after_s else self._status

    async def watch(self) -> None:
        """Ask for the status, for ever."""
        while True:
            try:
                handle = await self._resolve()
                self._status = await asyncio.wait_for(handle.status.remote(self._ingress_id), 2.0)
                self._answered_at = time.monotonic()
                if self._status.generation < self._config.generation:
                    # Ray restarts the actor with its first config, and an ingress that an upgrade
                    # is about to end may have started it anew with its own
                    await asyncio.wait_for(handle.adopt.remote(self._config), 2.0)
                await asyncio.sleep(_WATCH_PERIOD_S)
            except Exception as exc:  # whatever it is, health must go on telling the truth
                log.warning("scheduler_does_not_answer reason=%s", str(exc).partition("\n")[0])
                self._handle = None
                await asyncio.sleep(_RETRY_S)

    async def admit(self, profile: RequestProfile) -> Ticket | Refusal:
        """A ticket or the reason why not. Raises SchedulerGoneError without a scheduler.

        Cancelling also takes the request out of the scheduler.
        """
        while True:
            ref = None
            try:
                handle = await self._resolve()
                ref = handle.admit.remote(profile, self._ingress_id)
                return await self._answer(ref)
            except TimeoutError:
                raise SchedulerGoneError("the scheduler can not be found") from None
            except asyncio.CancelledError:
                self._give_up(ref, profile.request_id)
                raise
            except (RayActorError, ValueError):
                self._handle = None
                if self._silent_s() > self._gone_after_s:
                    raise SchedulerGoneError("the scheduler is gone") from None
                await asyncio.sleep(_RETRY_S)
            except TaskCancelledError:
                await _let_own_cancellation_come()

    def abandon(self, request_id: str) -> None:
        self._outbox.put(("abandon", request_id))

    def record(self, outcome: RequestOutcome) -> None:
        self._outbox.put(("record", outcome), can_wait=True)

    def replica_lost(self, replica_id: str) -> None:
        self._outbox.put(("replica_lost", replica_id))

    async def metrics_text(self) -> bytes:
        try:
            handle = await self._resolve()
            return await asyncio.wait_for(handle.metrics_text.remote(), self._gone_after_s)
        except (RayError, ValueError, TimeoutError):
            self._handle = None
            raise SchedulerGoneError("the scheduler does not answer") from None

    async def _answer(self, ref: "ray.ObjectRef[Any]") -> Ticket | Refusal:
        """Wait for an admission as long as the scheduler is seen alive."""
        answer = asyncio.ensure_future(_result(ref))
        try:
            while True:
                done, _ = await asyncio.wait({answer}, timeout=_WATCH_PERIOD_S)
                if done:
                    self._answered_at = time.monotonic()
                    return answer.result()
                if self._silent_s() > self._gone_after_s:
                    ray.cancel(ref)
                    raise SchedulerGoneError("the scheduler does not answer")
        finally:
            answer.cancel()

    def _give_up(self, ref: "ray.ObjectRef[Any] | None", request_id: str) -> None:
        if ref is not None:
            with suppress(Exception):
                ray.cancel(ref)
        self.abandon(request_id)  # a ticket may just be on its way

    async def _tell(self, messages: list[scheduler_actor.Message]) -> None:
        if self._handle is not None:
            await scheduler_actor.tell(self._handle, messages)

    async def _resolve(self) -> ActorHandle[Any]:
        """The actor's handle. Raises TimeoutError when it can not be found in time.

        While the head node is away each search takes as long, and holds a thread: so there is one
        for all who wait, and nobody waits for it who knows that the scheduler is gone.
        """
        if self._handle is not None:
            return self._handle
        if self._finding is None:
            self._finding = asyncio.get_running_loop().create_task(self._find())
        patience_s = max(self._gone_after_s - self._silent_s(), 0.0)
        return await asyncio.wait_for(asyncio.shield(self._finding), patience_s)

    async def _find(self) -> ActorHandle[Any]:
        try:
            self._handle = await asyncio.to_thread(
                scheduler_actor.get_or_create, self._address, self._config
            )
            return self._handle
        finally:
            self._finding = None

    def _silent_s(self) -> float:
        return time.monotonic() - self._answered_at


class RayReplicas:
    """Calls to the replicas through Serve's handle; the ticket's replica is the router's job."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def generate(
        self, ticket: Ticket, request: RagRequest
    ) -> AsyncGenerator[GenerationDelta | Refusal | AnsweredBy, None]:
        """The replica's deltas. Raises ReplicaLostError when the replica is gone.

        Closing this iterator, or cancelling its task, cancels the work on the replica.
        """
        response = self._streaming.generate.remote(ticket, request)
        finished = False
        try:
            async for delta in response:
                yield delta
            finished = True
        except asyncio.CancelledError:
            # Serve also turns a task that the replica's end cancelled into this
            if _is_cancelled():
                raise
            await _let_own_cancellation_come()
            raise ReplicaLostError("the replica ended the request") from None
        except TaskCancelledError:
            finished = True
            await _let_own_cancellation_come()
            raise ReplicaLostError("the replica ended the request") from None
        except (RayActorError, DeploymentUnavailableError) as exc:
            finished = True
            raise ReplicaLostError(str(exc).splitlines()[0]) from None
        except RayTaskError as exc:
            finished = True
            if isinstance(exc.cause, EngineDeadError):
                raise ReplicaLostError(str(exc.cause)) from None
            raise
        finally:
            if not finished:
                response.cancel()

    async def ingest(
        self, replica_id: str, chunks: Sequence[tuple[int, ...]], *, cache_salt: str
    ) -> list[IngestResult]:
        return await self._call("ingest", replica_id, chunks, cache_salt)

    async def find_chunk(self, replica_id: str, chunk_id: str) -> StoredChunk | None:
        return await self._call("find_chunk", replica_id, chunk_id)

    async def cache(self, replica_id: str, command: CacheCommand[T]) -> T | Refusal:
        return await self._call("cache", replica_id, command)

    async def _call(self, method: str, replica_id: str, *arguments: Any) -> Any:
        """Call one replica. Cancelling it cancels the work there.

        It runs in a context of its own: calls inherit the id of the HTTP request that they are
        made for, and of two with the same id that wait for their replica at the same time, Serve's
        router forgets one.
        """
        address = ReplicaAddress(replica_id=replica_id)

        async def call() -> Any:
            return await _unary(getattr(self._handle, method).remote(address, *arguments))

        return await asyncio.create_task(call(), context=Context())


async def _result(awaitable: Any) -> Any:
    return await awaitable


async def _unary(response: Any) -> Any:
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        if _is_cancelled():
            raise
        raise ReplicaLostError("the replica ended the call") from None
    except (RayActorError, TaskCancelledError, DeploymentUnavailableError) as exc:
        raise ReplicaLostError(str(exc).splitlines()[0]) from None


async def _let_own_cancellation_come() -> None:
    """A call was cancelled from outside: this task may be the next.

    When a client leaves, Ray cancels the request's calls along with the request itself, and their
    end may be seen here first.
    """
    await asyncio.sleep(_RETRY_S)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
