"""Random models and chunks stored in plain host memory: the phases without vLLM or the KV tier."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from kv_tier.store import ChunkLocation
from planner.types import Signal
from replicas.batch import BatchJob, Capture, PrefillJob, Segment, SegmentKind
from replicas.phases import ThreePhasePrefill
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


class ChunkMemory:
    """Chunk KV by key and layer, [2, num_kv_heads, num_tokens, head_dim], page-locked beside a GPU.

    `start` begins to copy chunks to the device, layer by layer on a stream of its own, as a
    transfer ahead of the computation does; `load` waits for the layer it is asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._values: dict[bytes, list[Tensor]] = {}
        self._arrived: dict[tuple[bytes, int], Tensor] = {}
        self._events: list[torch.cuda.Event] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __contains__(self, key: bytes) -> bool:
        return key in self._values

    def store(self, key: bytes, k: Tensor, v: Tensor) -> None:
        """The next layer; k, v: [num_tokens, num_kv_heads, head_dim]."""
        value = torch.stack((k, v)).transpose(1, 2).contiguous().cpu()
        if self._stream is not None:
            value = value.pin_memory()
        self._values.setdefault(key, []).append(value)

    def start(self, keys: Sequence[bytes]) -> None:
        self._arrived.clear()
        self._events.clear()
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        num_layers = len(self._values[keys[0]])
        with torch.cuda.stream(self._stream):
            for layer in range(num_layers):
                for key in keys:
                    value = self._values[key][layer].to(self._device, non_blocking=True)
                    self._arrived[key, layer] = value
                event = torch.cuda.Event()
                event.record()
                self._events.append(event)

    def load(self, location: ChunkLocation, layer: int) -> tuple[Tensor, Tensor]:
        if self._stream is None:
            k, v = self._values[location.key][layer]
            return k, v
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._events[layer])
        value = self._arrived[location.key, layer]
        value.record_stream(current)
        return value[0], value[1]


class DeviceCache:
    """Where finished KV goes: dense, on the device."""

    def __init__(self, model: TransformersModel, num_rows: int, memory: ChunkMemory) -> None:
        shape = (model.num_layers, num_rows, model.num_kv_heads, model.head_dim)
        self.k = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.v = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._memory = memory

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.k[layer], self.v[layer] = k, v

    def rewrite(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        self.k[layer, rows], self.v[layer, rows] = k, v

    def capture(
        self, request_idx: int, location: ChunkLocation, layer: int, k: Tensor, v: Tensor
    ) -> None:
        self._memory.store(location.key, k, v)


def ingest(
    model: TransformersModel, memory: ChunkMemory, tokens: list[int], anchor: list[int]
) -> ChunkLocation:
    """A chunk's KV behind its anchor, computed by the phases themselves."""
    location = ChunkLocation(
        key=repr((anchor, tokens)).encode(), offset=0, nbytes=0, num_tokens=len(tokens)
    )
    if location.key not in memory:
        start, end = len(anchor), len(anchor) + len(tokens)
        job = PrefillJob(
            request_id="ingest",
            token_ids=[*anchor, *tokens],
            segments=[],
            coverage=1.0,
            block_ids=[],
            captures=[Capture(start=start, end=end, location=location)],
        )
        run_phases(model, memory, job, signal=Signal.KV_DEV, w=model.num_layers, p=0)
    return location


def stored_job(
    model: TransformersModel,
    memory: ChunkMemory,
    prefix: list[int],
    chunks: Sequence[list[int]],
    suffix: list[int],
    *,
    coverage: float,
    anchor: list[int],
) -> PrefillJob:
    """A prompt whose chunks are all stored; its prefix and suffix are computed."""
    tokens, segments = list(prefix), []
    for chunk in chunks:
        segment = Segment(
            kind=SegmentKind.CHUNK,
            start=len(tokens),
            end=len(tokens) + len(chunk),
            location=ingest(model, memory, chunk, anchor),
        )
        segments.append(segment)
        tokens.extend(chunk)
    return PrefillJob(
        request_id="bench",
        token_ids=[*tokens, *suffix],
        segments=segments,
        coverage=coverage,
        block_ids=[],
        captures=[],
    )


@torch.inference_mode()
def run_phases(
    model: TransformersModel,
    memory: ChunkMemory,
    job: PrefillJob,
    *,
    signal: Signal,
    w: int,
    p: int,
    cache: DeviceCache | None = None,
) -> DeviceCache:
    """The KV of every token but the prompt's last."""
    cache = cache or DeviceCache(model, len(job.token_ids), memory)
    keys = [s.location.key for s in job.segments if s.location is not None]
    if keys and w < model.num_layers:
        memory.start(keys)
    batch = BatchJob(batch_id=0, signal=signal, warmup_depth=w, probe_len=p, jobs=[job])
    for _ in ThreePhasePrefill(model, memory, cache, batch).steps():
        pass
    return cache


def random_tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]
