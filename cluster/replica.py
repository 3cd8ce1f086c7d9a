"""The replica's Serve shell around a RagEngine."""

import asyncio
import importlib
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayError

from cluster import scheduler_actor
from cluster.cache_messages import CacheCommand
from cluster.config import ReplicaConfig, SchedulerAddress
from cluster.messages import ActiveRequest, AnsweredBy, IngestResult, Refusal, ReplicaAddress
from cluster.outbox import Outbox
from cluster.replica_reporter import ReplicaReporter
from planner import RagRequest, Ticket
from replicas.cache_types import CacheError
from replicas.interface import (
    EngineDeadError,
    GenerationDelta,
    PromptTooLongError,
    RagEngine,
    StoredChunk,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_MIN_REPORT_GAP_S = 0.25


class Replica:
    """One engine behind a Serve deployment: generates, keeps chunks, reports to the scheduler.

    A dead engine ends the process at once: Serve sees an actor's death sooner than a failing
    health check, and callers before their first token go to another replica.
    """

    async def __init__(self, config: ReplicaConfig, scheduler: SchedulerAddress) -> None:
        started_s = time.monotonic()
        self._config = config
        self._address = scheduler
        self._scheduler: ActorHandle[Any] | None = None
        self._outbox = Outbox(self._tell)
        self._active: dict[str, ActiveRequest] = {}
        self._changed = asyncio.Event()
        self._lone_batch_ids = itertools.count(-1, -1)
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._engine: RagEngine = load_function(config.builder)(config.engine)
        info = await self._engine.start()
        info = replace(info, load_ms=(time.monotonic() - started_s) * 1e3)
        self._reporter = ReplicaReporter(
            self._engine,
            info,
            replica_id=self._replica_id,
            node_id=ray.get_runtime_context().get_node_id(),
        )
        self._reporting = asyncio.get_running_loop().create_task(self._report_for_ever())
        log.info(
            "replica_ready replica=%s model=%s load_ms=%.0f",
            self._replica_id,
            info.model,
            info.load_ms,
        )

    async def generate(
        self, ticket: Ticket, request: RagRequest
    ) -> AsyncIterator[GenerationDelta | Refusal | AnsweredBy]:
        """The engine's deltas, or a refusal in their place."""
        if ticket.replica_id != self._replica_id:
            # the batch it was planned for is elsewhere: do not hold it for members that never come
            ticket = replace(ticket, batch_id=next(self._lone_batch_ids), batch_size=1)
            yield AnsweredBy(replica_id=self._replica_id)
        request_id = request.request_id
        active = ActiveRequest(
            request_id=request_id, num_tokens=request.num_prompt_tokens, in_prefill=True
        )
        self._active[request_id] = active
        try:
            async with aclosing(self._engine.generate(request, ticket)) as deltas:
                async for delta in deltas:
                    if self._active[request_id].in_prefill:
                        self._active[request_id] = replace(active, in_prefill=False)
                        self._outbox.put(("first_token", self._replica_id, request_id))
                    yield delta
        except PromptTooLongError as exc:
            yield Refusal(status=400, message=str(exc), code="context_length_exceeded")
        except EngineDeadError as exc:
            self._end_process(exc)
        finally:
            self._active.pop(request_id, None)
            self._outbox.put(("finished", request_id))
            self._changed.set()

    async def ingest(
        self, _: ReplicaAddress, chunks: Sequence[tuple[int, ...]], cache_salt: str
    ) -> list[IngestResult]:
        """Compute and store chunks; one that can not be stored does not stop the others."""
        results: list[IngestResult] = []
        for token_ids in chunks:
            try:
                stored = await self._engine.ingest(token_ids, cache_salt=cache_salt)
                results.append(IngestResult(stored=stored))
            except ValueError as exc:
                results.append(IngestResult(error=str(exc)))
            except EngineDeadError as exc:
                self._end_process(exc)
        self._changed.set()
        return results

    async def find_chunk(self, _: ReplicaAddress, chunk_id: str) -> StoredChunk | None:
        return self._engine.find_chunk(chunk_id)

    async def cache(self, _: ReplicaAddress, command: CacheCommand[T]) -> T | Refusal:
        """What an operator wants of the store, or why it can not be."""
        try:
            return await command.run(self._engine.cache)
        except CacheError as exc:
            return Refusal(status=exc.status, message=str(exc), code=exc.code)
        finally:
            self._changed.set()

    async def check_health(self) -> None:
        """Called by Serve every second."""
        try:
            await self._engine.check_health()
        except EngineDeadError as exc:
            self._end_process(exc)

    async def __del__(self) -> None:
        """Called by Serve once the replica has drained."""
        if reporting := getattr(self, "_reporting", None):
            reporting.cancel()
        if engine := getattr(self, "_engine", None):
            await engine.close()

    async def _report_for_ever(self) -> None:
        """Tell the scheduler our state, twice a second and soon after it changes."""
        while True:
            self._changed.clear()
            again = False
            try:
                report = self._reporter.build(self._active.values())
                if self._scheduler is None:
                    self._scheduler = await asyncio.to_thread(scheduler_actor.find, self._address)
                ack = await asyncio.wait_for(self._scheduler.report.remote(report), 5.0)
                again = self._reporter.acknowledged(ack)
            except (RayError, ValueError, TimeoutError):
                self._scheduler = None  # restarting; find it again
                self._reporter.lost()
            except Exception:  # a replica that falls silent would get no more tickets
                log.exception("report_failed replica=%s", self._replica_id)
                self._reporter.lost()
            await asyncio.sleep(_MIN_REPORT_GAP_S)
            if not again:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), self._config.report_period_s)

    async def _tell(self, messages: list[scheduler_actor.Message]) -> None:
        if self._scheduler is not None:
            await scheduler_actor.tell(self._scheduler, messages)

    def _end_process(self, reason: EngineDeadError) -> NoReturn:
        log.error("engine_dead replica=%s reason=%s", self._replica_id, reason)
        logging.shutdown()
        os._exit(1)


def load_function(path: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
