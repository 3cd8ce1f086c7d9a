"""What the three phases need of a model: one layer at a time, with RoPE apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Hidden:
    """The stream between layers. vLLM's layers carry the residual apart from the hidden states."""

    states: Tensor  # [num_rows, hidden_size]
    residual: Tensor | None = None  # [num_rows, hidden_size]

    def select(self, rows: Tensor) -> "Hidden":
        """A copy of some rows; rows: [n], int64."""
        residual = None if self.residual is None else self.residual[rows]
        return Hidden(self.states[rows], residual)


@dataclass(frozen=True, slots=True)
class Projection:
    """Queries, keys and values of one layer before RoPE, after any q/k norm."""

    q: Tensor  # [num_rows, num_heads, head_dim], this rank's heads
    k: Tensor  # [num_rows, num_kv_heads, head_dim]
    v: Tensor  # [num_rows, num_kv_heads, head_dim]
    residual: Tensor  # [num_rows, hidden_size], what the attention output is added to


class LayerwiseModel(Protocol):
    """A decoder walked layer by layer. Under tensor parallelism, one rank's part of it."""

    num_layers: int
    kv_head_start: int  # first of this rank's heads among all KV heads of the model
    num_kv_heads: int  # of this rank
    head_dim: int
    scale: float  # of the attention scores
    device: torch.device
    dtype: torch.dtype

    def embed(self, token_ids: Tensor) -> Hidden: ...

    def project(self, layer: int, hidden: Hidden) -> Projection:
        """Input norm and q, k, v. Consumes `hidden`: its tensors may be overwritten."""
        ...

    def rotate(self, layer: int, positions: Tensor, x: Tensor) -> Tensor:
        """RoPE: x [num_rows, heads, head_dim] at `positions` [num_rows], as a new tensor."""
        ...

    def rotary_table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `rotate`, the same in every layer: [n, head_dim // 2], float32."""
        ...

    def finish(self, layer: int, residual: Tensor, attention: Tensor) -> Hidden:
        """Output projection, residual, norm and MLP; attention: [num_rows, num_heads, head_dim]."""
        ...

    def logits(self, hidden: Hidden) -> Tensor | None:
        """Final norm and output head: [num_rows, vocab_size], float32; None where the first rank
        alone has them."""
        ...

    def reduce_scores(self, scores: Tensor) -> Tensor:
        """Sum of the ranks' scores, the same bits on every rank."""
        ...

    def agree(self, values: Tensor) -> Tensor:
        """The first rank's values on every rank; use what is returned."""
        ...

    def all_ready(self, ready: Sequence[bool]) -> list[bool]:
        """Each one True only if it is True on every rank."""
        ...
