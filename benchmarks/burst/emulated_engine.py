"""An engine that computes nothing: it sleeps as long as the cost model says of its plans."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from planner import (
    CostModel,
    EngineInfo,
    PrefillShape,
    PrefillTimings,
    RagRequest,
    Ticket,
    prefill_work,
)
from replicas.emulation import EmulatedEngine, planned_result
from replicas.interface import GenerationDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedConfig:
    """chunk_ids: of the chunks that are stored from the start, all that ever come"""

    cost: CostModel
    load_s: float
    chunk_ids: tuple[str, ...]
    max_model_len: int = 4096
    max_num_seqs: int = 16


def build(config: EmulatedConfig) -> "SleepingEngine":
    """Called in the replica's process."""
    return SleepingEngine(config)


class SleepingEngine(EmulatedEngine):
    """A `RagEngine` whose members of a batch have their first tokens at the same time."""

    def __init__(self, config: EmulatedConfig) -> None:
        super().__init__()
        self._config = config
        self.added = list(config.chunk_ids)

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

    async def generate(self, request: RagRequest, ticket: Ticket) -> AsyncIterator[GenerationDelta]:
        self.num_running += 1
        try:
            took_ms = ticket.plan.expected_ms or self._alone_ms(request, ticket)
            await asyncio.sleep(took_ms / 1e3)
            yield GenerationDelta(
                text="",
                num_generated=1,
                finish_reason="length",
                result=planned_result(
                    request,
                    ticket,
                    timings=PrefillTimings(compute_ms=took_ms, first_token_ms=took_ms),
                ),
            )
        finally:
            self.num_running -= 1

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
