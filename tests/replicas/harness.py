"""Runs the three phases on a small Hugging Face model and compares with its own forward."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kv_tier.store import ChunkLocation
from planner.types import Deviation, Signal
from replicas.batch import BatchJob, Capture, PrefillJob, Segment, SegmentKind
from replicas.phases import ThreePhasePrefill
from replicas.transformers_model import TransformersModel
from replicas.walk import PrefillTrace

VOCAB = 128
LayerKv = list[tuple[Tensor, Tensor]]  # by layer: K, V [num_tokens, num_kv_heads, head_dim]

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_model(
    family: str = "qwen3", *, num_layers: int = 4, seed: int = 0, **extra
) -> TransformersModel:
    """A random float32 model whose logits are far apart."""
    torch.manual_seed(seed)
    config_cls, model_cls = FAMILIES[family]
    if family == "mistral":
        extra = {"sliding_window": None, **extra}
    config = config_cls(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.2,
        **extra,
    )
    return TransformersModel(model_cls(config).to(torch.float32).eval())


class MemorySource:
    """Chunk KV by key; `broken` keys cannot be read."""

    def __init__(self) -> None:
        self.values: dict[bytes, LayerKv] = {}
        self.broken: set[bytes] = set()

    def load(self, location: ChunkLocation, layer: int) -> tuple[Tensor, Tensor] | None:
        if location.key in self.broken:
            return None
        k, v = self.values[location.key][layer]
        return k.transpose(0, 1), v.transpose(0, 1)


class DenseSink:
    """Collects the KV of a batch, and captured chunks into a source."""

    def __init__(self, num_layers: int, source: MemorySource) -> None:
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self._source = source

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.layers[layer] = (k.clone(), v.clone())

    def rewrite(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        kept_k, kept_v = self.layers[layer]
        kept_k[rows], kept_v[rows] = k, v

    def capture(self, request_idx, location, layer, k, v) -> None:
        self._source.values.setdefault(location.key, []).append((k.clone(), v.clone()))


def location_of(tokens: Sequence[int], anchor: Sequence[int]) -> ChunkLocation:
    key = repr((tuple(tokens), tuple(anchor))).encode()
    return ChunkLocation(key=key, offset=0, nbytes=0, num_tokens=len(tokens))


def ingest(
    model: TransformersModel, source: MemorySource, tokens: list[int], anchor: list[int]
) -> ChunkLocation:
    """A chunk's isolated KV behind its anchor, computed by the phases themselves."""
    location = location_of(tokens, anchor)
    if location.key not in source.values:
        start, end = len(anchor), len(anchor) + len(tokens)
        job = PrefillJob(
            request_id="ingest",
            token_ids=[*anchor, *tokens],
            segments=[],
            coverage=1.0,
            block_ids=[],
            captures=[Capture(start=start, end=end, location=location)],
        )
        batch = BatchJob(
            batch_id=0,
            signal=Signal.KV_DEV,
            warmup_depth=model.num_layers,
            probe_len=0,
            jobs=[job],
        )
        with torch.inference_mode():
            for _ in ThreePhasePrefill(
                model, source, DenseSink(model.num_layers, source), batch
            ).steps():
                pass
    return location


def make_job(
    model: TransformersModel,
    source: MemorySource,
    prefix: list[int],
    chunks: list[list[int]],
    suffix: list[int],
    *,
    coverage: float,
    anchor: list[int],
    missing: frozenset[int] = frozenset(),
    cached_prefix: bool = False,
    request_id: str = "r",
) -> PrefillJob:
    """A request whose chunks are stored, but for those in `missing`."""
    tokens, segments = list(prefix), []
    if cached_prefix and prefix:
        location = ingest(model, source, prefix, [])
        segments.append(
            Segment(kind=SegmentKind.PREFIX, start=0, end=len(prefix), location=location)
        )
    for idx, chunk in enumerate(chunks):
        location = None if idx in missing else ingest(model, source, chunk, anchor)
        segments.append(
            Segment(
                kind=SegmentKind.CHUNK,
                start=len(tokens),
                end=len(tokens) + len(chunk),
                location=location,
            )
        )
        tokens.extend(chunk)
    return PrefillJob(
        request_id=request_id,
        token_ids=[*tokens, *suffix],
        segments=segments,
        coverage=coverage,
        block_ids=[],
        captures=[],
    )


def run(
    model: TransformersModel,
    source: MemorySource,
    jobs: list[PrefillJob],
    signal: Signal,
    w: int,
    p: int,
    *,
    deviation: Deviation = Deviation.KV,
    **options: Any,
) -> tuple[list[LayerKv], PrefillTrace]:
    """KV of each request (without the prompt's last token), and the trace.

    options: of `ThreePhasePrefill`
    """
    batch = BatchJob(
        batch_id=1, signal=signal, warmup_depth=w, probe_len=p, jobs=jobs, deviation=deviation
    )
    sink = DenseSink(model.num_layers, source)
    prefill = ThreePhasePrefill(model, source, sink, batch, **options)
    with torch.inference_mode():
        for _ in prefill.steps():
            pass
    offsets = prefill.batch.offsets
    per_request = []
    for i in range(len(jobs)):
        rows = slice(offsets[i], offsets[i + 1] - 1)
        per_request.append([(k[rows], v[rows]) for k, v in sink.layers])
    return per_request, prefill.trace


def full_kv(model: TransformersModel, tokens: list[int]) -> LayerKv:
    """The model's own prefill, without the last token."""
    cache = DynamicCache()
    with torch.inference_mode():
        model.model(torch.tensor([tokens[:-1]]), past_key_values=cache)
    return [
        (layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers
    ]


def last_log_probs(model: TransformersModel, kv: LayerKv, tokens: list[int]) -> Tensor:
    """Log-probabilities after the whole prompt, the last token computed over `kv`."""
    cache = DynamicCache()
    for layer, (k, v) in enumerate(kv):
        cache.update(k.transpose(0, 1)[None].clone(), v.transpose(0, 1)[None].clone(), layer)
    with torch.inference_mode():
        out = model.model(torch.tensor([[tokens[-1]]]), past_key_values=cache)
    return out.logits[0, -1].log_softmax(-1)


def worst_difference(a: LayerKv, b: LayerKv) -> float:
    return max(
        float((x - y).abs().max())
        for left, right in zip(a, b, strict=True)
        for x, y in zip(left, right, strict=True)
    )


def random_tokens(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]
