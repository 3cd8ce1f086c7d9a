"""Use a wait for stored KV: recompute the prompt from its front.

A token depends on those before it alone, so the first tokens of a prompt, computed one block after
another, have exact KV whatever is stored behind them. What is finished needs no Patch any more.
"""

import torch
from torch import Tensor

from replicas.attention import SelectedAttention
from replicas.batch import PackedBatch
from replicas.model import Hidden, LayerwiseModel

# One block through one layer is what a layer that arrives has to wait for. Small blocks cost more
# for each row, so they grow with the front: who has waited long will wait long. Of what is computed
# at most a third is in a block that is not finished.
BLOCK_ROWS = 64
LONGEST_BLOCK_ROWS = 256


class FrontFill:
    """A walk of its own, block by block through all layers from `first_layer` on.

    hidden: every row of the batch, exact, as it enters `first_layer`; it is not changed
    fronts: by request, the first row that has not been through all layers
    """

    def __init__(
        self, model: LayerwiseModel, batch: PackedBatch, first_layer: int, hidden: Hidden
    ) -> None:
        self._model = model
        self._batch = batch
        self._first_layer = first_layer
        self._hidden = hidden
        self.fronts = list(batch.offsets[:-1])
        # the engine computes a prompt's last token itself
        self._ends = [offset - 1 for offset in batch.offsets[1:]]
        # layer -> by request, K rotated and V of the rows before its front
        empty = torch.empty(
            0, model.num_kv_heads, model.head_dim, dtype=model.dtype, device=model.device
        )
        self._kv: list[list[tuple[Tensor, Tensor]]] = [
            [(empty, empty)] * batch.num_requests for _ in range(model.num_layers - first_layer)
        ]
        self._block: _Block | None = None

    @property
    def has_work(self) -> bool:
        return any(front < end for front, end in zip(self.fronts, self._ends, strict=True))

    def step(self) -> None:
        """One block through one layer."""
        model, block = self._model, self._block or self._next_block()
        layer, idx = block.layer, block.request_idx
        projected = model.project(layer, block.stream)
        k = model.rotate(layer, block.positions, projected.k)
        before_k, before_v = self._kv[layer - self._first_layer][idx]
        keys, values = torch.cat((before_k, k)), torch.cat((before_v, projected.v))
        block.done.append((keys, values))
        if layer < model.num_layers - 1:
            q = model.rotate(layer, block.positions, projected.q)
            attended = block.attention(q, keys, values, model.scale)
            block.stream = model.finish(layer, projected.residual, attended)
            block.layer += 1
            self._block = block
            return
        for kept, fresh in zip(self._kv, block.done, strict=True):
            kept[idx] = fresh
        self.fronts[idx] = block.end
        self._block = None

    def overlay(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put the exact KV into one layer's K and V of the whole batch, [num_rows, heads, dim]."""
        for idx, (exact_k, exact_v) in enumerate(self._kv[layer - self._first_layer]):
            start = self._batch.offsets[idx]
            k[start : start + len(exact_k)] = exact_k
            v[start : start + len(exact_v)] = exact_v

    def between(self, layer: int, request_idx: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Exact K and V of one request's rows [start, end), which are before its front."""
        base = self._batch.offsets[request_idx]
        k, v = self._kv[layer - self._first_layer][request_idx]
        return k[start - base : end - base], v[start - base : end - base]

    def _next_block(self) -> "_Block":
        """Of the request that has come least far."""
        offsets = self._batch.offsets
        open_requests = [
            i
            for i, (front, end) in enumerate(zip(self.fronts, self._ends, strict=True))
            if front < end
        ]
        idx = min(
            open_requests,
            key=lambda i: (self.fronts[i] - offsets[i]) / (self._ends[i] - offsets[i]),
        )
        start = self.fronts[idx]
        num_rows = max(BLOCK_ROWS, min(LONGEST_BLOCK_ROWS, (start - offsets[idx]) // 2))
        end = min(start + num_rows, self._ends[idx])
        rows = torch.arange(start, end, device=self._model.device)
        positions = self._batch.positions[rows]
        attention = SelectedAttention(
            positions, [0, end - start], [0, end - offsets[idx]], self._model.dtype
        )
        stream = self._hidden.select(rows)
        return _Block(idx, end, self._first_layer, positions, attention, stream)


class _Block:
    """Rows of one request between two layers."""

    def __init__(
        self,
        request_idx: int,
        end: int,
        layer: int,
        positions: Tensor,
        attention: SelectedAttention,
        stream: Hidden,
    ) -> None:
        self.request_idx = request_idx
        self.end = end
        self.layer = layer
        self.positions = positions
        self.attention = attention
        self.stream = stream
        self.done: list[tuple[Tensor, Tensor]] = []  # by layer, keys and values up to `end`
