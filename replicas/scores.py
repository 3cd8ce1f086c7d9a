"""What ranks tokens for recomputation: attention from the question, deviation of stored KV."""

import torch
from torch import Tensor

from planner.types import Deviation


def attention_mass(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """How much the queries attend to each key, all keys visible (ProphetKV, arXiv 2602.02579).

    q: [num_queries, num_heads, head_dim]; k: [num_keys, num_kv_heads, head_dim]
    returns: [num_keys], float32: softmax over these keys alone, summed over heads and queries
    """
    num_keys, num_kv_heads, head_dim = k.shape
    # rounding scores to 16 bits would move a key's mass by percents, and save little
    by_head = q.unflatten(1, (num_kv_heads, -1)).transpose(0, 1).float() * scale
    grouped = by_head.reshape(num_kv_heads, -1, head_dim)
    mass = torch.zeros(num_keys, dtype=torch.float32, device=q.device)
    # one head at a time in the same place: fresh pages for every head cost more than the softmax
    scores = torch.empty(grouped.shape[1], num_keys, dtype=torch.float32, device=q.device)
    for head in range(num_kv_heads):
        torch.mm(grouped[head], k[:, head].float().T, out=scores)
        torch.softmax(scores, dim=-1, out=scores)
        mass += scores.sum(dim=0)
    return mass


def kv_deviation(
    k_cached: Tensor, v_cached: Tensor, k_exact: Tensor, v_exact: Tensor, *, parts: Deviation
) -> Tensor:
    """Squared distance between reused and exact keys, values or both.

    CacheBlend (arXiv 2405.16444) and its followers differ in which, so the caller says it.

    all: [num_tokens, num_kv_heads, head_dim], any float dtype
    returns: [num_tokens], float32, summed over heads and dims; larger means staler
    """
    if parts is Deviation.K:
        return _squared_distance(k_cached, k_exact)
    if parts is Deviation.V:
        return _squared_distance(v_cached, v_exact)
    return _squared_distance(k_cached, k_exact) + _squared_distance(v_cached, v_exact)


def _squared_distance(cached: Tensor, exact: Tensor) -> Tensor:
    """[num_tokens], float32; in few sweeps, since the tensors are larger than the caches."""
    delta = exact.to(torch.float32, copy=True).sub_(cached.float())
    return torch.linalg.vector_norm(delta.flatten(1), dim=1).square_()
