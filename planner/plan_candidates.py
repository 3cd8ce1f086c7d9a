"""Every (S, w, p) that a plan may choose, with what is known of it before any batch comes."""

from collections.abc import Sequence

import numpy as np

from planner.batch_times import BatchTimes, Ends, Floats, Ints, Splits
from planner.demand import DemandCurves
from planner.recompute_planner import EDGE, BudgetBand
from planner.types import Signal

# of the band; where loading takes turns with computing, the cheapest split changes step by step
UNIFORM_SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)


class PlanCandidates:
    """The splits (w, p) of each group, a group being a signal at a rank depth.

    The depths of a signal lie between its shallowest and its deepest anchor: nearer to the
    embeddings nothing has been measured, and further from them the same curve costs more.
    Arrays over coverages have one for each point of `coverages`, between which curves are straight.
    Raises ValueError if no anchor lies within the model.
    """

    def __init__(
        self,
        curves: DemandCurves,
        signals: Sequence[Signal],
        *,
        band: BudgetBand,
        num_layers: int,
        max_depths: int,
        depth: int | None = None,
        choose_split: bool = True,
    ) -> None:
        """depth: the only one; choose_split: else each has as little WarmUp as its signal allows"""
        self.groups = [
            (signal, each)
            for signal in signals
            for each in rank_depths(
                curves.anchor_depths(signal) if depth is None else (depth,), num_layers, max_depths
            )
        ]
        if not self.groups:
            raise ValueError(f"no anchor of {[*map(str, signals)]} is within {num_layers} layers")
        members = [
            depth_splits(signal, depth, least_warmup=curves.least_warmup(signal, depth))
            for signal, depth in self.groups
        ]
        if not choose_split:
            members = [splits[-1:] for splits in members]
        self.points = [
            (signal, w, p)
            for (signal, _), splits in zip(self.groups, members, strict=True)
            for w, p in splits
        ]
        self.splits = Splits.of(self.points)
        sizes = np.array([len(splits) for splits in members])
        self.group_of: Ints = np.repeat(np.arange(len(sizes)), sizes)
        # [num_groups, largest group]: indices of splits; short rows repeat their last one
        firsts = np.cumsum(sizes) - sizes
        steps = np.minimum(np.arange(sizes.max()), sizes[:, None] - 1)
        self._members: Ints = firsts[:, None] + steps

        # short of everything, where recomputed rows are selected ones
        low, high = band.floor, min(band.saturation, 1.0 - EDGE)
        self._inside = curves.grid[(curves.grid > low) & (curves.grid < high)]
        self.coverages: Floats = np.array([low, *self._inside, high])
        # [num_groups, num_buckets, num_coverages]
        self.chances: Floats = np.array(
            [
                [
                    np.interp(self.coverages, curves.grid, curves.curve(signal, depth, bucket))
                    for bucket in range(curves.num_buckets)
                ]
                for signal, depth in self.groups
            ]
        )
        self.filtered = self.splits.filtered(self.coverages)  # [num_splits, num_coverages]
        self.projected = self.splits.projected(self.coverages)
        # some coverages from the lowest to the highest, and what is known there
        self.uniform: Floats = low + np.array(UNIFORM_SHARES) * (high - low)
        groups, buckets = np.indices(self.chances.shape[:2])
        self.uniform_chances: Floats = np.array(
            [self.chance(groups, buckets, np.full(groups.shape, r)) for r in self.uniform]
        )
        self._uniform_filtered: Floats = self.splits.filtered(self.uniform).T.copy()
        self._uniform_projected: Floats = self.splits.projected(self.uniform).T.copy()
        self._make_segments(curves, low, high)
        # [num_groups, num_buckets]: from where on more coverage is worth nothing
        self.enough: Floats = low + self.widths.sum(axis=2)

    def _make_segments(self, curves: DemandCurves, low: float, high: float) -> None:
        """Envelopes as arrays, [num_groups, num_buckets, longest]; short ones end in nothing."""
        envelopes = [
            [
                curves.envelope(signal, depth, bucket, floor=low, saturation=high)
                for bucket in range(curves.num_buckets)
            ]
            for signal, depth in self.groups
        ]
        longest = max(1, *(len(one) for buckets in envelopes for one in buckets))
        shape = (len(self.groups), curves.num_buckets, longest)
        self.widths, self.gains = np.zeros(shape), np.zeros(shape)  # of each segment
        starts, stops = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for group, buckets in enumerate(envelopes):
            for bucket, envelope in enumerate(buckets):
                for idx, segment in enumerate(envelope):
                    at = (group, bucket, idx)
                    self.widths[at], self.gains[at] = segment.coverage, segment.gain
                    stop = segment.start + segment.coverage
                    starts[at] = np.abs(self.coverages - segment.start).argmin()
                    stops[at] = np.abs(self.coverages - stop).argmin()
        split = np.arange(len(self.points))[:, None, None]
        # what φ and the projected share grow by, [num_splits, num_buckets, longest]
        starts, stops = starts[self.group_of], stops[self.group_of]
        self.filtered_steps: Floats = self.filtered[split, stops] - self.filtered[split, starts]
        self.projected_steps: Floats = self.projected[split, stops] - self.projected[split, starts]

    def chance(self, group: Ints | int, buckets: Ints, coverages: Floats) -> Floats:
        """F of each request, shaped as `coverages`: [..., batch]; buckets: [batch]

        group: one for all, or [..., 1]
        """
        grid = self.coverages
        left = np.searchsorted(self._inside, coverages, side="right")
        low = self.chances[group, buckets, left]
        high = self.chances[group, buckets, left + 1]
        share = (coverages - grid[left]) / (grid[left + 1] - grid[left])
        chance: Floats = low + share * (high - low)
        return chance

    def uniform_ms(self, batch: BatchTimes, ends: Ends) -> Floats:
        """The time with one of the `uniform` coverages for all requests, [some, num_splits].

        ends: of all splits
        """
        patch_ms = np.array([[batch.patch_ms(r)] for r in self.uniform.tolist()])
        filter_ms = batch.filter_ms * self._uniform_filtered
        projected_ms = batch.projected_ms * self._uniform_projected if batch.loads else 0.0
        total: Floats = ends.total_ms(patch_ms, filter_ms, projected_ms)
        return batch.fixed_ms + total

    def bare_ms(self, batch: BatchTimes) -> Floats:
        """The time at coverage 0, where nothing is ranked, [num_splits]."""
        nothing = np.zeros(len(self.points))
        ends = batch.bare_ends(self.splits)
        total: Floats = ends.total_ms(batch.patch_ms(0.0) + nothing, nothing)
        return batch.fixed_ms + total

    def cheapest(self, times_ms: Floats) -> Ints:
        """The cheapest split of each group, [..., num_groups].

        times_ms: [..., num_splits]
        """
        best = times_ms[..., self._members].argmin(axis=-1)
        cheapest: Ints = self._members[np.arange(len(self.groups)), best]
        return cheapest


def depth_splits(signal: Signal, depth: int, *, least_warmup: int = 0) -> list[tuple[int, int]]:
    """(w, p) with w + p = depth, at least one Probe layer, and so much WarmUp if there is room.

    `kv_dev` ranks from layer 1 on where it can: at layer 0 a token's KV depends on that token
    alone, so that nothing deviates.
    """
    first = max(least_warmup, 0 if signal is Signal.QCI else 1)
    return [(w, depth - w) for w in range(depth - 1, min(first, depth - 1) - 1, -1)]


def rank_depths(anchors: Sequence[int], num_layers: int, max_depths: int) -> list[int]:
    """The anchors' depths within the model, and more between them, about `max_depths` in all."""
    known = sorted({depth for depth in anchors if 1 <= depth <= num_layers})
    if not known:
        return []
    between = np.linspace(known[0], known[-1], max_depths).round().astype(int).tolist()
    return sorted({*known, *between})
