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
SHARE_STEPS = 8
ONE_TOKEN = -1
SAFE = 1.001  # of a floor's time, for what is lost between lengths and shares
MAX_CELLS = 32_768
AMPLE_MS = 1e12  # more than any prefill takes
LOADING = (2.0, 1.4, 1.0)  # times as long as full prefill takes: when to look for deep WarmUps


def planned_passes(plan: BatchPlan) -> float:
    """The planner's own estimate."""
    return plan.expected_passes


def one_each(plan: BatchPlan) -> float:
    """For planners without a demand profile: whoever is on time passes."""
    return float(len(plan.requests))


@dataclass(frozen=True, slots=True)
class RequestCurve:
    """Of one request alone, on the reference machine, its stored KV in host memory.

    segments: (ms, passes) beyond the floor, the most passes per ms first; rise_ms: all of them.
    cold_ms: the floor's time where nothing is stored.
    exact_ms: the time of full prefill; infinite if the planner does not turn to it where stored KV
    takes too long to load.
    last_ms: the fixed time and the longest Patch layer; probed, loaded: token-layers of stored KV
    that have to be there by the end of the floor's Probe, and by the last Patch layer.
    deepest: of the layers behind the floor's WarmUp, the share that the planner adds to it at most
    where stored KV takes long to load.
    """

    floor_ms: float
    floor_passes: float
    segments: tuple[tuple[float, float], ...]
    rise_ms: float
    cold_ms: float
    exact_ms: float
    last_ms: float
    probed: float
    loaded: float
    deepest: float


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
    """Curves of many requests on one machine, as `decision_kernel.loaded_times` computes them.

    columns: floor_ms, floor_passes, the segments' ms, and their passes, [2 + 2 · NUM_SEGMENTS, Q]
    """

    columns: Floats

    @property
    def floor_ms(self) -> Floats:
        """[Q]"""
        floors: Floats = self.columns[0]
        return floors

    @property
    def floor_passes(self) -> Floats:
        """[Q]"""
        passes: Floats = self.columns[1]
        return passes

    @property
    def segment_ms(self) -> Floats:
        """[NUM_SEGMENTS, Q]"""
        lengths: Floats = self.columns[2 : 2 + NUM_SEGMENTS]
        return lengths

    @property
    def segment_passes(self) -> Floats:
        """[NUM_SEGMENTS, Q]"""
        gains: Floats = self.columns[2 + NUM_SEGMENTS :]
        return gains


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
        self._cells: dict[tuple[object, ...], RequestCurve] = {}
        self._slow_links: dict[tuple[object, ...], tuple[float, int]] = {}
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
        share = min(1.0, max(0, num_cached) / (num_tokens - 1))
        at = math.ceil(share * SHARE_STEPS - 1e-9)
        # with a single stored token, rows are selected ones, which cost what they do with more
        less = max(0, at - 1) if at != 1 else ONE_TOKEN
        above_share = 1.0 - (at - share * SHARE_STEPS)
        corners = [
            (self._cell(length, each, policy, config), by_length * by_share)
            for length, by_length in ((shorter, 1.0 - above), (longer, above))
            for each, by_share in ((less, 1.0 - above_share), (at, above_share))
        ]
        cold = [self._cell(length, 0, policy, config) for length in (shorter, longer)]
        return _blend(corners, cold, above=above)

    def _cell(
        self, length: int, share: int, policy: str, config: RecomputeConfig | None
    ) -> RequestCurve:
        """share: of the prompt that is stored, in steps up to all tokens but one; or `ONE_TOKEN`"""
        key = (policy, config, length, share)
        if key not in self._cells:
            if len(self._cells) >= MAX_CELLS:
                self._cells.clear()
                self._slow_links.clear()
            num_cached = 1 if share == ONE_TOKEN else round((length - 1) * share / SHARE_STEPS)
            self._cells[key] = self._measure(
                _input(length, num_cached, policy, config),
                *self._slow_link(length, policy, config),
            )
        return self._cells[key]

    def _slow_link(
        self, length: int, policy: str, config: RecomputeConfig | None
    ) -> tuple[float, int]:
        """`exact_ms` of `RequestCurve`, and the deepest WarmUp that falls short of full prefill."""
        key = (policy, config, length)
        if key not in self._slow_links:
            asked = replace(_input(length, length - 1, policy, config), layer_bytes=1.0)

            def floor(bytes_per_ms: float) -> BatchPlan:
                link = Link(bytes_per_ms=bytes_per_ms)
                return self._planner.plan([asked], budget_ms=0.0, cost=self.cost, link=link)

            exact_ms, deepest = math.inf, 0
            made, num_layers = floor(1.0 / AMPLE_MS), self.cost.num_layers
            if made.requests[0].warmup_depth == num_layers:
                exact_ms = made.expected_ms
                for times in LOADING:
                    w = floor(num_layers / (times * exact_ms)).requests[0].warmup_depth
                    if w < num_layers:
                        deepest = w
                        break
            self._slow_links[key] = exact_ms, deepest
        return self._slow_links[key]

    def _measure(self, asked: PlanInput, exact_ms: float, deepest: int) -> RequestCurve:
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
        probes = [max(1, made.probe_len) for made in floor.requests if made in reusing]
        behind = max((num_layers - made.warmup_depth for made in reusing), default=0)
        return RequestCurve(
            floor_ms,
            floor_passes,
            _envelope(points),
            rise_ms=max(0.0, points[1][0]),
            cold_ms=floor_ms,
            exact_ms=exact_ms,
            last_ms=max((self._last_ms(asked, made) for made in reusing), default=0.0),
            probed=num_cached * max(probes, default=0),
            loaded=num_cached * behind,
            deepest=max(0, deepest - num_layers + behind) / behind if behind else 0.0,
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
    corners: Sequence[tuple[RequestCurve, float]], cold: Sequence[RequestCurve], *, above: float
) -> RequestCurve:
    """Between two lengths and two shares of stored KV.

    corners: with their weights, that of the longer prompt with more stored the last: what passes is
    as there; cold: of both lengths with nothing stored; above: of the way between the two
    """
    floor_ms = rise_ms = probed = loaded = 0.0
    for curve, weight in corners:
        floor_ms += weight * curve.floor_ms
        rise_ms += weight * curve.rise_ms
        probed += weight * curve.probed
        loaded += weight * curve.loaded
    (shorter, _), (longer, _) = corners[1], corners[3]
    exact_ms = sum(
        weight * curve.exact_ms
        for curve, weight in ((shorter, 1.0 - above), (longer, above))
        if weight > 0.0
    )
    stretch = rise_ms / longer.rise_ms if longer.rise_ms > 0.0 else 0.0
    return RequestCurve(
        floor_ms=SAFE * floor_ms,
        floor_passes=longer.floor_passes,
        segments=tuple([(stretch * ms, passes) for ms, passes in longer.segments]),
        rise_ms=rise_ms,
        cold_ms=(1.0 - above) * cold[0].floor_ms + above * cold[1].floor_ms,
        exact_ms=exact_ms,
        last_ms=longer.last_ms,
        probed=probed,
        loaded=loaded,
        deepest=longer.deepest,
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
