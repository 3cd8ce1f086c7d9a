"""The connector's side in every vLLM worker: runs the phases, some layers an engine step."""

import logging
from collections import deque
from collections.abc import Generator, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from kv_tier.arena_view import ArenaView
from kv_tier.store import ChunkLocation
from planner.auto_signal import AutoRule
from planner.clock import Clock
from planner.coverage_resolver import PatchDemand, resolve_coverages
from planner.types import PhaseSpan, PrefillTimings
from replicas.arrivals import ArenaArrivals, LayerArrivals, PacedArrivals
from replicas.batch import BatchJob, CoverageTerms, slots_of
from replicas.connector_types import JobReport, Restore, StepMeta, WorkerReport
from replicas.parking import ParkingLot, sample_first
from replicas.phase_clock import Phase
from replicas.phases import CoverageResolver, ThreePhasePrefill
from replicas.vllm_model import VllmModel

logger = logging.getLogger(__name__)


class ArenaSource:
    """`KvSource` over the node's arena: this rank's heads, checked before they are used."""

    def __init__(
        self, arena: ArenaView, model: VllmModel, *, arriving: Set[bytes] = frozenset()
    ) -> None:
        """arriving: keys of chunks that are still being fetched"""
        self._arena = arena
        self._model = model
        self._arriving = arriving
        # found good in this batch: headers by offset, values by offset and layer
        self._known: set[int] = set()
        self._checked: set[tuple[int, int]] = set()
        self.damaged: set[bytes] = set()

    def load(self, location: ChunkLocation, layer: int) -> tuple[Tensor, Tensor] | None:
        if location.key in self.damaged:
            return None
        heads = self._model.kv_head_start, self._model.num_kv_heads
        if location.offset not in self._known and location.key not in self._arriving:
            if not self._arena.verify_header(location):
                self.damaged.add(location.key)
                return None
            self._known.add(location.offset)
        k, v = self._arena.read_layer(location, layer, *heads)
        if (location.offset, layer) not in self._checked:
            if not (self._arena.verify_layer(location, layer, *heads) and _is_finite((k, v))):
                self.damaged.add(location.key)
                return None
            self._checked.add((location.offset, layer))
        # blocking: the lease may end as soon as the walk does
        return k.to(self._model.device), v.to(self._model.device)


def _is_finite(parts: Sequence[Tensor]) -> bool:
    """A value that overflowed when it was stored is damaged, whatever its checksum says.

    Without their sign, floating-point numbers are ordered like the integers of the same bits.
    """
    for part in parts:
        bits = part.view(_BITS[part.dtype])
        magnitudes = np.bitwise_and(bits.numpy(), torch.iinfo(bits.dtype).max)
        if magnitudes.max() >= _INFINITY[part.dtype]:
            return False
    return True


_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
_INFINITY = {
    dtype: torch.tensor(torch.inf, dtype=dtype).view(bits).item() for dtype, bits in _BITS.items()
}


class PagedSink:
    """`KvSink` into vLLM's paged cache, parked layers into host memory, captured chunks into the
    arena."""

    def __init__(
        self, arena: ArenaView, model: VllmModel, block_size: int, parking: ParkingLot
    ) -> None:
        self._arena = arena
        self._model = model
        self._block_size = block_size
        self._parking = parking

    def open(self, prefill: ThreePhasePrefill) -> None:
        """Start writing for this batch."""
        self._slots = prefill.batch.slots(self._block_size)
        self._offsets = prefill.batch.offsets
        self._dropped: set[int] = set()
        self._parked = {
            i: job.park.park_id for i, job in enumerate(prefill.batch.jobs) if job.park is not None
        }

    def drop(self, request_idx: int) -> None:
        """Write nothing more of this request: its blocks and its space belong to others now."""
        self._dropped.add(request_idx)
        self._slots[self._offsets[request_idx] : self._offsets[request_idx + 1]] = -1
        park_id = self._parked.pop(request_idx, None)
        if park_id is not None:
            self._parking.drop(park_id)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        # vLLM's kernels skip rows whose slot is negative, as in its own padded batches
        self._model.write_cache(layer, k, v, self._slots)
        for i, park_id in self._parked.items():
            rows = slice(self._offsets[i], self._offsets[i + 1])
            self._parking.put(park_id, layer, k[rows], v[rows])

    def rewrite(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        self._model.write_cache(layer, k, v, self._slots[rows])
        for i, park_id in self._parked.items():
            start, end = self._offsets[i], self._offsets[i + 1]
            mine = (rows >= start) & (rows < end)
            if mine.any():
                self._parking.rewrite(park_id, layer, rows[mine] - start, k[mine], v[mine])

    def capture(
        self, request_idx: int, location: ChunkLocation, layer: int, k: Tensor, v: Tensor
    ) -> None:
        if request_idx in self._dropped or not self._model.stores_heads:
            return
        if layer == 0:
            self._arena.write_header(location)
        head = self._model.kv_head_start
        self._arena.write_layer(location, layer, head, k.transpose(0, 1), v.transpose(0, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    block_size: int
    auto_rule: AutoRule = field(default_factory=AutoRule)
    load_bytes_per_ms: float | None = None  # emulates a slower store; None: as fast as it is
    fill_stalls: bool = True


class _RunningBatch:
    """One batch between its first and its last layer."""

    def __init__(
        self,
        job: BatchJob,
        arena: ArenaView,
        model: VllmModel,
        parking: ParkingLot,
        settings: WorkerSettings,
        clock: Clock,
    ) -> None:
        self.job = job
        self._clock = clock
        self._started_ms = clock.now_ms()
        arriving = _arriving(job)
        self._source = ArenaSource(arena, model, arriving={place.key for place in arriving})
        self._sink = PagedSink(arena, model, settings.block_size, parking)
        self._prefill = ThreePhasePrefill(
            model,
            self._source,
            self._sink,
            job,
            arrivals=_arrivals(job, arena, model, settings, clock),
            resolver=None if job.terms is None else _resolver(job.terms, clock),
            auto_rule=settings.auto_rule,
            fill_stalls=settings.fill_stalls,
        )
        self._sink.open(self._prefill)
        self._steps: Generator[None, None, None] = self._prefill.steps()
        self._live = {request.request_id: i for i, request in enumerate(job.jobs)}

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
        timings, timeline = self._timings(), self._timeline()
        return {
            request_id: self._report(idx, timings, timeline, failed=failed)
            for request_id, idx in self._live.items()
        }

    def _report(
        self, idx: int, timings: PrefillTimings, timeline: list[PhaseSpan], *, failed: bool
    ) -> JobReport:
        trace, request = self._prefill.trace, self.job.jobs[idx]
        failed = failed or idx in trace.failed
        first_token, first_logprob = None, 0.0
        if request.park is not None and failed:
            self._sink.drop(idx)
        elif request.park is not None and idx in trace.logits:
            logits = trace.logits[idx]
            first_token = sample_first(logits, request.park.sampling)
            first_logprob = float(logits.log_softmax(-1)[first_token])
        return JobReport(
            num_selected=trace.num_selected[idx],
            num_filled=trace.num_filled[idx],
            signal=trace.signal,
            failed=failed,
            damaged=sorted(
                s.location.key
                for s in request.segments
                if s.location is not None and s.location.key in self._source.damaged
            ),
            missed=sorted(
                s.location.key
                for s in request.segments
                if s.location is not None and s.location.key in trace.missed
            ),
            batch_size=len(self.job.jobs),
            timings=timings,
            first_token=first_token,
            first_logprob=first_logprob,
            timeline=timeline if request.wants_timeline else [],
        )

    def _timings(self) -> PrefillTimings:
        clock = self._prefill.trace.clock
        totals = clock.totals_s()
        elapsed_s = clock.elapsed_s()
        return PrefillTimings(
            **{f"{phase}_ms": totals.get(phase, 0.0) * 1e3 for phase in Phase},
            pause_ms=max(0.0, elapsed_s - sum(totals.values())) * 1e3,
            compute_ms=elapsed_s * 1e3,
        )

    def _timeline(self) -> list[PhaseSpan]:
        if not any(request.wants_timeline for request in self.job.jobs):
            return []
        return [
            PhaseSpan(
                phase=str(span.phase),
                layer=span.layer,
                start_ms=self._started_ms + span.start_s * 1e3,
                duration_ms=(span.end_s - span.start_s) * 1e3,
            )
            for span in self._prefill.trace.clock.spans()
        ]


def _arriving(job: BatchJob) -> list[ChunkLocation]:
    """Where the stored KV is that is still being fetched."""
    segments = [segment for request in job.jobs for segment in request.segments]
    return [s.location for s in segments if s.is_arriving and s.location is not None]


def _arrivals(
    job: BatchJob, arena: ArenaView, model: VllmModel, settings: WorkerSettings, clock: Clock
) -> LayerArrivals | None:
    """None where everything stored is in this node's memory, and no slower link is emulated."""
    arriving = _arriving(job)
    if arriving and job.arrival is not None:
        return ArenaArrivals(
            arena,
            arriving,
            (model.kv_head_start, model.num_kv_heads),
            job.arrival,
            clock,
            first_layer=job.warmup_depth,
        )
    if settings.load_bytes_per_ms is None:
        return None
    num_tokens = sum(
        s.end - s.start for request in job.jobs for s in request.segments if s.location is not None
    )
    return PacedArrivals(
        clock,
        first_layer=job.warmup_depth,
        layer_bytes=arena.layout.layer_bytes(num_tokens),
        bytes_per_ms=settings.load_bytes_per_ms,
    )


def _resolver(terms: CoverageTerms, clock: Clock) -> CoverageResolver:
    def resolve(demands: Sequence[PatchDemand], arrivals_ms: Sequence[float]) -> list[float]:
        return resolve_coverages(
            demands,
            time_left_ms=terms.deadline_ms - clock.now_ms(),
            arrivals_ms=arrivals_ms,
            cost=terms.cost,
        )

    return resolve


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

    def __init__(
        self, arena: ArenaView, model: VllmModel, settings: WorkerSettings, clock: Clock
    ) -> None:
        self._arena = arena
        self._model = model
        self._settings = settings
        self._clock = clock
        self._parking = ParkingLot(model.num_layers, model.device)
        self._unwanted: set[str] = set()  # parked prefills to drop when they end
        self._requests = _Lane()
        self._ingests = _Lane()
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._reports: dict[str, JobReport] = {}

    @torch.inference_mode()
    def run_step(self, meta: StepMeta) -> None:
        """Take in new batches and advance by the step's number of layers."""
        for restore in meta.restores:
            self._restore(restore)
        for job in meta.batches:
            lane = self._ingests if job.is_ingest else self._requests
            lane.queue.append(job)
        for _ in range(meta.num_layers):
            lane = self._requests if self._requests.has_work else self._ingests
            if not lane.has_work:
                self._unwanted.clear()
                return
            self._advance(lane)

    def drop_parked(self, park_id: str) -> None:
        """Nobody goes on with this parked prefill, which may still be on its way: its abort comes
        with a step, and that step's layers may be its last."""
        self._parking.drop(park_id)
        self._unwanted.add(park_id)

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
                lane.running = _RunningBatch(
                    job, self._arena, self._model, self._parking, self._settings, self._clock
                )
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

    def _restore(self, restore: Restore) -> None:
        """A parked prefill into its blocks. If it is not here, vLLM computes the prompt itself."""
        layers = self._parking.take(restore.park_id)
        failed = layers is None or len(layers[0][0]) != restore.num_tokens
        if failed:
            logger.warning("the parked prefill %s is not here any more", restore.park_id)
            self._failed_blocks.update(restore.block_ids)
        else:
            slots = slots_of(restore.num_tokens, restore.block_ids, self._settings.block_size)
            device = self._model.device
            for layer, (k, v) in enumerate(layers):
                self._model.write_cache(layer, k.to(device), v.to(device), slots.to(device))
        self._reports[restore.request_id] = replace(_lost(1), failed=failed)
        self._finished.add(restore.request_id)

    def _end(self, lane: _Lane, job: BatchJob, reports: dict[str, JobReport]) -> None:
        for request in job.jobs:
            report = reports.get(request.request_id)
            if report is not None and report.failed:
                self._failed_blocks.update(request.block_ids)
            if request.park is not None and request.park.park_id in self._unwanted:
                self._parking.drop(request.park.park_id)
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
    return JobReport(num_selected=0, failed=True, batch_size=batch_size, timings=PrefillTimings())
