"""A RagEngine that computes nothing: its first delta says when the call reached it."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kv_tier.keys import content_id
from planner import (
    CostModel,
    EngineInfo,
    EngineLoad,
    PrefillResult,
    PrefillTimings,
    RagRequest,
    Ticket,
)
from replicas.cache_types import CacheOperations, NoRedisTierError, TierReport
from replicas.interface import GenerationDelta, ResidencyUpdate, StoredChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class InstantEngineConfig:
    num_layers: int
    max_num_seqs: int = 64
    max_model_len: int = 1 << 16
    kv_capacity_tokens: int = 1 << 22


def build(config: InstantEngineConfig) -> "InstantEngine":
    return InstantEngine(config)


class InstantEngine:
    """Says that it keeps every chunk that it has seen, so that requests are planned with reuse."""

    def __init__(self, config: InstantEngineConfig) -> None:
        self._config = config
        self._resident: set[str] = set()
        self._added: list[str] = []
        self._num_running = 0

    async def start(self) -> EngineInfo:
        config = self._config
        return EngineInfo(
            model="instant",
            fingerprint="instant",
            num_layers=config.num_layers,
            max_model_len=config.max_model_len,
            kv_capacity_tokens=config.kv_capacity_tokens,
            max_num_seqs=config.max_num_seqs,
            tensor_parallel_size=1,
        )

    @property
    def link(self) -> None:
        return None

    @property
    def cost(self) -> CostModel:
        """Of a GPU, so that plans are like those of a real one; none of it is spent."""
        return CostModel(
            num_layers=self._config.num_layers,
            fixed_ms=10.0,
            row_ms=0.003,
            pair_ms=1.5e-7,
            selected_pair_ms=2.5e-7,
            reuse_ms=5e-5,
        )

    async def generate(self, request: RagRequest, ticket: Ticket) -> AsyncIterator[GenerationDelta]:
        """The first token is the CLOCK_MONOTONIC time of the call, in ns; the others are empty."""
        stamp = str(time.monotonic_ns())
        self._num_running += 1
        try:
            max_tokens = request.sampling.max_tokens
            for index in range(max_tokens):
                is_last = index == max_tokens - 1
                yield GenerationDelta(
                    text="" if index else stamp,
                    num_generated=index + 1,
                    finish_reason="length" if is_last else None,
                    result=_result(request, ticket) if is_last else None,
                )
            for chunk in request.chunks:
                self.keep(content_id(chunk, cache_salt=request.cache_salt))
        finally:
            self._num_running -= 1

    async def ingest(self, token_ids: tuple[int, ...], *, cache_salt: str = "") -> StoredChunk:
        raise ValueError("this engine stores nothing")

    def find_chunk(self, chunk_id: str) -> StoredChunk | None:
        return None

    @property
    def cache(self) -> CacheOperations:
        raise NoRedisTierError("this engine has no tiers")

    def tier_report(self) -> TierReport:
        return TierReport()

    def load(self) -> EngineLoad:
        return EngineLoad(num_running=self._num_running, num_waiting=0, num_ingest_backlog=0)

    def residency_update(self) -> ResidencyUpdate:
        update = ResidencyUpdate(added=tuple(self._added))
        self._added.clear()
        return update

    async def check_health(self) -> None:
        return

    async def close(self) -> None:
        return

    def keep(self, chunk_id: str) -> None:
        if chunk_id not in self._resident:
            self._resident.add(chunk_id)
            self._added.append(chunk_id)


def _result(request: RagRequest, ticket: Ticket) -> PrefillResult:
    plan = ticket.plan
    return PrefillResult(
        policy=plan.policy,
        signal=plan.signal,
        warmup_depth=plan.warmup_depth,
        probe_len=plan.probe_len,
        coverage=plan.coverage,
        num_prompt_tokens=request.num_prompt_tokens,
        num_context_tokens=sum(map(len, request.chunks)),
        num_miss_tokens=0,
        num_recomputed_tokens=0,
        cached_tokens={"host": 0},
        batch_size=ticket.batch_size,
        timings=PrefillTimings(),
    )
