"""Attention of packed, sorted, selected queries over their request's whole context.

Queries are sparse, so a lower-triangular mask is wrong: a query sees the keys at positions up to
its own. `selected_attention_ref` is the plain statement of that, `selected_attention` the fast
path on torch's fused kernels; both have the same signature.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# Query rows a kernel call: long enough to fill the cores, short enough that a block of sorted rows
# does not attend far past its first row's position (the masked part is wasted work).
BLOCK_ROWS = 256


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
    """As `selected_attention_ref`, on torch's fused kernels; `q_positions` ascend in a request.

    A request whose queries are all of its keys takes the causal kernel. Other queries go in blocks
    of sorted rows, each against the keys up to the block's last position, under an additive mask.
    """
    out = torch.empty_like(q)
    heads_first_k, heads_first_v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    positions = q_positions.tolist()
    for i in range(len(q_offsets) - 1):
        start, end = q_offsets[i], q_offsets[i + 1]
        first_key, num_keys = k_offsets[i], k_offsets[i + 1] - k_offsets[i]
        if end == start:
            continue
        ki = heads_first_k[:, :, first_key : first_key + num_keys]
        vi = heads_first_v[:, :, first_key : first_key + num_keys]
        if end - start == num_keys:  # sorted distinct positions below num_keys: all of them
            out[start:end] = _sdpa(q[start:end], ki, vi, scale, is_causal=True)
            continue
        key_positions = torch.arange(num_keys, device=q.device)
        for lo in range(start, end, BLOCK_ROWS):
            hi = min(lo + BLOCK_ROWS, end)
            seen = positions[hi - 1] + 1
            mask = torch.zeros(hi - lo, seen, dtype=q.dtype, device=q.device)
            mask.masked_fill_(key_positions[:seen] > q_positions[lo:hi, None], float("-inf"))
            out[lo:hi] = _sdpa(q[lo:hi], ki[:, :, :seen], vi[:, :, :seen], scale, mask=mask)
    return out


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """q: [num_queries, num_heads, head_dim]; k, v: [1, num_kv_heads, num_keys, head_dim]."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


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
