"""The phases without vLLM or the KV tier: stored chunks in plain host memory, KV on the device."""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from kv_tier.store import ChunkLocation
from planner.types import Deviation, Signal
from replicas.batch import BatchJob, Capture, PrefillJob, Segment, SegmentKind
from replicas.phases import ThreePhasePrefill
from replicas.transformers_model import TransformersModel


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

    def copy(self) -> "DeviceCache":
        twin = copy(self)
        twin.k, twin.v = self.k.clone(), self.v.clone()
        return twin

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.k[layer], self.v[layer] = k, v

    def rewrite(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        self.k[layer, rows], self.v[layer, rows] = k, v

    def capture(
        self, request_idx: int, location: ChunkLocation, layer: int, k: Tensor, v: Tensor
    ) -> None:
        self._memory.store(location.key, k, v)


def location_of(tokens: Sequence[int], anchor: Sequence[int]) -> ChunkLocation:
    key = repr((tuple(anchor), tuple(tokens))).encode()
    return ChunkLocation(key=key, offset=0, nbytes=0, num_tokens=len(tokens))


def ingest(
    model: TransformersModel,
    memory: ChunkMemory,
    chunks: Sequence[Sequence[int]],
    anchor: Sequence[int],
) -> None:
    """The KV of each chunk alone behind its anchor, computed by the phases themselves."""
    start, jobs = len(anchor), {}
    for tokens in chunks:
        location = location_of(tokens, anchor)
        if location.key in memory:
            continue
        end = start + len(tokens)
        jobs[location.key] = PrefillJob(
            request_id="ingest",
            token_ids=[*anchor, *tokens],
            segments=[],
            coverage=1.0,
            block_ids=[],
            captures=[Capture(start=start, end=end, location=location)],
        )
    if jobs:
        batch = BatchJob(
            batch_id=0,
            signal=Signal.KV_DEV,
            warmup_depth=model.num_layers,
            probe_len=0,
            jobs=list(jobs.values()),
        )
        run_batch(model, memory, batch)


def stored_job(
    model: TransformersModel,
    memory: ChunkMemory,
    prefix: Sequence[int],
    chunks: Sequence[Sequence[int]],
    suffix: Sequence[int],
    *,
    coverage: float,
    anchor: Sequence[int],
) -> PrefillJob:
    """A prompt whose chunks are all stored; its prefix and suffix are computed."""
    ingest(model, memory, chunks, anchor)
    tokens, segments = list(prefix), []
    for chunk in chunks:
        segment = Segment(
            kind=SegmentKind.CHUNK,
            start=len(tokens),
            end=len(tokens) + len(chunk),
            location=location_of(chunk, anchor),
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


def run_phases(
    model: TransformersModel,
    memory: ChunkMemory,
    job: PrefillJob,
    *,
    signal: Signal,
    w: int,
    p: int,
    deviation: Deviation = Deviation.KV,
    cache: DeviceCache | None = None,
) -> DeviceCache:
    """The KV of every token but the prompt's last."""
    batch = BatchJob(
        batch_id=0, signal=signal, warmup_depth=w, probe_len=p, jobs=[job], deviation=deviation
    )
    keys = [s.location.key for s in job.segments if s.location is not None]
    if keys and w < model.num_layers:
        memory.start(keys)
    return run_batch(model, memory, batch, cache)


@torch.inference_mode()
def run_batch(
    model: TransformersModel,
    memory: ChunkMemory,
    batch: BatchJob,
    cache: DeviceCache | None = None,
) -> DeviceCache:
    cache = cache or DeviceCache(model, sum(len(job.token_ids) for job in batch.jobs), memory)
    for _ in ThreePhasePrefill(model, memory, cache, batch).steps():
        pass
    return cache
