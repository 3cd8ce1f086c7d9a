"""One request from its token ids to its last token: admission, replica, and what may fail between.

No HTTP and no Ray here: the ports below are the scheduler and the replicas, cluster/api.py makes
HTTP of the answers.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.cache_service import CachePort, CacheService
from cluster.config import GatewayConfig
from cluster.errors import ApiError, ReplicaLostError, SchedulerGoneError, error_of
from cluster.messages import (
    AnsweredBy,
    IngestResult,
    Refusal,
    RequestOutcome,
    SchedulerStatus,
)
from cluster.prompt import Prompt
from kv_tier.keys import content_id
from planner import (
    FULL_PREFILL,
    ChunkRef,
    Clock,
    EngineInfo,
    PrefillResult,
    RagRequest,
    RecomputeConfig,
    RequestPlan,
    RequestProfile,
    SamplingOptions,
    Ticket,
)
from replicas.interface import GenerationDelta, StoredChunk

log = logging.getLogger(__name__)


class SchedulerPort(Protocol):
    @property
    def status(self) -> SchedulerStatus | None:
        """The latest known status, None while the scheduler does not answer."""
        ...

    async def admit(self, profile: RequestProfile) -> Ticket | Refusal:
        """Raises SchedulerGoneError when there is no scheduler for too long."""
        ...

    def abandon(self, request_id: str) -> None: ...

    def record(self, outcome: RequestOutcome) -> None: ...

    def replica_lost(self, replica_id: str) -> None: ...

    async def metrics_text(self) -> bytes: ...


class ReplicaPort(CachePort, Protocol):
    """Calls to one replica. All raise ReplicaLostError when it is gone."""

    def generate(
        self, ticket: Ticket, request: RagRequest
    ) -> AsyncGenerator[GenerationDelta | Refusal | AnsweredBy, None]: ...

    async def ingest(
        self, replica_id: str, chunks: Sequence[tuple[int, ...]], *, cache_salt: str
    ) -> list[IngestResult]: ...

    async def find_chunk(self, replica_id: str, chunk_id: str) -> StoredChunk | None: ...


class SharedChunksPort(Protocol):
    async def are_shared(
        self, chunks: Sequence[tuple[int, ...]], *, cache_salt: str, info: EngineInfo | None
    ) -> list[bool]:
        """Which chunks every node can load, in bounded time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request as the gateway takes it: tokens, objective, policy, options."""

    prompt: Prompt
    ttft_slo_ms: float
    sampling: SamplingOptions
    arrived_ms: float
    cache_salt: str = ""
    policy: str = "adaptive"
    config: RecomputeConfig | None = None
    wants_timeline: bool = False

    @property
    def chunk_config(self) -> RecomputeConfig | None:
        """The config with the coverage that it means for this prompt."""
        return self.config and self.config.for_chunks([len(ids) for ids in self.prompt.chunks])


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Everything known about a finished answer, for the response's `cachesmith` field."""

    result: PrefillResult
    plan: RequestPlan
    queue_ms: float
    ttft_ms: float
    ttft_slo_ms: float
    replica_id: str
    wants_timeline: bool = False
    explanation: str = ""  # why the plan was chosen, if the request asked

    @property
    def slo_met(self) -> bool:
        return self.ttft_ms <= self.ttft_slo_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New text of an answer. The last piece has `finish_reason` and `served`."""

    text: str
    num_generated: int
    finish_reason: str | None = None
    served: Served | None = None


class Gateway:
    """Takes jobs through scheduler and replicas. One object serves all requests of an ingress."""

    def __init__(
        self,
        scheduler: SchedulerPort,
        replicas: ReplicaPort,
        config: GatewayConfig,
        clock: Clock,
        *,
        shared: SharedChunksPort | None = None,
    ) -> None:
        """shared: the second level of the KV tier, where there is one"""
        self._scheduler = scheduler
        self._shared = shared
        self._replicas = replicas
        self._config = config
        self._clock = clock
        self.cache = CacheService(replicas, lambda: scheduler.status)

    @property
    def status(self) -> SchedulerStatus | None:
        return self._scheduler.status

    @property
    def max_model_len(self) -> int | None:
        """The model's limit, as configured or as the ready replicas say."""
        status = self._scheduler.status
        reported = status.max_model_len if status else None
        return reported or self._config.max_model_len

    def max_tokens(self, prompt: Prompt, asked: int | None, *, prompt_param: str) -> int:
        """How many tokens to generate at most. Raises ApiError where prompt and answer do not fit.

        While no replica has said its limit, the engine's own check is the only one.
        """
        limit = self.max_model_len
        num_prompt = prompt.num_tokens
        if limit is None:
            return asked or self._config.default_max_tokens
        if num_prompt >= limit:
            raise ApiError(
                400,
                f"the prompt has {num_prompt} tokens, the model's limit is {limit} tokens for "
                "prompt and answer together",
                code="context_length_exceeded",
                param=prompt_param,
            )
        if asked is not None and num_prompt + asked > limit:
            raise ApiError(
                400,
                f"the prompt has {num_prompt} tokens and {asked} more were asked for: together "
                f"{num_prompt + asked}, over the model's limit of {limit} tokens",
                code="context_length_exceeded",
                param="max_tokens",
            )
        return asked or min(self._config.default_max_tokens, limit - num_prompt)

    async def run(self, job: Job) -> AsyncGenerator[Piece, None]:
        """The answer in pieces. Raises ApiError, before the first piece or between two.

        A replica that is lost before the first token is made good by another admission; after it,
        the request fails once, so that nothing is answered twice. Closing the iterator or
        cancelling its task gives up whatever the request holds.
        """
        request_id = uuid.uuid4().hex
        outcome = RequestOutcome(outcome="error", policy=job.policy)
        retries = 0
        try:
            are_shared = await self._are_shared(job)
            while True:
                ticket_id = f"{request_id}-{retries}"
                ticket = await self._admit(job, ticket_id, are_shared)
                outcome = replace(outcome, queue_ms=ticket.queue_ms)
                answered = False
                try:
                    async with aclosing(self._generate(job, ticket_id, ticket)) as pieces:
                        async for piece in pieces:
                            answered = True
                            if piece.served is not None:
                                outcome = _outcome_of(piece.served, job, piece.num_generated)
                            yield piece
                    return
                except ReplicaLostError as exc:
                    log.warning("replica_lost replica=%s reason=%s", ticket.replica_id, exc)
                    if ticket.replica_id:
                        self._scheduler.replica_lost(ticket.replica_id)
                    self._scheduler.abandon(ticket_id)
                    if outcome.outcome == "ok":
                        return  # it ended after its last token: the answer is complete
                    retries += 1
                    if answered:
                        raise ApiError(
                            500,
                            "the replica ended while it was answering; the answer is incomplete",
                            code="replica_lost",
                        ) from None
                    if retries >= self._config.max_attempts:
                        raise ApiError(
                            503,
                            f"{retries} replicas ended before the first token",
                            code="replica_lost",
                            retry_after_s=2.0,
                        ) from None
        except ApiError as exc:
            kind = "error" if exc.status >= 500 and exc.status != 503 else "rejected"
            outcome = replace(outcome, outcome=kind)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if outcome.outcome != "ok":
                outcome = replace(outcome, outcome="cancelled")
                # a replica that the call has not reached would be held for it
                self._scheduler.abandon(f"{request_id}-{retries}")
            raise
        finally:
            self._scheduler.record(replace(outcome, num_retries=retries))

    async def _are_shared(self, job: Job) -> list[bool]:
        chunks = job.prompt.chunks
        if self._shared is None or job.policy == FULL_PREFILL:
            return [False] * len(chunks)
        status = self._scheduler.status
        info = status.ready[0].info if status and status.ready else None
        return await self._shared.are_shared(chunks, cache_salt=job.cache_salt, info=info)

    async def _admit(self, job: Job, ticket_id: str, are_shared: Sequence[bool]) -> Ticket:
        profile = RequestProfile(
            request_id=ticket_id,
            num_prefix_tokens=len(job.prompt.prefix_ids),
            chunks=tuple(
                ChunkRef(
                    chunk_id=content_id(ids, cache_salt=job.cache_salt),
                    num_tokens=len(ids),
                    is_shared=is_shared,
                )
                for ids, is_shared in zip(job.prompt.chunks, are_shared, strict=True)
            ),
            num_suffix_tokens=len(job.prompt.suffix_ids),
            ttft_slo_ms=job.ttft_slo_ms,
            elapsed_ms=self._clock.now_ms() - job.arrived_ms,
            policy=job.policy,
            config=job.chunk_config,
            wants_explanation=job.wants_timeline,
        )
        try:
            ticket = await self._scheduler.admit(profile)
        except SchedulerGoneError:
            log.warning("scheduler_gone request_id=%s", ticket_id)
            return self._floor_ticket(job)
        if isinstance(ticket, Refusal):
            raise error_of(ticket)
        return ticket

    def _floor_ticket(self, job: Job) -> Ticket:
        """Without a scheduler: any replica, a batch of its own, as little work as is sensible."""
        config = job.chunk_config or self._config.floor
        return Ticket(
            replica_id="",
            batch_id=0,  # the replica that takes it makes it a batch of its own
            batch_size=1,
            plan=RequestPlan.of_config(job.policy, config, num_layers=self._config.num_layers),
            queue_ms=0.0,
        )

    async def _generate(
        self, job: Job, ticket_id: str, ticket: Ticket
    ) -> AsyncGenerator[Piece, None]:
        request = RagRequest(
            request_id=ticket_id,
            prefix_ids=job.prompt.prefix_ids,
            chunks=job.prompt.chunks,
            suffix_ids=job.prompt.suffix_ids,
            ttft_slo_ms=job.ttft_slo_ms,
            cache_salt=job.cache_salt,
            sampling=job.sampling,
            wants_timeline=job.wants_timeline,
        )
        replica_id = ticket.replica_id
        ttft_ms: float | None = None
        complete = False
        async with aclosing(self._replicas.generate(ticket, request)) as deltas:
            while True:
                delta = await self._next(deltas, first=ttft_ms is None)
                if delta is None:
                    break
                if isinstance(delta, Refusal):
                    raise error_of(delta)
                if isinstance(delta, AnsweredBy):
                    replica_id = delta.replica_id
                    continue
                if ttft_ms is None:
                    ttft_ms = self._clock.now_ms() - job.arrived_ms
                served = None
                if delta.result is not None:
                    complete = True
                    served = Served(
                        result=delta.result,
                        plan=ticket.plan,
                        queue_ms=ticket.queue_ms,
                        ttft_ms=ttft_ms,
                        ttft_slo_ms=job.ttft_slo_ms,
                        replica_id=replica_id,
                        wants_timeline=job.wants_timeline,
                        explanation=ticket.explanation,
                    )
                yield Piece(
                    text=delta.text,
                    num_generated=delta.num_generated,
                    finish_reason=delta.finish_reason,
                    served=served,
                )
        if not complete:
            raise ReplicaLostError("the replica's answer stopped before its end")

    async def _next(
        self, deltas: AsyncIterator[GenerationDelta | Refusal | AnsweredBy], *, first: bool
    ) -> GenerationDelta | Refusal | AnsweredBy | None:
        """The next delta, None at the end; the first one within a bound."""
        timeout_s = self._config.first_token_timeout_s if first else None
        try:
            async with asyncio.timeout(timeout_s):
                return await anext(deltas, None)
        except TimeoutError:
            raise ApiError(
                503,
                f"no token within {timeout_s:.0f} s",
                code="first_token_timeout",
                retry_after_s=5.0,
            ) from None

    # --- chunks ------------------------------------------------------------------------------

    async def ingest(
        self, chunks: Sequence[tuple[int, ...]], *, cache_salt: str
    ) -> dict[str, list[IngestResult]]:
        """Compute and store chunks on every node; node id → results in the order of `chunks`."""
        nodes = self._nodes()
        answers = await asyncio.gather(
            *(
                self._replicas.ingest(replica_id, chunks, cache_salt=cache_salt)
                for replica_id in nodes.values()
            ),
            return_exceptions=True,
        )
        results: dict[str, list[IngestResult]] = {}
        for node_id, answer in zip(nodes, answers, strict=True):
            if isinstance(answer, ReplicaLostError):
                answer = [IngestResult(error="the replica was lost")] * len(chunks)
            elif isinstance(answer, BaseException):
                raise answer
            results[node_id] = answer
        return results

    async def find_chunk(self, chunk_id: str) -> dict[str, StoredChunk]:
        """node id → the chunk as stored there; empty if it is nowhere."""
        found: dict[str, StoredChunk] = {}
        for node_id, replica_id in self._nodes().items():
            try:
                chunk = await self._replicas.find_chunk(replica_id, chunk_id)
            except ReplicaLostError:
                continue
            if chunk is not None:
                found[node_id] = chunk
        return found

    async def metrics_text(self) -> bytes:
        try:
            return await self._scheduler.metrics_text()
        except SchedulerGoneError as exc:
            raise ApiError(503, str(exc), code="scheduler_gone", retry_after_s=1.0) from None

    def _nodes(self) -> dict[str, str]:
        status = self._scheduler.status
        nodes = status.one_per_node() if status else {}
        if not nodes:
            raise ApiError(503, "no replica is ready", code="no_replica_ready", retry_after_s=2.0)
        return nodes


def _outcome_of(served: Served, job: Job, num_generated: int) -> RequestOutcome:
    result = served.result
    return RequestOutcome(
        outcome="ok",
        policy=job.policy,
        queue_ms=served.queue_ms,
        ttft_ms=served.ttft_ms,
        slo_met=served.slo_met,
        coverage=result.coverage if result.num_context_tokens else None,
        expected_ms=served.plan.expected_ms or None,
        prefill_ms=result.timings.first_token_ms,
        load_ms=result.timings.load_ms,
        stall_ms=result.timings.stall_ms,
        num_prompt_tokens=result.num_prompt_tokens,
        num_generated_tokens=num_generated,
        cached_tokens=result.cached_tokens,
        num_miss_tokens=result.num_miss_tokens,
        num_recomputed_tokens=result.num_recomputed_tokens,
        recovered=result.recovered,
        full_prefill=result.full_prefill,
    )
