"""The connector's side in every vLLM worker: runs the phases, some layers an engine step."""

import time
from collections import deque
from collections.abc import Generator

import torch
from torch import Tensor
from vllm.logger import init_logger

from kv_tier.arena_view import ArenaView
from kv_tier.store import ChunkLocation
from planner.types import PrefillTimings
from replicas.batch import BatchJob
from replicas.connector_types import JobReport, StepMeta, WorkerReport
from replicas.phases import ThreePhasePrefill
from replicas.vllm_model import VllmModel

logger = init_logger(__name__)


class ArenaSource:
    """`KvSource` over the node's arena: this rank's heads, checked before they are used."""

    def __init__(self, arena: ArenaView, model: VllmModel) -> None:
        self._arena = arena
        self._model = model
        self._checked: set[tuple[int, int]] = set()  # (offset, layer) found good in this batch
        self.damaged: set[bytes] = set()

    def load(self, location: ChunkLocation, layer: int) -> tuple[Tensor, Tensor] | None:
        if location.key in self.damaged:
            return None
        heads = self._model.kv_head_start, self._model.num_kv_heads
        if (location.offset, layer) not in self._checked:
            if not (
                self._arena.verify_header(location)
                and self._arena.verify_layer(location, layer, *heads)
            ):
                self.damaged.add(location.key)
                return None
            self._checked.add((location.offset, layer))
        k, v = self._arena.read_layer(location, layer, *heads)
        device = self._model.device
        return k.to(device, non_blocking=True), v.to(device, non_blocking=True)


class PagedSink:
    """`KvSink` into vLLM's paged cache, and captured chunks into the arena."""

    def __init__(self, arena: ArenaView, model: VllmModel, block_size: int) -> None:
        self._arena = arena
        self._model = model
        self._block_size = block_size

    def open(self, prefill: ThreePhasePrefill) -> None:
        """Start writing for this batch."""
        self._slots = prefill.batch.slots(self._block_size)
        self._offsets = prefill.batch.offsets
        self._dropped: set[int] = set()

    def drop(self, request_idx: int) -> None:
        """Write nothing more of this request: its blocks and its space belong to others now."""
        self._dropped.add(request_idx)
        self._slots[self._offsets[request_idx] : self._offsets[request_idx + 1]] = -1

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        attn = self._model.attention_layer(layer)
        # vLLM's kernels skip rows whose slot is negative, as in its own padded batches
        attn.impl.do_kv_cache_update(attn, k, v, attn.kv_cache, self._slots)

    def capture(
        self, request_idx: int, location: ChunkLocation, layer: int, k: Tensor, v: Tensor
    ) -> None:
        if request_idx in self._dropped or not self._model.stores_heads:
            return
        if layer == 0:
            self._arena.write_header(location)
        head = self._model.kv_head_start
        self._arena.write_layer(location, layer, head, k.transpose(0, 1), v.transpose(0, 1))


class _RunningBatch:
    """One batch between its first and its last layer."""

    def __init__(self, job: BatchJob, arena: ArenaView, model: VllmModel, block_size: int) -> None:
        self.job = job
        self._source = ArenaSource(arena, model)
        self._sink = PagedSink(arena, model, block_size)
        self._prefill = ThreePhasePrefill(model, self._source, self._sink, job)
        self._sink.open(self._prefill)
        self._steps: Generator[None, None, None] = self._prefill.steps()
        self._live = {request.request_id: i for i, request in enumerate(job.jobs)}
        self._started = time.perf_counter()

    @property
    def live(self) -> list[str]:
        return list(self._live)

    def advance(self) -> bool:
        """One layer; False when there was none left."""
        return next(self._steps, _END) is not _END

    def drop(self, request_id: str) -> bool:
        """Forget an aborted request. Its rows walk on with the batch, but write nothing."""
        idx = self._live.pop(request_id, None)
        if idx is None:
            return False
        self._sink.drop(idx)
        return True

    def reports(self, *, failed: bool) -> dict[str, JobReport]:
        trace = self._prefill.trace
        elapsed_s = time.perf_counter() - self._started
        timings = PrefillTimings(
            load_ms=trace.load_s * 1e3,
            warmup_ms=trace.warmup_s * 1e3,
            probe_ms=trace.probe_s * 1e3,
            patch_ms=trace.patch_s * 1e3,
            stall_ms=max(0.0, elapsed_s - trace.compute_s) * 1e3,
            compute_ms=elapsed_s * 1e3,
        )
        return {
            request_id: JobReport(
                num_selected=trace.num_selected[idx],
                failed=failed or idx in trace.failed,
                damaged=sorted(
                    s.location.key
                    for s in self.job.jobs[idx].segments
                    if s.location is not None and s.location.key in self._source.damaged
                ),
                batch_size=len(self.job.jobs),
                timings=timings,
            )
            for request_id, idx in self._live.items()
        }

    def blocks(self, request_id: str) -> list[int]:
        return self.job.jobs[self._live[request_id]].block_ids


_END = object()


class WorkerSide:
    """Advances the batches in the order in which they came."""

    def __init__(self, arena: ArenaView, model: VllmModel, block_size: int) -> None:
        self._arena = arena
        self._model = model
        self._block_size = block_size
        self._queue: deque[BatchJob] = deque()
        self._running: _RunningBatch | None = None
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._reports: dict[str, JobReport] = {}

    @torch.inference_mode()
    def run_step(self, meta: StepMeta) -> None:
        """Take in new batches and advance by the step's number of layers."""
        self._queue.extend(meta.batches)
        for _ in range(meta.num_layers):
            if self._running is None:
                if not self._queue:
                    return
                self._start(self._queue.popleft())
            if self._running is not None:
                self._advance(self._running)

    def take_finished(self, aborted: set[str]) -> set[str]:
        """Requests whose prefill ended since the last call, and those of `aborted` it knew."""
        for request_id in aborted:
            self._drop(request_id)
        finished, self._finished = self._finished, set()
        return finished

    def take_failed_blocks(self) -> set[int]:
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def take_report(self) -> WorkerReport | None:
        reports, self._reports = self._reports, {}
        return WorkerReport(reports) if reports else None

    # ---- parts ----

    def _start(self, job: BatchJob) -> None:
        try:
            self._running = _RunningBatch(job, self._arena, self._model, self._block_size)
        except Exception:
            # whatever it was, vLLM computes these prompts itself; the engine must live
            logger.exception("prefill of batch %d could not start", job.batch_id)
            for request in job.jobs:
                self._finished.add(request.request_id)
                self._failed_blocks.update(request.block_ids)
                self._reports[request.request_id] = _lost(len(job.jobs))

    def _advance(self, batch: _RunningBatch) -> None:
        try:
            more = batch.advance()
        except Exception:
            logger.exception("prefill of batch %d failed", batch.job.batch_id)
            self._end(batch, failed=True)
            return
        if not more:
            self._end(batch, failed=False)

    def _end(self, batch: _RunningBatch, *, failed: bool) -> None:
        reports = batch.reports(failed=failed)
        for request_id, report in reports.items():
            if report.failed:
                self._failed_blocks.update(batch.blocks(request_id))
        self._reports.update(reports)
        self._finished.update(reports)
        self._running = None

    def _drop(self, request_id: str) -> None:
        if self._running is not None and self._running.drop(request_id):
            self._finished.add(request_id)
            if not self._running.live:
                self._running = None
            return
        for job in list(self._queue):
            kept = [r for r in job.jobs if r.request_id != request_id]
            if len(kept) < len(job.jobs):
                job.jobs[:] = kept
                self._finished.add(request_id)
                if not kept:
                    self._queue.remove(job)
                return


def _lost(batch_size: int) -> JobReport:
    return JobReport(
        num_selected=0, failed=True, damaged=[], batch_size=batch_size, timings=PrefillTimings()
    )
