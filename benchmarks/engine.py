"""For benchmarks on a real engine: its life, random prompts, tickets without a scheduler."""

import os
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.report import say
from deploy.models import resolve_model
from kv_tier import HostTier
from planner import (
    EngineInfo,
    PrefillResult,
    PrefillTimings,
    RagRequest,
    RecomputeConfig,
    RequestPlan,
    SamplingOptions,
    Ticket,
)
from replicas.config import EngineConfig
from replicas.vllm_engine import VllmEngine

DEFAULT_MODEL = "smollm2-135m-instruct"
CHUNK_TOKENS = 256
PREFIX_TOKENS, SUFFIX_TOKENS = 16, 32
WHOLES = ("hold_ms", "compute_ms", "first_token_ms", "block_wait_ms")  # and waits before it
PHASES = tuple(f.name.removesuffix("_ms") for f in fields(PrefillTimings) if f.name not in WHOLES)
WAITS = ("stall", "pause")  # phases in which the walk does nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """One request up to its first token."""

    ttft_ms: float
    result: PrefillResult

    @property
    def phases_ms(self) -> dict[str, float] | None:
        """The phases, which add up to compute, and `outside`, of which the walk does not know: the
        way in, the last token's step, the way back. None for vLLM's own prefill."""
        if self.result.full_prefill:
            return None
        timings = self.result.timings
        phases = {phase: float(getattr(timings, f"{phase}_ms")) for phase in PHASES}
        return {**phases, "outside": self.ttft_ms - timings.compute_ms}

    @property
    def work_ms(self) -> float:
        """Without waits; the whole time for vLLM's own prefill."""
        phases = self.phases_ms
        if phases is None:
            return self.ttft_ms
        return sum(phases[phase] for phase in PHASES if phase not in WAITS)


@asynccontextmanager
async def running_engine(
    model: str, *, reuse: bool = True, **config: Any
) -> AsyncIterator[tuple[VllmEngine, EngineInfo]]:
    """A started engine with a chunk store of its own, closed and removed at the end.

    reuse: False for vLLM without our connector. config: further fields of `EngineConfig`.
    """
    _quiet_logs()
    config["vllm"] = {"use_tqdm_on_load": False, **config.get("vllm", {})}
    model_dir = str(resolve_model(model))
    with tempfile.TemporaryDirectory(prefix="cachesmith-bench-", dir="/dev/shm") as folder:
        tier = Path(folder) / "tier"
        engine = VllmEngine(
            EngineConfig(
                model_dir=model_dir,
                host_tier_dir=str(tier) if reuse else "",
                host_tier_bytes=1 << 29,
                **config,
            )
        )
        say("the engine starts")
        try:
            yield engine, await engine.start()
        finally:
            await engine.close()
            if reuse:
                HostTier.destroy(tier, force=True)


def _quiet_logs() -> None:
    """Errors alone, unless the user wants more; call it before vLLM is imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def random_request(
    engine: VllmEngine, rng: random.Random, *, num_chunks: int, max_tokens: int = 1
) -> RagRequest:
    """A prefix, chunks of 256 tokens and a suffix, of uniformly random tokens."""

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(engine.vocab_size) for _ in range(count))

    return RagRequest(
        request_id="bench",
        prefix_ids=tokens(PREFIX_TOKENS),
        chunks=tuple(tokens(CHUNK_TOKENS) for _ in range(num_chunks)),
        suffix_ids=tokens(SUFFIX_TOKENS),
        ttft_slo_ms=1e6,
        sampling=SamplingOptions(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )


def ticket(policy: str, config: RecomputeConfig, num_layers: int) -> Ticket:
    """A scheduler's answer with this configuration, for a batch of one."""
    plan = RequestPlan.of_config(policy, config, num_layers=num_layers)
    return Ticket(replica_id="", batch_id=0, batch_size=1, plan=plan, queue_ms=0.0)


async def prefill(engine: VllmEngine, request: RagRequest, its_ticket: Ticket) -> Prefilled:
    """Run one request of one new token, and time its first token."""
    started = time.perf_counter()
    first: float | None = None
    result: PrefillResult | None = None
    async for delta in engine.generate(request, its_ticket):
        first = first or time.perf_counter()
        result = delta.result or result
    assert first is not None and result is not None
    return Prefilled(ttft_ms=(first - started) * 1e3, result=result)
