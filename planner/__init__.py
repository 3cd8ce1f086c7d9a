"""Decisions: cost model, recompute planner, scheduler policy. Pure; no torch, Ray or Redis."""

from planner.auto_signal import AutoRule
from planner.budget_planner import BudgetPlanner, BudgetPlannerConfig
from planner.clock import Clock, MonotonicClock
from planner.cost_model import CostModel, PrefillShape, Work, fit_cost_model, prefill_work
from planner.coverage_resolver import PatchDemand, resolve_coverages
from planner.demand import DemandCurves, built_in_demand
from planner.demand_profile import DemandAnchor, DemandBucket, DemandProfile
from planner.plan_explanation import PlanCandidate, PlanExplanation
from planner.policies import ADAPTIVE, CUSTOM, FULL_PREFILL, STATIC_POLICIES, policy_names
from planner.recompute_planner import (
    BudgetBand,
    PlanInput,
    RecomputePlanner,
    SlackPlanner,
    SlackPlannerConfig,
)
from planner.scheduler import (
    BatchDecision,
    FcfsConfig,
    FcfsScheduler,
    QueueFullError,
    ReplicaState,
    SloScheduler,
    request_shape,
)
from planner.timeline import LayerTimes, Link, Timeline, arrivals_ms, layer_times, run_timeline
from planner.types import (
    BatchPlan,
    ChunkRef,
    Deviation,
    EngineInfo,
    EngineLoad,
    PrefillResult,
    PrefillTimings,
    RagRequest,
    RecomputeConfig,
    RequestPlan,
    RequestProfile,
    SamplingOptions,
    Signal,
    Ticket,
)

__all__ = [
    "ADAPTIVE",
    "CUSTOM",
    "FULL_PREFILL",
    "STATIC_POLICIES",
    "AutoRule",
    "BatchDecision",
    "BatchPlan",
    "BudgetBand",
    "BudgetPlanner",
    "BudgetPlannerConfig",
    "ChunkRef",
    "Clock",
    "CostModel",
    "DemandAnchor",
    "DemandBucket",
    "DemandCurves",
    "DemandProfile",
    "Deviation",
    "EngineInfo",
    "EngineLoad",
    "FcfsConfig",
    "FcfsScheduler",
    "LayerTimes",
    "Link",
    "MonotonicClock",
    "PatchDemand",
    "PlanCandidate",
    "PlanExplanation",
    "PlanInput",
    "PrefillResult",
    "PrefillShape",
    "PrefillTimings",
    "QueueFullError",
    "RagRequest",
    "RecomputeConfig",
    "RecomputePlanner",
    "ReplicaState",
    "RequestPlan",
    "RequestProfile",
    "SamplingOptions",
    "Signal",
    "SlackPlanner",
    "SlackPlannerConfig",
    "SloScheduler",
    "Ticket",
    "Timeline",
    "Work",
    "arrivals_ms",
    "built_in_demand",
    "fit_cost_model",
    "layer_times",
    "policy_names",
    "prefill_work",
    "request_shape",
    "resolve_coverages",
    "run_timeline",
]
