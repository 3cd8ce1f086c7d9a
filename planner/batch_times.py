"""The timeline of one batch in closed form, for many (w, p) at once.

`run_timeline` walks layers; a planner compares hundreds of plans and cannot. Three facts make its
recurrence an expression: stored KV arrives at even intervals, Patch layers take equal time, and no
Probe layer takes longer than the one before. So the only waits that can decide the end are those
for the first and the last Probe layer and for the last Patch layer. With n = L - w Patch layers of
c milliseconds each

    total = fixed + max(start + v + n·c, probed + u + n·c, loaded + c)

start: WarmUp's end, or the first layer's arrival, and what Probe takes at any coverage; probed: the
arrival of the last Probe layer's KV, and that layer; loaded: the arrival of the last layer's KV.
c, v and u are sums over the requests: c is linear in each coverage r; v, what a filtering Probe
takes for the rows that it keeps (it walks them, and compares them in the next layer), is f·φ(r),
φ(r) being the sum of r^(s/p) over the steps s = 1..p-1 (see `planner/cost_model.py`); u, what its
last layer compares of them, is g·r^((p-1)/p).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost_model import CostModel, PrefillShape
from planner.timeline import Link
from planner.types import Signal

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Ways to reach a rank depth, as arrays over them; each has at least one Probe layer."""

    warmup: Ints  # [num_splits], w
    probe: Ints  # p
    filters: Floats  # 1 where Probe filters the context (`kv_dev`, `auto`), else 0
    questions: Ints  # layers that the suffix walks: p for `qci`, 1 for `auto`, else 0

    @classmethod
    def of(cls, points: Sequence[tuple[Signal, int, int]]) -> "Splits":
        """From (signal, w, p) of each."""
        walked = {Signal.QCI: None, Signal.AUTO: 1, Signal.KV_DEV: 0}
        questions = [p if walked[s] is None else walked[s] for s, _, p in points]
        return cls(
            warmup=np.array([w for _, w, _ in points], dtype=np.int64),
            probe=np.array([p for _, _, p in points], dtype=np.int64),
            filters=np.array([float(s is not Signal.QCI) for s, _, _ in points]),
            questions=np.array(questions, dtype=np.int64),
        )

    def take(self, chosen: Ints) -> "Splits":
        return Splits(
            warmup=self.warmup[chosen],
            probe=self.probe[chosen],
            filters=self.filters[chosen],
            questions=self.questions[chosen],
        )

    def filtered(self, coverages: Floats) -> Floats:
        """φ(r) of each split at each coverage; [num_splits, num_coverages], 0 where none filters.

        coverages: [num_coverages], 0 or more, less than 1
        """
        phi: Floats = self.filters[:, None] * filtered_sum(self.probe[:, None], coverages)
        return phi

    def projected(self, coverages: Floats) -> Floats:
        """r^((p-1)/p), as `filtered`; 0 where the last Probe layer is the first."""
        filters = (self.filters * (self.probe > 1))[:, None]
        kept: Floats = filters * coverages ** (1.0 - 1.0 / self.probe[:, None])
        return kept


def filtered_sum(probe: Ints | int, coverages: Floats) -> Floats:
    """φ(r), a geometric series; coverages: 0 or more, less than 1"""
    kept = coverages ** (1.0 / probe)  # of each step to the next
    phi: Floats = (kept - coverages) / (1.0 - kept)
    return phi


def filtered_sum_and_slope(probe: Ints, coverages: Floats) -> tuple[Floats, Floats]:
    """φ(r) and its derivative."""
    coverages = np.maximum(coverages, 1e-300)  # at 0 the derivative is infinite
    kept = coverages ** (1.0 / probe)
    kept_slope = kept / (probe * coverages)
    gone = 1.0 - kept
    phi = (kept - coverages) / gone
    return phi, (kept_slope - 1.0 + phi * kept_slope) / gone


@dataclass(frozen=True, slots=True)
class Ends:
    """The terms of `total`, [num_splits] each."""

    layers: Ints  # n
    start: Floats
    probed: Floats
    loaded: Floats

    def take(self, chosen: Ints) -> "Ends":
        return Ends(
            layers=self.layers[chosen],
            start=self.start[chosen],
            probed=self.probed[chosen],
            loaded=self.loaded[chosen],
        )

    def terms_ms(
        self, patch_ms: Floats, filter_ms: Floats, projected_ms: Floats | float = 0.0
    ) -> Floats:
        """The three terms without the fixed time, [3, ..., num_splits].

        patch_ms, filter_ms, projected_ms: c, v and u, [..., num_splits]; u counts with a link only
        """
        behind = self.layers * patch_ms
        terms = np.empty((3, *behind.shape))
        np.add(self.start + filter_ms, behind, out=terms[0])
        np.add(self.probed + projected_ms, behind, out=terms[1])
        np.add(self.loaded, patch_ms, out=terms[2])
        return terms

    def total_ms(
        self, patch_ms: Floats, filter_ms: Floats, projected_ms: Floats | float = 0.0
    ) -> Floats:
        """Without the fixed time; arguments as of `terms_ms`."""
        total: Floats = self.terms_ms(patch_ms, filter_ms, projected_ms).max(axis=0)
        return total


class BatchTimes:
    """What one batch costs: constants that every plan for it shares."""

    def __init__(
        self,
        shapes: Sequence[PrefillShape],
        layer_bytes: float,
        *,
        cost: CostModel,
        link: Link | None,
    ) -> None:
        """layer_bytes: of one layer of the batch's stored KV"""
        scale, row = cost.scale, cost.scale * cost.row_ms
        cached = np.array([shape.num_cached for shape in shapes], dtype=np.float64)
        always = np.array([shape.num_always for shape in shapes], dtype=np.float64)
        tokens = cached + always
        selected = row + scale * cost.selected_pair_ms * tokens / 2  # a selected row, [batch]
        dense = row + scale * cost.pair_ms * tokens / 2
        compare = scale * cost.compare_ms
        stitch = cost.stitched_layer_ms(len(shapes)) + scale * cost.reuse_ms * float(cached.sum())
        self.fixed_ms = cost.batch_fixed_ms(len(shapes))
        self.num_layers = cost.num_layers
        self.reuses = cached > 0
        self.slopes = selected * cached  # of a Patch layer from coverage 0 to 1, [batch]
        self.filter_slopes = (selected + compare) * cached  # f, [batch]
        self.filter_ms = float(self.filter_slopes.sum())  # with one coverage for all
        self.projected_slopes = compare * cached  # g
        self.projected_ms = float(self.projected_slopes.sum())
        self._warmup_ms = scale * cost.layer_ms + float(dense @ tokens)
        self._patch_ms = stitch + float(np.where(cached > 0, selected, dense) @ always)
        layer = scale * cost.layer_ms
        self._read_ms = stitch - layer  # a layer's KV, of which little or nothing is walked
        self._question_ms = layer + float((2 * selected - row) @ always)  # sees all keys, not half
        self._compare_ms = compare * float(tokens.sum())  # the first layer of a filtering Probe
        self._compare_always_ms = compare * float(always.sum())
        # walking those that are always kept, and leaving out others
        self._kept_ms = layer + scale * cost.filter_ms + float(selected @ always)
        self._layer_ms = self._latency_ms = 0.0
        self.loads = link is not None and layer_bytes > 0
        if link is not None and self.loads:
            self._layer_ms, self._latency_ms = layer_bytes / link.bytes_per_ms, link.latency_ms

    def patch_ms(self, coverages: Floats | float) -> float:
        """c; coverages: [batch], or one for all"""
        return self._patch_ms + float((self.slopes * coverages).sum())

    def ends(self, splits: Splits) -> Ends:
        """At coverages that need a Probe."""
        bare, p = self.bare_ends(splits), splits.probe
        always = p * self._read_ms + splits.questions * self._question_ms
        kept_ms = self._kept_ms + self._compare_always_ms
        always += splits.filters * (self._compare_ms + (p - 1) * kept_ms)
        probed = bare.probed
        if self.loads:  # one Probe layer is the first and the last; `start` has it
            last = self._latency_ms + p * self._layer_ms + self._read_ms
            last += np.where(splits.filters > 0, self._compare_always_ms, self._question_ms)
            probed = np.where(p > 1, last, -np.inf)
        return Ends(bare.layers, bare.start + always, probed, bare.loaded)

    @property
    def exact_ms(self) -> float:
        """The time of full prefill, which waits for nothing."""
        return self.fixed_ms + self.num_layers * self._warmup_ms

    def planned_ms(self, splits: Splits, ends: Ends, chosen: int, coverages: Floats) -> float:
        """The whole of one plan, as `planner.timeline.total_ms` has it.

        ends: of all splits; chosen: the index of its split; coverages: [batch], less than 1
        """
        patch_ms = self.patch_ms(coverages)
        if not coverages.any():
            bare = self.bare_ends(splits.take(np.array([chosen])))
            return self.fixed_ms + float(bare.total_ms(np.array([patch_ms]), np.zeros(1))[0])
        probe, filters = int(splits.probe[chosen]), float(splits.filters[chosen])
        filter_ms = projected_ms = 0.0
        if filters and probe > 1:
            filter_ms = filters * float(self.filter_slopes @ filtered_sum(probe, coverages))
            projected_ms = filters * float(self.projected_slopes @ coverages ** (1.0 - 1.0 / probe))
        behind_ms = int(ends.layers[chosen]) * patch_ms
        return self.fixed_ms + max(
            float(ends.start[chosen]) + filter_ms + behind_ms,
            float(ends.probed[chosen]) + projected_ms + behind_ms,
            float(ends.loaded[chosen]) + patch_ms,
        )

    def bare_ends(self, splits: Splits) -> Ends:
        """At coverage 0, which needs no Probe."""
        layers = self.num_layers - splits.warmup
        start = np.multiply(splits.warmup, self._warmup_ms, dtype=np.float64)
        never = np.full(len(start), -np.inf)
        if not self.loads:
            return Ends(layers, start, never, never)
        np.maximum(start, self._latency_ms + self._layer_ms, out=start)
        loaded = np.multiply(layers, self._layer_ms, dtype=np.float64) + self._latency_ms
        return Ends(layers, start, never, loaded)
