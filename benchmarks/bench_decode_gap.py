"""How long do running answers pause while a long prompt is prefilled?

Four requests decode; then a prompt of 2,048 chunk tokens arrives. What counts are the times between
two tokens of the decodes, from the prompt's arrival to its first token: the worst one, the 99th
percentile and the median. The goal: prefill in slices of layers pauses them at most a third as long
as plain prefill does.

- plain: vLLM without our connector. With `max_num_batched_tokens` 4096 it computes the whole prompt
  in one step, beside one token of each decode. (vLLM's default on a CPU is 2,048 tokens a step, so
  this prompt would take two, the second one short. --chunked N adds vLLM's own answer to the same
  question, N tokens a step.)
- unsliced: our walk, all layers in one engine step
- slice N: our walk, N layers an engine step

Our walk runs twice: over all layers for all tokens, which is plain's work, so that these compare
like for like; and with stored chunks at 15% coverage (w 1, p 1), as it serves.

Floor: a step without prefill, and the step's share of the prompt's own work, measured alone. Slices
can not go below it; layers that all tokens walk make the first ones longer than the mean, and
selected tokens' attention is in it.

Slices are a setting of the engine, so each way has an engine of its own, one after the other: what
the machine does meanwhile hurts them differently. `quiet` is the median gap of the same engine just
before the prompt arrives: if it is not about the same in all rows, run again.

    cachesmith bench decode-gap --rounds 5 --slices 4 1
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.engine import (
    CHUNK_TOKENS,
    DEFAULT_MODEL,
    prefill,
    random_request,
    running_engine,
    ticket,
)
from benchmarks.report import argument_parser, print_json, print_table, say
from benchmarks.timing import percentile, spread
from planner import RagRequest, RecomputeConfig, Ticket
from planner.policies import CUSTOM, FULL_PREFILL, STATIC_POLICIES
from replicas.vllm_engine import VllmEngine

ONE_STEP_TOKENS = 4096
QUIET_TOKENS = 24  # of each decode before the prompt arrives
SETTLE_TOKENS = 8  # of them, the first ones do not count
DECODE_TOKENS = 400  # at most; the decodes must outlast the prefill
ALL_LAYERS = 1 << 16
ALL_TOKENS = RecomputeConfig(warmup_depth=None, probe_len=0, coverage=1.0)
REUSE = STATIC_POLICIES["cacheblend"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One engine's configuration, and what its prompts do."""

    name: str
    prompts: dict[str, tuple[str, RecomputeConfig]]  # label → policy, configuration
    reuse: bool = True
    slice_layers: int = ALL_LAYERS
    step_tokens: int = ONE_STEP_TOKENS


@dataclass(slots=True)
class Round:
    """Milliseconds of one prompt beside the decodes."""

    quiet_gaps: list[float]
    gaps: list[float]
    ttft_ms: float
    work_ms: float  # of the same prompt alone


@dataclass(slots=True)
class Decode:
    """One running answer: when its tokens came, in seconds."""

    times: list[float] = field(default_factory=list)
    _wanted: int = 0
    _reached: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, engine: VllmEngine, request: RagRequest, its_ticket: Ticket) -> None:
        async for _ in engine.generate(request, its_ticket):
            self.times.append(time.perf_counter())
            if len(self.times) >= self._wanted:
                self._reached.set()
        raise RuntimeError(f"a decode ended before the prefill, after {DECODE_TOKENS} tokens")

    async def until(self, num_tokens: int) -> None:
        self._wanted = num_tokens
        self._reached.clear()
        if len(self.times) < num_tokens:
            await self._reached.wait()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("decode-gap", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as in `cachesmith serve`")
    parser.add_argument("--tokens", type=int, default=2048, help="chunk tokens of the prompt")
    parser.add_argument("--decodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--slices", type=int, nargs="*", default=[4, 1], help="layers a step (default: 4 1)"
    )
    parser.add_argument(
        "--chunked",
        type=int,
        nargs="*",
        default=[],
        metavar="TOKENS",
        help="also plain vLLM with at most so many tokens a step",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.tokens + 1024 > ONE_STEP_TOKENS:
        parser.error(f"--tokens must leave room in a step of {ONE_STEP_TOKENS} tokens")
    results: list[dict[str, Any]] = []
    for way in ways(args.slices, args.chunked):
        results += asyncio.run(_measure(way, args))
    plain_ms = results[0]["worst_gap_ms"]
    for result in results:
        result["to_plain"] = result["worst_gap_ms"] / plain_ms
    _print(results)
    print_json("decode_gap", seed=args.seed, results=results)


def ways(slices: Sequence[int], chunked: Sequence[int]) -> list[Way]:
    """Plain first: the others are compared with it."""
    plain = {"all tokens": (FULL_PREFILL, ALL_TOKENS)}
    ours = {"all tokens": (CUSTOM, ALL_TOKENS), "15% coverage": ("cacheblend", REUSE)}
    return [
        Way(name="plain", prompts=plain, reuse=False),
        *(
            Way(name=f"plain {count} a step", prompts=plain, reuse=False, step_tokens=count)
            for count in chunked
        ),
        Way(name="unsliced", prompts=ours),
        *(Way(name=f"slice {count}", prompts=ours, slice_layers=count) for count in slices),
    ]


async def _measure(way: Way, args: Any) -> list[dict[str, Any]]:
    rng = random.Random(args.seed)
    vllm = {"max_num_batched_tokens": way.step_tokens}
    async with running_engine(
        args.model, reuse=way.reuse, slice_layers=way.slice_layers, vllm=vllm
    ) as (engine, info):
        prompt = random_request(engine, rng, num_chunks=args.tokens // CHUNK_TOKENS)
        decodes = [
            random_request(engine, rng, num_chunks=0, max_tokens=DECODE_TOKENS)
            for _ in range(args.decodes)
        ]
        if way.reuse:
            for chunk in prompt.chunks:
                await engine.ingest(chunk)
        rounds: dict[str, list[Round]] = {label: [] for label in way.prompts}
        for round_no in range(args.rounds + 1):  # the first one warms up
            started = time.perf_counter()
            for label, (policy, config) in way.prompts.items():
                its_ticket = ticket(policy, config, info.num_layers)
                result = await _round(engine, prompt, its_ticket, decodes)
                if round_no > 0:
                    rounds[label].append(result)
            spent_s = time.perf_counter() - started
            say(f"{way.name}, round {round_no} of {args.rounds}: {spent_s:.1f} s")
    share = step_share(way, num_layers=info.num_layers, num_tokens=prompt.num_prompt_tokens)
    return [_result(way, label, found, share) for label, found in rounds.items()]


async def _round(
    engine: VllmEngine, prompt: RagRequest, its_ticket: Ticket, requests: Sequence[RagRequest]
) -> Round:
    alone = await prefill(engine, prompt, its_ticket)
    decodes = [Decode() for _ in requests]
    async with asyncio.TaskGroup() as group:
        plain = ticket(FULL_PREFILL, ALL_TOKENS, 1)
        tasks = [
            group.create_task(decode.run(engine, request, plain))
            for decode, request in zip(decodes, requests, strict=True)
        ]
        for decode in decodes:
            await decode.until(QUIET_TOKENS)
        arrived = time.perf_counter()
        beside = await prefill(engine, prompt, its_ticket)
        first_token = arrived + beside.ttft_ms / 1e3
        for decode in decodes:  # so that the last gap has its end
            await decode.until(len(decode.times) + 2)
        for task in tasks:
            task.cancel()
    times = [decode.times[SETTLE_TOKENS:] for decode in decodes]
    return Round(
        quiet_gaps=gaps_ms(times, start=0.0, end=arrived, whole=True),
        gaps=gaps_ms(times, start=arrived, end=first_token),
        ttft_ms=beside.ttft_ms,
        work_ms=alone.work_ms,
    )


def gaps_ms(
    times: Sequence[Sequence[float]], *, start: float, end: float, whole: bool = False
) -> list[float]:
    """Milliseconds between neighbouring times (in seconds) that overlap [start, end).

    whole: only those that lie in it from their beginning to their end.
    """
    gaps = []
    for mine in times:
        for before, after in pairwise(mine):
            is_in = start <= before and after < end if whole else before < end and after > start
            if is_in:
                gaps.append((after - before) * 1e3)
    return gaps


def _result(way: Way, label: str, rounds: Sequence[Round], share: float) -> dict[str, Any]:
    gaps = [gap for r in rounds for gap in r.gaps]
    quiet_ms = median(gap for r in rounds for gap in r.quiet_gaps)
    work_ms = median(r.work_ms for r in rounds)
    floor_ms = quiet_ms + work_ms * share
    worst = spread("worst_gap_ms", [max(r.gaps) for r in rounds])
    return {
        "way": way.name,
        "prompt": label,
        **worst,
        "p99_gap_ms": percentile(gaps, 0.99),
        "median_gap_ms": median(gaps),
        "num_gaps": len(gaps),
        "quiet_gap_ms": quiet_ms,
        "floor_ms": floor_ms,
        "times_floor": worst["worst_gap_ms"] / floor_ms,
        "work_ms": work_ms,
        **spread("ttft_ms", [r.ttft_ms for r in rounds]),
    }


def step_share(way: Way, *, num_layers: int, num_tokens: int) -> float:
    """Share of the prompt's work that the longest step has, if all parts are equal."""
    if way.reuse:
        return min(1.0, way.slice_layers / num_layers)
    return min(1.0, way.step_tokens / num_tokens)


def _print(results: Sequence[dict[str, Any]]) -> None:
    header = ["way", "prompt", "quiet ms", "worst ms", "range", "p99 ms", "median ms", "to plain"]
    rows = [
        (
            r["way"],
            r["prompt"],
            r["quiet_gap_ms"],
            r["worst_gap_ms"],
            f"{r['worst_gap_ms_min']:.0f}–{r['worst_gap_ms_max']:.0f}",
            r["p99_gap_ms"],
            r["median_gap_ms"],
            r["to_plain"],
            r["floor_ms"],
            r["times_floor"],
            r["ttft_ms"],
        )
        for r in results
    ]
    print_table([*header, "floor ms", "times floor", "TTFT ms"], rows)


if __name__ == "__main__":
    main()
