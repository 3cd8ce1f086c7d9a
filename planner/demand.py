"""How likely a coverage is to be enough: a demand profile, evaluated.

F_d(r) of a signal is read from the profile's anchors: linear in the coverage between the measured
ones, linear in the rank depth between anchors, and outside them the nearest anchor's.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.demand_profile import DemandAnchor, DemandBucket, DemandProfile
from planner.types import Signal

Floats = NDArray[np.float64]

RANKING = (Signal.KV_DEV, Signal.QCI, Signal.AUTO)  # signals that need a Probe to say anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A step along the concave envelope of a demand curve."""

    start: float  # coverage
    coverage: float  # more of it
    gain: float  # probability that comes with it, more than 0


class DemandCurves:
    """A profile's curves, by signal, rank depth and bucket of context length.

    Buckets here are those of all anchors together: the context lengths are cut wherever one of the
    anchors cuts them. Of two anchors of a signal with the same rank depth, the lower curve counts.
    Anchors of `kv_dev` and `qci` without a Probe rank nothing and are left out. `auto` may end as
    either of these two: unless it has anchors of its own, it has the lower of their curves, where
    both have some.

    A rank depth can be split in many ways between WarmUp and Probe. A curve holds for the anchor's
    own split, and for those with more WarmUp, whose keys and values are exact in more layers.
    """

    def __init__(self, profile: DemandProfile) -> None:
        by_signal: dict[Signal, dict[int, list[DemandAnchor]]] = {}
        for anchor in profile.anchors:
            if anchor.signal not in RANKING or anchor.probe_len > 0:
                depths = by_signal.setdefault(anchor.signal, {})
                depths.setdefault(anchor.rank_depth, []).append(anchor)
        anchors = [a for depths in by_signal.values() for same in depths.values() for a in same]
        limits = {b.max_context_tokens for anchor in anchors for b in anchor.buckets}
        self._limits = sorted(limit for limit in limits if limit is not None)
        coverages = {r for anchor in anchors for b in anchor.buckets for r in b.coverages}
        self._grid = np.array(sorted({0.0, 1.0, *coverages}))
        self._warmups = {
            signal: {
                depth: max(anchor.warmup_depth for anchor in same)
                for depth, same in sorted(depths.items())
            }
            for signal, depths in by_signal.items()
        }
        self._curves: dict[Signal, dict[int, list[Floats]]] = {
            signal: {
                depth: [self._lowest(same, bucket) for bucket in range(self.num_buckets)]
                for depth, same in sorted(depths.items())
            }
            for signal, depths in by_signal.items()
        }
        if Signal.AUTO not in self._curves and {Signal.KV_DEV, Signal.QCI} <= self._curves.keys():
            self._curves[Signal.AUTO] = self._lower(Signal.KV_DEV, Signal.QCI)

    @property
    def signals(self) -> tuple[Signal, ...]:
        """Those with anchors."""
        return tuple(self._curves)

    @property
    def num_buckets(self) -> int:
        return len(self._limits) + 1

    @property
    def grid(self) -> Floats:
        """[num_coverages], from 0 to 1: every curve is straight between two neighbours."""
        return self._grid

    def anchor_depths(self, signal: Signal) -> tuple[int, ...]:
        """Rank depths of a signal's anchors, ascending; empty for a signal without any."""
        return tuple(self._curves.get(signal, {}))

    def least_warmup(self, signal: Signal, depth: int) -> int:
        """The fewest WarmUp layers that the curve of this rank depth holds for.

        Raises ValueError for a signal without anchors.
        """
        if signal not in self._warmups and signal in self._curves:  # `auto`, as either of the two
            return max(self.least_warmup(each, depth) for each in (Signal.KV_DEV, Signal.QCI))
        known = self._warmups.get(signal)
        if known is None:
            raise ValueError(f"the demand profile has no anchors for {signal}")
        return math.ceil(np.interp(depth, list(known), list(known.values())) - 1e-9)

    def bucket(self, num_context_tokens: int) -> int:
        """Index of the bucket that a context of this length is in."""
        return bisect_left(self._limits, num_context_tokens)

    def curve(self, signal: Signal, depth: float, bucket: int) -> Floats:
        """F_d over `grid`, [num_coverages]. Raises ValueError for a signal without anchors."""
        anchors = self._curves.get(signal)
        if not anchors:
            raise ValueError(f"the demand profile has no anchors for {signal}")
        depths = list(anchors)
        right = int(np.searchsorted(depths, depth))
        if right == 0 or right == len(depths):
            return anchors[depths[min(right, len(depths) - 1)]][bucket]
        low, high = depths[right - 1], depths[right]
        share = (depth - low) / (high - low)
        mixed: Floats = (1 - share) * anchors[low][bucket] + share * anchors[high][bucket]
        return mixed

    def enough(
        self, signal: Signal, depth: float, num_context_tokens: int, coverage: float
    ) -> float:
        """F_d(r): the probability that `coverage` is enough.

        Raises ValueError for a signal without anchors, or a coverage outside 0 and 1.
        """
        if not 0.0 <= coverage <= 1.0:
            raise ValueError(f"coverage must be within 0 and 1, got {coverage}")
        curve = self.curve(signal, depth, self.bucket(num_context_tokens))
        return float(np.interp(coverage, self._grid, curve))

    def envelope(
        self, signal: Signal, depth: int, bucket: int, *, floor: float, saturation: float
    ) -> tuple[Segment, ...]:
        """The concave envelope of F_d between two coverages; steeper segments come first.

        It starts on the curve at the floor, and ends where the curve stops to rise.
        """
        inside = self._grid[(self._grid > floor) & (self._grid < saturation)]
        coverages = np.array([floor, *inside, saturation])
        chances = np.interp(coverages, self._grid, self.curve(signal, depth, bucket))
        return concave_envelope(coverages.tolist(), chances.tolist())

    def _lower(self, one: Signal, other: Signal) -> dict[int, list[Floats]]:
        """By rank depth, from the depth on where both have been measured."""
        ends = [self.anchor_depths(signal) for signal in (one, other)]
        first = max(depths[0] for depths in ends)
        depths = sorted({first, *(d for known in ends for d in known if d > first)})
        return {
            depth: [
                np.minimum(self.curve(one, depth, bucket), self.curve(other, depth, bucket))
                for bucket in range(self.num_buckets)
            ]
            for depth in depths
        }

    def _lowest(self, anchors: Sequence[DemandAnchor], bucket: int) -> Floats:
        """[num_coverages]"""
        curves = []
        for anchor in anchors:
            found = self._bucket_of(anchor, bucket)
            # two equal coverages are a step; what counts is its upper end
            steps = dict(zip(found.coverages, found.enough, strict=True))
            curves.append(np.interp(self._grid, list(steps), list(steps.values())))
        lowest: Floats = np.min(curves, axis=0)
        return lowest

    def _bucket_of(self, anchor: DemandAnchor, bucket: int) -> DemandBucket:
        if bucket < len(self._limits):
            for own in anchor.buckets:
                if own.max_context_tokens is None or own.max_context_tokens >= self._limits[bucket]:
                    return own
        return anchor.buckets[-1]


def concave_envelope(coverages: Sequence[float], chances: Sequence[float]) -> tuple[Segment, ...]:
    """The rising part of the smallest concave curve over some points.

    coverages: ascending; chances: as many
    """
    corners: list[tuple[float, float]] = []
    for point in zip(coverages, chances, strict=True):
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) <= _slope(corners[-1], point):
            corners.pop()
        corners.append(point)
    return tuple(
        Segment(start=left[0], coverage=right[0] - left[0], gain=right[1] - left[1])
        for left, right in pairwise(corners)
        if right[1] > left[1] and right[0] > left[0]
    )


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    width = right[0] - left[0]
    return (right[1] - left[1]) / width if width > 0 else float("inf")


# (coverage, share of requests for which it is enough), at a shallow and at a deep ranking
_SHALLOW = ((0.0, 0.0), (0.05, 0.15), (0.15, 0.35), (0.3, 0.55), (0.5, 0.75), (0.8, 0.92), (1, 1))
_DEEP = ((0.0, 0.0), (0.05, 0.25), (0.15, 0.5), (0.3, 0.75), (0.5, 0.9), (0.8, 0.97), (1, 1))


def built_in_demand(num_layers: int, signal: Signal | None = None) -> DemandProfile:
    """For a model that has not been profiled. An assumption, not a measurement.

    Unless a signal is asked for, it is about `kv_dev`, as in CacheBlend (arXiv 2405.16444), and
    assumes nothing of other signals; `auto` may be either of its two. Ranked at layer 2, half of
    the requests need more than a quarter of their context and a quarter need more than half; ranked
    after a quarter of the layers, half of them need more than 15% and a quarter more than 30%. The
    context's length makes no difference. The curves lie below
    what the CacheSmith paper's summary tells (arXiv 2610.18925: a median of 20%, and of 10% behind
    five WarmUp layers), so plans err towards recomputing. They are concave, so that no coverage
    looks like a threshold.
    Raises ValueError for less than one layer.
    """
    if num_layers < 1:
        raise ValueError(f"num_layers must be 1 or more, got {num_layers}")
    shallow = min(2, num_layers)
    deep = max(shallow, num_layers // 4)
    points = {shallow: _SHALLOW, deep: _SHALLOW if deep == shallow else _DEEP}
    return DemandProfile(
        model="any",
        task="none",
        gate="assumed, not measured",
        anchors=tuple(
            DemandAnchor(
                signal=each or Signal.KV_DEV,
                warmup_depth=depth - 1,
                probe_len=1,
                buckets=(
                    DemandBucket(
                        max_context_tokens=None,
                        num_requests=1,
                        coverages=tuple(float(r) for r, _ in curve),
                        enough=tuple(float(share) for _, share in curve),
                    ),
                ),
            )
            for each in ((Signal.KV_DEV, Signal.QCI) if signal is Signal.AUTO else (signal,))
            for depth, curve in points.items()
        ),
    )
