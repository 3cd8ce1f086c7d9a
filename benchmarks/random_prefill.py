"""Random models and tokens, for benchmarks that need no sense."""

import random

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from replicas.transformers_model import TransformersModel


def small_config(family: str) -> PretrainedConfig:
    """A model whose logits lie far apart: the usual initialisation leaves near-ties."""
    config_class = {"llama": LlamaConfig, "qwen3": Qwen3Config}[family]
    return config_class(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )


def random_model(
    config: PretrainedConfig, *, device: torch.device, dtype: torch.dtype, seed: int
) -> TransformersModel:
    """Random weights, made on the device itself."""
    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return TransformersModel(model.eval())


def random_tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]
