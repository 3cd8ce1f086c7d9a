"""Attention of packed, sorted, selected queries over their request's whole context.

Queries are sparse, so a lower-triangular mask is wrong: a query sees the keys at positions up to
its own. `selected_attention_ref` is the plain statement of that, `selected_attention` the fast
path on torch's fused kernels; both have the same signature.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Query rows a kernel call: long enough to fill the cores, short enough that a block of sorted rows
# does not attend far past its first row's position (the masked part is wasted work).
BLOCK_ROWS = 128
# Masks are the same in every layer and kept between them, up to this many elements.
MAX_KEPT_MASK = 1 << 26


def selected_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    q_offsets: Sequence[int],
    k_offsets: Sequence[int],
    scale: float,
) -> Tensor:
    """Softmax attention per request, computed in float32.

    q: [num_queries, num_heads, head_dim], the requests one after another
    k, v: [num_keys, num_kv_heads, head_dim]; key j of a request stands at position j
    q_positions: [num_queries], int64, position of each query within its request
    q_offsets, k_offsets: half-open ranges of each request, [num_requests + 1]
    returns: [num_queries, num_heads, head_dim], q's dtype
    """
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for i in range(len(q_offsets) - 1):
        rows = slice(q_offsets[i], q_offsets[i + 1])
        keys = slice(k_offsets[i], k_offsets[i + 1])
        qi = q[rows].float()
        ki = k[keys].float().repeat_interleave(group, dim=1)
        vi = v[keys].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", qi, ki) * scale
        hidden = torch.arange(ki.shape[0], device=q.device) > q_positions[rows, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, vi).to(q.dtype)
    return out


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    q_offsets: Sequence[int],
    k_offsets: Sequence[int],
    scale: float,
) -> Tensor:
    """As `selected_attention_ref`, on torch's fused kernels; `q_positions` ascend in a request."""
    return SelectedAttention(q_positions, q_offsets, k_offsets, q.dtype)(q, k, v, scale)


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries [start, end) against keys [first_key, last_key) of the batch."""

    start: int
    end: int
    first_key: int
    last_key: int
    positions: Tensor | None  # None: the queries are all of the keys, for the causal kernel
    mask: Tensor | None  # additive, if it is kept


class SelectedAttention:
    """The plan of `selected_attention` for one set of queries, made once and run in every layer.

    Queries that are all of the keys from the first on take the causal kernel. The others go in
    blocks of sorted rows, each against the keys up to the block's last position, under an additive
    mask.
    """

    def __init__(
        self,
        q_positions: Tensor,
        q_offsets: Sequence[int],
        k_offsets: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self._dtype = dtype
        self._blocks: list[_Block] = []
        kept = 0
        positions = q_positions.tolist()
        for i in range(len(q_offsets) - 1):
            start, end = q_offsets[i], q_offsets[i + 1]
            first_key = k_offsets[i]
            dense = _leading_run(positions[start:end])
            if dense >= BLOCK_ROWS or dense == end - start > 0:
                block = _Block(start, start + dense, first_key, first_key + dense, None, None)
                self._blocks.append(block)
                start += dense
            for lo in range(start, end, BLOCK_ROWS):
                hi = min(lo + BLOCK_ROWS, end)
                seen = positions[hi - 1] + 1
                mask = None
                kept += (hi - lo) * seen
                if kept <= MAX_KEPT_MASK:
                    mask = _mask(q_positions[lo:hi], seen, dtype)
                self._blocks.append(
                    _Block(lo, hi, first_key, first_key + seen, q_positions[lo:hi], mask)
                )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q: [num_queries, num_heads, head_dim]; k, v: [num_keys, num_kv_heads, head_dim]."""
        out = torch.empty_like(q)
        heads_first_k, heads_first_v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        for block in self._blocks:
            keys = slice(block.first_key, block.last_key)
            mask = block.mask
            if mask is None and block.positions is not None:
                mask = _mask(block.positions, block.last_key - block.first_key, self._dtype)
            attended = F.scaled_dot_product_attention(
                q[block.start : block.end].transpose(0, 1)[None],
                heads_first_k[:, :, keys],
                heads_first_v[:, :, keys],
                attn_mask=mask,
                is_causal=block.positions is None,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            out[block.start : block.end] = attended[0].transpose(0, 1)
        return out


def _leading_run(positions: Sequence[int]) -> int:
    """How many of the ascending positions are 0, 1, 2 and so on."""
    run = 0
    for position in positions:
        if position != run:
            break
        run += 1
    return run


def _mask(positions: Tensor, num_keys: int, dtype: torch.dtype) -> Tensor:
    """0 where a query may look, -inf behind its own position; [num_queries, num_keys]."""
    keys = torch.arange(num_keys, device=positions.device)
    mask = torch.zeros(len(positions), num_keys, dtype=dtype, device=positions.device)
    return mask.masked_fill_(keys > positions[:, None], float("-inf"))


def attention_mass(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """How much the queries attend to each key, all keys visible (ProphetKV, arXiv 2602.02579).

    q: [num_queries, num_heads, head_dim]; k: [num_keys, num_kv_heads, head_dim]
    returns: [num_keys], float32: softmax over these keys alone, summed over heads and queries
    """
    num_keys, num_kv_heads, head_dim = k.shape
    group = q.shape[1] // num_kv_heads
    grouped = q.float().view(q.shape[0], num_kv_heads, group, head_dim)
    mass = torch.zeros(num_keys, dtype=torch.float32, device=q.device)
    for head in range(num_kv_heads):  # one head at a time bounds the score matrix
        scores = grouped[:, head].reshape(-1, head_dim) @ k[:, head].float().T
        mass += (scores * scale).softmax(dim=-1).sum(dim=0)
    return mass


def kv_deviation(k_cached: Tensor, v_cached: Tensor, k_exact: Tensor, v_exact: Tensor) -> Tensor:
    """Squared distance between reused and exact keys and values (CacheBlend, arXiv 2405.16444).

    all: [num_tokens, num_kv_heads, head_dim], any float dtype
    returns: [num_tokens], float32, summed over heads and dims; larger means staler
    """
    dk = k_exact.float() - k_cached.float()
    dv = v_exact.float() - v_cached.float()
    return dk.square().sum(dim=(1, 2)) + dv.square().sum(dim=(1, 2))
