"""An engine that computes nothing: it sleeps as long as the cost model says of its plans."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from planner import (
    CostModel,
    EngineInfo,
    EngineLoad,
    PrefillResult,
    PrefillShape,
    PrefillTimings,
    RagRequest,
    Ticket,
    prefill_work,
)
from replicas.cache_types import CacheOperations, TierReport
from replicas.interface import GenerationDelta, ResidencyUpdate, StoredChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedConfig:
    """chunk_ids: of the chunks that are stored from the start, all that ever come"""

    cost: CostModel
    load_s: float
    chunk_ids: tuple[str, ...]
    max_model_len: int = 4096
    max_num_seqs: int = 16


def build(config: EmulatedConfig) -> "EmulatedEngine":
    """Called in the replica's process."""
    return EmulatedEngine(config)


class EmulatedEngine:
    """A `RagEngine` whose members of a batch have their first tokens at the same time."""

    def __init__(self, config: EmulatedConfig) -> None:
        self._config = config
        self._num_running = 0
        self._new_chunks = config.chunk_ids

    async def start(self) -> EngineInfo:
        await asyncio.sleep(self._config.load_s)
        return EngineInfo(
            model="emulated",
            fingerprint="emulated",
            num_layers=self.cost.num_layers,
            max_model_len=self._config.max_model_len,
            kv_capacity_tokens=self._config.max_num_seqs * self._config.max_model_len,
            max_num_seqs=self._config.max_num_seqs,
            tensor_parallel_size=1,
            cost_source="profile",
        )

    @property
    def cost(self) -> CostModel:
        return self._config.cost

    @property
    def link(self) -> None:
        return None

    async def generate(self, request: RagRequest, ticket: Ticket) -> AsyncIterator[GenerationDelta]:
        self._num_running += 1
        try:
            took_ms = ticket.plan.expected_ms or self._alone_ms(request, ticket)
            await asyncio.sleep(took_ms / 1e3)
            yield GenerationDelta(
                text="",
                num_generated=1,
                finish_reason="length",
                result=_result(request, ticket, took_ms),
            )
        finally:
            self._num_running -= 1

    def _alone_ms(self, request: RagRequest, ticket: Ticket) -> float:
        """Of a request that nobody has planned, because the scheduler was away."""
        num_context, plan = sum(map(len, request.chunks)), ticket.plan
        num_always = request.num_prompt_tokens - num_context
        work = prefill_work(
            [PrefillShape(num_cached=num_context, num_always=num_always)],
            [plan.coverage],
            signal=plan.signal,
            warmup_depth=plan.warmup_depth,
            probe_len=plan.probe_len,
            num_layers=self.cost.num_layers,
        )
        return self.cost.work_ms(work)

    async def ingest(self, token_ids: tuple[int, ...], *, cache_salt: str = "") -> StoredChunk:
        raise ValueError("the emulated engine stores nothing")

    def find_chunk(self, chunk_id: str) -> None:
        return None

    @property
    def cache(self) -> CacheOperations:
        raise NotImplementedError("the emulated engine has no store")

    def tier_report(self) -> TierReport:
        return TierReport()

    def load(self) -> EngineLoad:
        return EngineLoad(num_running=self._num_running, num_waiting=0, num_ingest_backlog=0)

    def residency_update(self) -> ResidencyUpdate:
        new, self._new_chunks = self._new_chunks, ()
        return ResidencyUpdate(added=new)

    async def check_health(self) -> None:
        return None

    async def close(self) -> None:
        return None


def _result(request: RagRequest, ticket: Ticket, took_ms: float) -> PrefillResult:
    plan, num_context = ticket.plan, sum(map(len, request.chunks))
    return PrefillResult(
        policy=plan.policy,
        signal=plan.signal,
        warmup_depth=plan.warmup_depth,
        probe_len=plan.probe_len,
        coverage=plan.coverage,
        num_prompt_tokens=request.num_prompt_tokens,
        num_context_tokens=num_context,
        num_miss_tokens=0,
        num_recomputed_tokens=round(plan.coverage * num_context),
        cached_tokens={"host": num_context},
        batch_size=ticket.batch_size,
        timings=PrefillTimings(compute_ms=took_ms, first_token_ms=took_ms),
    )
