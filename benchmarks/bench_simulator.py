"""How many events and requests does the simulator get through in a second?

The same scenario with a scheduler that decides nothing (`fcfs`, full prefill: the simulator's own
cost), with static recomputation, and with CacheSmith, on fleets of several sizes. `us/request` is
CPU time of the process for each request; `decisions` what of it went into the schedulers'
`next_batch`, `submit` and `take_refused`. Times are of the process, since other processes take the
cores away on a shared machine.
Ceiling: the bare event queue, an event that plans the next one, is shown first. Goal: one million
requests on 1,000 replicas in 15 minutes, that is 900 us a request, in less than 4 GiB.

    cachesmith bench simulator --replicas 1 64 --requests 4000
"""

import resource
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.report import argument_parser, print_json, print_table, say
from planner.scheduler import BatchDecision, RefusedRequest, ReplicaState, SloScheduler
from planner.simulator import Scenario, Simulation, named_policy, prepare
from planner.simulator.event_queue import EventQueue
from planner.types import RequestProfile

POLICIES = ("full_prefill", "cacheblend", "cachesmith")
REPLICAS_OF_A_SCHEDULER = 64
TASK = {
    "name": "rag",
    "num_chunks": [3, 7],
    "chunk_tokens": [400, 600],
    "prefix_tokens": 300,
    "suffix_tokens": [20, 200],
    "output_tokens": [50, 250],
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("simulator", __doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--requests", type=int, default=4_000)
    parser.add_argument("--load", type=float, default=0.8, help="of full prefill's capacity")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    bare = _bare_events_per_s(200_000)
    print(f"bare event queue: {bare:,.0f} events/s\n")
    results = []
    for num_replicas in args.replicas:
        for policy in args.policies:
            say(f"{policy}, {num_replicas} replicas")
            results.append(_row(policy, num_replicas, args.requests, args.load, args.seed))
    header = ("policy", "replicas", "requests", "events/s", "us/request", "decisions", "MiB", "QSA")
    keys = ("policy", "replicas", "requests", "events_per_s", "us_per_request")
    keys += ("decisions_us", "peak_mib", "qsa")
    print_table(header, [[row[key] for key in keys] for row in results])
    print_json("simulator", seed=args.seed, results=[{"bare_events_per_s": bare}, *results])


def _bare_events_per_s(count: int) -> float:
    events = EventQueue()

    def again() -> None:
        events.after(1.0, again)

    for _ in range(1_000):
        events.after(1.0, again)
    started_s = time.process_time()
    events.run(lambda: events.num_run == count)
    return count / (time.process_time() - started_s)


def _row(policy: str, num_replicas: int, requests: int, load: float, seed: int) -> dict[str, Any]:
    num_schedulers = -(-num_replicas // REPLICAS_OF_A_SCHEDULER)
    scenario = Scenario.model_validate(
        {
            "num_requests": requests,
            "arrivals": {"kind": "gamma", "cv": 2.0},
            "load": {"of_full_prefill": load},
            "slo": {"times_full_prefill": 2.0},
            "tasks": [TASK],
            "limits": {"max_waiting": 4096},
            "models": [
                {
                    "fleet": {
                        "replicas": num_replicas,
                        "schedulers": num_schedulers,
                        "replicas_per_node": 8,
                        "link_gb_per_s": 25.0,
                    }
                }
            ],
        }
    )
    prepared = prepare(scenario, seed=seed)
    simulation = Simulation(prepared, named_policy(policy), schedulers=TimedScheduler)
    started_s = time.process_time()
    simulation.run()
    took_s = time.process_time() - started_s
    summary = simulation.summary()
    decided_s = sum(each.took_s for each in simulation.schedulers)
    return {
        "policy": policy,
        "replicas": num_replicas,
        "requests": requests,
        "events_per_s": simulation.events.num_run / took_s,
        "us_per_request": took_s / requests * 1e6,
        "decisions_us": decided_s / requests * 1e6,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "qsa": summary.qsa,
    }


class TimedScheduler:
    """A scheduler with a stop watch."""

    def __init__(self, scheduler: SloScheduler) -> None:
        self._scheduler = scheduler
        self.took_s = 0.0

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    def submit(self, profile: RequestProfile, *, now_ms: float) -> None:
        started_s = time.process_time()
        try:
            self._scheduler.submit(profile, now_ms=now_ms)
        finally:
            self.took_s += time.process_time() - started_s

    def cancel(self, request_id: str) -> bool:
        return self._scheduler.cancel(request_id)

    def next_batch(
        self, replicas: Sequence[ReplicaState], *, now_ms: float
    ) -> BatchDecision | None:
        started_s = time.process_time()
        decision = self._scheduler.next_batch(replicas, now_ms=now_ms)
        self.took_s += time.process_time() - started_s
        return decision

    def take_refused(self, *, now_ms: float) -> Sequence[RefusedRequest]:
        started_s = time.process_time()
        refused = self._scheduler.take_refused(now_ms=now_ms)
        self.took_s += time.process_time() - started_s
        return refused


if __name__ == "__main__":
    main()
