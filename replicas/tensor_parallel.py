"""One rank's part of a Hugging Face decoder: slices of its linear layers, and what joins them.

As in Megatron-LM (arXiv 1909.08053): q, k, v, gate and up are cut by their outputs, the output and
down projections by their inputs, and each pair needs one sum over the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class Ranks:
    """The processes that hold a model together; this one alone where `group` is None."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group that it is to hold a model with")
        self._group = group

    def sum(self, x: Tensor) -> Tensor:
        """Over all ranks. Consumes `x`."""
        if self.size > 1:
            dist.all_reduce(x, group=self._group)
        return x

    def agree(self, x: Tensor) -> Tensor:
        """Rank 0's values on every rank, bit for bit."""
        if self.size == 1:
            return x
        x = x.clone(memory_format=torch.contiguous_format)
        dist.broadcast(x, group=self._group, group_src=0)
        return x

    def all_ready(self, ready: Sequence[bool], device: torch.device) -> list[bool]:
        """Each one True only if it is True on every rank."""
        if self.size == 1:
            return list(ready)
        votes = torch.tensor(ready, dtype=torch.int32, device=device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._group)
        return [bool(vote) for vote in votes.tolist()]


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """The attention heads of one rank. Query heads [i·g, (i+1)·g) share KV head i."""

    head_start: int
    num_heads: int
    kv_head_start: int
    num_kv_heads: int
    stores_heads: bool  # of the ranks that hold the same KV head, one writes it to the store


def head_slice(num_heads: int, num_kv_heads: int, rank: int, num_ranks: int) -> HeadSlice:
    """With more ranks than KV heads, neighbours hold the same one and the first of them stores it.

    num_heads, num_kv_heads: of the whole model
    """
    if num_heads % num_ranks:
        raise ValueError(f"{num_heads} attention heads cannot be divided among {num_ranks} ranks")
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        raise ValueError(
            f"{num_kv_heads} KV heads can neither be divided among {num_ranks} ranks "
            "nor be held by equally many of them"
        )
    mine = num_heads // num_ranks
    start = rank * num_kv_heads // num_ranks
    is_repeated = rank > 0 and (rank - 1) * num_kv_heads // num_ranks == start
    return HeadSlice(
        head_start=rank * mine,
        num_heads=mine,
        kv_head_start=start,
        num_kv_heads=max(1, num_kv_heads // num_ranks),
        stores_heads=not is_repeated,
    )


class LayerSlice(nn.Module):
    """One rank's part of a decoder layer, under the names that the whole one has."""

    def __init__(self, layer: Any, heads: HeadSlice, head_dim: int, ranks: Ranks) -> None:
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.self_attn = AttentionSlice(layer.self_attn, heads, head_dim, ranks)
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = MlpSlice(layer.mlp, ranks)


class AttentionSlice(nn.Module):
    """The projections of some heads. The outputs of `o_proj` are to be summed over the ranks."""

    def __init__(self, attn: Any, heads: HeadSlice, head_dim: int, ranks: Ranks) -> None:
        super().__init__()
        q_start, kv_start = heads.head_start * head_dim, heads.kv_head_start * head_dim
        q = slice(q_start, q_start + heads.num_heads * head_dim)
        kv = slice(kv_start, kv_start + heads.num_kv_heads * head_dim)
        self.q_proj = _outputs(attn.q_proj, q)
        self.k_proj = _outputs(attn.k_proj, kv)
        self.v_proj = _outputs(attn.v_proj, kv)
        self.o_proj = _inputs(attn.o_proj, q, has_bias=ranks.rank == 0)
        if hasattr(attn, "q_norm"):
            self.q_norm, self.k_norm = attn.q_norm, attn.k_norm


class MlpSlice(nn.Module):
    """The gated MLP over some inner features. Its outputs are to be summed over the ranks."""

    def __init__(self, mlp: Any, ranks: Ranks) -> None:
        super().__init__()
        num_features = mlp.gate_proj.out_features
        mine = slice(
            ranks.rank * num_features // ranks.size, (ranks.rank + 1) * num_features // ranks.size
        )
        self.gate_proj = _outputs(mlp.gate_proj, mine)
        self.up_proj = _outputs(mlp.up_proj, mine)
        self.down_proj = _inputs(mlp.down_proj, mine, has_bias=ranks.rank == 0)
        self.act_fn = mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _outputs(linear: nn.Linear, mine: slice) -> nn.Linear:
    """A copy of the rows `mine` of its weight."""
    _check_plain(linear)
    return _linear(linear.weight[mine], None if linear.bias is None else linear.bias[mine])


def _inputs(linear: nn.Linear, mine: slice, *, has_bias: bool) -> nn.Linear:
    """A copy of the columns `mine` of its weight. The bias counts once: one rank adds it."""
    _check_plain(linear)
    return _linear(linear.weight[:, mine], linear.bias if has_bias else None)


def _check_plain(linear: nn.Linear) -> None:
    if type(linear) is not nn.Linear:
        raise ValueError(f"only plain linear layers can be cut, not {type(linear).__name__}")


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    # on "meta": the weights of its own would be random, and thrown away
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = _copy(weight)
    if bias is not None:
        made.bias = _copy(bias)
    return made


def _copy(part: Tensor) -> nn.Parameter:
    """A view would keep the whole weight in memory."""
    return nn.Parameter(
        part.detach().clone(memory_format=torch.contiguous_format), requires_grad=False
    )
