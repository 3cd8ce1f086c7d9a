"""Admissions by scheduler actors under a load of calls alone: rows of the benchmark's tables."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import ray
from ray.actor import ActorHandle

from benchmarks.control_plane.admission_load import (
    NUM_LAYERS,
    Admissions,
    Callers,
    EmulatedReplicas,
    cpu_s,
    decision_ms,
)
from benchmarks.control_plane.bare_app import BareScheduler
from benchmarks.report import say
from benchmarks.timing import percentile, spread
from cluster import scheduler_actor
from cluster.config import SchedulerConfig, scheduler_address
from planner import CacheSmithConfig, PolicyConfig, QueueLimits

MAX_WAITING = 2_048
BUSY_REPORT_S = 0.25  # the gap between the reports of a replica whose requests end all the time


def scheduler_rows(args: Any) -> list[dict[str, Any]]:
    rows = []
    for num_replicas in args.replicas:
        with _Scheduler(num_replicas, num_callers=2) as scheduler:
            for num_waiting in args.waiting:
                say(f"{num_replicas} replicas, {num_waiting} admissions under way")
                cpu, decisions = cpu_s(scheduler.actor), decision_ms(scheduler.actor)
                seen = scheduler.load(num_waiting, args.seconds)
                num = sum(part.num for part in seen)
                num_decisions = decision_ms(scheduler.actor)[0] - decisions[0]
                spent_ms = decision_ms(scheduler.actor)[1] - decisions[1]
                latencies = [ms for part in seen for ms in part.latencies_ms]
                cpu_ms = (cpu_s(scheduler.actor) - cpu) / num * 1e3
                rows.append(
                    {
                        "part": "scheduler",
                        "replicas": num_replicas,
                        "under way": num_waiting,
                        "admissions/s": sum(part.num / part.elapsed_s for part in seen),
                        "P50 ms": percentile(latencies, 0.5),
                        "P99 ms": percentile(latencies, 0.99),
                        "decision ms": spent_ms / num_decisions,
                        "batch": num / num_decisions,
                        "CPU ms": cpu_ms,
                        "admissions per core second": 1e3 / cpu_ms,
                    }
                )
    return rows


def idle_rows(args: Any) -> list[dict[str, Any]]:
    """Sequential calls, ours and the bare actor's in turns."""
    bare = ray.remote(BareScheduler).options(num_cpus=0).remote()
    rows: dict[str, list[float]] = defaultdict(list)
    with _Scheduler(1, num_callers=1) as scheduler:
        caller = scheduler.callers[0]
        for _ in range(args.rounds):
            rows["an admission"] += ray.get(caller.run.remote(1, args.seconds / 3)).latencies_ms
            rows["a call"] += ray.get(caller.call.remote(bare, args.seconds / 3))
    ray.kill(bare)
    base = percentile(rows["a call"], 0.5)
    return [
        {
            "part": "idle",
            "what": name,
            "count": len(times),
            "P50 ms": percentile(times, 0.5),
            "P99 ms": percentile(times, 0.99),
            "ratio": percentile(times, 0.5) / base,
        }
        for name, times in rows.items()
    ]


def schedulers_rows(args: Any) -> list[dict[str, Any]]:
    rates: dict[str, list[float]] = defaultdict(list)
    with _Scheduler(8, num_callers=1) as one, _Scheduler(8, num_callers=1, name="second") as two:
        for _ in range(args.rounds):
            rates["one"].append(_rate(one.load(64, args.seconds)))
            both = [s.start(64, args.seconds) for s in (one, two)]
            rates["two at once"].append(_rate([part for refs in both for part in ray.get(refs)]))
    base = median(rates["one"])
    return [
        {
            "part": "schedulers",
            "schedulers": name,
            **spread("admissions/s", values),
            "ratio": median(values) / base,
        }
        for name, values in rates.items()
    ]


def _rate(parts: Sequence[Admissions]) -> float:
    return sum(part.num / part.elapsed_s for part in parts)


class _Scheduler:
    """A scheduler actor with replicas and callers, as a context."""

    def __init__(self, num_replicas: int, *, num_callers: int, name: str = "bench") -> None:
        rules = CacheSmithConfig(limits=QueueLimits(max_waiting=MAX_WAITING))
        config = SchedulerConfig(policy=PolicyConfig(rules=rules), gather_ms=0.0)
        self._address = scheduler_address(name)
        self.actor: ActorHandle[Any] = scheduler_actor.get_or_create(
            self._address, config.for_model(NUM_LAYERS)
        )
        self.callers = [_actor(Callers, self.actor, seed) for seed in range(num_callers)]
        self._replicas = _actor(EmulatedReplicas, self.actor, num_replicas)

    def __enter__(self) -> "_Scheduler":
        ray.get(self._replicas.start.remote(BUSY_REPORT_S))
        self.load(8, 1.0)  # to warm up
        return self

    def __exit__(self, *_: object) -> None:
        for actor in (*self.callers, self._replicas):
            ray.kill(actor)
        scheduler_actor.stop(self._address)

    def start(self, num_waiting: int, seconds: float) -> list[Any]:
        """References to what each process of callers will have seen."""
        shares = [num_waiting // len(self.callers)] * len(self.callers)
        shares[0] += num_waiting - sum(shares)
        return [
            caller.run.remote(share, seconds)
            for caller, share in zip(self.callers, shares, strict=True)
            if share
        ]

    def load(self, num_waiting: int, seconds: float) -> list[Admissions]:
        return ray.get(self.start(num_waiting, seconds))


def _actor(cls: type, *arguments: Any) -> ActorHandle[Any]:
    return ray.remote(cls).options(num_cpus=0).remote(*arguments)
