"""What travels between a request, the connector's two sides, and back.

`RequestParams` rides in vLLM's `kv_transfer_params`; `StepMeta` goes from the scheduler side to
every rank with each engine step, `WorkerReport` comes back; `ResultParams` is in the request's
final output.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kv_tier.store import ChunkLocation
from planner.cost_model import CostModel
from planner.types import Deviation, PhaseSpan, PrefillResult, PrefillTimings, Signal
from replicas.batch import ArrivalTerms, BatchJob, CoverageTerms, SegmentKind
from replicas.parking import FirstTokenSampling, ParkOrder

PARAMS_KEY = "cachesmith"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSpan:
    """Prompt tokens [start, end) that may be in the store."""

    kind: SegmentKind
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivingSegment:
    """A segment whose KV is on its way into the arena; who sent the request holds it there."""

    segment_idx: int
    location: ChunkLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    """What the connector is asked to do with one request."""

    segments: list[SegmentSpan] = field(default_factory=list)
    arriving: list[ArrivingSegment] = field(default_factory=list)
    arrival: ArrivalTerms | None = None  # of those
    cache_salt: str = ""
    policy: str = "adaptive"
    signal: Signal = Signal.KV_DEV
    warmup_depth: int = 1
    probe_len: int = 1
    coverage: float = 1.0
    deviation: Deviation = Deviation.KV
    band: tuple[float, float] | None = None  # the coverage may be solved again within; None: fixed
    terms: CoverageTerms | None = None  # to solve it with
    wants_timeline: bool = False
    # a prefill without KV blocks; vLLM's own prompt is a stand-in of two tokens then
    park: ParkOrder | None = None
    park_token_ids: list[int] = field(default_factory=list)
    restore_id: str | None = None  # a parked prefill, to go on with
    batch_id: int = 0
    batch_size: int = 1
    # store the segments' KV instead of reusing it: the prompt is an anchor and one chunk
    ingest_content_id: str | None = None
    recompute_ms: float = 0.0

    def to_wire(self) -> dict[str, Any]:
        return {PARAMS_KEY: asdict(self)}

    @classmethod
    def from_wire(cls, params: dict[str, Any] | None) -> "RequestParams | None":
        wire = (params or {}).get(PARAMS_KEY)
        if wire is None:
            return None
        segments = [
            SegmentSpan(kind=SegmentKind(s["kind"]), start=s["start"], end=s["end"])
            for s in wire["segments"]
        ]
        arriving = [
            ArrivingSegment(segment_idx=a["segment_idx"], location=ChunkLocation(**a["location"]))
            for a in wire["arriving"]
        ]
        park, terms, band = wire["park"], wire["terms"], wire["band"]
        arrival = wire["arrival"]
        if terms is not None:
            cost = CostModel(**terms["cost"])
            terms = CoverageTerms(deadline_ms=terms["deadline_ms"], cost=cost)
        if park is not None:
            sampling = FirstTokenSampling(**park["sampling"])
            park = ParkOrder(park_id=park["park_id"], sampling=sampling)
        read = {
            "segments": segments,
            "arriving": arriving,
            "arrival": None if arrival is None else ArrivalTerms(**arrival),
            "signal": Signal(wire["signal"]),
            "deviation": Deviation(wire["deviation"]),
            "park": park,
            "terms": terms,
            "band": None if band is None else tuple(band),
        }
        return cls(**{**wire, **read})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultParams:
    """What became of it: the prefill's result, and which segments were not stored."""

    result: PrefillResult
    missing: list[int] = field(default_factory=list)  # indices of the request's segments
    damaged: list[bytes] = field(default_factory=list)  # keys, gone from the arena by now
    stored: bool = False  # an ingest was committed
    first_token: int | None = None  # of a parked prompt
    first_logprob: float = 0.0

    def to_wire(self) -> dict[str, Any]:
        return {PARAMS_KEY: asdict(self)}

    @classmethod
    def from_wire(cls, params: dict[str, Any] | None) -> "ResultParams | None":
        wire = (params or {}).get(PARAMS_KEY)
        if wire is None:
            return None
        result = dict(wire["result"])
        result["signal"] = Signal(result["signal"])
        result["timings"] = PrefillTimings(**result["timings"])
        result["timeline"] = tuple(PhaseSpan(**span) for span in result["timeline"])
        return cls(**{**wire, "result": PrefillResult(**result)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Put a parked prefill's KV into these blocks, for all of the prompt's tokens but the last."""

    request_id: str
    park_id: str
    num_tokens: int
    block_ids: list[int]


@dataclass
class StepMeta:
    """One engine step's work, the same for every rank."""

    batches: list[BatchJob] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    num_layers: int = 0  # how many layers to advance this step


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """One request's prefill on one rank, or on all ranks after aggregation."""

    num_selected: int
    failed: bool
    batch_size: int
    timings: PrefillTimings
    damaged: list[bytes] = field(default_factory=list)  # keys whose stored value can not be read
    missed: list[bytes] = field(default_factory=list)  # keys whose stored value did not arrive
    num_filled: int = 0
    signal: Signal | None = None  # that ranked
    first_token: int | None = None
    first_logprob: float = 0.0
    timeline: list[PhaseSpan] = field(default_factory=list)  # on the node's clock

    def merge(self, other: "JobReport") -> "JobReport":
        """A prefill failed if it failed on any rank; the first rank's times stand for all."""
        return replace(
            self,
            failed=self.failed or other.failed,
            damaged=sorted({*self.damaged, *other.damaged}),
        )


@dataclass
class WorkerReport:
    """The prefills that ended in this step, by request id."""

    jobs: dict[str, JobReport] = field(default_factory=dict)

    def aggregate(self, other: "WorkerReport") -> "WorkerReport":
        """Two ranks' reports as one; vLLM calls it."""
        merged = dict(self.jobs)
        for request_id, report in other.jobs.items():
            mine = merged.get(request_id)
            merged[request_id] = report if mine is None else mine.merge(report)
        return WorkerReport(merged)
