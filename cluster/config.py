"""What each part of the cluster reads. deploy/settings.py builds these."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kv_tier.redis.config import RedisTierConfig
from planner import (
    BudgetPlannerConfig,
    DemandProfile,
    PolicyConfig,
    RecomputeConfig,
    ScalingConfig,
    built_in_demand,
)

NAMESPACE = "cachesmith"
DEFAULT_MAX_BODY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The queue, and how long the scheduler waits for what.

    demand: None where the model has not been profiled
    generation: of the deployment that it belongs to; the scheduler follows the highest
    """

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    planner: BudgetPlannerConfig = field(default_factory=BudgetPlannerConfig)
    demand: DemandProfile | None = None
    gather_ms: float = 5.0  # a request waits this long for others to share its batch
    max_wait_ms: float = 120_000.0  # a request that waits longer is answered with 503
    lease_ms: float = 5_000.0  # a ticket that its replica has not confirmed by then is void
    suspect_ms: float = 2_000.0  # no tickets for a replica that just failed a request
    router_ttl_ms: float = 3_000.0  # a router that has not spoken for so long is gone
    ingress_ttl_ms: float = 5_000.0  # an ingress likewise, and who waits through it
    decode_reserve_tokens: int = 128  # KV kept free for what a request will generate
    tick_ms: float = 250.0
    unused_s: float = 60.0  # a scheduler that no ingress has asked for so long ends itself
    generation: int = 0

    def __post_init__(self) -> None:
        for name in (
            "max_wait_ms",
            "lease_ms",
            "router_ttl_ms",
            "ingress_ttl_ms",
            "tick_ms",
            "unused_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}")
        for name in ("gather_ms", "suspect_ms", "decode_reserve_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    def for_model(self, num_layers: int) -> "SchedulerConfig":
        """With a demand: the measured one, or what is assumed of a model of so many layers."""
        if self.demand is not None:
            return self
        return replace(self, demand=built_in_demand(num_layers, self.planner.signal))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerAddress:
    """Where the scheduler actor of one application is found."""

    name: str
    namespace: str = NAMESPACE


def scheduler_address(app_name: str) -> SchedulerAddress:
    return SchedulerAddress(name=f"cachesmith-scheduler-{app_name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptConfig:
    """How documents and question become one prompt.

    The last user message becomes intro, documents, then the question. Titles and texts are put in
    as they are; `untitled_template` is for documents without a title.
    """

    intro: str = "Answer the question from the documents.\n\n"
    document_template: str = "{title}\n{text}\n\n"
    untitled_template: str = "{text}\n\n"
    question_template: str = "{question}"
    max_chunk_tokens: int = 2048  # longer documents become several chunks
    token_cache_tokens: int = 1 << 20  # of documents tokenised lately, kept by each ingress

    def __post_init__(self) -> None:
        if self.document_template.count("{text}") != 1:
            raise ValueError("document_template must hold {text} once")
        if self.untitled_template.count("{text}") != 1 or "{title}" in self.untitled_template:
            raise ValueError("untitled_template must hold {text} once and no {title}")
        if self.question_template.count("{question}") != 1:
            raise ValueError("question_template must hold {question} once")
        if self.max_chunk_tokens < 1:
            raise ValueError(f"max_chunk_tokens must be 1 or more, got {self.max_chunk_tokens}")
        if self.token_cache_tokens < 0:
            raise ValueError(
                f"token_cache_tokens must not be negative, got {self.token_cache_tokens}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """How the ingress takes a request through admission and replicas."""

    num_layers: int
    # what runs while the scheduler is away
    floor: RecomputeConfig = field(default_factory=lambda: PolicyConfig().slack.floor)
    max_model_len: int | None = None  # what the replicas report, if None
    default_max_tokens: int = 256
    max_attempts: int = 3  # replicas tried before the first token
    first_token_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("num_layers", "default_max_tokens", "max_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressConfig:
    model: str  # folder or hub id, resolved where the ingress runs
    model_name: str
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    max_model_len: int | None = None
    default_ttft_slo_ms: float = 2_000.0
    default_max_tokens: int = 256
    scheduler_gone_s: float = 2.0  # without the scheduler for so long: floor plan, any replica
    redis: RedisTierConfig | None = None  # the second level, to plan with what it holds
    resolve_model: str = ""  # "module:function" from `model` to a folder; empty: it is a folder
    admin_token: str | None = field(default=None, repr=False)  # None: there is none
    api_keys_file: str = ""  # on every node with an ingress; empty: no keys are needed
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    may_sleep: bool = False  # no replica is no reason for being unhealthy: a request starts one


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """How a replica builds its engine: `builder` ("module:function") is called with `engine`."""

    builder: str
    engine: Any
    report_period_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalingSpec:
    """How many replicas there are.

    policy: `slo`, the rule of `planner.autoscaling`; `ongoing`, Serve's own, for comparison, by
    the requests that are at replicas already
    ongoing: further fields of Serve's AutoscalingConfig, for `ongoing`
    """

    scaling: ScalingConfig
    policy: Literal["slo", "ongoing"] = "slo"
    ongoing: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.policy == "ongoing" and self.scaling.scale_to_zero_after_s is not None:
            raise ValueError(
                "the policy ongoing does not see requests that wait in the scheduler, so nothing "
                "would wake the first replica: scale_to_zero_after_s needs the policy slo"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """One application: replicas, ingresses, and what Serve is told about them."""

    ingress: IngressConfig
    replica: ReplicaConfig
    app_name: str = "cachesmith"
    num_replicas: int = 1
    autoscaling: AutoscalingSpec | None = None  # instead of a fixed number
    cpus_per_replica: float = 1.0
    gpus_per_replica: float = 0.0
    replica_env: dict[str, str] = field(default_factory=dict)
    max_ongoing_per_replica: int = 64
    max_surge: float = 0.0  # share of the replicas that an upgrade starts before others end
    num_ingresses: int = 1
    max_ingresses_per_node: int | None = None  # None: no bound
    cpus_per_ingress: float = 0.1
    health_check_period_s: float = 1.0
    health_check_timeout_s: float = 10.0
    graceful_shutdown_s: float = 20.0

    def __post_init__(self) -> None:
        for name in ("num_replicas", "num_ingresses", "max_ongoing_per_replica"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if not 0.0 <= self.max_surge <= 1.0:
            raise ValueError(f"max_surge must be from 0 to 1, got {self.max_surge}")

    @property
    def max_replicas(self) -> int:
        if self.autoscaling is None:
            return self.num_replicas
        return self.autoscaling.scaling.max_replicas
