"""What travels between a request, the connector's two sides, and back.

`RequestParams` rides in vLLM's `kv_transfer_params`; `StepMeta` goes from the scheduler side to
every rank with each engine step, `WorkerReport` comes back; `ResultParams` is in the request's
final output.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from planner.types import PrefillResult, PrefillTimings, Signal
from replicas.batch import BatchJob, SegmentKind

PARAMS_KEY = "cachesmith"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSpan:
    """Prompt tokens [start, end) that may be in the store."""

    kind: SegmentKind
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    """What the connector is asked to do with one request."""

    segments: list[SegmentSpan] = field(default_factory=list)
    cache_salt: str = ""
    policy: str = "adaptive"
    signal: Signal = Signal.KV_DEV
    warmup_depth: int = 1
    probe_len: int = 1
    coverage: float = 1.0
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
        return cls(**{**wire, "segments": segments, "signal": Signal(wire["signal"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultParams:
    """What became of it: the prefill's result, and which segments were not stored."""

    result: PrefillResult
    missing: list[int] = field(default_factory=list)  # indices of the request's segments
    stored: bool = False  # an ingest was committed

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
        return cls(result=PrefillResult(**result), missing=wire["missing"], stored=wire["stored"])


@dataclass
class StepMeta:
    """One engine step's work, the same for every rank."""

    batches: list[BatchJob] = field(default_factory=list)
    num_layers: int = 0  # how many layers to advance this step


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """One request's prefill on one rank, or on all ranks after aggregation."""

    num_selected: int
    failed: bool
    damaged: list[bytes]  # keys whose stored value could not be read
    batch_size: int
    timings: PrefillTimings

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
