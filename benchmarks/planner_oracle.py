"""How far do the planner's fast rules fall short of trying everything, on small random batches?

Ceiling: the optimum, found by force over every signal, (w, p) and coverage. Demand curves are
straight between their measured coverages, so at an optimum all requests but one stand at a measured
coverage or at an end of the band: all combinations of these are tried, and the one request takes
what is left by bisection. The goal is 98% of the optimum's expected passes on average, and 90% in
the worst case. Costs, curves and links are random numbers, not measurements.

    python -m benchmarks.planner_oracle
    python -m benchmarks.planner_oracle --cases 2000 --seed 7
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import argument_parser, print_json, print_table
from planner.budget_planner import BudgetPlanner, BudgetPlannerConfig
from planner.cost_model import CostModel, PrefillShape
from planner.demand import DemandCurves
from planner.demand_profile import DemandAnchor, DemandBucket, DemandProfile
from planner.recompute_planner import BudgetBand, PlanInput
from planner.timeline import Link
from planner.types import Signal

Floats = NDArray[np.float64]

BISECTIONS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleCase:
    """One batch to plan."""

    name: str  # what kind of curves it has
    profile: DemandProfile
    requests: tuple[PlanInput, ...]
    cost: CostModel
    link: Link | None
    band: BudgetBand
    budget_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleResult:
    """Expected passes of the planner and of the optimum."""

    case: OracleCase
    planned: float
    best: float

    @property
    def share(self) -> float:
        return self.planned / self.best if self.best > 0 else 1.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("planner-oracle", __doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    results = compare(args.cases, seed=args.seed)
    rows = []
    for name in ("all", *sorted({result.case.name for result in results})):
        shares = [r.share for r in results if name in ("all", r.case.name)]
        rows.append(summary(name, shares))
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    print_json("planner_oracle", seed=args.seed, results=rows)


def summary(name: str, shares: Sequence[float]) -> dict[str, str | float]:
    return {
        "curves": name,
        "cases": len(shares),
        "mean": float(np.mean(shares)),
        "worst": min(shares),
        "p01": float(np.quantile(shares, 0.01)),
        "short": sum(share < 1.0 - 1e-6 for share in shares) / len(shares),
        "below_98": sum(share < 0.98 for share in shares) / len(shares),
    }


def compare(num_cases: int, *, seed: int) -> list[OracleResult]:
    rng = random.Random(seed)
    results = []
    for _ in range(num_cases):
        case = random_case(rng)
        curves = DemandCurves(case.profile)
        planner = BudgetPlanner(BudgetPlannerConfig(band=case.band, reserve=0.0), curves)
        plan = planner.plan(case.requests, budget_ms=case.budget_ms, cost=case.cost, link=case.link)
        best = best_by_force(case, curves)
        results.append(OracleResult(case=case, planned=plan.expected_passes, best=best))
    return results


# ---- the optimum ----


def best_by_force(case: OracleCase, curves: DemandCurves) -> float:
    """The most expected passes within the budget; the cheapest floor's if nothing is within it."""
    best, cheapest = -1.0, (np.inf, 0.0)
    saturated_ms: dict[tuple[Signal, int], float] = {}  # by rank depth
    for signal, w, p in _points(curves, case.cost.num_layers):
        chances = [_chances(case, curves, signal, w + p, r) for r in case.requests]
        ends = (case.band.floor, case.band.saturation)
        high = np.full((1, len(case.requests)), ends[1])
        high_ms = float(total_ms(case, signal, w, p, high)[0])
        depth = (signal, w + p)
        saturated_ms[depth] = min(high_ms, saturated_ms.get(depth, np.inf))
        inside = [r for r in curves.grid.tolist() if ends[0] < r < ends[1]]
        corners = [ends[0], *inside, ends[1]]
        for coverages, free in _combinations(corners, len(case.requests)):
            low = coverages.copy()
            if free is not None:
                low[:, free] = ends[0]
            within = total_ms(case, signal, w, p, low) <= case.budget_ms
            floors = low[:1]
            floor_ms = float(total_ms(case, signal, w, p, floors)[0])
            if np.all(floors == ends[0]) and floor_ms < cheapest[0]:
                cheapest = (floor_ms, _passes(curves, chances, floors)[0])
            if not within.any():
                continue
            reached = low[within]
            if free is not None:
                reached = _raised(case, signal, w, p, reached, free)
            best = max(best, float(_passes(curves, chances, reached).max()))
    exact_ms = _exact_ms(case)
    if exact_ms <= min(case.budget_ms, max(saturated_ms.values())) or exact_ms <= cheapest[0]:
        return float(len(case.requests))
    return best if best >= 0 else float(cheapest[1])


def _exact_ms(case: OracleCase) -> float:
    """Full prefill."""
    cost, tokens = case.cost, [r.shape.num_tokens for r in case.requests]
    layer = cost.layer_ms + sum(cost.row_ms * n + cost.pair_ms * n * n / 2 for n in tokens)
    fixed = cost.fixed_ms + cost.request_ms * len(tokens)
    return cost.scale * (fixed + cost.num_layers * layer)


def _points(curves: DemandCurves, num_layers: int) -> Iterator[tuple[Signal, int, int]]:
    """Every (S, w, p) that was measured, or lies between two that were, or has more WarmUp."""
    for signal in (Signal.KV_DEV, Signal.QCI):
        depths = [d for d in curves.anchor_depths(signal) if d <= num_layers]
        if not depths:
            continue
        for depth in range(depths[0], depths[-1] + 1):
            first = 1 if signal is Signal.KV_DEV else 0  # layer 0 never deviates
            first = max(first, curves.least_warmup(signal, depth))
            for w in range(min(first, depth - 1), depth):
                yield signal, w, depth - w


def _combinations(
    corners: Sequence[float], num_requests: int
) -> Iterator[tuple[Floats, int | None]]:
    """([combinations, batch], the request that takes what is left)."""
    for free in (None, *range(num_requests)):
        choices = [corners[:1] if i == free else corners for i in range(num_requests)]
        yield np.array(list(itertools.product(*choices))), free


def _raised(
    case: OracleCase, signal: Signal, w: int, p: int, coverages: Floats, free: int
) -> Floats:
    """One request's coverage up to the budget; coverages: [n, batch], within it as they are."""
    low = coverages.copy()
    high = np.full(len(low), case.band.saturation)
    tried = coverages.copy()
    tried[:, free] = high
    fits = total_ms(case, signal, w, p, tried) <= case.budget_ms
    low[fits, free] = high[fits]
    for _ in range(BISECTIONS):
        middle = (low[:, free] + high) / 2
        tried[:, free] = middle
        fits = total_ms(case, signal, w, p, tried) <= case.budget_ms
        low[:, free] = np.where(fits, middle, low[:, free])
        high = np.where(fits, high, middle)
    return low


def total_ms(case: OracleCase, signal: Signal, w: int, p: int, coverages: Floats) -> Floats:
    """The timeline layer by layer, for many coverages at once; coverages: [n, batch].

    Written apart from the planner's own, so that the two check each other.
    """
    cost = case.cost
    cached = np.array([r.shape.num_cached for r in case.requests], dtype=float)
    always = np.array([r.shape.num_always for r in case.requests], dtype=float)
    tokens = cached + always
    dense = cost.row_ms * tokens + cost.pair_ms * tokens**2 / 2
    layer_bytes = sum(r.layer_bytes for r in case.requests)
    active = always + coverages * cached
    selected = active * (cost.row_ms + cost.selected_pair_ms * tokens / 2)
    num_requests = len(case.requests)
    read = cost.member_ms * num_requests + cost.reuse_ms * cached.sum()
    patch = np.where(active == tokens, dense, selected).sum(axis=1)
    patch = patch + cost.layer_ms + read
    now = np.full(len(coverages), w * (cost.layer_ms + dense.sum()))

    def arrival(layer: int) -> float:
        if case.link is None or layer_bytes == 0:
            return 0.0
        return case.link.latency_ms + (layer - w + 1) * layer_bytes / case.link.bytes_per_ms

    is_ranked = ((coverages > 0) & (coverages < 1)).any(axis=1)
    rows = np.full(len(coverages), tokens.sum())
    for step in range(1, p + 1):
        if signal is Signal.QCI:
            walk = always * (cost.row_ms + cost.selected_pair_ms * tokens)
            probe = cost.layer_ms + walk.sum()
        else:
            probe = cost.compare_ms * rows
            if step < p:
                kept = always + coverages ** (step / p) * cached
                rows = kept.sum(axis=1)
                attended = (kept * tokens).sum(axis=1) / 2
                walk = cost.row_ms * rows + cost.selected_pair_ms * attended
                probe = probe + cost.layer_ms + cost.filter_ms + walk
        done = np.maximum(now, arrival(w + step - 1)) + probe + read
        now = np.where(is_ranked, done, now)
    for layer in range(w, cost.num_layers):
        now = np.maximum(now, arrival(layer)) + patch
    return cost.scale * (now + cost.fixed_ms + cost.request_ms * num_requests)


def _chances(
    case: OracleCase, curves: DemandCurves, signal: Signal, depth: int, request: PlanInput
) -> Floats:
    if request.shape.num_cached == 0:
        return np.ones(len(curves.grid))
    return curves.curve(signal, depth, curves.bucket(request.shape.num_cached))


def _passes(curves: DemandCurves, chances: Sequence[Floats], coverages: Floats) -> Floats:
    """[n]; coverages: [n, batch]"""
    each = [np.interp(coverages[:, i], curves.grid, own) for i, own in enumerate(chances)]
    return np.sum(each, axis=0)


# ---- random cases ----


def random_case(rng: random.Random) -> OracleCase:
    """4 to 8 layers, 1 to 3 requests, a budget between the floor's and the saturation's time."""
    num_layers = rng.randint(4, 8)
    name = rng.choice(("concave", "rough"))
    row_ms = rng.uniform(0.005, 0.02)
    cost = CostModel(
        num_layers=num_layers,
        fixed_ms=rng.uniform(0.0, 20.0),
        request_ms=rng.uniform(0.0, 5.0),
        layer_ms=rng.uniform(0.0, 5.0),
        member_ms=rng.uniform(0.0, 2.0),
        filter_ms=rng.uniform(0.0, 5.0),
        row_ms=row_ms,
        compare_ms=row_ms * rng.uniform(0.0, 0.5),
        pair_ms=row_ms * rng.uniform(0.0, 3e-4),
        selected_pair_ms=row_ms * rng.uniform(0.0, 6e-4),
        reuse_ms=row_ms * rng.uniform(0.0, 0.05),
    )
    link = None
    bytes_per_token = 0.0
    if rng.random() < 0.5:
        link = Link(bytes_per_ms=rng.uniform(0.5, 20.0) / row_ms, latency_ms=rng.uniform(0.0, 10.0))
        bytes_per_token = 1.0
    requests = []
    for _ in range(rng.randint(1, 3)):
        cached = rng.choice((0, *[rng.randint(100, 6000)] * 5))
        requests.append(
            PlanInput(
                shape=PrefillShape(num_cached=cached, num_always=rng.randint(10, 300)),
                layer_bytes=bytes_per_token * cached,
            )
        )
    case = OracleCase(
        name=name,
        profile=random_profile(rng, num_layers, is_concave=name == "concave"),
        requests=tuple(requests),
        cost=cost,
        link=link,
        band=rng.choice((BudgetBand(), BudgetBand(), BudgetBand(floor=0.0, saturation=0.75))),
        budget_ms=0.0,
    )
    curves = DemandCurves(case.profile)
    ends = [
        total_ms(case, *point, np.full((1, len(requests)), coverage))[0]
        for point in _points(curves, num_layers)
        for coverage in (case.band.floor, case.band.saturation)
    ]
    budget_ms = rng.uniform(0.95 * min(ends), max(ends))
    return OracleCase(
        **{field: getattr(case, field) for field in case.__slots__ if field != "budget_ms"},
        budget_ms=budget_ms,
    )


def random_profile(rng: random.Random, num_layers: int, *, is_concave: bool) -> DemandProfile:
    """One or two signals, one to three anchors each; a deeper ranking is never worse."""
    anchors = []
    for signal in rng.sample((Signal.KV_DEV, Signal.QCI), rng.randint(1, 2)):
        depths = sorted(rng.sample(range(2, num_layers), rng.randint(1, min(3, num_layers - 2))))
        limits = (rng.randint(500, 4000), None) if rng.random() < 0.5 else (None,)
        grid = (0.0, *sorted(round(rng.uniform(0.01, 0.9), 3) for _ in range(6)), 1.0)
        known = [np.zeros(len(grid)) for _ in limits]
        for depth in depths:
            known = [
                np.maximum(lower, _random_curve(rng, grid, is_concave=is_concave))
                for lower in known
            ]
            buckets = tuple(
                DemandBucket(
                    max_context_tokens=limit,
                    num_requests=20,
                    coverages=grid,
                    enough=tuple(curve.tolist()),
                )
                for limit, curve in zip(limits, known, strict=True)
            )
            w = rng.randrange(depth)
            anchors.append(
                DemandAnchor(signal=signal, warmup_depth=w, probe_len=depth - w, buckets=buckets)
            )
    return DemandProfile(model="random", task="none", gate="none", anchors=tuple(anchors))


def _random_curve(rng: random.Random, grid: Sequence[float], *, is_concave: bool) -> Floats:
    if is_concave:
        power = rng.uniform(0.15, 0.9)
        return np.array(grid) ** power
    inside = sorted(rng.random() for _ in grid[1:])
    return np.array([*inside, 1.0])


if __name__ == "__main__":
    main()
