"""The values that ingress, scheduler and replica send each other, beside the planner's types."""

from dataclasses import dataclass, field

from planner import CostModel, EngineInfo, EngineLoad, Link
from replicas.cache_types import TierReport
from replicas.interface import ResidencyUpdate, StoredChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request that is not served, as a value: exceptions do not cross Ray unchanged."""

    status: int
    message: str
    code: str
    retry_after_s: float | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddress:
    """First argument of a handle call that must reach one replica; a Ticket serves as well."""

    replica_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredBy:
    """Said by a replica, before its first delta, that got a ticket for another or for any."""

    replica_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveRequest:
    """A request that a replica is working on."""

    request_id: str
    num_tokens: int
    in_prefill: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """A replica's state. `info` is set in complete reports; then `residency.reset` is True.

    `tiers` is set in complete reports, and when it has changed.
    """

    replica_id: str
    node_id: str
    info: EngineInfo | None
    cost: CostModel
    load: EngineLoad
    link: Link | None = None  # what stored KV comes over; None: it is in the node's memory
    active: tuple[ActiveRequest, ...] = ()
    residency: ResidencyUpdate = field(default_factory=ResidencyUpdate)
    tiers: TierReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportAck:
    """`epoch` names the scheduler's life: another one knows nothing of earlier reports."""

    epoch: str
    needs_full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSummary:
    """One replica as the scheduler sees it."""

    replica_id: str
    node_id: str
    ready: bool  # reachable by every router, and it has reported
    num_running: int
    num_waiting: int
    num_ingest_backlog: int
    num_leases: int
    in_prefill: bool
    num_resident_chunks: int
    cost_drift: float = 1.0  # observed prefill time over what the first costs say
    info: EngineInfo | None
    tiers: TierReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStatus:
    """generation: of the configuration that the scheduler runs under"""

    epoch: str
    num_waiting: int
    replicas: tuple[ReplicaSummary, ...]
    generation: int = 0

    @property
    def ready(self) -> tuple[ReplicaSummary, ...]:
        return tuple(r for r in self.replicas if r.ready)

    @property
    def max_model_len(self) -> int | None:
        """The shortest limit of the ready replicas; None while there is none."""
        lengths = [r.info.max_model_len for r in self.ready if r.info is not None]
        return min(lengths, default=None)

    def one_per_node(self) -> dict[str, str]:
        """node id → id of a ready replica there: what the node's chunk store is reached by."""
        return {r.node_id: r.replica_id for r in reversed(self.ready)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """One finished request, told by its ingress for the metrics."""

    outcome: str  # "ok", "cancelled", "rejected", "error"
    policy: str
    queue_ms: float | None = None
    ttft_ms: float | None = None
    slo_met: bool | None = None
    coverage: float | None = None
    expected_ms: float | None = None
    prefill_ms: float | None = None
    load_ms: float = 0.0
    stall_ms: float = 0.0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)
    num_miss_tokens: int = 0
    num_recomputed_tokens: int = 0
    recovered: bool = False
    full_prefill: bool = False
    num_retries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestResult:
    """What became of one chunk on one node: `stored` or the reason why not."""

    stored: StoredChunk | None = None
    error: str | None = None
