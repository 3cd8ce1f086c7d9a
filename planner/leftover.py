"""From the stops of a path to coverages: what is left of the time there is spent.

The request that comes next on the path takes it. Where its curve is concave nothing is better, and
that is the end of it. Elsewhere, from each stop within the target any one request may rise as far
as the time allows; in batches of up to three, another one may rise to a measured coverage first.
More time adds choices and takes none away.
"""

import math
from dataclasses import dataclass

import numpy as np

from planner.batch_times import (
    BatchTimes,
    Floats,
    Ints,
    filtered_sum,
    filtered_sum_and_slope,
)
from planner.coverage_shift import Paths
from planner.plan_candidates import PlanCandidates

TINY = 1e-12  # a probability: less makes no difference
CLOSE = 1e-9  # the same, of what comes out of a bisection
NEWTON_STEPS = 2
BISECTIONS = 30
MAX_BRANCHED = 3  # requests: in a larger batch, what one of them cannot use matters less


@dataclass(frozen=True, slots=True)
class Spending:
    """Coverages at the split of a path, [batch], and the passes to expect of them."""

    path: int
    coverages: Floats
    passes: float


def spend_on_next(
    candidates: PlanCandidates, batch: BatchTimes, paths: Paths, path: int, target_ms: float
) -> tuple[Spending, bool]:
    """The last stop of a path, with the next request on it raised; whether that is the best.

    path: the index of one that has a stop within the target
    """
    num_segments, last = candidates.widths.shape[2], int(paths.num_within[path]) - 1
    split = int(paths.chosen[path])
    group = int(candidates.group_of[split])
    order = paths.order[path].tolist()
    coverages = [float(candidates.coverages[0])] * len(paths.buckets)
    for step in order[:last]:
        request, segment = divmod(step, num_segments)
        coverages[request] += candidates.widths[group, paths.buckets[request], segment]
    passes = float(paths.passes[path, last])
    stop = Spending(path, np.array(coverages), passes)
    if last == len(order):
        return stop, True
    request, segment = divmod(order[last], num_segments)
    bucket = paths.buckets[request]
    width = float(candidates.widths[group, bucket, segment])
    gain = float(candidates.gains[group, bucket, segment])
    start = coverages[request]
    raised = _rise(candidates, batch, paths, path, request, start, start + width, target_ms)
    if raised <= start:
        return stop, True
    curve = candidates.chances[group, bucket]
    more = float(np.interp(raised, candidates.coverages, curve)) - float(
        np.interp(start, candidates.coverages, curve)
    )
    is_on_envelope = more >= gain * (raised - start) / width - CLOSE
    coverages[request] = raised
    return Spending(path, np.array(coverages), passes + more), is_on_envelope or len(coverages) == 1


def _rise(
    candidates: PlanCandidates,
    batch: BatchTimes,
    paths: Paths,
    path: int,
    request: int,
    start: float,
    stop: float,
    target_ms: float,
) -> float:
    """The highest coverage up to `stop` of a request that stands at `start`, within the target."""
    ends, last = paths.ends, int(paths.num_within[path]) - 1
    left = target_ms - batch.fixed_ms
    layers, patch_ms = int(ends.layers[path]), float(paths.patch_ms[path, last])
    slope = float(batch.slopes[request])
    rate = layers * slope
    # what the three terms leave
    behind = left - float(ends.start[path] + paths.filter_ms[path, last]) - layers * patch_ms
    probed = left - float(ends.probed[path] + paths.projected_ms[path, last]) - layers * patch_ms
    loaded = left - float(ends.loaded[path]) - patch_ms
    if min(behind, probed, loaded) < 0:
        return start
    high = float(stop)
    if slope > 0:
        high = min(high, start + min(loaded / slope, behind / rate, probed / rate))
    split = int(paths.chosen[path])
    probe = int(candidates.splits.probe[split])
    weight = float(batch.filter_slopes[request] * candidates.splits.filters[split])
    if weight == 0 or probe == 1:
        return high
    exponent = 1.0 / probe
    share = float(batch.projected_slopes[request])

    def fits(coverage: float) -> bool:
        kept = math.pow(coverage, exponent)
        used = rate * (coverage - start)
        filtered = weight * ((kept - coverage) / (1.0 - kept) - at_start[0])
        projected = share * (math.pow(coverage, 1.0 - exponent) - at_start[1])
        return used + filtered <= behind and used + projected <= probed

    kept = math.pow(start, exponent)
    at_start = ((kept - start) / (1.0 - kept), math.pow(start, 1.0 - exponent))
    if fits(high):
        return high
    low = start
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def spend(
    candidates: PlanCandidates, batch: BatchTimes, paths: Paths, some: Ints, target_ms: float
) -> Spending:
    """The best of what some paths allow.

    some: [num_some], indices of paths that have a stop within the target
    """
    left = _Leftover(candidates, batch, paths, some, target_ms)
    stops = left.stops()
    best = left.spent(stops)
    if 1 < len(batch.slopes) <= MAX_BRANCHED and best.passes < paths.bounds[some].max() - TINY:
        other = left.spent(left.branches(stops))
        if other.passes > best.passes + TINY:
            return other
    return best


@dataclass(frozen=True, slots=True)
class _Stops:
    """Coverages that may be raised, and what they take."""

    coverages: Floats  # [num_some, num_stops, batch]
    passes: Floats  # [num_some, num_stops, 1]; -inf for one that takes longer than the target
    patch_ms: Floats  # [num_some, num_stops, 1]
    filter_ms: Floats  # [num_some, num_stops, 1]


class _Leftover:
    """Some paths of one batch. Arrays over them are [num_some, 1, 1]."""

    def __init__(
        self,
        candidates: PlanCandidates,
        batch: BatchTimes,
        paths: Paths,
        some: Ints,
        target_ms: float,
    ) -> None:
        self._candidates, self._batch, self._paths, self._some = candidates, batch, paths, some
        self._chosen = paths.chosen[some, None, None]
        self._groups = candidates.group_of[self._chosen]
        self._probe = candidates.splits.probe[self._chosen]
        self._filters = batch.filter_slopes * candidates.splits.filters[self._chosen]
        self._does_filter = bool(self._filters.any())
        self._layers = paths.ends.layers[some, None, None]
        self._rates = self._layers * batch.slopes
        # what the three terms of the total leave
        left = target_ms - batch.fixed_ms
        self._to_load = left - paths.ends.loaded[some, None, None]
        # the last Probe layer at its longest, so that two terms are linear in a coverage
        projected_ms = batch.projected_ms * candidates.projected[self._chosen, -1]
        self._to_probe = left - paths.ends.probed[some, None, None] - projected_ms
        self._to_start = left - paths.ends.start[some, None, None]

    def stops(self) -> _Stops:
        """Those of the paths, within the target."""
        candidates, paths, some = self._candidates, self._paths, self._some
        counts = paths.num_within[some]
        num_stops = int(counts.max())
        owners, taken = np.divmod(paths.order[some, : num_stops - 1], candidates.widths.shape[2])
        steps = np.zeros((len(some), num_stops, len(paths.buckets)))
        steps[:, 0] = candidates.coverages[0]
        steps[np.arange(len(some))[:, None], np.arange(1, num_stops), owners] = candidates.widths[
            self._groups[:, 0], paths.buckets[owners], taken
        ]
        is_within = np.arange(num_stops) < counts[:, None]
        return _Stops(
            coverages=np.minimum(np.cumsum(steps, axis=1), candidates.coverages[-1]),
            passes=np.where(is_within, paths.passes[some, :num_stops], -np.inf)[..., None],
            patch_ms=paths.patch_ms[some, :num_stops, None],
            filter_ms=paths.filter_ms[some, :num_stops, None],
        )

    def branches(self, stops: _Stops) -> _Stops:
        """From every stop, every request alone at every higher coverage that was measured."""
        grid, batch = self._candidates.coverages, self._batch
        now = stops.coverages[..., None]  # by request, then by coverage of the grid
        is_higher = (grid > now + TINY) & batch.reuses[:, None]
        patch_ms = stops.patch_ms[..., None] + batch.slopes[:, None] * (grid - now)
        filter_ms = np.broadcast_to(stops.filter_ms[..., None], patch_ms.shape)
        if self._does_filter:
            more = filtered_sum(self._probe[..., None], grid)
            more = more - filtered_sum(self._probe, stops.coverages)[..., None]
            filter_ms = filter_ms + self._filters[..., None] * more
        curves = self._candidates.chances[self._groups[..., 0], self._paths.buckets]
        gains = curves[:, None] - self._chance(stops.coverages)[..., None]
        behind = self._layers[..., None] * patch_ms
        is_within = patch_ms <= self._to_load[..., None]
        is_within &= behind <= self._to_probe[..., None]
        is_within &= behind + filter_ms <= self._to_start[..., None]
        passes = np.where(is_higher & is_within, stops.passes[..., None] + gains, -np.inf)
        # each request's branch has the coverages of its stop, and its own one replaced
        requests = np.arange(len(batch.slopes))
        coverages = np.repeat(stops.coverages[:, :, None, None], len(requests), axis=2)
        coverages = np.repeat(coverages, len(grid), axis=3)
        coverages[:, :, requests, :, requests] = grid
        num_some = len(self._some)
        return _Stops(
            coverages=coverages.reshape(num_some, -1, len(requests)),
            passes=passes.reshape(num_some, -1, 1),
            patch_ms=patch_ms.reshape(num_some, -1, 1),
            filter_ms=filter_ms.reshape(num_some, -1, 1),
        )

    def spent(self, stops: _Stops) -> Spending:
        """The best stop, with one request raised if that is worth anything."""
        raised = self._raised(stops)
        gains = self._chance(raised) - self._chance(stops.coverages)
        values = stops.passes + gains * self._batch.reuses
        path, stop, request = np.unravel_index(int(values.argmax()), values.shape)
        best = float(values[path, stop, request])
        plain, last = np.unravel_index(int(stops.passes.argmax()), stops.passes.shape[:2])
        as_it_is = float(stops.passes[plain, last, 0])
        if best <= as_it_is + TINY:
            return Spending(int(self._some[plain]), stops.coverages[plain, last], as_it_is)
        coverages = stops.coverages[path, stop].copy()
        coverages[request] = self._first_as_good(path, request, raised[path, stop, request])
        return Spending(int(self._some[path]), coverages, best)

    def _raised(self, stops: _Stops) -> Floats:
        """How far each request alone can rise; [num_some, num_stops, batch].

        Two terms of the total are linear in a coverage. The third, where Probe filters, is convex
        in r^(1/p), so that a chord's root lies below its own, and concave in r, so that Newton's
        steps from there approach it from below: the plan stays within the target.
        """
        start, slopes = stops.coverages, np.maximum(self._batch.slopes, 1e-300)
        room = np.minimum(self._to_load, self._to_probe / self._layers) - stops.patch_ms
        highest = self._candidates.coverages[-1]
        limit: Floats = np.maximum(start, np.minimum(start + room / slopes, highest))
        behind = self._to_start - self._layers * stops.patch_ms - stops.filter_ms
        if not self._does_filter:
            free: Floats = np.minimum(start + behind / np.maximum(self._rates, 1e-300), limit)
            return np.maximum(start, free)
        probe, at_start = self._probe, filtered_sum(self._probe, start)
        used = self._rates * (limit - start) + self._filters * (
            filtered_sum(probe, limit) - at_start
        )
        share = np.minimum(np.maximum(behind / np.maximum(used, 1e-300), 0.0), 1.0)
        kept = start ** (1.0 / probe)
        now = (kept + share * (limit ** (1.0 / probe) - kept)) ** probe
        now = np.maximum(start, np.minimum(now, limit))
        for _ in range(NEWTON_STEPS):
            filtered, slope = filtered_sum_and_slope(probe, now)
            used = self._rates * (now - start) + self._filters * (filtered - at_start)
            rate = np.maximum(self._rates + self._filters * slope, 1e-300)
            now = np.maximum(start, np.minimum(now + (behind - used) / rate, limit))
        raised: Floats = now
        return raised

    def _chance(self, coverages: Floats) -> Floats:
        """As `coverages`: [num_some, num_stops, batch]"""
        return self._candidates.chance(self._groups, self._paths.buckets, coverages)

    def _first_as_good(self, path: np.intp, request: np.intp, coverage: float) -> float:
        """Down from where the curve is flat to where it became so."""
        grid = self._candidates.coverages
        curve = self._candidates.chances[self._groups[path, 0, 0], self._paths.buckets[request]]
        chance = np.interp(coverage, grid, curve)
        return min(float(coverage), float(grid[np.searchsorted(curve, chance - TINY)]))
