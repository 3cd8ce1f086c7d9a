"""A small Qwen3 for training on one CPU thread: bfloat16 arithmetic over float32 weights.

Weight names are those of `Qwen3ForCausalLM`, which loads the result; a test compares the logits.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.training.synthetic_words import BOS, EOS, PAD, VOCAB_SIZE

HEAD_DIM = 32
MASKED = -1e4  # bfloat16 has no need of minus infinity, and its softmax no NaN


def synthetic_config(*, num_layers: int = 16) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def new_model(config: Qwen3Config, seed: int) -> Qwen3ForCausalLM:
    """Random weights, with two priors that a model of this size does not find by itself in time.

    Small output projections; and in each group the keys start as the first head's queries, so that
    equal words match from the start.
    """
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).float()
    group = config.num_attention_heads // config.num_key_value_heads
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=0.05)
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                gain = 0.3 if "o_proj" in name or "down_proj" in name else 1.0
                weight.normal_(std=gain / math.sqrt(weight.shape[1]))
        for layer in model.model.layers:
            q = layer.self_attn.q_proj.weight.view(-1, group, HEAD_DIM, config.hidden_size)
            layer.self_attn.k_proj.weight.copy_(q[:, 0].reshape(-1, config.hidden_size))
    return model


def target_logits(
    weights: dict[str, Tensor], config: Any, ids: Tensor, positions: Tensor
) -> Tensor:
    """Logits at some places of a batch of rows, in the weights' type, returned as float32.

    weights: by their names in `Qwen3ForCausalLM`; ids: [rows, tokens];
    positions: [n], int64, into the flattened ids. Returns [n, vocab_size].

    Plain products of batched matrices: on a CPU their backward pass takes half the time of that
    of torch's fused attention.
    """
    rows, tokens = ids.shape
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    group, eps = heads // kv_heads, config.rms_norm_eps
    x = F.embedding(ids, weights["model.embed_tokens.weight"])
    cos, sin = _rotary(tokens, config.rope_parameters["rope_theta"], x.dtype)
    mask = torch.full((tokens, tokens), MASKED, dtype=x.dtype).triu(1).repeat(group, 1)[None]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."

        def weight(name: str, start: str = prefix) -> Tensor:
            return weights[f"{start}{name}.weight"]

        h = F.rms_norm(x, x.shape[-1:], weight("input_layernorm"), eps)
        joined = torch.cat([weight(f"{name}_proj", attention) for name in "qkv"])
        qkv = F.linear(h, joined).view(rows, tokens, heads + 2 * kv_heads, HEAD_DIM)
        qk, v = qkv[:, :, : heads + kv_heads], qkv[:, :, heads + kv_heads :]
        gains = torch.cat(
            [
                weight("q_norm", attention).expand(heads, HEAD_DIM),
                weight("k_norm", attention).expand(kv_heads, HEAD_DIM),
            ]
        )
        qk = F.rms_norm(qk, (HEAD_DIM,), None, eps)
        # the norm's gains go into the tables: one product less over all tokens
        qk = qk * (gains * cos) + _turned(qk) * (_swapped(gains) * sin)
        q = qk[:, :, :heads].reshape(rows, tokens, kv_heads, group, HEAD_DIM)
        q = q.permute(0, 2, 3, 1, 4).reshape(rows * kv_heads, group * tokens, HEAD_DIM)
        k = qk[:, :, heads:].permute(0, 2, 3, 1).reshape(rows * kv_heads, HEAD_DIM, tokens)
        v = v.transpose(1, 2).reshape(rows * kv_heads, tokens, HEAD_DIM)
        scores = torch.baddbmm(mask, q, k, alpha=HEAD_DIM**-0.5)
        mixed = torch.bmm(torch.softmax(scores, -1), v)
        mixed = mixed.view(rows, kv_heads, group, tokens, HEAD_DIM).permute(0, 3, 1, 2, 4)
        x = x + F.linear(mixed.reshape(rows, tokens, -1), weight("o_proj", attention))
        h = F.rms_norm(x, x.shape[-1:], weight("post_attention_layernorm"), eps)
        gate_up = F.linear(h, torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")]))
        gate, up = gate_up.chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, weight("mlp.down_proj"))
    last = x.reshape(rows * tokens, -1)[positions]
    last = F.rms_norm(last, last.shape[-1:], weights["model.norm.weight"], eps)
    return F.linear(last, weights["model.embed_tokens.weight"]).float()


def _rotary(tokens: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [tokens, 1, head_dim]."""
    frequencies = theta ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM)
    angles = torch.arange(tokens, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], dim=-1)


def _swapped(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([x[..., half:], x[..., :half]], dim=-1)
