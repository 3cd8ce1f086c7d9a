"""The connector's side in vLLM's scheduler process: what to load, for whom, and when.

It declares every prompt token but the last one external, looks the chunks up when vLLM has
allocated the request's blocks, and holds their leases until every rank has finished with them. All
ranks get the same step, so they can never disagree about a hit.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from kv_tier.errors import KvTierError
from kv_tier.keys import KeySpace
from kv_tier.store import ChunkLocation, ChunkQuery, ChunkStore, Lease, Reservation
from planner.clock import Clock
from planner.types import PrefillResult
from replicas.batch import (
    BatchJob,
    Capture,
    PrefillJob,
    Segment,
    SegmentKind,
)
from replicas.connector_types import (
    JobReport,
    RequestParams,
    Restore,
    ResultParams,
    StepMeta,
    WorkerReport,
)
from replicas.segment_keys import segment_queries

logger = logging.getLogger(__name__)

MAX_RELEASED = 1024
HOST_TIER, REMOTE_TIER = "host", "redis"  # in `cached_tokens`


class JobState(Enum):
    WAITING = auto()  # vLLM has no blocks for it yet, or its batch is not complete
    ACTIVE = auto()  # the ranks are prefilling it
    DONE = auto()  # finished, failed or given to vLLM's own prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceConfig:
    """How many layers of a prefill one engine step runs."""

    decoding: int = 4  # while other requests decode
    idle: int = 8  # otherwise: short enough to see arrivals and aborts
    hold_ms: float = 50.0  # longest wait for the other members of a batch


@dataclass(slots=True)
class _Job:
    params: RequestParams
    num_prompt_tokens: int
    since_ms: float
    state: JobState = JobState.WAITING
    hold_ms: float = 0.0
    leases: list[Lease] = field(default_factory=list)
    reservation: Reservation | None = None
    keys: list[bytes] = field(default_factory=list)  # by segment
    tiers: list[str | None] = field(default_factory=list)  # that has it; None: nowhere
    report: JobReport | None = None
    stored: bool = False


@dataclass(slots=True)
class _Gathering:
    """A batch whose members are still arriving."""

    size: int
    since_ms: float
    members: set[str] = field(default_factory=set)


class SchedulerSide:
    """Pure bookkeeping over a chunk store; vLLM's types stay in `vllm_connector.py`."""

    def __init__(
        self, store: ChunkStore, keys: KeySpace, slices: SliceConfig, clock: Clock
    ) -> None:
        self._store = store
        self._keys = keys
        self._slices = slices
        self._clock = clock
        self._jobs: dict[str, _Job] = {}
        self._gathering: dict[int, _Gathering] = {}
        self._released: OrderedDict[int, None] = OrderedDict()  # batches that went without a member
        # since the last step:
        self._allocated: dict[tuple[object, ...], BatchJob] = {}
        self._restores: list[Restore] = []

    def arrived(
        self, request_id: str, params: RequestParams | None, *, num_prompt_tokens: int
    ) -> None:
        """A request came to vLLM's queue."""
        if params is None:
            return
        now_ms = self._clock.now_ms()
        if params.park is not None:
            num_prompt_tokens = len(params.park_token_ids)
        self._jobs[request_id] = _Job(params, num_prompt_tokens, now_ms)
        if params.batch_size > 1 and params.batch_id not in self._released:
            batch = self._gathering.setdefault(
                params.batch_id, _Gathering(params.batch_size, now_ms)
            )
            batch.members.add(request_id)

    def external_tokens(self, request_id: str, num_computed: int) -> tuple[int | None, bool]:
        """Tokens that the connector will compute, and whether vLLM goes on meanwhile.

        None holds the request back. Asked again after a failure or a preemption, the answer is 0:
        vLLM then computes the prompt itself.
        """
        job = self._jobs.get(request_id)
        if job is None or job.state is not JobState.WAITING or num_computed > 0:
            return 0, False
        if job.num_prompt_tokens < 2:
            job.state = JobState.DONE
            return 0, False
        batch = self._gathering.get(job.params.batch_id)
        if batch is not None and request_id in batch.members:
            if len(batch.members) < batch.size:
                if self._clock.now_ms() - batch.since_ms < self._slices.hold_ms:
                    return None, False
                self._released[job.params.batch_id] = None
                if len(self._released) > MAX_RELEASED:
                    self._released.popitem(last=False)
            del self._gathering[job.params.batch_id]
        return (1 if job.params.park is not None else job.num_prompt_tokens - 1), True

    def allocated(self, request_id: str, token_ids: Sequence[int], block_ids: list[int]) -> None:
        """vLLM gave the request its blocks: look its chunks up and queue its prefill."""
        job = self._jobs[request_id]
        params = job.params
        job.state = JobState.ACTIVE
        job.hold_ms = self._clock.now_ms() - job.since_ms
        if params.restore_id is not None:
            self._restores.append(
                Restore(
                    request_id=request_id,
                    park_id=params.restore_id,
                    num_tokens=len(token_ids) - 1,
                    block_ids=block_ids,
                )
            )
            return
        if params.park is not None:
            token_ids, block_ids = params.park_token_ids, []
        prefill = (
            self._reuse_job(request_id, job, token_ids, block_ids)
            if params.ingest_content_id is None
            else self._ingest_job(request_id, job, token_ids, block_ids)
        )
        batch = BatchJob(
            batch_id=params.batch_id,
            signal=params.signal,
            warmup_depth=params.warmup_depth,
            probe_len=params.probe_len,
            deviation=params.deviation,
            terms=params.terms,
            arrival=params.arrival,
            jobs=[],
            is_ingest=params.ingest_content_id is not None,
        )
        key = (
            batch.batch_id,
            batch.signal,
            batch.warmup_depth,
            batch.probe_len,
            batch.deviation,
            batch.is_ingest,
        )
        known = self._allocated.get(key)
        if known is None:
            self._allocated[key] = known = batch
        else:
            terms = [t for t in (known.terms, batch.terms) if t is not None]
            self._allocated[key] = known = replace(
                known,
                # a batch has one deadline, its members' first
                terms=min(terms, key=lambda t: t.deadline_ms, default=None),
                arrival=max(
                    (a for a in (known.arrival, batch.arrival) if a is not None),
                    key=lambda a: a.deadline_ms,
                    default=None,
                ),
            )
        known.jobs.append(prefill)

    def step(self, *, decoding: bool) -> StepMeta:
        """The work of one engine step; `decoding`: whether the step also generates tokens."""
        meta = StepMeta(
            batches=list(self._allocated.values()),
            restores=self._restores,
            num_layers=self._slices.decoding if decoding else self._slices.idle,
        )
        self._allocated.clear()
        self._restores = []
        return meta

    def received(self, finished: set[str], report: WorkerReport | None) -> None:
        """Every rank has ended these prefills: let go of what they read and wrote."""
        for request_id, job_report in (report.jobs if report else {}).items():
            job = self._jobs.get(request_id)
            if job is not None:
                job.report = job_report if job.report is None else job.report.merge(job_report)
            for key in job_report.damaged:
                self._discard(key)
        for request_id in finished:
            job = self._jobs.get(request_id)
            if job is None:
                continue
            self._let_go(job, completed=job.report is not None and not job.report.failed)
            if job.state is JobState.DONE:  # aborted meanwhile
                del self._jobs[request_id]
            job.state = JobState.DONE

    def finished(self, request_id: str) -> ResultParams | None:
        """The request ended in vLLM, for whatever reason. An abort in mid-prefill keeps its leases
        until the ranks report that they have dropped it."""
        job = self._jobs.get(request_id)
        if job is None:
            return None
        batch = self._gathering.get(job.params.batch_id)
        if batch is not None and request_id in batch.members:
            batch.members.discard(request_id)
            batch.size -= 1
            if not batch.members:
                del self._gathering[job.params.batch_id]
        if job.state is JobState.ACTIVE:
            job.state = JobState.DONE
        else:
            del self._jobs[request_id]
        return self._result(job)

    def close(self) -> None:
        self._store.close()

    # ---- parts ----

    def _reuse_job(
        self, request_id: str, job: _Job, token_ids: Sequence[int], block_ids: list[int]
    ) -> PrefillJob:
        spans = job.params.segments
        queries = segment_queries(self._keys, spans, token_ids, cache_salt=job.params.cache_salt)
        job.keys = [query.key for query in queries]
        arriving = {a.segment_idx: a.location for a in job.params.arriving}
        looked_up = [i for i in range(len(spans)) if i not in arriving]
        leases = dict(zip(looked_up, self._lookup([queries[i] for i in looked_up]), strict=True))
        job.leases = [lease for lease in leases.values() if lease is not None]
        locations = arriving | {i: le.location for i, le in leases.items() if le is not None}
        job.tiers = [
            REMOTE_TIER if i in arriving else HOST_TIER if i in locations else None
            for i in range(len(spans))
        ]
        return PrefillJob(
            request_id=request_id,
            token_ids=list(token_ids),
            segments=[
                Segment(
                    kind=span.kind,
                    start=span.start,
                    end=span.end,
                    location=locations.get(i),
                    is_arriving=i in arriving,
                )
                for i, span in enumerate(spans)
            ],
            coverage=job.params.coverage,
            band=job.params.band,
            block_ids=block_ids,
            captures=[],
            park=job.params.park,
            wants_timeline=job.params.wants_timeline,
        )

    def _ingest_job(
        self, request_id: str, job: _Job, token_ids: Sequence[int], block_ids: list[int]
    ) -> PrefillJob:
        """All layers exact, the chunk's rows captured; nothing to capture if it is there by now."""
        (span,) = job.params.segments
        (query,) = segment_queries(self._keys, [span], token_ids, cache_salt=job.params.cache_salt)
        try:
            job.reservation = self._store.reserve(
                query.key,
                query.token_ids,
                recompute_ms=job.params.recompute_ms,
                content_id=job.params.ingest_content_id or "",
            )
        except KvTierError:
            logger.exception("the host tier takes no chunk")
        location = None if job.reservation is None else job.reservation.location
        return PrefillJob(
            request_id=request_id,
            token_ids=list(token_ids),
            segments=[],
            coverage=1.0,
            block_ids=block_ids,
            captures=_captures(span.start, span.end, location),
        )

    def _lookup(self, queries: list[ChunkQuery]) -> list[Lease | None]:
        """Leases of what is stored. A store that cannot be read has nothing: the engine goes on."""
        if not queries:
            return []
        try:
            return self._store.lookup(queries)
        except KvTierError:
            logger.exception("the host tier cannot be read")
            return [None] * len(queries)

    def _discard(self, key: bytes) -> None:
        try:
            self._store.discard(key)
        except KvTierError:
            logger.exception("a damaged chunk could not be discarded")

    def _let_go(self, job: _Job, *, completed: bool) -> None:
        """End the job's leases and its reservation. If the store is out of order they die with
        this process, by its owner lock."""
        leases, job.leases = job.leases, []
        reservation, job.reservation = job.reservation, None
        try:
            if leases:
                self._store.release(leases)
        except KvTierError:
            logger.exception("leases could not be released")
        try:
            if reservation is not None and completed:
                job.stored = self._store.commit(reservation)
            elif reservation is not None:
                self._store.abort(reservation)
        except KvTierError:
            logger.exception("a reservation could not be ended")

    def _result(self, job: _Job) -> ResultParams | None:
        """None for a request that ended before its prefill, or that went on with a parked one."""
        report, params = job.report, job.params
        if report is None or params.restore_id is not None:
            return None
        spans = params.segments if params.ingest_content_id is None else []
        tiers = [
            None if key in report.missed else tier
            for key, tier in zip(job.keys, job.tiers, strict=True)
        ]
        cached = dict.fromkeys((HOST_TIER, REMOTE_TIER), 0)
        num_context = num_miss = 0
        for span, tier in zip(spans, tiers, strict=True):
            num_tokens = span.end - span.start
            if tier is not None:
                cached[tier] += num_tokens
            if span.kind is SegmentKind.CHUNK:
                num_context += num_tokens
                num_miss += num_tokens if tier is None else 0
        hit = sum(cached.values())
        recomputed = job.num_prompt_tokens - hit + report.num_selected
        num_covered = num_miss + report.num_selected
        if report.failed:
            recomputed, num_covered = job.num_prompt_tokens, num_context
            cached = dict.fromkeys(cached, 0)
        return ResultParams(
            result=PrefillResult(
                policy=params.policy,
                signal=report.signal or params.signal,
                warmup_depth=params.warmup_depth,
                probe_len=params.probe_len,
                coverage=min(1.0, num_covered / num_context) if num_context else 0.0,
                num_prompt_tokens=job.num_prompt_tokens,
                num_context_tokens=num_context,
                num_miss_tokens=num_miss,
                num_recomputed_tokens=recomputed,
                num_filled_tokens=report.num_filled,
                cached_tokens={tier: n for tier, n in cached.items() if n or tier == HOST_TIER},
                batch_size=report.batch_size,
                timings=replace(report.timings, hold_ms=job.hold_ms),
                parked=params.park is not None,
                recovered=report.failed,
                timeline=tuple(report.timeline),
            ),
            missing=[i for i, tier in enumerate(tiers) if tier is None],
            damaged=report.damaged,
            stored=job.stored,
            first_token=report.first_token,
            first_logprob=report.first_logprob,
        )


def _captures(start: int, end: int, location: ChunkLocation | None) -> list[Capture]:
    return [] if location is None else [Capture(start=start, end=end, location=location)]
