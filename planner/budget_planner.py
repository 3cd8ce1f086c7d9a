"""(S, w, p) and coverages with the most expected passes within a batch's budget.

Each signal that has been profiled is a candidate, at a few rank depths; a depth takes the splits
(w, p) that are cheapest under the timeline, at some coverages of the band. At each of these,
coverage goes to the request with the largest gain per millisecond until the budget, less a reserve,
is used (`planner/coverage_shift.py`, `planner/leftover.py`). The candidate with the most expected
passes runs; of equals, the faster one.

The band ends the search on both sides: under the cheapest floor's time that floor runs, and with
time for the saturation at every depth, the saturation runs where it is worth most.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module

import numpy as np

from planner.batch_times import BatchTimes
from planner.cost_model import CostModel
from planner.demand import DemandCurves
from planner.plan_candidates import PlanCandidates
from planner.plan_explanation import PlanCandidate, PlanExplanation
from planner.plan_search import (
    Choice,
    PlanCase,
    best_at,
    choose,
    exact,
    floor_at,
    splits_of_interest,
)
from planner.recompute_planner import (
    EDGE,
    BudgetBand,
    PlanInput,
    SlackPlanner,
    SlackPlannerConfig,
)
from planner.timeline import (
    LayerTimes,
    Link,
    arrivals_ms,
    layer_times,
    run_timeline,
    total_ms,
)
from planner.types import BatchPlan, Deviation, RequestPlan, Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPlannerConfig:
    signal: Signal | None = None  # None: the one that promises most; AUTO: the engine decides
    deviation: Deviation = Deviation.KV
    resolve: bool = True  # let the engine solve the coverage again while the batch runs
    band: BudgetBand = field(default_factory=BudgetBand)
    reserve: float = 0.15  # share of the budget kept for the cost model's error and the way back
    max_depths: int = 6  # rank depths to try between a signal's shallowest and deepest anchor
    depth: int | None = None  # the only rank depth, to compare with; None: the best of all
    choose_split: bool = True  # of a depth into WarmUp and Probe; else the least WarmUp, to compare

    def __post_init__(self) -> None:
        if not 0.0 <= self.reserve < 1.0:
            raise ValueError(f"reserve must be within 0 and 1, got {self.reserve}")
        if self.max_depths < 1:
            raise ValueError(f"max_depths must be 1 or more, got {self.max_depths}")
        if self.depth is not None and self.depth < 1:
            raise ValueError(f"depth must be 1 or more, got {self.depth}")
        if self.signal in (Signal.POSITION, Signal.QCI_FINAL):
            raise ValueError(f"signal must be kv_dev, qci or auto, got {self.signal}")


class BudgetPlanner:
    """Plans batches for the most expected passes within a budget; see the module.

    A request's config is planned as `SlackPlanner` does it. Arrays that do not depend on the batch
    are made once for each number of layers, when it is first asked about.
    """

    def __init__(self, config: BudgetPlannerConfig, curves: DemandCurves) -> None:
        """Raises ValueError for a signal that the demand profile knows nothing about."""
        import_module("planner.path_kernel")  # compiles it, before any plan is asked for
        self._config = config
        self._curves = curves
        self._signals = _candidate_signals(config.signal, curves)
        self._candidates: dict[int, PlanCandidates] = {}
        self._static = SlackPlanner(
            SlackPlannerConfig(
                deviation=config.deviation,
                resolve=config.resolve,
                band=config.band,
                reserve=config.reserve,
            )
        )

    def plan(
        self,
        requests: Sequence[PlanInput],
        *,
        budget_ms: float,
        cost: CostModel,
        link: Link | None = None,
    ) -> BatchPlan:
        """The batch's (S, w, p) and each request's coverage.

        budget_ms: from now to the first deadline; none, or less than none, runs the floor
        link: what the requests' `layer_bytes` come over; None: all KV is in host memory
        Raises ValueError for an empty batch, and for a budget that is not a number.
        """
        _check(requests, budget_ms)
        if any(request.config is not None for request in requests):
            return self._static_plan(requests, budget_ms, cost, link)
        order = _canonical_order(requests)
        ordered = [requests[idx] for idx in order]
        case = self._case(ordered, budget_ms, cost, link)
        choice = choose(case)
        (signal, w, p), coverages = case.point(choice), self._rounded(choice)
        expected_ms = case.expected_ms(choice, np.array(coverages))
        chances = case.chances(choice).tolist()
        plans: list[RequestPlan | None] = [None] * len(order)
        members = zip(ordered, order, coverages, chances, self._bands(case, choice), strict=True)
        for request, idx, coverage, chance, band in members:
            plans[idx] = RequestPlan(
                policy=request.policy,
                signal=signal,
                warmup_depth=w,
                probe_len=p,
                coverage=coverage,
                expected_ms=expected_ms,
                budget_ms=budget_ms,
                deviation=self._config.deviation,
                band=band,
                target_ms=case.target_ms,
                num_cached=request.shape.num_cached,
                cost_scale=cost.scale,
                pass_probability=chance,
            )
        return BatchPlan(
            requests=tuple(plan for plan in plans if plan is not None),
            budget_ms=budget_ms,
            expected_ms=expected_ms,
            expected_passes=sum(chances),
        )

    def floor_ms(
        self, requests: Sequence[PlanInput], cost: CostModel, link: Link | None = None
    ) -> float:
        """The time of the cheapest plan; of requests with a config, of theirs.

        Raises ValueError for an empty batch.
        """
        _check(requests, 0.0)
        if any(request.config is not None for request in requests):
            return self._static_plan(requests, 0.0, cost, link).expected_ms
        return self._case(requests, 0.0, cost, link).least_ms

    def explain(
        self,
        requests: Sequence[PlanInput],
        *,
        budget_ms: float,
        cost: CostModel,
        link: Link | None = None,
    ) -> PlanExplanation:
        """The plan, and what every other signal and depth would have given. Raises as `plan`."""
        plan = self.plan(requests, budget_ms=budget_ms, cost=cost, link=link)
        target_ms = (1.0 - self._config.reserve) * budget_ms
        if any(request.config is not None for request in requests):
            rule = "the requests' own configuration runs"
            return PlanExplanation(plan=plan, target_ms=target_ms, rule=rule, candidates=())
        order = _canonical_order(requests)
        ordered = [requests[idx] for idx in order]
        case = self._case(ordered, budget_ms, cost, link)
        chosen, groups = choose(case), case.candidates.group_of
        splits = splits_of_interest(case)
        chosen_group = None if chosen.split is None else groups[chosen.split]
        choices = [exact(case) if chosen.split is not None else chosen]
        for group in np.unique(groups[splits]):
            own = splits[groups[splits] == group]
            is_chosen = bool(group == chosen_group)
            choices.append(chosen if is_chosen else best_at(case, own) or floor_at(case, own))
        made = []
        for choice in choices:
            coverages, point = self._rounded(choice), case.point(choice)
            times = run_timeline(*_layers(ordered, coverages, point, cost, link))
            ends_ms = case.ends_ms(choice)
            made.append(
                PlanCandidate(
                    signal=point[0],
                    warmup_depth=point[1],
                    probe_len=point[2],
                    floor_ms=ends_ms[0],
                    saturation_ms=ends_ms[1],
                    coverages=tuple(coverages[order.index(i)] for i in range(len(order))),
                    expected_ms=times.total_ms,
                    expected_passes=choice.passes,
                    stall_ms=times.stall_ms,
                    is_chosen=choice is chosen,
                )
            )
        made.sort(key=lambda c: (not c.is_chosen, -c.expected_passes, c.expected_ms))
        return PlanExplanation(
            plan=plan, target_ms=target_ms, rule=chosen.rule, candidates=tuple(made)
        )

    def _bands(self, case: PlanCase, choice: Choice) -> list[tuple[float, float] | None]:
        """Where the engine may move each coverage to, when it knows the time that is left."""
        if choice.split is None or not self._config.resolve:
            return [None] * len(choice.coverages)
        floor = self._config.band.floor
        most = np.maximum(case.enough(choice.split), choice.coverages).tolist()
        return [(floor, max(floor, high)) for high in most]

    def _of_model(self, num_layers: int) -> PlanCandidates:
        if num_layers not in self._candidates:
            self._candidates[num_layers] = PlanCandidates(
                self._curves,
                self._signals,
                band=self._config.band,
                num_layers=num_layers,
                max_depths=self._config.max_depths,
                depth=self._config.depth,
                choose_split=self._config.choose_split,
            )
        return self._candidates[num_layers]

    def _times(
        self, requests: Sequence[PlanInput], cost: CostModel, link: Link | None
    ) -> BatchTimes:
        return BatchTimes(
            [request.shape for request in requests],
            sum(request.layer_bytes for request in requests),
            cost=cost,
            link=link,
        )

    def _case(
        self, requests: Sequence[PlanInput], budget_ms: float, cost: CostModel, link: Link | None
    ) -> PlanCase:
        candidates, times = self._of_model(cost.num_layers), self._times(requests, cost, link)
        ends = times.ends(candidates.splits)
        uniform_ms = candidates.uniform_ms(times, ends)
        is_bare = self._config.band.floor == 0
        return PlanCase(
            candidates=candidates,
            times=times,
            ends=ends,
            buckets=np.array([self._curves.bucket(_context_tokens(r)) for r in requests]),
            floor_ms=candidates.bare_ms(times) if is_bare else uniform_ms[0],
            uniform_ms=uniform_ms,
            target_ms=(1.0 - self._config.reserve) * budget_ms,
        )

    def _rounded(self, choice: Choice) -> list[float]:
        """Coverages that stand next to the ends of the band are at them."""
        band = self._config.band
        return [band.floor if r <= max(band.floor, EDGE) else r for r in choice.coverages.tolist()]

    def _static_plan(
        self, requests: Sequence[PlanInput], budget_ms: float, cost: CostModel, link: Link | None
    ) -> BatchPlan:
        """As they are configured; what is expected of them is added."""
        made = self._static.plan(requests, budget_ms=budget_ms, cost=cost)
        first = made.requests[0]
        point = (first.signal, first.warmup_depth, first.probe_len)
        expected_ms = made.expected_ms
        if link is not None:
            coverages = [plan.coverage for plan in made.requests]
            expected_ms = total_ms(*_layers(requests, coverages, point, cost, link))
        plans = tuple(
            replace(
                plan,
                expected_ms=expected_ms,
                pass_probability=self._static_chance(request, plan, cost.num_layers),
            )
            for request, plan in zip(requests, made.requests, strict=True)
        )
        return replace(
            made,
            requests=plans,
            expected_ms=expected_ms,
            expected_passes=sum(plan.pass_probability for plan in plans),
        )

    def _static_chance(self, request: PlanInput, plan: RequestPlan, num_layers: int) -> float:
        """Of a signal that has not been profiled: the least that any other promises."""
        if plan.warmup_depth == num_layers or plan.coverage == 1.0 or not request.shape.num_cached:
            return 1.0
        known = self._curves.signals
        return min(
            self._curves.enough(
                signal,
                plan.warmup_depth + plan.probe_len,
                _context_tokens(request),
                plan.coverage,
            )
            for signal in ((plan.signal,) if plan.signal in known else known)
        )


def _check(requests: Sequence[PlanInput], budget_ms: float) -> None:
    if not requests:
        raise ValueError("a batch needs at least one request")
    if math.isnan(budget_ms):
        raise ValueError(f"budget_ms must be a number, got {budget_ms}")


def _candidate_signals(wanted: Signal | None, curves: DemandCurves) -> tuple[Signal, ...]:
    """`auto` with curves of one signal alone is that signal: the other is not to be chosen."""
    ranking = tuple(s for s in (Signal.KV_DEV, Signal.QCI) if s in curves.signals)
    if wanted is None or (wanted is Signal.AUTO and wanted not in curves.signals):
        if ranking:
            return ranking
        raise ValueError("the demand profile has no anchors for kv_dev or qci")
    if wanted not in curves.signals:
        raise ValueError(f"the demand profile has no anchors for {wanted}")
    return (wanted,)


def _canonical_order(requests: Sequence[PlanInput]) -> list[int]:
    """Their indices in an order of their own, so that the caller's order decides nothing."""

    def key(idx: int) -> tuple[float, ...]:
        request = requests[idx]
        shape = request.shape
        tokens = _context_tokens(request)
        return (shape.num_cached, shape.num_always, tokens, request.layer_bytes)

    return sorted(range(len(requests)), key=key)


def _context_tokens(request: PlanInput) -> int:
    known = request.num_context_tokens
    return request.shape.num_cached if known is None else known


def _layers(
    requests: Sequence[PlanInput],
    coverages: Sequence[float],
    point: tuple[Signal, int, int],
    cost: CostModel,
    link: Link | None,
) -> tuple[LayerTimes, list[float]]:
    """A plan as the timeline wants it; point: (S, w, p)"""
    signal, w, p = point
    times = layer_times(
        [request.shape for request in requests],
        coverages,
        signal=signal,
        warmup_depth=w,
        probe_len=p,
        cost=cost,
    )
    layer_bytes = sum(request.layer_bytes for request in requests)
    if link is None or layer_bytes == 0:
        return times, []
    return times, arrivals_ms([layer_bytes] * (cost.num_layers - w), link)
