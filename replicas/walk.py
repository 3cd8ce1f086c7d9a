"""What WarmUp, Probe and Patch share: some rows of a batch on their way through one layer."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from kv_tier.store import ChunkLocation
from planner.types import Signal
from replicas.arrivals import LayerArrivals
from replicas.attention import SelectedAttention
from replicas.batch import PackedBatch
from replicas.front_fill import FrontFill
from replicas.model import Hidden, LayerwiseModel, Projection
from replicas.phase_clock import Phase, PhaseClock

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields after each layer, returns a T

WAIT_MS = 2.0  # for a layer's KV, between two looks at the engine


class KvSource(Protocol):
    """Stored chunk KV, one layer at a time."""

    def load(self, location: ChunkLocation, layer: int) -> tuple[Tensor, Tensor] | None:
        """K without RoPE and V of this rank's heads, each [num_kv_heads, num_tokens, head_dim].

        None when the value is missing or damaged.
        """
        ...


@dataclass(slots=True)
class PrefillTrace:
    """What happened, filled while the phases run."""

    clock: PhaseClock
    signal: Signal  # that ranked; the batch's own, unless that was `auto`
    coverages: list[float]  # by request, as last solved
    num_selected: list[int] = field(default_factory=list)  # stored tokens recomputed, by request
    num_filled: list[int] = field(default_factory=list)  # of those: while waiting for stored KV
    selected: list[Tensor] = field(default_factory=list)  # rows, by request
    failed: set[int] = field(default_factory=set)  # requests whose stored KV could not be read
    missed: set[bytes] = field(default_factory=set)  # keys of chunks that did not arrive
    logits: dict[int, Tensor] = field(default_factory=dict)  # [vocab_size], of parked requests


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of the batch, ascending, that walk together, and the plan of their attention."""

    rows: Tensor  # [num_rows], int64
    positions: Tensor  # [num_rows], within each row's request
    attention: SelectedAttention


class ChunksMissed(Exception):
    """Stored KV that was to arrive will not: go on without these chunks."""

    def __init__(self, keys: frozenset[bytes]) -> None:
        super().__init__(f"{len(keys)} chunks did not arrive")
        self.keys = keys


class Walk:
    """One batch, its model and its stored KV."""

    def __init__(
        self,
        model: LayerwiseModel,
        source: KvSource,
        batch: PackedBatch,
        trace: PrefillTrace,
        arrivals: LayerArrivals | None,
    ) -> None:
        self.model = model
        self.batch = batch
        self.trace = trace
        self.arrivals = arrivals
        self._source = source
        self._fill: FrontFill | None = None
        self._fused = fused_stitch(model.device)
        if self._fused is not None and batch.pieces:
            self._rotary = model.rotary_table(batch.positions)
            self._row_ids = torch.arange(batch.num_rows, device=model.device)

    def over(self, batch: PackedBatch) -> "Walk":
        """This walk over another view of the same rows: what the waits recomputed stays."""
        walk = Walk(self.model, self._source, batch, self.trace, self.arrivals)
        walk._fill = self._fill
        return walk

    def start_filling(self, first_layer: int, hidden: Hidden) -> None:
        """From now on a wait for stored KV is used; `hidden`: all rows, as they enter the layer."""
        if self.arrivals is not None and self.batch.pieces:
            self._fill = FrontFill(self.model, self.batch, first_layer, hidden)

    def rows(self, rows: Tensor) -> Rows:
        batch = self.batch
        positions = batch.positions[rows]
        attention = SelectedAttention(
            positions, batch.offsets_of(rows), batch.offsets, self.model.dtype
        )
        return Rows(rows, positions, attention)

    def attend(
        self,
        layer: int,
        projected: Projection,
        k: Tensor,
        v: Tensor,
        rows: Rows,
        *,
        rotated_q: Tensor | None = None,
    ) -> Hidden:
        """Attention of some rows over their requests' keys, and the rest of the layer."""
        model = self.model
        q = model.rotate(layer, rows.positions, projected.q) if rotated_q is None else rotated_q
        attended = rows.attention(q, k, v, model.scale)
        return model.finish(layer, projected.residual, attended)

    def arrival(self, layer: int) -> Steps[None]:
        """Wait until the layer's stored KV is there, and use the time.

        What the wait has recomputed needs no stored KV any more.
        Raises ChunksMissed, on all ranks, when a chunk will not come on one of them.
        """
        arrivals, fill = self.arrivals, self._fill
        while arrivals is not None and (fill is None or fill.has_work):
            there = [not missed for missed in arrivals.have_missed()]
            is_ready, *there = self.model.all_ready([arrivals.is_ready(layer), *there])
            if not all(there):
                gone = [key for key, yes in zip(arrivals.keys, there, strict=True) if not yes]
                raise ChunksMissed(frozenset(gone))
            if is_ready:
                return
            if fill is not None:
                with self.trace.clock.span(Phase.FILL, layer):
                    fill.step()
            else:
                with self.trace.clock.span(Phase.STALL, layer):
                    arrivals.wait(layer, WAIT_MS)
            yield

    def stitch(self, layer: int) -> tuple[Tensor, Tensor]:
        """Stored K, rotated to its final positions, and V of every row; zero where none is stored.

        Rows that the wait recomputed have their exact KV.
        returns: K, V, each [num_rows, num_kv_heads, head_dim], owned by the caller
        """
        model, batch = self.model, self.batch
        with self.trace.clock.span(Phase.LOAD, layer):
            shape = (batch.num_rows, model.num_kv_heads, model.head_dim)
            k = torch.zeros(shape, dtype=model.dtype, device=model.device)
            v = torch.zeros(shape, dtype=model.dtype, device=model.device)
            fronts = self.fronts
            for piece in batch.pieces:
                if piece.end <= fronts[piece.request_idx]:
                    continue  # all of it was recomputed, and may not have arrived
                loaded = self._source.load(piece.location, layer)
                wanted = (model.num_kv_heads, piece.end - piece.start, model.head_dim)
                if loaded is None or any(tuple(part.shape) != wanted for part in loaded):
                    self.trace.failed.add(piece.request_idx)
                    continue
                rows = slice(piece.start, piece.end)
                if self._fused is not None:
                    cos, sin = (part[rows] for part in self._rotary)
                    self._fused(*loaded, cos, sin, k, v, self._row_ids[rows])
                else:
                    scatter_heads(k[rows], loaded[0])
                    scatter_heads(v[rows], loaded[1])
            if self._fused is None:  # in one sweep: what is zero stays zero
                k = model.rotate(layer, batch.positions, k)
            if self._fill is not None:
                self._fill.overlay(layer, k, v)
            return k, v

    @property
    def fronts(self) -> list[int]:
        """By request: the first row that is not known to be exact in all layers."""
        return self.batch.offsets[:-1] if self._fill is None else list(self._fill.fronts)

    def exact(self, layer: int, request_idx: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """K and V of one request's rows [start, end) before its front."""
        assert self._fill is not None, "without a wait there is no front"
        return self._fill.between(layer, request_idx, start, end)

    def behind_front(self, request_idx: int, rows: Tensor) -> Tensor:
        """Those of one request's ascending rows that the wait has not recomputed."""
        if self._fill is None:
            return rows
        return rows[int((rows < self._fill.fronts[request_idx]).sum()) :]


def pick(projected: Projection, at: Tensor) -> Projection:
    return Projection(projected.q[at], projected.k[at], projected.v[at], projected.residual[at])


def scatter_heads(out: Tensor, stored: Tensor) -> None:
    """One piece of stored KV to its rows, whatever the device.

    out: [num_tokens, num_kv_heads, head_dim]; stored: [num_kv_heads, num_tokens, head_dim]
    """
    word = torch.int64
    is_plain = out.device.type == stored.device.type == "cpu" and out.dtype == stored.dtype
    if is_plain and stored.is_contiguous() and out.shape[2] * out.element_size() % 8 == 0:
        # NumPy in words of eight bytes: torch moves single elements, and wakes its threads for it
        words = stored.view(word).numpy().transpose(1, 0, 2)
        out.view(word).numpy()[...] = words
    else:
        out.copy_(stored.transpose(0, 1))


def fused_stitch(device: torch.device) -> Callable[..., None] | None:
    """The kernel that rotates and scatters stored KV in one pass, where there is one."""
    if device.type != "cuda":
        return None
    try:
        from replicas.triton_stitch import stitch_rotated
    except ImportError:  # without Triton
        return None
    return stitch_rotated
