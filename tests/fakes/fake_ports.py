"""The gateway's ports without Ray: a scheduler that grants at once, replicas from a FakeEngine."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import TypeVar

from cluster.cache_messages import CacheCommand
from cluster.errors import ReplicaLostError, SchedulerGoneError
from cluster.messages import (
    AnsweredBy,
    IngestResult,
    Refusal,
    ReplicaSummary,
    RequestOutcome,
    SchedulerStatus,
)
from planner import EngineInfo, RagRequest, RequestProfile, Ticket
from replicas.cache_types import CacheError
from replicas.interface import GenerationDelta, PromptTooLongError, RagEngine, StoredChunk
from tests.fakes.records import request_plan

T = TypeVar("T")

PLAN = request_plan(coverage=0.25)


def ready_status(info: EngineInfo, *, replica_ids: Sequence[str] = ("r1",)) -> SchedulerStatus:
    return SchedulerStatus(
        epoch="e",
        num_waiting=0,
        replicas=tuple(
            ReplicaSummary(
                replica_id=replica_id,
                node_id=f"node-of-{replica_id}",
                ready=True,
                num_running=0,
                num_waiting=0,
                num_ingest_backlog=0,
                num_leases=0,
                in_prefill=False,
                num_resident_chunks=0,
                info=info,
            )
            for replica_id in replica_ids
        ),
    )


class FakeScheduler:
    """Grants r1 tickets; `answers` are given first, in order, an exception is raised."""

    def __init__(self, status: SchedulerStatus | None) -> None:
        self.status = status
        self.answers: list[Ticket | Refusal | Exception] = []
        self.profiles: list[RequestProfile] = []
        self.outcomes: list[RequestOutcome] = []
        self.abandoned: list[str] = []
        self.lost: list[str] = []
        self.block = False

    async def admit(self, profile: RequestProfile) -> Ticket | Refusal:
        self.profiles.append(profile)
        if self.block:
            await asyncio.Event().wait()
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        plan = replace(PLAN, policy=profile.policy)
        if profile.config is not None:
            plan = replace(plan, coverage=profile.config.coverage, signal=profile.config.signal)
        return Ticket(replica_id="r1", batch_id=1, batch_size=1, plan=plan, queue_ms=2.0)

    def abandon(self, request_id: str) -> None:
        self.abandoned.append(request_id)

    def record(self, outcome: RequestOutcome) -> None:
        self.outcomes.append(outcome)

    def replica_lost(self, replica_id: str) -> None:
        self.lost.append(replica_id)

    async def metrics_text(self) -> bytes:
        if self.status is None:
            raise SchedulerGoneError("the scheduler does not answer")
        return b"cachesmith_requests_total 0\n"


class FakeReplicas:
    """One engine behind every replica id, but for those in `engines`.

    `lose_after` deltas, one call each, the replica dies; the operators' calls to those in `gone`
    find nobody.
    """

    def __init__(self, engine: RagEngine) -> None:
        self.engine = engine
        self.engines: dict[str, RagEngine] = {}
        self.gone: set[str] = set()
        self.lose_after: list[int] = []
        self.requests: list[tuple[Ticket, RagRequest]] = []

    async def generate(
        self, ticket: Ticket, request: RagRequest
    ) -> AsyncGenerator[GenerationDelta | Refusal | AnsweredBy, None]:
        self.requests.append((ticket, request))
        left = self.lose_after.pop(0) if self.lose_after else None
        if ticket.replica_id == "":
            yield AnsweredBy(replica_id="r1")
        deltas = self.engine.generate(request, ticket)
        try:
            async for delta in deltas:
                if left is not None:
                    if left == 0:
                        raise ReplicaLostError("the fake replica is told to be lost")
                    left -= 1
                yield delta
            if left == 0:
                raise ReplicaLostError("the fake replica is told to be lost at its end")
        except PromptTooLongError as exc:
            yield Refusal(status=400, message=str(exc), code="context_length_exceeded")
        finally:
            await deltas.aclose()

    async def ingest(
        self, replica_id: str, chunks: Sequence[tuple[int, ...]], *, cache_salt: str
    ) -> list[IngestResult]:
        results = []
        for chunk in chunks:
            try:
                stored = await self.engine.ingest(chunk, cache_salt=cache_salt)
                results.append(IngestResult(stored=stored))
            except ValueError as exc:
                results.append(IngestResult(error=str(exc)))
        return results

    async def find_chunk(self, replica_id: str, chunk_id: str) -> StoredChunk | None:
        return self.engines.get(replica_id, self.engine).find_chunk(chunk_id)

    async def cache(self, replica_id: str, command: CacheCommand[T]) -> T | Refusal:
        if replica_id in self.gone:
            raise ReplicaLostError("the fake replica is told to be gone")
        try:
            return await command.run(self.engines.get(replica_id, self.engine).cache)
        except CacheError as exc:
            return Refusal(status=exc.status, message=str(exc), code=exc.code)
