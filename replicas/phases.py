"""The three-phase prefill: WarmUp, Probe, Patch, over any model, store and cache.

`ThreePhasePrefill.steps` yields after every layer, so that an engine can put its running
decodes between two layers. It computes the KV of every prompt token but the last one's.

- WarmUp: layers 0..w-1 for all tokens. Their KV is exact.
- Probe: ranks the context tokens with stored KV, from layer w on (CacheBlend's KV deviation, or the
  question's attention over the cache as in ProphetKV).
- Patch: back to layer w; the top-ranked tokens and those without stored KV go through the rest, and
  their fresh KV overwrites the stored one.
"""

import itertools
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from kv_tier.store import ChunkLocation
from planner.types import Signal
from replicas.attention import SelectedAttention, attention_mass, kv_deviation
from replicas.batch import BatchJob, PackedBatch, merge_rows
from replicas.model import Hidden, LayerwiseModel, Projection
from replicas.selection import kept_candidates, selection_size, top_rows

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields after each layer, returns a T


class KvSource(Protocol):
    """Stored chunk KV, one layer at a time."""

    def load(self, location: ChunkLocation, layer: int) -> tuple[Tensor, Tensor] | None:
        """K without RoPE and V of this rank's heads, each [num_kv_heads, num_tokens, head_dim].

        None when the value is missing or damaged.
        """
        ...


class KvSink(Protocol):
    """Where finished KV goes."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """One layer's rotated K and V of every row of the batch into the engine's cache.

        k, v: [num_rows, num_kv_heads, head_dim]
        """
        ...

    def capture(
        self, request_idx: int, location: ChunkLocation, layer: int, k: Tensor, v: Tensor
    ) -> None:
        """Position-free K and V of a chunk into the store, [num_tokens, num_kv_heads, head_dim]."""
        ...


@dataclass(slots=True)
class PrefillTrace:
    """What happened, filled while the phases run."""

    load_s: float = 0.0
    warmup_s: float = 0.0
    probe_s: float = 0.0
    patch_s: float = 0.0
    num_selected: list[int] = field(default_factory=list)  # stored tokens recomputed, by request
    selected: list[Tensor] = field(default_factory=list)  # rows, by request
    failed: set[int] = field(default_factory=set)  # requests whose stored KV could not be read

    @property
    def compute_s(self) -> float:
        return self.load_s + self.warmup_s + self.probe_s + self.patch_s


class ThreePhasePrefill:
    """One batch on its way through the phases."""

    def __init__(
        self, model: LayerwiseModel, source: KvSource, sink: KvSink, job: BatchJob
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
        self._source = source
        self._sink = sink
        self._job = job
        self.batch = PackedBatch(job, model.device)
        self.trace = PrefillTrace(
            num_selected=[0] * self.batch.num_requests,
            selected=[torch.empty(0, dtype=torch.int64)] * self.batch.num_requests,
        )
        # fresh KV from the Probe that Patch keeps: layer -> (rows, rotated K, V)
        self._fresh: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def steps(self) -> Steps[None]:
        """Run the phases, yielding after each layer."""
        hidden = self._model.embed(self.batch.token_ids)
        everything = self._rows(torch.arange(self.batch.num_rows, device=self._model.device))
        for layer in range(self._job.warmup_depth):
            with self._timed("warmup"):
                hidden = self._warmup_layer(layer, hidden, everything)
            yield
        if self._job.warmup_depth == self._model.num_layers:
            for piece in self.batch.pieces:  # all of what is stored was computed again
                self.trace.num_selected[piece.request_idx] += piece.end - piece.start
            return
        selected = yield from self._probe(hidden)
        yield from self._patch(hidden, selected)

    # ---- WarmUp ----

    def _warmup_layer(self, layer: int, hidden: Hidden, everything: "_Rows") -> Hidden:
        batch = self.batch
        projected = self._model.project(layer, hidden)
        for idx, request in enumerate(batch.jobs):
            for capture in request.captures:
                rows = slice(batch.offsets[idx] + capture.start, batch.offsets[idx] + capture.end)
                self._sink.capture(
                    idx, capture.location, layer, projected.k[rows], projected.v[rows]
                )
        k = self._model.rotate(layer, batch.positions, projected.k)
        self._sink.write(layer, k, projected.v)
        if layer == self._model.num_layers - 1:
            return hidden  # nobody reads what follows the last layer's KV
        return self._attend(layer, projected, k, projected.v, everything)

    # ---- Probe ----

    def _probe(self, hidden: Hidden) -> Steps[list[Tensor]]:
        """The selected rows of each request."""
        coverages = [request.coverage for request in self.batch.jobs]
        # a request that recomputes nothing or everything needs no ranking
        walks = {
            Signal.KV_DEV: self._probe_kv_dev,
            Signal.QCI: self._probe_qci,
            Signal.QCI_FINAL: self._probe_qci_final,
            Signal.POSITION: self._probe_position,
        }
        needs_layers = self._job.signal in (Signal.KV_DEV, Signal.QCI)
        can_rank = self._job.probe_len > 0 or not needs_layers
        probed = [
            i
            for i, r in enumerate(coverages)
            if can_rank and 0.0 < r < 1.0 and len(self.batch.candidates[i]) > 0
        ]
        selected: list[Tensor] = []
        for i, rows in enumerate(self.batch.candidates):
            count = 0 if i in probed else selection_size(coverages[i], len(rows))
            selected.append(rows[:count])
        if probed:
            ranked = yield from walks[self._job.signal](hidden, probed)
            for i in probed:
                selected[i] = ranked[i]
        for i, rows in enumerate(selected):
            self.trace.num_selected[i] = len(rows)
            self.trace.selected[i] = rows
        return selected

    def _probe_kv_dev(self, hidden: Hidden, probed: list[int]) -> Steps[dict[int, Tensor]]:
        """Gradual filtering: each layer scores the best candidates of the one before."""
        batch, model = self.batch, self._model
        first, steps = self._job.warmup_depth, self._job.probe_len
        candidates = {i: batch.candidates[i] for i in probed}
        all_rows = [
            torch.arange(batch.offsets[i], batch.offsets[i + 1], device=model.device)
            for i in probed
        ]
        rows = merge_rows(all_rows)
        stream = hidden.select(rows)
        for step in range(1, steps + 1):
            layer = first + step - 1
            stored_k, stored_v = self._stitch(layer)
            with self._timed("probe"):
                projected = model.project(layer, stream)
                k = model.rotate(layer, batch.positions[rows], projected.k)
                self._fresh[layer] = (rows, k, projected.v)
                candidates = self._filter(
                    candidates, rows, stored_k, stored_v, k, projected.v, step
                )
                if step < steps:
                    keep = merge_rows([*candidates.values(), *(batch.always[i] for i in probed)])
                    at = torch.searchsorted(rows, keep)
                    stored_k[rows], stored_v[rows] = k, projected.v
                    stream = self._attend(
                        layer, _pick(projected, at), stored_k, stored_v, self._rows(keep)
                    )
                    rows = keep
            yield
        return candidates

    def _filter(
        self,
        candidates: dict[int, Tensor],
        rows: Tensor,
        stored_k: Tensor,
        stored_v: Tensor,
        k: Tensor,
        v: Tensor,
        step: int,
    ) -> dict[int, Tensor]:
        """The candidates of each request that deviate most at this layer."""
        merged = merge_rows(list(candidates.values()))
        at = torch.searchsorted(rows, merged)
        scores = self._model.reduce_scores(
            kv_deviation(stored_k[merged], stored_v[merged], k[at], v[at])
        )
        kept = {}
        for i, mine in candidates.items():
            total = len(self.batch.candidates[i])
            count = kept_candidates(self._job.jobs[i].coverage, total, step, self._job.probe_len)
            kept[i] = top_rows(mine, scores[torch.searchsorted(merged, mine)], count)
        return kept

    def _probe_qci(self, hidden: Hidden, probed: list[int]) -> Steps[dict[int, Tensor]]:
        """Only tokens without stored KV walk, over the cache; the suffix's attention ranks."""
        batch, model = self.batch, self._model
        rows = merge_rows([batch.always[i] for i in probed])
        mass = {i: torch.zeros(len(batch.candidates[i]), device=model.device) for i in probed}
        walked = self._rows(rows)
        stream = hidden.select(rows)
        last = self._job.warmup_depth + self._job.probe_len - 1
        for layer in range(self._job.warmup_depth, last + 1):
            k, v = self._stitch(layer)
            with self._timed("probe"):
                projected = model.project(layer, stream)
                q = model.rotate(layer, walked.positions, projected.q)
                for i in probed:
                    queries = q[torch.searchsorted(rows, batch.suffix[i])]
                    mass[i] += attention_mass(queries, k[batch.candidates[i]], model.scale)
                if layer < last:
                    k[rows] = model.rotate(layer, walked.positions, projected.k)
                    v[rows] = projected.v
                    stream = self._attend(layer, projected, k, v, walked, rotated_q=q)
            yield
        return self._highest(mass)

    def _probe_qci_final(self, hidden: Hidden, probed: list[int]) -> Steps[dict[int, Tensor]]:
        """The suffix walks alone, from the embeddings on; its last queries rank the context by the
        last layer's stored keys (FusionRAG, arXiv 2601.12904).

        It stands where the prompt has it, so that distances are those of the prompt.
        """
        batch, model = self.batch, self._model
        suffix = [batch.suffix[i] for i in probed]
        rows = torch.cat(suffix)
        positions = batch.positions[rows]
        offsets = [0, *itertools.accumulate(len(s) for s in suffix)]
        order = torch.cat([torch.arange(len(s), device=model.device) for s in suffix])
        alone = SelectedAttention(order, offsets, offsets, model.dtype)
        stream = model.embed(batch.token_ids[rows])
        mass: dict[int, Tensor] = {}
        for layer in range(model.num_layers):
            is_last = layer == model.num_layers - 1
            k = self._stitch(layer)[0] if is_last else None
            with self._timed("probe"):
                projected = model.project(layer, stream)
                q = model.rotate(layer, positions, projected.q)
                if k is None:
                    mine = model.rotate(layer, positions, projected.k)
                    attended = alone(q, mine, projected.v, model.scale)
                    stream = model.finish(layer, projected.residual, attended)
                else:
                    ranges = itertools.pairwise(offsets)
                    for i, (start, end) in zip(probed, ranges, strict=True):
                        mass[i] = attention_mass(q[start:end], k[batch.candidates[i]], model.scale)
            yield
        return self._highest(mass)

    def _probe_position(self, hidden: Hidden, probed: list[int]) -> Steps[dict[int, Tensor]]:
        """The first tokens of every chunk but the first (EPIC, arXiv 2410.15332)."""
        yield from ()
        ranked = {}
        for i in probed:
            rows = self.batch.candidates[i]
            count = selection_size(self._job.jobs[i].coverage, len(rows))
            ranked[i] = top_rows(rows, -self.batch.ranks[i].float(), count)
        return ranked

    def _highest(self, mass: dict[int, Tensor]) -> dict[int, Tensor]:
        """The candidates of each request with the most attention, over all ranks' heads."""
        scores = self._model.reduce_scores(torch.cat(list(mass.values())))
        ranked = {}
        for i, mine in zip(mass, scores.split([len(m) for m in mass.values()]), strict=True):
            count = selection_size(self._job.jobs[i].coverage, len(mine))
            ranked[i] = top_rows(self.batch.candidates[i], mine, count)
        return ranked

    # ---- Patch ----

    def _patch(self, hidden: Hidden, selected: list[Tensor]) -> Steps[None]:
        batch, model = self.batch, self._model
        always = [rows[:-1] for rows in batch.always]  # the engine computes the last token itself
        rows = merge_rows([*selected, *always])
        patched = self._rows(rows)
        stream = hidden.select(rows)
        for layer in range(self._job.warmup_depth, model.num_layers):
            k, v = self._stitch(layer)
            with self._timed("patch"):
                if layer in self._fresh:
                    fresh_rows, fresh_k, fresh_v = self._fresh.pop(layer)
                    k[fresh_rows], v[fresh_rows] = fresh_k, fresh_v
                if len(rows) == 0:  # all is stored but the last token; kernels want a row
                    self._sink.write(layer, k, v)
                else:
                    projected = model.project(layer, stream)
                    k[rows] = model.rotate(layer, patched.positions, projected.k)
                    v[rows] = projected.v
                    self._sink.write(layer, k, v)
                    if layer < model.num_layers - 1:
                        stream = self._attend(layer, projected, k, v, patched)
            yield

    # ---- parts ----

    def _rows(self, rows: Tensor) -> "_Rows":
        """Rows that walk together through several layers."""
        batch = self.batch
        positions = batch.positions[rows]
        attention = SelectedAttention(
            positions, batch.offsets_of(rows), batch.offsets, self._model.dtype
        )
        return _Rows(positions, attention)

    def _attend(
        self,
        layer: int,
        projected: Projection,
        k: Tensor,
        v: Tensor,
        rows: "_Rows",
        *,
        rotated_q: Tensor | None = None,
    ) -> Hidden:
        """Attention of some rows over their requests' keys, and the rest of the layer."""
        model = self._model
        q = model.rotate(layer, rows.positions, projected.q) if rotated_q is None else rotated_q
        attended = rows.attention(q, k, v, model.scale)
        return model.finish(layer, projected.residual, attended)

    def _stitch(self, layer: int) -> tuple[Tensor, Tensor]:
        """Stored K, rotated to its final positions, and V of every row; zero where none is stored.

        returns: K, V, each [num_rows, num_kv_heads, head_dim], owned by the caller
        """
        model, batch = self._model, self.batch
        with self._timed("load"):
            shape = (batch.num_rows, model.num_kv_heads, model.head_dim)
            k = torch.zeros(shape, dtype=model.dtype, device=model.device)
            v = torch.zeros(shape, dtype=model.dtype, device=model.device)
            for piece in batch.pieces:
                loaded = self._source.load(piece.location, layer)
                if loaded is None:
                    self.trace.failed.add(piece.request_idx)
                    continue
                k[piece.start : piece.end] = loaded[0].transpose(0, 1)
                v[piece.start : piece.end] = loaded[1].transpose(0, 1)
            # in one sweep: what is zero stays zero
            return model.rotate(layer, batch.positions, k), v

    def _timed(self, phase: str) -> "_PhaseTimer":
        return _PhaseTimer(self.trace, f"{phase}_s")


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of the batch, and the plan of their attention."""

    positions: Tensor  # [num_rows], within each row's request
    attention: SelectedAttention


class _PhaseTimer:
    """Adds the block's time to one field of the trace."""

    def __init__(self, trace: PrefillTrace, name: str) -> None:
        self._trace = trace
        self._name = name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        spent = time.perf_counter() - self._start
        setattr(self._trace, self._name, getattr(self._trace, self._name) + spent)


def _pick(projected: Projection, at: Tensor) -> Projection:
    return Projection(projected.q[at], projected.k[at], projected.v[at], projected.residual[at])
