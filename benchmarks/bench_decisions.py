"""How long do the planner and the scheduler take to decide?

A queue that is kept at its length: one replica after the other becomes free, takes a batch, and as
many new requests arrive. Eight replicas share a node and its store. Prompts of 500 to 8,000 tokens,
all stored; deadlines from impossible to half a minute. `next_batch` is timed with the planning of
its batch, and without ("own"); `submit` with the queue at its length. Times are of the thread's CPU
beside the wall clock, since other processes take the cores away on a shared machine; its P10 is
close to the median of a quiet one. Goal: P99 under 1 ms at 256 waiting and 8 replicas, growth no
worse than n log n: the last column is the median over that of the row with 256 waiting (or the
first), divided by the ratio of n log n.
Ceiling: every decision has to look at each waiting request once; one pass over their deadlines is
shown.

    cachesmith bench decisions --waiting 1 256 --replicas 8
"""

import random
import time
from collections.abc import Sequence
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
from planner.recompute_planner import PlanInput, RecomputePlanner
from planner.scheduler import QueueLimits, ReplicaState
from planner.slo_scheduler import CacheSmithScheduler
from planner.timeline import Link
from planner.types import BatchPlan, ChunkRef, RequestProfile

CHUNKS_PER_REQUEST = 8
NUM_CHUNKS = 2_000


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("decisions", __doc__)
    parser.add_argument("--waiting", type=int, nargs="+", default=[1, 16, 256, 1_000, 10_000])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--layers", type=int, nargs="+", default=[32, 64])
    parser.add_argument(
        "--decisions", type=int, default=200, help="of each row; a tenth from 1,000"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    results: list[dict[str, Any]] = []
    for num_layers in args.layers:
        results += _planner_rows(num_layers, args.decisions, args.seed)
        for num_replicas in args.replicas:
            for num_waiting in args.waiting:
                say(f"{num_layers} layers, {num_replicas} replicas, {num_waiting} waiting")
                results.append(
                    _scheduler_row(num_layers, num_replicas, num_waiting, args.decisions, args.seed)
                )
    _print_planners([r for r in results if r["kind"] == "planner"])
    print()
    _print_scheduler([r for r in results if r["kind"] == "scheduler"])
    print_json("decisions", seed=args.seed, results=results)


def _planner(num_layers: int) -> BudgetPlanner:
    return BudgetPlanner(BudgetPlannerConfig(), DemandCurves(built_in_demand(num_layers)))


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


def _planner_rows(num_layers: int, decisions: int, seed: int) -> list[dict[str, Any]]:
    planner, cost = _planner(num_layers), _cost(num_layers)
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
                "num_layers": num_layers,
                "batch_size": size,
                **times.result(),
            }
        )
    return rows


def _scheduler_row(
    num_layers: int, num_replicas: int, num_waiting: int, decisions: int, seed: int
) -> dict[str, Any]:
    if num_waiting >= 1_000:
        decisions = max(10, decisions // 10)
    planner, cost = _TimedPlanner(_planner(num_layers)), _cost(num_layers)
    reserve = BudgetPlannerConfig().reserve
    scheduler = CacheSmithScheduler(
        CacheSmithConfig(limits=QueueLimits(max_waiting=20_000), reserve=reserve), planner
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
    times, own, submits = _Times(), _Times(without=planner.spent), _Times()
    now, number = 0.0, 0
    warm_up = max(10, decisions // 5)
    for step in range(decisions + warm_up):
        while scheduler.num_waiting < num_waiting:
            request, number = _request(number, rng), number + 1
            with submits:
                scheduler.submit(request, now_ms=now)
        turn = min(range(num_replicas), key=free_at.__getitem__)
        now = max(now, free_at[turn])
        offered = [
            state if i == turn else replace(state, busy_until_ms=free_at[i])
            for i, state in enumerate(states)
        ]
        with times, own:
            decision = scheduler.next_batch(offered, now_ms=now)
        assert decision is not None
        free_at[turn] = now + decision.plan.expected_ms
        if step < warm_up:
            for timed in (times, own, submits):
                timed.forget()
    deadlines = np.random.default_rng(seed).random(num_waiting)
    started = time.perf_counter()
    for _ in range(100):
        deadlines.argmin()
    return {
        "kind": "scheduler",
        "num_layers": num_layers,
        "num_replicas": num_replicas,
        "num_waiting": num_waiting,
        "ceiling_ms": (time.perf_counter() - started) * 10.0,
        **times.result(),
        **{f"own_{name}": value for name, value in own.result().items()},
        **{f"submit_{name}": value for name, value in submits.result().items()},
    }


class _TimedPlanner:
    def __init__(self, planner: RecomputePlanner) -> None:
        self._planner = planner
        self.spent = _Times()

    def plan(
        self,
        requests: Sequence[PlanInput],
        *,
        budget_ms: float,
        cost: CostModel,
        link: Link | None = None,
    ) -> BatchPlan:
        with self.spent:
            return self._planner.plan(requests, budget_ms=budget_ms, cost=cost, link=link)


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
    """Wall and CPU milliseconds of what runs inside, less what `without` takes meanwhile."""

    def __init__(self, without: "_Times | None" = None) -> None:
        self._without = without
        self.total = np.zeros(2)
        self.forget()

    def forget(self) -> None:
        self._each: list[tuple[float, float]] = []

    def __enter__(self) -> None:
        self._started = self._now()

    def __exit__(self, *_: object) -> None:
        took = self._now() - self._started
        self.total += took
        self._each.append((float(took[0]), float(took[1])))

    def _now(self) -> np.ndarray:
        now = np.array([time.perf_counter(), time.thread_time()]) * 1e3
        return now if self._without is None else now - self._without.total

    def result(self) -> dict[str, Any]:
        wall, cpu = [ms for ms, _ in self._each], [ms for _, ms in self._each]
        return {
            "count": len(wall),
            "p50_ms": percentile(wall, 0.5),
            "p99_ms": percentile(wall, 0.99),
            "cpu_p50_ms": percentile(cpu, 0.5),
            "cpu_p99_ms": percentile(cpu, 0.99),
            "best_ms": percentile(cpu, 0.1),
        }


def _print_planners(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        ["layers", "batch", "P50 ms", "P99 ms", "CPU P50", "CPU P99", "CPU P10"],
        [[r["num_layers"], r["batch_size"], *_times(r)] for r in rows],
    )


def _print_scheduler(rows: Sequence[dict[str, Any]]) -> None:
    table = []
    for r in rows:
        alike = [o for o in rows if _group(o) == _group(r)]
        base = next((o for o in alike if o["num_waiting"] == 256), alike[0])
        growth = r["cpu_p50_ms"] / base["cpu_p50_ms"] / (_work(r) / _work(base))
        table.append(
            [
                *(r[name] for name in ("num_layers", "num_replicas", "num_waiting")),
                *_times(r),
                *(r[name] for name in ("own_cpu_p50_ms", "own_cpu_p99_ms")),
                *(r[name] for name in ("submit_cpu_p50_ms", "submit_cpu_p99_ms")),
                r["ceiling_ms"],
                growth if r["num_waiting"] > base["num_waiting"] else "",
            ]
        )
    names = ["layers", "replicas", "waiting", "P50 ms", "P99 ms", "CPU P50", "CPU P99"]
    names += ["CPU P10"]
    names += ["own P50", "own P99", "submit P50", "submit P99", "ceiling", "growth"]
    print_table(names, table)


def _times(row: dict[str, Any]) -> list[float]:
    return [row[name] for name in ("p50_ms", "p99_ms", "cpu_p50_ms", "cpu_p99_ms", "best_ms")]


def _group(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["num_layers"], row["num_replicas"]


def _work(row: dict[str, Any]) -> float:
    return float(row["num_waiting"] * max(1.0, log2(row["num_waiting"])))


if __name__ == "__main__":
    main()
