"""A Hugging Face causal language model walked layer by layer.

The plain reference beside the vLLM adapter: any torch device, one process, no paged cache.
"""

from typing import Any

import torch
from torch import Tensor

from replicas.model import Hidden, Projection

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


class TransformersModel:
    """`LayerwiseModel` over a loaded `LlamaForCausalLM` or one of its siblings."""

    def __init__(self, model: Any) -> None:
        name = type(model).__name__
        if name not in SUPPORTED_ARCHITECTURES:
            raise ValueError(f"{name} is not among {', '.join(SUPPORTED_ARCHITECTURES)}")
        config = model.config
        self.model = model
        self._layers = model.model.layers
        self.num_layers = len(self._layers)
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.kv_head_start = 0
        self.head_dim = self._layers[0].self_attn.head_dim
        self.scale = self.head_dim**-0.5
        self.device = model.device
        self.dtype = model.dtype

    def embed(self, token_ids: Tensor) -> Hidden:
        return Hidden(self.model.model.embed_tokens(token_ids))

    def project(self, layer: int, hidden: Hidden) -> Projection:
        block = self._layers[layer]
        attn = block.self_attn
        x = block.input_layernorm(hidden.states)
        n = x.shape[0]
        q = attn.q_proj(x).view(n, self.num_heads, self.head_dim)
        k = attn.k_proj(x).view(n, self.num_kv_heads, self.head_dim)
        v = attn.v_proj(x).view(n, self.num_kv_heads, self.head_dim)
        if hasattr(attn, "q_norm"):
            q, k = attn.q_norm(q), attn.k_norm(k)
        return Projection(q, k, v, hidden.states)

    def rotate(self, layer: int, positions: Tensor, x: Tensor) -> Tensor:
        cos, sin = self.model.model.rotary_emb(x, positions[None])
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cos[0, :, None] + turned * sin[0, :, None]

    def finish(self, layer: int, residual: Tensor, attention: Tensor) -> Hidden:
        block = self._layers[layer]
        states = residual + block.self_attn.o_proj(attention.flatten(1))
        return Hidden(states + block.mlp(block.post_attention_layernorm(states)))

    def reduce_scores(self, scores: Tensor) -> Tensor:
        return scores
