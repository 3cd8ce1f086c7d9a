"""A RagEngine that computes nothing: its first delta says when the call reached it."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kv_tier.keys import content_id
from planner import CostModel, EngineInfo, RagRequest, Ticket
from replicas.emulation import EmulatedEngine, planned_result
from replicas.interface import GenerationDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class InstantEngineConfig:
    num_layers: int
    max_num_seqs: int = 64
    max_model_len: int = 1 << 16
    kv_capacity_tokens: int = 1 << 22


def build(config: InstantEngineConfig) -> "InstantEngine":
    return InstantEngine(config)


class InstantEngine(EmulatedEngine):
    """Says that it keeps every chunk that it has seen, so that requests are planned with reuse."""

    def __init__(self, config: InstantEngineConfig) -> None:
        super().__init__()
        self._config = config
        self._resident: set[str] = set()

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
        self.num_running += 1
        try:
            max_tokens = request.sampling.max_tokens
            for index in range(max_tokens):
                is_last = index == max_tokens - 1
                yield GenerationDelta(
                    text="" if index else stamp,
                    num_generated=index + 1,
                    finish_reason="length" if is_last else None,
                    result=planned_result(request, ticket) if is_last else None,
                )
            for chunk in request.chunks:
                self.keep(content_id(chunk, cache_salt=request.cache_salt))
        finally:
            self.num_running -= 1

    def keep(self, chunk_id: str) -> None:
        if chunk_id not in self._resident:
            self._resident.add(chunk_id)
            self.added.append(chunk_id)
