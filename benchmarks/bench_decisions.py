"""How long do the planner and the scheduler take to decide?

A queue that is kept at its length: one replica after the other becomes free, takes a batch, and as
many new requests arrive. Prompts of 500 to 8,000 tokens, all stored; deadlines from impossible to
half a minute. Times are of `next_batch` alone, planning included, and of the thread's CPU beside
the wall clock, since other processes take the cores away on a shared machine. Goal: P99 under 1 ms
at 256 waiting and 8 replicas, growth no worse than n log n: the last column is the median over that
of the row with 256 waiting (or the first), divided by the ratio of n log n. Ceiling: every decision
has to look at each waiting request once; one pass over their deadlines is shown.

    cachesmith bench decisions --waiting 1 256 --replicas 8
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log2
from typing import Any

import numpy as np

from benchmarks.report import argument_parser, print_json, print_table, say
from benchmarks.timing import percentile
from planner.batch_choice import CacheSmithConfig
from planner.budget_planner import BudgetPlanner, BudgetPlannerConfig
from planner.cost_model import CostModel, PrefillShape
from planner.demand import DemandCurves, built_in_demand
from planner.pass_curves import one_each, planned_passes
from planner.recompute_planner import PlanInput, RecomputePlanner, SlackPlanner, SlackPlannerConfig
from planner.scheduler import FcfsConfig, ReplicaState
from planner.slo_scheduler import CacheSmithScheduler
from planner.types import ChunkRef, RequestProfile

CHUNKS_PER_REQUEST = 8
NUM_CHUNKS = 2_000


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("decisions", __doc__)
    parser.add_argument("--waiting", type=int, nargs="+", default=[1, 16, 256, 1_000, 10_000])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--layers", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--planners", nargs="+", choices=list(PLANNERS), default=list(PLANNERS))
    parser.add_argument(
        "--decisions", type=int, default=300, help="of each row; a tenth from 1,000"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    results: list[dict[str, Any]] = []
    for num_layers in args.layers:
        for name in args.planners:
            results += _planner_rows(name, num_layers, args.decisions, args.seed)
            for num_replicas in args.replicas:
                for num_waiting in args.waiting:
                    say(f"{name}, {num_layers} layers, {num_replicas} replicas, {num_waiting} wait")
                    results.append(
                        _scheduler_row(
                            name, num_layers, num_replicas, num_waiting, args.decisions, args.seed
                        )
                    )
    _print_planners([r for r in results if r["kind"] == "planner"])
    print()
    _print_scheduler([r for r in results if r["kind"] == "scheduler"])
    print_json("decisions", seed=args.seed, results=results)


def _budget_planner(num_layers: int) -> RecomputePlanner:
    return BudgetPlanner(BudgetPlannerConfig(), DemandCurves(built_in_demand(num_layers)))


PLANNERS: dict[str, Callable[[int], RecomputePlanner]] = {
    "slack": lambda num_layers: SlackPlanner(SlackPlannerConfig()),
    "budget": _budget_planner,
}


def _cost(num_layers: int) -> CostModel:
    """Of a made-up GPU: 8,000 tokens in full take about a second at 32 layers."""
    return CostModel(
        num_layers=num_layers,
        fixed_ms=10.0,
        row_ms=0.003,
        pair_ms=1.5e-7,
        selected_pair_ms=2.5e-7,
        reuse_ms=5e-5,
    )


def _planner_rows(name: str, num_layers: int, decisions: int, seed: int) -> list[dict[str, Any]]:
    planner, cost = PLANNERS[name](num_layers), _cost(num_layers)
    rng = random.Random(seed)
    rows = []
    for size in (1, 8, 32):
        times = _Times()
        for step in range(decisions + 20):
            batch = [
                PlanInput(shape=PrefillShape(num_cached=rng.randint(500, 8_000), num_always=100))
                for _ in range(size)
            ]
            budget_ms = rng.uniform(0.0, 300.0 * size)
            with times:
                planner.plan(batch, budget_ms=budget_ms, cost=cost)
            if step < 20:
                times.forget()
        rows.append(
            {
                "kind": "planner",
                "planner": name,
                "num_layers": num_layers,
                "batch_size": size,
                **times.result(),
            }
        )
    return rows


def _scheduler_row(
    name: str, num_layers: int, num_replicas: int, num_waiting: int, decisions: int, seed: int
) -> dict[str, Any]:
    if num_waiting >= 1_000:
        decisions = max(10, decisions // 10)
    planner, cost = PLANNERS[name](num_layers), _cost(num_layers)
    reserve = 0.15  # of both planners
    scheduler = CacheSmithScheduler(
        CacheSmithConfig(limits=FcfsConfig(max_waiting=20_000), reserve=reserve),
        planner,
        passes=planned_passes if name == "budget" else one_each,
    )
    rng = random.Random(seed)
    resident = frozenset(f"c{i}" for i in range(NUM_CHUNKS))
    states = [
        ReplicaState(
            replica_id=f"r{i:03d}",
            cost=cost,
            free_seqs=32,
            free_kv_tokens=200_000,
            resident=resident,
            node_id=f"n{i // 8:02d}",
            max_kv_tokens=200_000,
        )
        for i in range(num_replicas)
    ]
    free_at = [rng.uniform(0.0, 500.0) for _ in states]
    times, now, number = _Times(), 0.0, 0
    warm_up = max(20, decisions // 5)
    for step in range(decisions + warm_up):
        while scheduler.num_waiting < num_waiting:
            scheduler.submit(_request(number, rng), now_ms=now)
            number += 1
        turn = min(range(num_replicas), key=free_at.__getitem__)
        now = max(now, free_at[turn])
        offered = [
            state if i == turn else replace(state, busy_until_ms=free_at[i])
            for i, state in enumerate(states)
        ]
        with times:
            decision = scheduler.next_batch(offered, now_ms=now)
        assert decision is not None
        free_at[turn] = now + decision.plan.expected_ms
        if step < warm_up:
            times.forget()
    deadlines = np.random.default_rng(seed).random(num_waiting)
    started = time.perf_counter()
    for _ in range(100):
        deadlines.argmin()
    return {
        "kind": "scheduler",
        "planner": name,
        "num_layers": num_layers,
        "num_replicas": num_replicas,
        "num_waiting": num_waiting,
        "ceiling_ms": (time.perf_counter() - started) * 10.0,
        **times.result(),
    }


def _request(number: int, rng: random.Random) -> RequestProfile:
    tokens = rng.randint(500, 8_000) // CHUNKS_PER_REQUEST
    return RequestProfile(
        request_id=f"q{number}",
        num_prefix_tokens=20,
        chunks=tuple(
            ChunkRef(chunk_id=f"c{rng.randrange(NUM_CHUNKS)}", num_tokens=tokens)
            for _ in range(CHUNKS_PER_REQUEST)
        ),
        num_suffix_tokens=40,
        ttft_slo_ms=rng.uniform(0.0, 30_000.0),
    )


class _Times:
    """Wall and CPU milliseconds of what runs inside."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._wall: list[float] = []
        self._cpu: list[float] = []

    def __enter__(self) -> None:
        self._started = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._wall.append((time.perf_counter() - self._started[0]) * 1e3)
        self._cpu.append((time.thread_time() - self._started[1]) * 1e3)

    def result(self) -> dict[str, Any]:
        return {
            "decisions": len(self._wall),
            "p50_ms": percentile(self._wall, 0.5),
            "p99_ms": percentile(self._wall, 0.99),
            "cpu_p50_ms": percentile(self._cpu, 0.5),
            "cpu_p99_ms": percentile(self._cpu, 0.99),
        }


def _print_planners(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        ["planner", "layers", "batch", "P50 ms", "P99 ms", "CPU P50", "CPU P99"],
        [[r["planner"], r["num_layers"], r["batch_size"], *_times(r)] for r in rows],
    )


def _print_scheduler(rows: Sequence[dict[str, Any]]) -> None:
    table = []
    for r in rows:
        alike = [o for o in rows if _group(o) == _group(r)]
        base = next((o for o in alike if o["num_waiting"] == 256), alike[0])
        growth = r["cpu_p50_ms"] / base["cpu_p50_ms"] / (_work(r) / _work(base))
        names = [r["planner"], r["num_layers"], r["num_replicas"], r["num_waiting"]]
        is_longer = r["num_waiting"] > base["num_waiting"]
        table.append([*names, *_times(r), r["ceiling_ms"], growth if is_longer else ""])
    names = ["planner", "layers", "replicas", "waiting"]
    print_table([*names, "P50 ms", "P99 ms", "CPU P50", "CPU P99", "ceiling", "growth"], table)


def _times(row: dict[str, Any]) -> list[float]:
    return [row[name] for name in ("p50_ms", "p99_ms", "cpu_p50_ms", "cpu_p99_ms")]


def _group(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["planner"], row["num_layers"], row["num_replicas"]


def _work(row: dict[str, Any]) -> float:
    return float(row["num_waiting"] * max(1.0, log2(row["num_waiting"])))


if __name__ == "__main__":
    main()
