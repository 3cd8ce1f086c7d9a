"""A real vLLM engine on a tiny float32 model, for the tests marked `vllm`."""

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.tiny_models import make_tiny_qwen3
from kv_tier.host_tier import HostTier
from planner.cost_model import CostModel
from planner.types import (
    PrefillResult,
    RagRequest,
    SamplingOptions,
    Ticket,
)
from replicas import vllm_args, vllm_engine
from replicas.config import EngineConfig
from replicas.vllm_engine import VllmEngine
from tests.fakes.records import request_plan

NUM_LAYERS = 4
ANCHOR = "<|im_start|>"
GREEDY = SamplingOptions(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    result: PrefillResult


def tiny_config(folder: Path, arena: Path, **overrides) -> EngineConfig:
    values = {
        "model_dir": str(make_tiny_qwen3(folder / "tiny-qwen3", num_layers=NUM_LAYERS)),
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 25,
        "slice_layers": 1,  # one layer a step beside a decode; the whole model when idle
        "anchor_text": ANCHOR,
        "host_tier_dir": str(arena),
        "host_tier_bytes": 1 << 26,
    }
    return EngineConfig(**{**values, **overrides})


@asynccontextmanager
async def running_engine(
    folder: Path, *, inspected: bool = False, **overrides
) -> AsyncIterator[VllmEngine]:
    """An engine with an arena of its own, both gone afterwards. `held` needs an inspected one. The
    cost is made up: measuring it takes as long as the rest of the start."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="cachesmith-test-") as arena,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(vllm_engine, "measure_cost", no_measurement)
        if inspected:
            patch.setattr(vllm_args, "CONNECTOR_MODULE", "tests.replicas.inspected_connector")
        engine = VllmEngine(tiny_config(folder, Path(arena) / "tier", **overrides))
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()
            HostTier.destroy(Path(arena) / "tier", force=True)


def tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, 500) for _ in range(count))


def make_request(
    rng: random.Random, lengths: list[int], *, prefix=9, suffix=12, sampling=GREEDY, salt=""
) -> RagRequest:
    return RagRequest(
        request_id=f"r{rng.random()}",
        prefix_ids=tokens(rng, prefix) if isinstance(prefix, int) else prefix,
        chunks=tuple(tokens(rng, n) for n in lengths),
        suffix_ids=tokens(rng, suffix),
        ttft_slo_ms=1000.0,
        cache_salt=salt,
        sampling=sampling,
    )


def make_ticket(batch_id: int = 0, batch_size: int = 1, **plan) -> Ticket:
    exact = {"policy": "custom", "coverage": 1.0, "expected_ms": 0.0, "budget_ms": 0.0}
    return Ticket(
        replica_id="test",
        batch_id=batch_id,
        batch_size=batch_size,
        plan=request_plan(**{**exact, **plan}),
        queue_ms=0.0,
    )


FULL_PREFILL = make_ticket(policy="full_prefill")


async def ask(engine: VllmEngine, request: RagRequest, ticket: Ticket = FULL_PREFILL) -> Answer:
    ids: list[int] = []
    logprobs: list[float] = []
    result = None
    async for delta in engine.generate(request, ticket):
        ids.extend(delta.token_ids)
        logprobs.extend(delta.logprobs or ())
        result = delta.result or result
    assert result is not None
    return Answer(token_ids=tuple(ids), logprobs=tuple(logprobs), result=result)


async def ask_batch(
    engine: VllmEngine, requests: list[RagRequest], batch_id: int, plans: list[dict]
) -> list[Answer]:
    tickets = [make_ticket(batch_id, len(requests), **plan) for plan in plans]
    return await asyncio.gather(
        *(ask(engine, r, t) for r, t in zip(requests, tickets, strict=True))
    )


async def store(engine: VllmEngine, request: RagRequest) -> None:
    """Every chunk of a request in the store."""
    for chunk in request.chunks:
        await engine.ingest(chunk, cache_salt=request.cache_salt)


async def no_measurement(engine: VllmEngine, *, num_layers: int) -> CostModel:
    """Stands in for `measure_cost`."""
    return CostModel(
        num_layers=num_layers,
        fixed_ms=10.0,
        row_ms=0.01,
        pair_ms=0.0,
        selected_pair_ms=0.0,
        reuse_ms=0.0,
    )


async def held(engine: VllmEngine) -> dict[str, int]:
    """What the engine's processes and the host tier hold now; the engine must be `inspected`."""
    core = engine._engine
    ranks = await core.collective_rpc("held_by_worker")
    stats = engine._tier.stats()
    return {
        **await core.engine_core.call_utility_async("held_by_scheduler"),
        **{name: sum(rank[name] for rank in ranks) for name in ranks[0]},
        "answering": len(core.output_processor.request_states),
        "leases": stats.num_leases,
        "reservations": stats.num_reservations,
        "retired": stats.num_retired,
        "ingests": engine.load().num_ingest_backlog,
        "prefilling": engine.load().num_waiting,
        "decoding": engine.load().num_running,
    }


async def assert_idle(engine: VllmEngine, seconds: float = 30) -> None:
    """Soon nothing is held: what was aborted or missed ends after its answer."""
    now: dict[str, int] = {}
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while any((now := await held(engine)).values()):
                await asyncio.sleep(0.01)
    assert not any(now.values()), now
    assert engine._tier.check_integrity() == []


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something that happens on another process's time."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def assert_same(answer: Answer, plain: Answer) -> None:
    """The same greedy tokens, and the same probabilities to float32's noise."""
    assert answer.token_ids == plain.token_ids
    worst = max(abs(a - b) for a, b in zip(answer.logprobs, plain.logprobs, strict=True))
    assert worst < 1e-4
