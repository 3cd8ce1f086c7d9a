"""The policies that are compared: a scheduler, and what it lets requests run."""

from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from planner.batch_choice import CacheSmithConfig
from planner.budget_planner import BudgetPlanner, BudgetPlannerConfig
from planner.demand import DemandCurves
from planner.policies import ADAPTIVE, CUSTOM, STATIC_POLICIES
from planner.recompute_planner import BudgetBand, SlackPlannerConfig
from planner.scheduler import QueueLimits, SloScheduler
from planner.scheduler_policies import (
    CACHESMITH,
    CACHESMITH_STATIC,
    EDF,
    FCFS,
    PolicyConfig,
    build_scheduler,
)
from planner.simulator.part import Count, Part, Share
from planner.types import RecomputeConfig, Signal

BEST_STATIC = "best_static"
# who runs next, in batches of how many requests; None: as the scenario says
ORDERS: dict[str, tuple[str, int | None]] = {
    FCFS: (FCFS, None),
    EDF: (EDF, None),
    "fcfs1": (FCFS, 1),
    "edf1": (EDF, 1),
    "slo": (CACHESMITH, None),  # the CacheSmith scheduler without its planner
}


class StaticPoint(Part):
    """(S, w, p, r); w and p None: all layers."""

    signal: Signal = Signal.KV_DEV
    warmup_depth: int | None = Field(default=1, ge=0)
    probe_len: int | None = Field(default=1, ge=0)
    coverage: Share = 0.15

    @property
    def config(self) -> RecomputeConfig:
        return RecomputeConfig(
            signal=self.signal,
            warmup_depth=self.warmup_depth,
            probe_len=self.probe_len,
            coverage=self.coverage,
        )


class PolicySpec(Part):
    """runs: `adaptive`, the name of a static configuration, or `custom` with `static` given.

    knows_link: else the planner takes all stored KV for being in host memory.
    max_batch_requests: less than the scenario's limit; None: that one.
    """

    name: str
    scheduler: Literal["cachesmith", "cachesmith-static", "fcfs", "edf"] = "cachesmith"
    runs: str = ADAPTIVE
    static: StaticPoint | None = None
    signal: Signal | None = None
    floor: Share = 0.05
    saturation: Share = 0.50
    max_depths: Count = 6
    depth: Count | None = None
    choose_split: bool = True
    reserve: float = Field(default=0.15, ge=0.0, lt=1.0)
    resolve: bool = True
    knows_link: bool = True
    refuse_hopeless: bool = False
    max_batch_requests: Count | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "PolicySpec":
        if (self.runs == CUSTOM) != (self.static is not None):
            raise ValueError("static is given if and only if runs is custom")
        if self.runs not in (ADAPTIVE, CUSTOM, *STATIC_POLICIES):
            known = ", ".join((ADAPTIVE, CUSTOM, *STATIC_POLICIES))
            raise ValueError(f"runs must be one of {known}, got {self.runs!r}")
        if self.floor >= self.saturation:
            raise ValueError(f"floor must be less than saturation, got {self.floor}")
        return self

    @property
    def request_config(self) -> RecomputeConfig | None:
        """What every request asks for; None: adaptive."""
        if self.static is not None:
            return self.static.config
        return STATIC_POLICIES.get(self.runs)

    def planner(self, curves: DemandCurves) -> BudgetPlanner:
        """Raises ValueError for a signal that the curves know nothing of."""
        return BudgetPlanner(
            BudgetPlannerConfig(
                signal=self.signal,
                resolve=self.resolve,
                band=BudgetBand(floor=self.floor, saturation=self.saturation),
                reserve=self.reserve,
                max_depths=self.max_depths,
                depth=self.depth,
                choose_split=self.choose_split,
            ),
            curves,
        )

    def scheduler_of(self, planner: BudgetPlanner, limits: QueueLimits) -> SloScheduler:
        """A production scheduler."""
        if self.max_batch_requests is not None:
            most = min(self.max_batch_requests, limits.max_batch_requests)
            limits = replace(limits, max_batch_requests=most)
        config = PolicyConfig(
            name=self.scheduler,
            rules=CacheSmithConfig(
                limits=limits,
                refuse_hopeless=self.refuse_hopeless,
                reserve=self.reserve,
            ),
            static=None,
            slack=SlackPlannerConfig(
                resolve=self.resolve,
                band=BudgetBand(floor=self.floor, saturation=self.saturation),
                reserve=self.reserve,
            ),
        )
        return build_scheduler(config, planner)


def named_policy(name: str) -> PolicySpec:
    """`cachesmith`, `cachesmith-static`, or a static configuration with or without an order.

    A configuration alone runs first come, first served. Raises ValueError for any other name.
    """
    if name == CACHESMITH:
        return PolicySpec(name=name)
    if name == CACHESMITH_STATIC:
        return PolicySpec(name=name, scheduler="cachesmith-static")
    order, _, runs = name.rpartition("/")
    if runs in (ADAPTIVE, *STATIC_POLICIES) and order in ("", *ORDERS):
        return in_order(PolicySpec(name=name, runs=runs), order or FCFS)
    raise ValueError(
        f"{name!r} is no policy; known are {CACHESMITH}, {CACHESMITH_STATIC}, {BEST_STATIC}, and "
        f"{', '.join((ADAPTIVE, *STATIC_POLICIES))}, with or without one of "
        f"{', '.join(f'{order}/' for order in ORDERS)} in front"
    )


def in_order(spec: PolicySpec, order: str) -> PolicySpec:
    """As the scheduler of `ORDERS` has it."""
    scheduler, max_batch_requests = ORDERS[order]
    return spec.model_copy(
        update={"scheduler": scheduler, "max_batch_requests": max_batch_requests}
    )


def static_grid(num_layers: int, order: str) -> list[PolicySpec]:
    """What `best_static` is the best of: the six baselines and a grid of both signals.

    Rank depths of 2, a sixth and two fifths of the layers, at four coverages.
    """
    specs = [named_policy(f"{order}/{name}") for name in STATIC_POLICIES]
    depths = sorted({2, max(2, num_layers // 6), max(2, num_layers * 2 // 5)})
    for signal in (Signal.KV_DEV, Signal.QCI):
        for depth in depths:
            w = 1 if signal is Signal.KV_DEV else 0
            for coverage in (0.05, 0.10, 0.20, 0.40):
                point = StaticPoint(
                    signal=signal, warmup_depth=w, probe_len=depth - w, coverage=coverage
                )
                name = f"{order}/{signal} w{w} p{depth - w} r{coverage:g}"
                specs.append(in_order(PolicySpec(name=name, runs=CUSTOM, static=point), order))
    return specs
