"""What engines without a model have in common: benchmarks and the testbed emulate one each."""

from dataclasses import replace
from typing import Any

from planner import EngineLoad, PrefillResult, PrefillTimings, RagRequest, Ticket
from replicas.cache_admin import CacheAdmin
from replicas.cache_types import TierReport
from replicas.interface import ResidencyUpdate, StoredChunk


class EmulatedEngine:
    """A `RagEngine` but for `start`, `cost` and `generate`. It has no store."""

    def __init__(self) -> None:
        self.num_running = 0
        self.added: list[str] = []  # ids of chunks that it says it holds from now on
        self._cache = CacheAdmin(None)

    @property
    def link(self) -> None:
        return None

    async def ingest(self, token_ids: tuple[int, ...], *, cache_salt: str = "") -> StoredChunk:
        raise ValueError("the engine is emulated and stores nothing")

    def find_chunk(self, chunk_id: str) -> StoredChunk | None:
        return None

    @property
    def cache(self) -> CacheAdmin:
        return self._cache

    def tier_report(self) -> TierReport:
        return self._cache.report()

    def load(self) -> EngineLoad:
        return EngineLoad(num_running=self.num_running, num_waiting=0, num_ingest_backlog=0)

    def residency_update(self) -> ResidencyUpdate:
        update = ResidencyUpdate(added=tuple(self.added))
        self.added.clear()
        return update

    async def check_health(self) -> None:
        return

    async def close(self) -> None:
        return


def planned_result(request: RagRequest, ticket: Ticket, **changes: Any) -> PrefillResult:
    """As if the plan had been followed with every chunk stored, in no time, but for `changes`."""
    plan, num_context = ticket.plan, sum(map(len, request.chunks))
    result = PrefillResult(
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
        timings=PrefillTimings(),
    )
    return replace(result, **changes)
