"""One setting to simulate: who comes, what for, and what there is to serve them."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from planner.scheduler import QueueLimits
from planner.simulator.arrivals import Arrivals, PoissonArrivals
from planner.simulator.autoscaling import FixedSize, Sizing
from planner.simulator.hardware import MACHINES, Machine
from planner.simulator.part import Count, NotNegative, Part, Positive, Share
from planner.simulator.tasks import TASKS, TaskSpec


class FaultSpec(Part):
    """mtbf_s: of each replica, exponential; deaths: (second, replica's number)."""

    mtbf_s: Positive | None = None
    deaths: tuple[tuple[NotNegative, int], ...] = ()


class FleetSpec(Part):
    """The replicas of one model, their nodes and stores.

    schedulers: each has its own share of the replicas and of the requests.
    link_steps: (second, GB/s) from when on a node's link to Redis is that fast.
    slice_layers: so many layers of a prefill run between two steps of those that decode, as the
    engine's setting; None: they do not disturb it.
    noise: deviation of the logarithm of what a batch computes over what its plan expects.
    """

    replicas: Count = 1
    replicas_per_node: Count = 1
    schedulers: Count = 1
    max_num_seqs: Count = 64
    kv_tokens: Count | None = None  # None: what the machine holds
    parking_tokens: int = Field(default=0, ge=0)
    decode_reserve_tokens: int = Field(default=128, ge=0)
    host_tokens: NotNegative = 0.0  # of each node
    redis_tokens: NotNegative | None = None  # None: unlimited; 0: there is no Redis
    prewarmed: bool = True  # the most popular chunks are stored at the start
    link_gb_per_s: Positive = 6.0  # of each node
    link_latency_ms: NotNegative = 0.5
    link_steps: tuple[tuple[NotNegative, Positive], ...] = ()
    slice_layers: Count | None = 16
    noise: NotNegative = 0.05
    startup_s: NotNegative = 60.0
    sizing: Sizing = FixedSize()
    faults: FaultSpec = FaultSpec()

    @model_validator(mode="after")
    def _fits_together(self) -> "FleetSpec":
        if self.schedulers > self.replicas:
            raise ValueError(f"schedulers must be {self.replicas} or less, as replicas")
        sizing = self.sizing
        if not isinstance(sizing, FixedSize) and self.schedulers > sizing.min_replicas:
            raise ValueError(f"schedulers must be {sizing.min_replicas} or less, as min_replicas")
        if self.redis_tokens and self.redis_tokens < self.host_tokens:
            raise ValueError("redis_tokens must be 0, or host_tokens or more")
        for _, number in self.faults.deaths:
            if number >= self.replicas:
                raise ValueError(f"faults.deaths: there is no replica {number}")
        if list(self.link_steps) != sorted(self.link_steps):
            raise ValueError("link_steps must rise in time")
        return self

    def capacity(self, machine: Machine) -> int:
        """KV tokens of each replica."""
        return self.kv_tokens or machine.kv_capacity_tokens

    @property
    def link_bytes_per_ms(self) -> tuple[tuple[float, float], ...]:
        """(from when on in ms, bytes per ms)"""
        steps = ((0.0, self.link_gb_per_s), *self.link_steps)
        return tuple((at_s * 1e3, gb * 1e6) for at_s, gb in steps)


class LimitsSpec(Part):
    """As in a server's settings; `gather_ms` and `tick_ms` too."""

    max_batch_requests: Count = 8
    max_batch_tokens: Count = 32_768
    max_waiting: Count = 256
    gather_ms: NotNegative = 5.0
    tick_ms: Positive = 250.0
    max_wait_ms: Positive = 120_000.0

    @property
    def fcfs(self) -> QueueLimits:
        return QueueLimits(
            max_batch_requests=self.max_batch_requests,
            max_batch_tokens=self.max_batch_tokens,
            max_waiting=self.max_waiting,
        )


class ModelSpec(Part):
    """machine: a known one; profile: a measured `ServingProfile`, for its costs.

    believes: the demand that the planner goes by, of the task itself or of passage retrieval, as
    `cachesmith profile` measures it, or a profile's; truth: a profile's instead of the tasks' own.
    """

    name: str = "model"
    machine: str = "qwen3-8b-h200"
    profile: Path | None = None
    share: Positive = 1.0  # of the requests
    fleet: FleetSpec = FleetSpec()
    believes: Literal["task", "pr"] | Path = "pr"
    truth: Path | None = None

    @model_validator(mode="after")
    def _is_known(self) -> "ModelSpec":
        if self.machine not in MACHINES:
            raise ValueError(f"machine must be one of {', '.join(MACHINES)}, got {self.machine!r}")
        return self


class LoadSpec(Part):
    """Exactly one of the two.

    of_full_prefill: 1 is the rate at which full prefill alone, one prompt at a time, keeps all
    replicas of the start busy.
    """

    of_full_prefill: Positive | None = None
    rate_per_s: Positive | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "LoadSpec":
        if (self.of_full_prefill is None) == (self.rate_per_s is None):
            raise ValueError("give one of of_full_prefill and rate_per_s")
        return self


class SloSpec(Part):
    """Exactly one of the two. times_full_prefill: of the task's mean prompt, alone."""

    ms: Positive | None = None
    times_full_prefill: Positive | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "SloSpec":
        if (self.ms is None) == (self.times_full_prefill is None):
            raise ValueError("give one of ms and times_full_prefill")
        return self


class DemandChange(Part):
    """To see what hangs on the assumptions: applied to the demand of all tasks."""

    gap_scale: NotNegative = 1.0
    spread_scale: Positive = 1.0
    depth_scale: NotNegative = 1.0
    hardness: float = 0.0  # added


class Scenario(Part):
    """entropy_accuracy: how often a late choice of the signal sees what suits; assumed."""

    num_requests: Count = 600
    arrivals: Arrivals = PoissonArrivals()
    load: LoadSpec = LoadSpec(of_full_prefill=0.8)
    slo: SloSpec = SloSpec(times_full_prefill=1.5)
    tasks: Literal["pr", "vt", "mhqa", "mix"] | Annotated[tuple[TaskSpec, ...], Field(min_length=1)]
    tasks_change: DemandChange = DemandChange()
    models: Annotated[tuple[ModelSpec, ...], Field(min_length=1)] = (ModelSpec(),)
    limits: LimitsSpec = LimitsSpec()
    entropy_accuracy: Share = 0.8

    @model_validator(mode="after")
    def _names_differ(self) -> "Scenario":
        for what, named in (("tasks", self.task_specs), ("models", self.models)):
            names = [each.name for each in named]
            if len(set(names)) < len(names):
                raise ValueError(f"{what}: two have the same name")
        return self

    @property
    def task_specs(self) -> tuple[TaskSpec, ...]:
        """With the change applied."""
        specs = TASKS[self.tasks] if isinstance(self.tasks, str) else self.tasks
        change = self.tasks_change
        return tuple(
            spec.model_copy(
                update={
                    "demand": spec.demand.model_copy(
                        update={
                            "gap": spec.demand.gap * change.gap_scale,
                            "spread_scale": spec.demand.spread_scale * change.spread_scale,
                            "depth_scale": spec.demand.depth_scale * change.depth_scale,
                            "hardness": spec.demand.hardness + change.hardness,
                        }
                    )
                }
            )
            for spec in specs
        )
