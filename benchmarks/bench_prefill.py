"""What does a prefill with chunk reuse cost, against full prefill and against its own arithmetic?

One engine, random prompts of stored 256-token chunks, time to the first token of one request alone.
`full_prefill` is vLLM's own, in steps of its default of at most 2,048 tokens on a CPU. The
configurations take turns, so that a shared machine hurts all alike.

Ceiling: `ideal` is full prefill's time times the share of its matrix products that a configuration
computes, counted as the walk does them (benchmarks/work.py). The ideal leaves out:
- attention: selected tokens are spread over the prompt and attend half of it on average, as those
  of full prefill do, but the suffix attends all of it, and the kernel for selected tokens is slower
- reading, checking and rotating the stored keys and values, and writing them into vLLM's cache, for
  every token and layer, whatever is recomputed
- the ranking itself, and gathering the selected tokens
- the engine's own step for the prompt's last token, which takes as long as a decode step: it is
  counted as one token of many, but it reads all weights and the whole cache for itself
- requests' way into the engine and the engine's steps between slices of layers
So `full_reuse`, which computes next to nothing, shows these costs bare.

    cachesmith bench prefill --tokens 512 2048 --policies cacheblend full_reuse --phases
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine import (
    CHUNK_TOKENS,
    DEFAULT_MODEL,
    PHASES,
    Prefilled,
    prefill,
    random_request,
    running_engine,
    ticket,
)
from benchmarks.report import argument_parser, print_json, print_table, say
from benchmarks.timing import spread
from benchmarks.work import PromptShape, projection_share, token_layers
from deploy.models import resolve_model
from planner import RagRequest, RecomputeConfig, Signal
from planner.policies import FULL_PREFILL, STATIC_POLICIES
from replicas.vllm_engine import VllmEngine

POINTS = {
    "w1 p1 r.05": RecomputeConfig(coverage=0.05),
    "w1 p2 r.15": RecomputeConfig(probe_len=2, coverage=0.15),
    "w1 p1 r.30": RecomputeConfig(coverage=0.30),
    "qci w1 p2 r.15": RecomputeConfig(signal=Signal.QCI, probe_len=2, coverage=0.15),
}
CONFIGS = {**STATIC_POLICIES, **POINTS}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("prefill", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as in `cachesmith serve`")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[512, 2048, 4096], help="chunk tokens of a prompt"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured ones, after one more")
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=list(CONFIGS),
        default=list(CONFIGS),
        metavar="NAME",
        help=f"some of: {', '.join(map(repr, CONFIGS))}; {FULL_PREFILL} is always measured",
    )
    parser.add_argument("--phases", action="store_true", help="a second table: where the time went")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    configs = {n: c for n, c in CONFIGS.items() if n in args.policies or n == FULL_PREFILL}
    results = asyncio.run(
        _measure(args.model, configs, args.tokens, args.rounds, args.seed, phases=args.phases)
    )
    print_json("prefill", seed=args.seed, results=results)


async def _measure(
    model: str,
    configs: Mapping[str, RecomputeConfig],
    lengths: Sequence[int],
    rounds: int,
    seed: int,
    *,
    phases: bool,
) -> list[dict[str, Any]]:
    projected = projection_share(Path(resolve_model(model)))
    results = []
    async with running_engine(model) as (engine, info):
        for length in lengths:
            request = random_request(
                engine, random.Random(seed), num_chunks=max(1, length // CHUNK_TOKENS)
            )
            runs = await _one_length(engine, request, configs, rounds, info.num_layers)
            found = _results(request, configs, runs, info.num_layers, projected)
            print(f"\n{request.num_prompt_tokens} tokens, {len(request.chunks)} stored chunks")
            _print_times(found)
            if phases:
                _print_phases(found)
            results += found
    return results


async def _one_length(
    engine: VllmEngine,
    request: RagRequest,
    configs: Mapping[str, RecomputeConfig],
    rounds: int,
    num_layers: int,
) -> dict[str, list[Prefilled]]:
    """Every configuration once a round. The round before the first one warms up, and has the
    prompt's prefix stored."""
    for chunk in request.chunks:
        await engine.ingest(chunk)
    lengths = [len(chunk) for chunk in request.chunks]
    runs: dict[str, list[Prefilled]] = {name: [] for name in configs}
    for round_no in range(rounds + 1):
        started = time.perf_counter()
        for name, config in configs.items():
            its_ticket = ticket(name, config.for_chunks(lengths), num_layers)
            run = await prefill(engine, request, its_ticket)
            if round_no > 0:
                runs[name].append(run)
        spent_s = time.perf_counter() - started
        say(f"{request.num_prompt_tokens} tokens, round {round_no} of {rounds}: {spent_s:.1f} s")
    return runs


def _results(
    request: RagRequest,
    configs: Mapping[str, RecomputeConfig],
    runs: Mapping[str, list[Prefilled]],
    num_layers: int,
    projected: float,
) -> list[dict[str, Any]]:
    lengths = [len(chunk) for chunk in request.chunks]
    shape = PromptShape(
        num_prefix=len(request.prefix_ids),
        num_context=sum(lengths),
        num_suffix=len(request.suffix_ids),
    )
    full_ms = median(run.ttft_ms for run in runs[FULL_PREFILL])
    results = []
    for name, config in configs.items():
        ttft = spread("ttft_ms", [run.ttft_ms for run in runs[name]])
        share = share_of_full(
            name, config.for_chunks(lengths), shape, num_layers=num_layers, projected=projected
        )
        results.append(
            {
                "num_tokens": shape.num_tokens,
                "config": name,
                **ttft,
                "speedup": full_ms / ttft["ttft_ms"],
                "token_layer_share": share,
                "ideal_ms": share * full_ms,
                "times_ideal": ttft["ttft_ms"] / (share * full_ms),
                "phases_ms": _phases(runs[name]),
            }
        )
    return results


def share_of_full(
    name: str, config: RecomputeConfig, shape: PromptShape, *, num_layers: int, projected: float
) -> float:
    """Token-layers computed over those of vLLM's own full prefill."""
    if name == FULL_PREFILL:
        return 1.0
    counted = token_layers(config, shape, num_layers=num_layers, projection_share=projected)
    return counted / (shape.num_tokens * num_layers)


def _phases(runs: Sequence[Prefilled]) -> dict[str, float] | None:
    """Median of each phase; None for vLLM's own prefill, which has none."""
    found = [run.phases_ms for run in runs if run.phases_ms is not None]
    if not found:
        return None
    return {phase: median(phases[phase] for phases in found) for phase in found[0]}


def _print_times(results: Sequence[dict[str, Any]]) -> None:
    header = ["config", "TTFT ms", "range", "speed-up", "share", "ideal ms", "times ideal"]
    rows = [
        (
            r["config"],
            r["ttft_ms"],
            f"{r['ttft_ms_min']:.0f}–{r['ttft_ms_max']:.0f}",
            r["speedup"],
            r["token_layer_share"],
            r["ideal_ms"],
            r["times_ideal"],
        )
        for r in results
    ]
    print_table(header, rows)


def _print_phases(results: Sequence[dict[str, Any]]) -> None:
    header = [*PHASES, "outside"]
    rows = [(r["config"], *map(r["phases_ms"].get, header)) for r in results if r["phases_ms"]]
    print("\nwhere the milliseconds went")
    print_table(["config", *header], rows)


if __name__ == "__main__":
    main()
