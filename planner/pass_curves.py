"""What time is worth to a request: its floor cost, and the passes that more time buys.

The scheduler compares dozens of batches in a decision and cannot plan each of them. It asks the
planner for single requests instead, a few budgets each, and keeps the concave envelope. The curve
of a batch is then the merge of its members' segments, the steepest first: what a planner that
shifts coverage to the best marginal pass probability would get. The few batches that look best
are planned for real.

Costs are linear in the share of a prompt that is stored, and all but linear between lengths that
are a 32nd of an octave apart, so that a few hundred curves serve every request.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost_model import CostModel, PrefillShape
from planner.recompute_planner import PlanInput, RecomputePlanner
from planner.timeline import Link, layer_times
from planner.types import BatchPlan, RecomputeConfig, RequestPlan

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
PassesOf = Callable[[BatchPlan], float]

SAMPLES = (0.2, 0.55)  # between the floor's and the saturation's time
NUM_SEGMENTS = len(SAMPLES) + 1
STEPS_PER_OCTAVE = 32
COVERAGE_STEPS = 64
MAX_CELLS = 16_384
AMPLE_MS = 1e12  # more than any prefill takes
NO_LINK = Link(bytes_per_ms=1.0 / AMPLE_MS)  # too slow for any KV, at a byte per layer


def planned_passes(plan: BatchPlan) -> float:
    """The planner's own estimate."""
    return plan.expected_passes


def one_each(plan: BatchPlan) -> float:
    """For planners without a demand profile: whoever is on time passes."""
    return float(len(plan.requests))


@dataclass(frozen=True, slots=True)
class RequestCurve:
    """Of one request alone, on the reference machine, its stored KV in host memory.

    segments: (ms, passes) beyond the floor, the most passes per ms first.
    cold_ms: the floor's time where nothing is stored.
    exact_ms: the time of full prefill; infinite if the planner does not turn to it where stored KV
    takes too long to load.
    last_ms: the fixed time and the longest Patch layer; probed, loaded: token-layers of stored KV
    that have to be there by the end of the Probe, and by the last Patch layer.
    """

    floor_ms: float
    floor_passes: float
    segments: tuple[tuple[float, float], ...]
    cold_ms: float
    exact_ms: float
    last_ms: float
    probed: float
    loaded: float


@dataclass(frozen=True, slots=True)
class Pace:
    """What sets a machine apart from the reference.

    speed: how much longer it computes; token_ms: until the stored KV of one token is loaded, in
    one layer; latency_ms: until the first is. Loading does not go with the speed.
    """

    speed: float = 1.0
    token_ms: float = 0.0
    latency_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Times:
    """Curves of many requests on one machine: [num_requests], segments [NUM_SEGMENTS, ...]."""

    floor_ms: Floats
    floor_passes: Floats
    segment_ms: Floats
    segment_passes: Floats

    def loading(
        self, pace: Pace, *, exact_ms: Floats, last_ms: Floats, probed: Floats, loaded: Floats
    ) -> "Times":
        """With the waits for stored KV; as of `RequestCurve`, at this machine's speed.

        A prefill ends, by the terms of `batch_times`, no later than it would without waits, the
        Probe's KV loaded first; or, where that is later, one Patch layer after the last KV. Until
        then more coverage costs nothing. Full prefill waits for nothing and passes for sure, so it
        is the floor where it takes no longer.
        """
        latency_ms = pace.latency_ms * (loaded > 0.0)
        floor_ms = self.floor_ms + latency_ms + pace.token_ms * probed
        free_ms = np.maximum(latency_ms + pace.token_ms * loaded + last_ms - floor_ms, 0.0)
        paid_ms = np.maximum(np.cumsum(self.segment_ms, axis=0) - free_ms, 0.0)
        paid_ms[1:] -= paid_ms[:-1].copy()
        paid_passes = self.segment_passes * (paid_ms / np.maximum(self.segment_ms, 1e-12))
        free_passes = (self.segment_passes - paid_passes).sum(axis=0)
        floor_ms, floor_passes = floor_ms + free_ms, self.floor_passes + free_passes
        is_exact = exact_ms < floor_ms
        return Times(
            np.where(is_exact, exact_ms, floor_ms),
            np.where(is_exact, 1.0, floor_passes),
            np.where(is_exact, 0.0, paid_ms),
            np.where(is_exact, 0.0, paid_passes),
        )


class CurveBook:
    """Curves by kind and length of a request, made when they are first asked for.

    cost: of the reference machine, at scale 1; the scheduler multiplies by a replica's own.
    reserve: share of a budget that the planner keeps back.
    """

    def __init__(
        self, planner: RecomputePlanner, passes: PassesOf, cost: CostModel, *, reserve: float
    ) -> None:
        self._planner = planner
        self._passes = passes
        self._reserve = reserve
        self._cells: dict[tuple[object, ...], tuple[RequestCurve, RequestCurve]] = {}
        self.cost = cost

    def curve(
        self, num_tokens: int, num_cached: int, *, policy: str, config: RecomputeConfig | None
    ) -> RequestCurve:
        """Of a prompt of `num_tokens`, of which the KV of `num_cached` is stored."""
        num_tokens = max(2, num_tokens)
        if config is not None:
            steps = math.ceil(config.coverage * COVERAGE_STEPS)
            config = replace(config, coverage=min(1.0, steps / COVERAGE_STEPS))
        step = math.ceil(STEPS_PER_OCTAVE * math.log2(num_tokens) - 1e-9)
        shorter, longer = _length(step - 1), _length(step)
        above = 1.0 if longer <= shorter else (num_tokens - shorter) / (longer - shorter)
        return _blend(
            self._cell(shorter, policy, config),
            self._cell(longer, policy, config),
            above=above,
            share=min(1.0, max(0, num_cached - 1) / max(1, num_tokens - 2)),
        )

    def _cell(
        self, length: int, policy: str, config: RecomputeConfig | None
    ) -> tuple[RequestCurve, RequestCurve]:
        """With nothing stored but a token, and with everything but one."""
        key = (policy, config, length)
        if key not in self._cells:
            if len(self._cells) >= MAX_CELLS:
                self._cells.clear()
            exact_ms = self._exact_ms(length, policy, config)
            cold, hot = (
                self._measure(_input(length, num_cached, policy, config), exact_ms)
                for num_cached in (1, length - 1)
            )
            self._cells[key] = cold, hot
        return self._cells[key]

    def _exact_ms(self, length: int, policy: str, config: RecomputeConfig | None) -> float:
        """As of `RequestCurve`."""
        asked = replace(_input(length, length - 1, policy, config), layer_bytes=1.0)
        made = self._planner.plan([asked], budget_ms=0.0, cost=self.cost, link=NO_LINK)
        is_exact = made.requests[0].warmup_depth == self.cost.num_layers
        return made.expected_ms if is_exact else math.inf

    def _measure(self, asked: PlanInput, exact_ms: float) -> RequestCurve:
        def plan(budget_ms: float) -> BatchPlan:
            return self._planner.plan([asked], budget_ms=budget_ms, cost=self.cost)

        floor, most = plan(0.0), plan(AMPLE_MS)
        floor_ms, floor_passes = floor.expected_ms, self._passes(floor)
        most_ms, most_passes = most.expected_ms, self._passes(most)
        points = [(0.0, 0.0), (most_ms - floor_ms, most_passes - floor_passes)]
        if points[1][0] > 0.0 and points[1][1] > 0.0:
            for sample in SAMPLES:
                target_ms = floor_ms + sample * (most_ms - floor_ms)
                made = plan(target_ms / (1.0 - self._reserve))
                points.append((made.expected_ms - floor_ms, self._passes(made) - floor_passes))
        num_cached, num_layers = asked.shape.num_cached, self.cost.num_layers
        plans = (*floor.requests, *most.requests)
        reusing = [made for made in plans if made.warmup_depth < num_layers]
        behind = max((num_layers - made.warmup_depth for made in reusing), default=0)
        return RequestCurve(
            floor_ms,
            floor_passes,
            _envelope(points),
            cold_ms=floor_ms,
            exact_ms=exact_ms,
            last_ms=max((self._last_ms(asked, made) for made in reusing), default=0.0),
            probed=num_cached * max((max(1, made.probe_len) for made in reusing), default=0),
            loaded=num_cached * behind,
        )

    def _last_ms(self, asked: PlanInput, made: RequestPlan) -> float:
        """The fixed time and one Patch layer of a plan."""
        times = layer_times(
            [asked.shape],
            [made.coverage],
            signal=made.signal,
            warmup_depth=made.warmup_depth,
            probe_len=made.probe_len,
            cost=self.cost,
        )
        return times.fixed_ms + times.patch_ms


def _input(length: int, num_cached: int, policy: str, config: RecomputeConfig | None) -> PlanInput:
    shape = PrefillShape(num_cached=num_cached, num_always=length - num_cached)
    return PlanInput(shape=shape, policy=policy, config=config, num_context_tokens=length)


def _length(step: int) -> int:
    return max(2, math.ceil(math.exp2(step / STEPS_PER_OCTAVE) - 1e-9))


def _blend(
    shorter: tuple[RequestCurve, RequestCurve],
    longer: tuple[RequestCurve, RequestCurve],
    *,
    above: float,
    share: float,
) -> RequestCurve:
    """Between two lengths, each with nothing stored and with everything.

    above: of the way from the shorter to the longer; share: of the prompt that is stored. Where
    nothing is stored there is nothing to choose, so time for more coverage is that of the stored
    share, in the steps of the longer prompt.
    """

    def mix(a: float, b: float, weight: float) -> float:
        return (1.0 - weight) * a + weight * b

    cold_ms = mix(shorter[0].floor_ms, longer[0].floor_ms, above)
    hot_ms = mix(shorter[1].floor_ms, longer[1].floor_ms, above)
    exact_ms = math.inf
    if math.isfinite(shorter[1].exact_ms) and math.isfinite(longer[1].exact_ms):
        exact_ms = mix(shorter[1].exact_ms, longer[1].exact_ms, above)
    long_rise = sum(ms for ms, _ in longer[1].segments)
    rise = mix(sum(ms for ms, _ in shorter[1].segments), long_rise, above)
    stretch = share * rise / long_rise if long_rise > 0.0 else 0.0
    return RequestCurve(
        floor_ms=mix(cold_ms, hot_ms, share),
        floor_passes=mix(longer[0].floor_passes, longer[1].floor_passes, share),
        segments=tuple((stretch * ms, passes) for ms, passes in longer[1].segments),
        cold_ms=cold_ms,
        exact_ms=exact_ms,
        last_ms=longer[1].last_ms,
        probed=share * longer[1].probed,
        loaded=share * longer[1].loaded,
    )


def _envelope(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Segments of the smallest concave rising function above the points, from (0, 0).

    Time that brings nothing is a last segment without passes.
    """
    hull: list[tuple[float, float]] = []
    highest = 0.0
    for x, y in sorted(set(points)):
        highest = max(highest, y)
        while len(hull) >= 2:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) > (highest - y0) * (x1 - x0):
                break
            hull.pop()
        if hull and x <= hull[-1][0]:
            continue
        hull.append((x, highest))
    return tuple((b[0] - a[0], b[1] - a[1]) for a, b in pairwise(hull))
