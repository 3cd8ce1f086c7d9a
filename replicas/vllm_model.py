"""The model that a vLLM worker holds, walked layer by layer with the worker's own modules.

vLLM's linears (tensor-parallel, quantised), norms and rotary embeddings are used as they are; only
the order of the walk and the attention are ours.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from replicas.model import Hidden, Projection
from replicas.transformers_model import SUPPORTED_ARCHITECTURES

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def reuse_refusal(hf_config: Any, vllm_config: Any) -> str | None:
    """Why chunk reuse would not be exact or is not validated here; None if it may be used.

    Models that are refused are still served, by vLLM's own full prefill.
    """
    architectures = list(getattr(hf_config, "architectures", None) or [])
    if not any(name in SUPPORTED_ARCHITECTURES for name in architectures):
        return f"architecture {architectures} is not among {list(SUPPORTED_ARCHITECTURES)}"
    if getattr(hf_config, "use_sliding_window", True) and getattr(
        hf_config, "sliding_window", None
    ):
        return f"sliding window attention ({hf_config.sliding_window} tokens)"
    layer_types = set(getattr(hf_config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        return f"layers that are not full attention: {sorted(layer_types)}"
    rope = getattr(hf_config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in SUPPORTED_ROPE_TYPES:
        return f"rotary embedding of type {rope_type!r}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "partial rotary embedding"
    if getattr(hf_config, "llama_4_scaling", None):
        return "queries scaled by position"
    if getattr(hf_config, "dual_chunk_attention_config", None):
        return "dual chunk attention"
    if not getattr(hf_config, "is_causal", True):
        return "attention that is not causal"
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return "context parallelism"
    if vllm_config.lora_config is not None:
        return "LoRA adapters"
    if vllm_config.speculative_config is not None:
        return "speculative decoding"
    return None


class VllmModel:
    """`LayerwiseModel` over a loaded vLLM Llama, Qwen2, Qwen3 or Mistral; one rank's part."""

    def __init__(self, model: Any, *, total_num_kv_heads: int, max_rows: int) -> None:
        """max_rows: as many as vLLM itself runs through a layer at once, and has room for."""
        from vllm.distributed.parallel_state import get_tp_group

        body = model.model
        self._norm = body.norm
        self._head = model.compute_logits
        self._embed = body.embed_input_ids
        self._layers = list(islice(body.layers, body.start_layer, body.end_layer))
        self._group = get_tp_group()
        attn = self._layers[0].self_attn
        weight = next(body.parameters())
        self._max_rows = max_rows
        self.num_ranks = self._group.world_size
        self.num_layers = len(self._layers)
        self.num_heads = attn.num_heads
        self.num_kv_heads = attn.num_kv_heads
        self.head_dim = attn.head_dim
        self.scale = attn.scaling
        self.device = weight.device
        self.dtype = weight.dtype
        rank, size = self._group.rank_in_group, self._group.world_size
        self.kv_head_start = rank * total_num_kv_heads // size
        # with more ranks than KV heads, neighbours hold the same head: the first one stores it
        self.stores_heads = rank == 0 or (rank - 1) * total_num_kv_heads // size != (
            self.kv_head_start
        )

    def attention_layer(self, layer: int) -> Any:
        return self._layers[layer].self_attn.attn

    def write_cache(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Rotated K and V into vLLM's paged cache; rows whose slot is negative are skipped.

        k, v: [num_rows, num_kv_heads, head_dim]; slots: [num_rows], int64
        """
        attn = self._layers[layer].self_attn.attn
        attn.impl.do_kv_cache_update(attn, k, v, attn.kv_cache, slots)

    def embed(self, token_ids: Tensor) -> Hidden:
        return Hidden(self._embed(token_ids))

    def project(self, layer: int, hidden: Hidden) -> Projection:
        parts = [self._project(layer, part) for part in self._blocks(hidden)]
        if len(parts) == 1:
            return parts[0]
        return Projection(
            torch.cat([p.q for p in parts]),
            torch.cat([p.k for p in parts]),
            torch.cat([p.v for p in parts]),
            torch.cat([p.residual for p in parts]),
        )

    def _project(self, layer: int, hidden: Hidden) -> Projection:
        block = self._layers[layer]
        attn = block.self_attn
        if hidden.residual is None:
            residual = hidden.states
            x = block.input_layernorm(hidden.states)
        else:
            x, residual = block.input_layernorm(hidden.states, hidden.residual)
        qkv, _ = attn.qkv_proj(x)
        q, k, v = qkv.split([attn.q_size, attn.kv_size, attn.kv_size], dim=-1)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        if hasattr(attn, "q_norm"):
            q, k = attn.q_norm(q), attn.k_norm(k)
        return Projection(q, k, v, residual)

    def rotate(self, layer: int, positions: Tensor, x: Tensor) -> Tensor:
        # vLLM's kernels rotate in place, and want the heads flattened; the key may be absent
        flat = x.reshape(x.shape[0], -1).clone()
        rotated, _ = self._layers[layer].self_attn.rotary_emb(positions, flat, None)
        return rotated.view(x.shape)

    def rotary_table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        table = self._layers[0].self_attn.rotary_emb.cos_sin_cache[positions].float()
        cos, sin = table.chunk(2, dim=-1)
        return cos.contiguous(), sin.contiguous()

    def finish(self, layer: int, residual: Tensor, attention: Tensor) -> Hidden:
        parts = [
            self._finish(layer, part.residual, part.states)
            for part in self._blocks(Hidden(attention, residual))
        ]
        if len(parts) == 1:
            return parts[0]
        return Hidden(torch.cat([p.states for p in parts]), torch.cat([p.residual for p in parts]))

    def _blocks(self, hidden: Hidden) -> list[Hidden]:
        """The rows in blocks that vLLM has room for."""
        if hidden.states.shape[0] <= self._max_rows:
            return [hidden]
        states = hidden.states.split(self._max_rows)
        if hidden.residual is None:
            return [Hidden(part) for part in states]
        residuals = hidden.residual.split(self._max_rows)
        return [Hidden(s, r) for s, r in zip(states, residuals, strict=True)]

    def _finish(self, layer: int, residual: Tensor, attention: Tensor) -> Hidden:
        block = self._layers[layer]
        out, _ = block.self_attn.o_proj(attention.flatten(1))
        x, residual = block.post_attention_layernorm(out, residual)
        return Hidden(block.mlp(x), residual)

    def logits(self, hidden: Hidden) -> Tensor | None:
        if hidden.residual is None:
            states = self._norm(hidden.states)
        else:
            states, _ = self._norm(hidden.states, hidden.residual)
        logits = self._head(states)
        return None if logits is None else logits.float()

    def reduce_scores(self, scores: Tensor) -> Tensor:
        if self._group.world_size == 1:
            return scores
        total = self._group.all_reduce(scores)
        return self._group.broadcast(total, src=0)  # the same bits on every rank

    def agree(self, values: Tensor) -> Tensor:
        if self._group.world_size > 1:
            torch.distributed.broadcast(
                values, src=self._group.ranks[0], group=self._group.cpu_group
            )
        return values

    def all_ready(self, ready: Sequence[bool]) -> list[bool]:
        if self._group.world_size == 1:
            return list(ready)
        everyone = torch.tensor(ready, dtype=torch.int32)
        torch.distributed.all_reduce(
            everyone, op=torch.distributed.ReduceOp.MIN, group=self._group.cpu_group
        )
        return [bool(vote) for vote in everyone.tolist()]
