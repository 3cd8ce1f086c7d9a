"""Scheduling policies by name, behind one interface, so that they can be compared."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from planner.batch_choice import CacheSmithConfig
from planner.cost_model import CostModel
from planner.pass_curves import one_each
from planner.policies import STATIC_POLICIES
from planner.recompute_planner import (
    PlanInput,
    RecomputePlanner,
    SlackPlanner,
    SlackPlannerConfig,
)
from planner.scheduler import EdfScheduler, FcfsScheduler, SloScheduler
from planner.slo_scheduler import CacheSmithScheduler
from planner.timeline import Link
from planner.types import BatchPlan, RecomputeConfig

CACHESMITH = "cachesmith"
CACHESMITH_STATIC = "cachesmith-static"  # static (S, w, p), the coverage set to meet the budget
FCFS = "fcfs"
EDF = "edf"
SCHEDULER_POLICIES = (CACHESMITH, FCFS, EDF, CACHESMITH_STATIC)


class StaticPlanner:
    """Every request that has no configuration of its own gets the same one, whatever the budget."""

    def __init__(self, config: RecomputeConfig) -> None:
        """Raises ValueError for a configuration that depends on the chunks of each request."""
        if config.tokens_per_chunk is not None:
            raise ValueError("tokens_per_chunk is no static coverage; give coverage")
        self._config = config
        self._planner = SlackPlanner(SlackPlannerConfig(resolve=False))

    def plan(
        self,
        requests: Sequence[PlanInput],
        *,
        budget_ms: float,
        cost: CostModel,
        link: Link | None = None,
    ) -> BatchPlan:
        given = [r if r.config is not None else replace(r, config=self._config) for r in requests]
        return self._planner.plan(given, budget_ms=budget_ms, cost=cost, link=link)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """A policy and what it needs.

    static: what `fcfs` and `edf` run; None: the planner decides from the batch's smallest slack.
    slack: the static (S, w, p) and the band of `cachesmith-static`.
    """

    name: str = CACHESMITH
    rules: CacheSmithConfig = field(default_factory=CacheSmithConfig)
    static: RecomputeConfig | None = STATIC_POLICIES["cacheblend"]
    slack: SlackPlannerConfig = field(default_factory=SlackPlannerConfig)

    def __post_init__(self) -> None:
        if self.name not in SCHEDULER_POLICIES:
            raise ValueError(
                f"name must be one of {', '.join(SCHEDULER_POLICIES)}, got {self.name!r}"
            )


def build_scheduler(config: PolicyConfig, planner: RecomputePlanner) -> SloScheduler:
    """planner: promises passes; `config.rules.reserve` is the share of a budget it keeps back."""
    if config.name == CACHESMITH:
        return CacheSmithScheduler(config.rules, planner)
    if config.name == CACHESMITH_STATIC:
        rules = replace(config.rules, reserve=config.slack.reserve)
        return CacheSmithScheduler(rules, SlackPlanner(config.slack), passes=one_each)
    chosen = planner if config.static is None else StaticPlanner(config.static)
    if config.name == EDF:
        return EdfScheduler(config.rules.limits, chosen)
    return FcfsScheduler(config.rules.limits, chosen)
