"""The connector's side in every vLLM worker: runs the phases, some layers an engine step."""

import logging
import time
from collections import deque
from collections.abc import Generator

import torch
from torch import Tensor

from kv_tier.arena_view import ArenaView
from kv_tier.store import ChunkLocation
from planner.types import PrefillTimings
from replicas.batch import BatchJob
from replicas.connector_types import JobReport, StepMeta, WorkerReport
from replicas.phases import ThreePhasePrefill
from replicas.vllm_model import VllmModel

logger = logging.getLogger(__name__)


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
        # blocking: the lease may end as soon as the walk does
        return k.to(self._model.device), v.to(self._model.device)


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


_END = object()


class _Lane:
    """Batches that run one after another."""

    def __init__(self) -> None:
        self.queue: deque[BatchJob] = deque()
        self.running: _RunningBatch | None = None

    @property
    def has_work(self) -> bool:
        return self.running is not None or bool(self.queue)


class WorkerSide:
    """Advances the batches in the order in which they came, requests before ingests.

    Every rank decides alike: what it goes by is the step's metadata and its own walk, which is the
    same on all of them.
    """

    def __init__(self, arena: ArenaView, model: VllmModel, block_size: int) -> None:
        self._arena = arena
        self._model = model
        self._block_size = block_size
        self._requests = _Lane()
        self._ingests = _Lane()
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._reports: dict[str, JobReport] = {}

    @torch.inference_mode()
    def run_step(self, meta: StepMeta) -> None:
        """Take in new batches and advance by the step's number of layers."""
        for job in meta.batches:
            lane = self._ingests if job.is_ingest else self._requests
            lane.queue.append(job)
        for _ in range(meta.num_layers):
            lane = self._requests if self._requests.has_work else self._ingests
            if not lane.has_work:
                return
            self._advance(lane)

    @torch.inference_mode()
    def take_finished(self, aborted: set[str]) -> set[str]:
        """Requests whose prefill ended since the last call, and those of `aborted` it knew."""
        for request_id in aborted:
            if self._drop(self._requests, request_id) or self._drop(self._ingests, request_id):
                self._finished.add(request_id)
        finished, self._finished = self._finished, set()
        return finished

    def take_failed_blocks(self) -> set[int]:
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def take_report(self) -> WorkerReport | None:
        reports, self._reports = self._reports, {}
        return WorkerReport(reports) if reports else None

    # ---- parts ----

    def _advance(self, lane: _Lane) -> None:
        """One layer of the lane's batch. Whatever goes wrong, vLLM computes these prompts itself.

        Not with several ranks: the others wait for this one in the middle of a layer, so the rank,
        and with it the replica, has to end.
        """
        job = lane.running.job if lane.running is not None else lane.queue.popleft()
        try:
            if lane.running is None:
                lane.running = _RunningBatch(job, self._arena, self._model, self._block_size)
            if not lane.running.advance():
                self._end(lane, job, lane.running.reports(failed=False))
        except Exception:
            if self._model.num_ranks > 1:
                raise
            logger.exception("the prefill of batch %d failed", job.batch_id)
            reports = (
                {r.request_id: _lost(len(job.jobs)) for r in job.jobs}
                if lane.running is None
                else lane.running.reports(failed=True)
            )
            self._end(lane, job, reports)

    def _end(self, lane: _Lane, job: BatchJob, reports: dict[str, JobReport]) -> None:
        for request in job.jobs:
            report = reports.get(request.request_id)
            if report is not None and report.failed:
                self._failed_blocks.update(request.block_ids)
        self._reports.update(reports)
        self._finished.update(reports)
        lane.running = None

    def _drop(self, lane: _Lane, request_id: str) -> bool:
        """Forget an aborted request; False if the lane does not know it."""
        if lane.running is not None and lane.running.drop(request_id):
            if not lane.running.live:
                lane.running = None
            return True
        for job in lane.queue:
            kept = [r for r in job.jobs if r.request_id != request_id]
            if len(kept) < len(job.jobs):
                job.jobs[:] = kept
                if not kept:
                    lane.queue.remove(job)
                return True
        return False


def _lost(batch_size: int) -> JobReport:
    return JobReport(
        num_selected=0, failed=True, damaged=[], batch_size=batch_size, timings=PrefillTimings()
    )
