"""Small worlds for the scheduler's tests: a planner with an explicit demand, and a clock to run."""

import heapq
import itertools
import random
from dataclasses import dataclass, replace

from planner import (
    BatchPlan,
    ChunkRef,
    CostModel,
    PlanInput,
    ReplicaState,
    RequestProfile,
    SlackPlanner,
    SlackPlannerConfig,
    prefill_work,
)
from planner.timeline import Link, arrivals_ms, layer_times, total_ms
from planner.types import RequestPlan, Signal

COST = CostModel(
    num_layers=30,
    fixed_ms=20.0,
    row_ms=0.02,
    pair_ms=1e-6,
    selected_pair_ms=1e-6,
    reuse_ms=0.0005,
)
FLOOR, SATURATION, STEPS = 0.05, 0.5, 9


@dataclass(frozen=True)
class PromisedPlan(BatchPlan):
    expected_passes: float = 0.0


class ConcavePlanner:
    """Coverage is enough with probability F(r), concave; the best coverages for the budget.

    F rises from `at_floor` at the floor to `at_most` at the saturation; `bend` 1 is a line, more
    is steeper at first.
    """

    def __init__(self, *, at_floor=0.4, at_most=0.95, bend=2.0):
        self.at_floor, self.at_most, self.bend = at_floor, at_most, bend
        self.num_plans = 0

    def enough(self, coverage):
        share = (coverage - FLOOR) / (SATURATION - FLOOR)
        return self.at_floor + (self.at_most - self.at_floor) * (1 - (1 - share) ** self.bend)

    def plan(self, requests, *, budget_ms, cost, link=None):
        """With a link, no plan ends before the timeline lets it; coverages do not know of it."""
        self.num_plans += 1
        slopes = [_coverage_ms(r.shape, cost) for r in requests]
        coverages = [FLOOR] * len(requests)
        spent = _floor_ms([r.shape for r in requests], cost)
        step = (SATURATION - FLOOR) / STEPS
        steps = sorted(
            (-(self.enough(start + step) - self.enough(start)) / max(1e-12, slope), number, i)
            for i, slope in enumerate(slopes)
            for number in range(STEPS)
            for start in [FLOOR + number * step]
        )
        for _, _, i in steps:  # the last step may be a part of one
            part = min(step, max(0.0, (budget_ms - spent) / max(1e-12, slopes[i])))
            coverages[i] += part
            spent += part * slopes[i]
            if part < step:
                break
        if link is not None:
            spent = max(spent, _loaded_ms(requests, coverages, cost, link))
        plans = tuple(
            RequestPlan(
                policy=r.policy,
                signal=Signal.KV_DEV,
                warmup_depth=1,
                probe_len=1,
                coverage=coverage,
                expected_ms=spent,
                budget_ms=budget_ms,
            )
            for r, coverage in zip(requests, coverages, strict=True)
        )
        return PromisedPlan(
            requests=plans,
            budget_ms=budget_ms,
            expected_ms=spent,
            expected_passes=sum(map(self.enough, coverages)),
        )


def _loaded_ms(requests, coverages, cost, link):
    """What the timeline says, with the stored KV of the layers behind WarmUp on its way."""
    times = layer_times(
        [r.shape for r in requests],
        coverages,
        signal=Signal.KV_DEV,
        warmup_depth=1,
        probe_len=1,
        cost=cost,
    )
    layer_bytes = sum(r.layer_bytes for r in requests)
    return total_ms(times, arrivals_ms([layer_bytes] * (cost.num_layers - 1), link))


def _floor_ms(shapes, cost, coverage=FLOOR):
    return cost.work_ms(
        prefill_work(
            shapes,
            [coverage] * len(shapes),
            signal=Signal.KV_DEV,
            warmup_depth=1,
            probe_len=1,
            num_layers=cost.num_layers,
        )
    )


def _coverage_ms(shape, cost):
    rise = _floor_ms([shape], cost, SATURATION) - _floor_ms([shape], cost)
    return rise / (SATURATION - FLOOR)


def profile(name, *, tokens=600, slo=2000.0, **fields):
    """A request of one chunk, with 50 tokens around it."""
    defaults = {
        "request_id": name,
        "num_prefix_tokens": 20,
        "chunks": (ChunkRef(chunk_id=f"chunk-{name}", num_tokens=tokens),),
        "num_suffix_tokens": 30,
        "ttft_slo_ms": slo,
    }
    return RequestProfile(**{**defaults, **fields})


class AllHot:
    """A residency that has every chunk."""

    def __contains__(self, chunk_id):
        return True


def replica(name="r", **fields):
    defaults = {
        "replica_id": name,
        "cost": COST,
        "free_seqs": 8,
        "free_kv_tokens": 100_000,
        "resident": AllHot(),
        "node_id": "node",
    }
    return ReplicaState(**{**defaults, **fields})


def linked(name="r", *, ms_per_kilotoken, **fields):
    """A replica to which the stored KV of 1,000 tokens, all layers, takes so long."""
    link = Link(bytes_per_ms=COST.num_layers * 1e6 / ms_per_kilotoken, latency_ms=1.0)
    return replica(name, link=link, kv_token_bytes=1e3, **fields)


def slack_planner(reserve=0.0):
    return SlackPlanner(SlackPlannerConfig(reserve=reserve))


def run_to_the_end(scheduler, replicas, *, max_batches=10_000):
    """Event by event on expected times: passes that came true, and the decisions with their start.

    All replicas are passed in every call, those in prefill with their time.
    """
    free_at = {r.replica_id: 0.0 for r in replicas}
    events = [0.0]
    passes, decisions = 0.0, []
    while events and scheduler.num_waiting:
        now = heapq.heappop(events)
        while len(decisions) < max_batches:
            states = [
                replace(r, busy_until_ms=None if free_at[r.replica_id] <= now else until)
                for r in replicas
                for until in [free_at[r.replica_id]]
            ]
            decision = scheduler.next_batch(states, now_ms=now)
            if decision is None:
                break
            decisions.append((now, decision))
            end = now + decision.plan.expected_ms
            free_at[decision.replica_id] = end
            heapq.heappush(events, end)
            on_time = sum(end <= p.ttft_slo_ms - p.elapsed_ms + 1e-6 for p in decision.requests)
            promised = getattr(decision.plan, "expected_passes", len(decision.requests))
            passes += promised * on_time / len(decision.requests)
    return passes, decisions


def best_passes(profiles, planner, *, num_replicas, levels, max_batch=8):
    """The most passes of any batches, order, replicas and budgets of a grid; all wait at 0."""
    shapes = [PlanInput(shape=_hot_shape(p)) for p in profiles]
    slacks = [p.ttft_slo_ms - p.elapsed_ms for p in profiles]
    grids = {}
    for size in range(1, min(max_batch, len(profiles)) + 1):
        for subset in itertools.combinations(range(len(profiles)), size):
            grids[subset] = _grid([shapes[i] for i in subset], planner, levels)
    most = max(grids[(i,)][-1][1] for i in range(len(profiles)))
    best = 0.0

    def search(left, times, passes):
        nonlocal best
        best = max(best, passes)
        if not left or not times or passes + most * len(left) <= best + 1e-9:
            return
        start, rest = times[0], times[1:]
        for size in range(min(max_batch, len(left)), 0, -1):
            for subset in itertools.combinations(left, size):
                slack = min(slacks[i] for i in subset) - start
                others = tuple(i for i in left if i not in subset)
                for ms, worth in _within(grids[subset], slack):
                    search(others, tuple(sorted((*rest, start + ms))), passes + worth)
        if rest:
            search(left, rest, passes)  # this replica takes no more

    search(tuple(range(len(profiles))), (0.0,) * num_replicas, 0.0)
    return best


def _hot_shape(p):
    from planner import request_shape

    return request_shape(p, AllHot())


def _grid(requests, planner, levels):
    floor = planner.plan(requests, budget_ms=0.0, cost=COST)
    most = planner.plan(requests, budget_ms=1e12, cost=COST)
    span = most.expected_ms - floor.expected_ms
    points = []
    for level in range(levels + 1):
        made = planner.plan(
            requests, budget_ms=floor.expected_ms + span * level / levels, cost=COST
        )
        points.append((made.expected_ms, made.expected_passes))
    return points


def _within(grid, slack):
    """Points of the grid that end in time, the longest first, and one that ends just in time."""
    for (ms, worth), above in zip(
        reversed(grid), itertools.chain([None], reversed(grid)), strict=False
    ):
        if ms > slack + 1e-9:
            continue
        if above is not None and above[0] > slack + 1e-9 and above[0] > ms:
            share = (slack - ms) / (above[0] - ms)
            yield slack, worth + share * (above[1] - worth)
        yield ms, worth


def random_case(rng: random.Random, *, num_requests):
    """Profiles and a planner; deadlines from tight to loose for the queue's work."""
    planner = ConcavePlanner(
        at_floor=rng.uniform(0.05, 0.7), at_most=rng.uniform(0.8, 1.0), bend=rng.uniform(1.0, 5.0)
    )
    profiles = []
    load = rng.choice([0.6, 1.0, 2.0, 4.0])
    for i in range(num_requests):
        tokens = rng.choice([300, 800, 1500, 3000, 6000])
        alone = _floor_ms([_hot_shape(profile("x", tokens=tokens))], COST)
        slo = alone * rng.uniform(0.8, 2.0 + load * num_requests)
        profiles.append(profile(f"q{i}", tokens=tokens, slo=slo))
    return profiles, planner
