"""A Hugging Face causal language model walked layer by layer.

The plain reference beside the vLLM adapter: any torch device, one process or several with a slice
each, no paged cache.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from replicas.model import Hidden, Projection
from replicas.tensor_parallel import LayerSlice, Ranks, head_slice

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


class TransformersModel:
    """`LayerwiseModel` over a loaded `LlamaForCausalLM` or one of its siblings.

    With a group, every rank of it loads the whole model, keeps its slice of the layers (norms,
    embeddings and head are held by all), and lets go of the rest. gloo on the CPU, NCCL on CUDA.
    """

    def __init__(self, model: Any, group: ProcessGroup | None = None) -> None:
        name = type(model).__name__
        if name not in SUPPORTED_ARCHITECTURES:
            raise ValueError(f"{name} is not among {', '.join(SUPPORTED_ARCHITECTURES)}")
        config, layers = model.config, model.model.layers
        self._ranks = Ranks(group)
        self.num_ranks = self._ranks.size
        heads = head_slice(
            config.num_attention_heads,
            config.num_key_value_heads,
            self._ranks.rank,
            self.num_ranks,
        )
        self.num_layers = len(layers)
        self.num_heads = heads.num_heads
        self.num_kv_heads = heads.num_kv_heads
        self.kv_head_start = heads.kv_head_start
        self.stores_heads = heads.stores_heads
        self.head_dim = layers[0].self_attn.head_dim
        self.scale = self.head_dim**-0.5
        self.device = model.device
        self.dtype = model.dtype
        self._embed_tokens = model.model.embed_tokens
        self._rotary_emb = model.model.rotary_emb
        self._norm = model.model.norm
        self._lm_head = model.lm_head
        if self.num_ranks == 1:
            self.model = model
            self._layers = layers
        else:
            self._layers = [
                LayerSlice(layer, heads, self.head_dim, self._ranks) for layer in layers
            ]

    def embed(self, token_ids: Tensor) -> Hidden:
        return Hidden(self._embed_tokens(token_ids))

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
        cos, sin = self._rotary_emb(x, positions[None])
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cos[0, :, None] + turned * sin[0, :, None]

    def rotary_table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.empty(0, dtype=torch.float32, device=self.device)  # for its type and place
        cos, sin = self._rotary_emb(wide, positions[None])
        half = self.head_dim // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

    def finish(self, layer: int, residual: Tensor, attention: Tensor) -> Hidden:
        block = self._layers[layer]
        states = residual + self._ranks.sum(block.self_attn.o_proj(attention.flatten(1)))
        return Hidden(states + self._ranks.sum(block.mlp(block.post_attention_layernorm(states))))

    def logits(self, hidden: Hidden) -> Tensor:
        """[num_rows, vocab_size], float32, the same bits on every rank."""
        return self.agree(self._lm_head(self._norm(hidden.states)).float())

    def reduce_scores(self, scores: Tensor) -> Tensor:
        if self.num_ranks == 1:
            return scores
        return self.agree(self._ranks.sum(scores.clone()))

    def agree(self, values: Tensor) -> Tensor:
        return self._ranks.agree(values.to(self.device)).to(values.device)  # NCCL has no CPU side

    def all_ready(self, ready: Sequence[bool]) -> list[bool]:
        return self._ranks.all_ready(ready, self.device)
