"""The three-phase prefill: WarmUp, Probe, Patch, over any model, store and cache.

`ThreePhasePrefill.steps` yields after every layer, so that an engine can put its running
decodes between two layers. It computes the KV of every prompt token but the last one's.

- WarmUp: layers 0..w-1 for all tokens. Their KV is exact.
- Probe: ranks the context tokens with stored KV, from layer w on (`replicas/probe.py`).
- Patch: back to layer w; the top-ranked tokens and those without stored KV go through the rest, and
  their fresh KV overwrites the stored one.

After WarmUp and after Probe the coverages are solved again from what is known by then. Where stored
KV is not there yet, the wait recomputes the prompt from its front (`replicas/front_fill.py`). When
a chunk turns out not to come at all, Probe and Patch start over without it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kv_tier.store import ChunkLocation
from planner.auto_signal import AutoRule
from planner.coverage_resolver import PatchDemand
from planner.types import Signal
from replicas.arrivals import LayerArrivals
from replicas.batch import BatchJob, PackedBatch, merge_rows
from replicas.model import Hidden, LayerwiseModel, Projection
from replicas.phase_clock import Phase, PhaseClock
from replicas.probe import FreshKv, Probe, Ranking
from replicas.selection import selection_size, top_rows
from replicas.walk import ChunksMissed, KvSource, PrefillTrace, Rows, Steps, Walk, pick

# (demands, when each layer's stored KV is there, in ms from now) -> coverages
CoverageResolver = Callable[[Sequence[PatchDemand], Sequence[float]], list[float]]


class KvSink(Protocol):
    """Where finished KV goes."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """One layer's rotated K and V of every row of the batch into the engine's cache.

        k, v: [num_rows, num_kv_heads, head_dim]
        """
        ...

    def rewrite(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Better K and V of some rows of a layer that was written; rows: [n], int64."""
        ...

    def capture(
        self, request_idx: int, location: ChunkLocation, layer: int, k: Tensor, v: Tensor
    ) -> None:
        """Position-free K and V of a chunk into the store, [num_tokens, num_kv_heads, head_dim]."""
        ...


class ThreePhasePrefill:
    """One batch on its way through the phases.

    arrivals: the transfer of the stored KV; None if all of it is there
    resolver: solves the coverages of requests with a band again; None leaves them as planned
    fill_stalls: whether waits for stored KV recompute the prompt's front
    """

    def __init__(
        self,
        model: LayerwiseModel,
        source: KvSource,
        sink: KvSink,
        job: BatchJob,
        *,
        arrivals: LayerArrivals | None = None,
        resolver: CoverageResolver | None = None,
        auto_rule: AutoRule | None = None,
        fill_stalls: bool = True,
    ) -> None:
        if not 0 <= job.warmup_depth <= model.num_layers:
            raise ValueError(
                f"warmup_depth {job.warmup_depth} is not within {model.num_layers} layers"
            )
        if not 0 <= job.probe_len <= model.num_layers - job.warmup_depth:
            raise ValueError(
                f"probe_len {job.probe_len} does not fit behind {job.warmup_depth} of "
                f"{model.num_layers} layers"
            )
        self._model = model
        self._sink = sink
        self._job = job
        self._resolver = resolver
        self._auto_rule = auto_rule or AutoRule()
        self._fill_stalls = fill_stalls
        self.batch = PackedBatch(job, model.device)
        num_requests = self.batch.num_requests
        self.trace = PrefillTrace(
            clock=PhaseClock(model.device),
            signal=job.signal,
            coverages=[request.coverage for request in job.jobs],
            num_selected=[0] * num_requests,
            num_filled=[0] * num_requests,
            selected=[torch.empty(0, dtype=torch.int64)] * num_requests,
        )
        self._walk = Walk(model, source, self.batch, self.trace, arrivals)
        # rows of the prompts' last tokens whose logits are wanted: their requests have no pages
        parked = [i for i, request in enumerate(job.jobs) if request.park is not None]
        self._parked = parked
        self._last_rows = torch.tensor(
            [self.batch.offsets[i + 1] - 1 for i in parked], dtype=torch.int64, device=model.device
        )

    def steps(self) -> Steps[None]:
        """Run the phases, yielding after each layer."""
        hidden = yield from self.warm_up()
        if self._job.warmup_depth == self._model.num_layers:
            for piece in self.batch.pieces:  # all of what is stored was computed again
                self.trace.num_selected[piece.request_idx] += piece.end - piece.start
            return
        if self._fill_stalls:
            self._walk.start_filling(self._job.warmup_depth, hidden)
        while True:
            try:
                self._resolve({})
                rankings, fresh = yield from self.probe(hidden)
                self._resolve(rankings)
                yield from self.patch(hidden, self.select(rankings), fresh)
                return
            except ChunksMissed as missed:
                self._do_without(missed.keys)

    def _do_without(self, keys: frozenset[bytes]) -> None:
        """Count these chunks as missing, and start over behind WarmUp, which needs none of them."""
        self.trace.missed |= keys
        assert self._walk.arrivals is not None
        self._walk.arrivals.do_without(keys)
        self._job = self._job.without_stored(keys)
        self.batch = PackedBatch(self._job, self._model.device)
        self._walk = self._walk.over(self.batch)

    # ---- WarmUp ----

    def warm_up(self) -> Steps[Hidden]:
        """Layers before `warmup_depth` for all rows; returns what enters the next one."""
        hidden = self._model.embed(self.batch.token_ids)
        everything = self._walk.rows(torch.arange(self.batch.num_rows, device=self._model.device))
        for layer in range(self._job.warmup_depth):
            hidden = self._warmup_layer(layer, hidden, everything)
            yield
        return hidden

    def _warmup_layer(self, layer: int, hidden: Hidden, everything: Rows) -> Hidden:
        batch, is_last = self.batch, layer == self._model.num_layers - 1
        with self._span(Phase.WARMUP, layer):
            projected = self._model.project(layer, hidden)
            k = self._model.rotate(layer, batch.positions, projected.k)
        with self._span(Phase.WRITE, layer):
            for idx, request in enumerate(batch.jobs):
                base = batch.offsets[idx]
                for capture in request.captures:
                    rows = slice(base + capture.start, base + capture.end)
                    self._sink.capture(
                        idx, capture.location, layer, projected.k[rows], projected.v[rows]
                    )
            self._sink.write(layer, k, projected.v)
        with self._span(Phase.WARMUP, layer):
            if is_last:  # nobody else reads what follows the last layer's KV
                self._finish_last(layer, projected, k, projected.v, everything.rows)
                return hidden
            return self._walk.attend(layer, projected, k, projected.v, everything)

    # ---- coverage ----

    def _resolve(self, rankings: dict[int, Ranking]) -> None:
        """Solve the coverages again, for requests whose plan leaves it open."""
        jobs, arrivals = self._job.jobs, self._walk.arrivals
        if self._resolver is None or all(request.band is None for request in jobs):
            return
        demands = []
        for i, request in enumerate(jobs):
            coverage = self.trace.coverages[i]
            floor, saturation = request.band or (coverage, coverage)
            ranking = rankings.get(i)
            demands.append(
                PatchDemand(
                    num_cached=len(self.batch.candidates[i]),
                    num_always=len(self.batch.always[i]),
                    num_keys=len(request.token_ids),
                    planned=request.coverage,
                    floor=floor,
                    saturation=saturation,
                    scores=None if ranking is None else _worths(ranking.scores),
                )
            )
        layers = range(self._job.warmup_depth, self._model.num_layers)
        expected_ms = [0.0 if arrivals is None else arrivals.expected_ms(la) for la in layers]
        solved = torch.tensor(self._resolver(demands, expected_ms), dtype=torch.float64)
        self.trace.coverages = self._model.agree(solved).tolist()

    # ---- Probe ----

    def probe(self, hidden: Hidden) -> Steps[tuple[dict[int, Ranking], FreshKv]]:
        """Rank where it matters: a request that recomputes nothing or everything needs none.

        hidden: what `warm_up` returned; it can be used again
        """
        job = self._job
        needs_layers = job.signal not in (Signal.QCI_FINAL, Signal.POSITION)
        can_rank = job.probe_len > 0 or not needs_layers
        probed = [
            i
            for i, coverage in enumerate(self.trace.coverages)
            if can_rank and 0.0 < coverage < 1.0 and self._has_unfilled(i)
        ]
        probe = Probe(
            self._walk,
            hidden,
            probed,
            first=job.warmup_depth,
            length=job.probe_len,
            deviation=job.deviation,
        )
        rankings: dict[int, Ranking] = {}
        if probed:
            rankings = yield from probe.rank(job.signal, self._auto_rule)
        return rankings, probe.fresh

    def _has_unfilled(self, request_idx: int) -> bool:
        """Whether stored rows are left behind what a wait has recomputed."""
        return len(self._walk.behind_front(request_idx, self.batch.candidates[request_idx])) > 0

    def select(self, rankings: dict[int, Ranking]) -> list[Tensor]:
        """The rows of each request that Patch recomputes, besides those without stored KV."""
        selected = []
        for i, candidates in enumerate(self.batch.candidates):
            count = selection_size(self.trace.coverages[i], len(candidates))
            ranking = rankings.get(i)
            if ranking is None:
                rows = self._walk.behind_front(i, candidates)[:count]
            else:
                rows = top_rows(ranking.rows, ranking.scores, count)
            selected.append(rows)
        return selected

    # ---- Patch ----

    def patch(self, hidden: Hidden, selected: list[Tensor], fresh: FreshKv) -> Steps[None]:
        """Some rows of each request through the layers from `warmup_depth` on.

        hidden: what `warm_up` returned; it can be used again
        fresh: what `probe` returned; taken out layer by layer, so that its memory is free
        """
        batch, model, walk = self.batch, self._model, self._walk
        first = self._job.warmup_depth
        # the engine computes the last token itself, but for a parked prompt
        always = [
            rows if request.park is not None else rows[:-1]
            for rows, request in zip(batch.always, self._job.jobs, strict=True)
        ]
        fronts = walk.fronts
        walking = walk.rows(self._behind_fronts(merge_rows([*selected, *always])))
        stream = hidden.select(walking.rows)
        for layer in range(first, model.num_layers):
            yield from walk.arrival(layer)
            if walk.fronts != fronts:
                self._rewrite_front(fronts, first, layer)
                fronts = walk.fronts
                rows = self._behind_fronts(walking.rows)
                stream = stream.select(torch.searchsorted(walking.rows, rows))
                walking = walk.rows(rows)
            k, v = walk.stitch(layer)
            rows, projected = walking.rows, None
            with self._span(Phase.PATCH, layer):
                if layer in fresh:
                    fresh_rows, fresh_k, fresh_v = fresh.pop(layer)
                    k[fresh_rows], v[fresh_rows] = fresh_k, fresh_v
                if len(rows) > 0:  # else all is stored but the last token; kernels want a row
                    projected = model.project(layer, stream)
                    k[rows] = model.rotate(layer, walking.positions, projected.k)
                    v[rows] = projected.v
            with self._span(Phase.WRITE, layer):
                self._sink.write(layer, k, v)
            with self._span(Phase.PATCH, layer):
                if projected is not None and layer < model.num_layers - 1:
                    stream = walk.attend(layer, projected, k, v, walking)
                elif projected is not None:
                    self._finish_last(layer, projected, k, v, rows)
            yield
        self._account(selected)

    def _behind_fronts(self, rows: Tensor) -> Tensor:
        """Ascending rows of the batch, less those that the wait has recomputed."""
        offsets = self.batch.offsets_of(rows)
        parts = [rows[start:end] for start, end in pairwise(offsets)]
        return torch.cat([self._walk.behind_front(i, part) for i, part in enumerate(parts)])

    def _rewrite_front(self, fronts: list[int], first: int, layer: int) -> None:
        """Rows that became exact in mid-Patch, in the layers that are written already."""
        for i, (start, end) in enumerate(zip(fronts, self._walk.fronts, strict=True)):
            if start == end:
                continue
            rows = torch.arange(start, end, device=self._model.device)
            for written in range(first, layer):
                self._sink.rewrite(written, rows, *self._walk.exact(written, i, start, end))

    def _finish_last(
        self, layer: int, projected: Projection, k: Tensor, v: Tensor, rows: Tensor
    ) -> None:
        """The logits of parked prompts: their last rows through the rest of the last layer."""
        if not self._parked:
            return
        last = pick(projected, torch.searchsorted(rows, self._last_rows))
        hidden = self._walk.attend(layer, last, k, v, self._walk.rows(self._last_rows))
        logits = self._model.logits(hidden)
        if logits is not None:
            self.trace.logits = dict(zip(self._parked, logits, strict=True))

    def _account(self, selected: list[Tensor]) -> None:
        trace = self.trace
        for i, (rows, front) in enumerate(zip(selected, self._walk.fronts, strict=True)):
            filled = int((self.batch.candidates[i] < front).sum())
            trace.num_filled[i] = filled
            trace.num_selected[i] = filled + len(self._walk.behind_front(i, rows))
            trace.selected[i] = rows

    def _span(self, phase: Phase, layer: int) -> AbstractContextManager[None]:
        return self.trace.clock.span(phase, layer)


def _worths(scores: Tensor) -> np.ndarray:
    """Scores as the resolver wants them: not negative, so that ranks by position count too."""
    wide = scores.double()
    lowest = torch.where(wide.isfinite(), wide, 0.0).min()
    return (wide - lowest.clamp_max(0.0)).cpu().numpy()
