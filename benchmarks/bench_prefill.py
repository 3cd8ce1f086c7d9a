"""What does a prefill with chunk reuse cost, against full prefill and against its own arithmetic?

Ceiling: the share of token-layers that a configuration computes, times full prefill's time. One
engine, random prompts of stored 256-token chunks, time to the first token; configurations take
turns, so that a shared machine hurts all alike.

    python -m benchmarks.bench_prefill --tokens 512 2048
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.report import print_json, print_table
from deploy.models import resolve_model
from kv_tier import HostTier
from planner import (
    PrefillShape,
    RagRequest,
    RecomputeConfig,
    RequestPlan,
    SamplingOptions,
    Signal,
    Ticket,
    prefill_work,
)
from planner.policies import FULL_PREFILL, STATIC_POLICIES
from replicas.config import EngineConfig
from replicas.vllm_engine import VllmEngine

CHUNK_TOKENS = 256
PREFIX_TOKENS, SUFFIX_TOKENS = 16, 32
POINTS = {
    "w1 p1 r.05": RecomputeConfig(coverage=0.05),
    "w1 p2 r.15": RecomputeConfig(probe_len=2, coverage=0.15),
    "w1 p1 r.30": RecomputeConfig(coverage=0.30),
    "qci w1 p2 r.15": RecomputeConfig(signal=Signal.QCI, probe_len=2, coverage=0.15),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    asyncio.run(_measure(args.model, args.tokens, args.rounds, args.seed))


async def _measure(model: str, lengths: Sequence[int], rounds: int, seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="cachesmith-bench-", dir="/dev/shm") as folder:
        tier = Path(folder) / "tier"
        engine = VllmEngine(
            EngineConfig(
                model_dir=str(resolve_model(model)),
                host_tier_dir=str(tier),
                host_tier_bytes=1 << 29,
            )
        )
        info = await engine.start()
        results = []
        for length in lengths:
            results += await _one_length(
                engine, length, rounds, random.Random(seed), num_layers=info.num_layers
            )
        await engine.close()
        HostTier.destroy(tier, force=True)
    print_json("prefill", seed=seed, results=results)


async def _one_length(
    engine: VllmEngine, length: int, rounds: int, rng: random.Random, *, num_layers: int
) -> list[dict[str, object]]:
    request = _request(engine, length, rng)
    for chunk in request.chunks:
        await engine.ingest(chunk)
    chunk_lengths = [len(c) for c in request.chunks]
    configs = {
        name: config.for_chunks(chunk_lengths)
        for name, config in {**STATIC_POLICIES, **POINTS}.items()
    }
    times: dict[str, list[float]] = {name: [] for name in configs}
    for round_no in range(rounds + 1):  # the first one warms up
        for name, config in configs.items():
            spent_ms = await _ttft_ms(engine, request, _ticket(name, config, num_layers))
            if round_no > 0:
                times[name].append(spent_ms)
    full_ms = median(times[FULL_PREFILL])
    results, rows = [], []
    for name, config in configs.items():
        ttft_ms = median(times[name])
        share = _share(config, sum(chunk_lengths), num_layers)
        ideal_ms = share * full_ms
        rows.append((name, ttft_ms, full_ms / ttft_ms, share, ideal_ms, ttft_ms / ideal_ms))
        results.append(
            {
                "num_tokens": request.num_prompt_tokens,
                "config": name,
                "ttft_ms": ttft_ms,
                "speedup": full_ms / ttft_ms,
                "token_layer_share": share,
                "times_ideal": ttft_ms / ideal_ms,
            }
        )
    print(f"\n{request.num_prompt_tokens} tokens, {len(request.chunks)} stored chunks")
    header = ["config", "TTFT ms", "speed-up", "share", "ideal ms", "times ideal"]
    print_table(header, rows)
    return results


def _request(engine: VllmEngine, length: int, rng: random.Random) -> RagRequest:
    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(engine.vocab_size) for _ in range(count))

    return RagRequest(
        request_id="bench",
        prefix_ids=tokens(PREFIX_TOKENS),
        chunks=tuple(tokens(CHUNK_TOKENS) for _ in range(max(1, length // CHUNK_TOKENS))),
        suffix_ids=tokens(SUFFIX_TOKENS),
        ttft_slo_ms=1e6,
        sampling=SamplingOptions(max_tokens=1, temperature=0.0),
    )


def _ticket(name: str, config: RecomputeConfig, num_layers: int) -> Ticket:
    warmup_depth, probe_len = config.depths(num_layers)
    plan = RequestPlan(
        policy=name,
        signal=config.signal,
        warmup_depth=warmup_depth,
        probe_len=probe_len,
        coverage=config.coverage,
        expected_ms=0.0,
        budget_ms=0.0,
    )
    return Ticket(replica_id="", batch_id=0, batch_size=1, plan=plan, queue_ms=0.0)


async def _ttft_ms(engine: VllmEngine, request: RagRequest, ticket: Ticket) -> float:
    started = time.perf_counter()
    first: float | None = None
    async for _ in engine.generate(request, ticket):
        first = first or time.perf_counter()
    assert first is not None
    return (first - started) * 1e3


def _share(config: RecomputeConfig, num_context: int, num_layers: int) -> float:
    """Token-layers computed over those of full prefill."""
    warmup_depth, probe_len = config.depths(num_layers)
    num_tokens = PREFIX_TOKENS + num_context + SUFFIX_TOKENS
    work = prefill_work(
        [PrefillShape(num_cached=PREFIX_TOKENS + num_context, num_always=SUFFIX_TOKENS)],
        [config.coverage],
        signal=config.signal,
        warmup_depth=warmup_depth,
        probe_len=probe_len,
        num_layers=num_layers,
    )
    return work.rows / (num_tokens * num_layers)


if __name__ == "__main__":
    main()
