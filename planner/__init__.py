"""Decisions: cost model, recompute planner, scheduler policy. Pure; no torch, Ray or Redis."""

from planner.arrival_forecast import Arrivals
from planner.auto_signal import AutoRule
from planner.autoscaling import Autoscaler, LoadSignal, ScalingConfig, ScalingDecision
from planner.batch_choice import CacheSmithConfig
from planner.budget_planner import BudgetPlanner, BudgetPlannerConfig
from planner.clock import Clock, MonotonicClock
from planner.cost_fit import fit_cost_model, fit_phases
from planner.cost_model import CostModel, PrefillShape, Work, phase_works, prefill_work
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
    FcfsScheduler,
    QueueFullError,
    QueueLimits,
    RefusalReason,
    RefusedRequest,
    ReplicaState,
    SloScheduler,
    plan_input,
    request_shape,
)
from planner.scheduler_policies import CACHESMITH, SCHEDULER_POLICIES, PolicyConfig, build_scheduler
from planner.service_times import ServiceTimes
from planner.serving_profile import CostProfile, MeasuredPhase, PhaseFit, ServingProfile
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
    "CACHESMITH",
    "CUSTOM",
    "FULL_PREFILL",
    "SCHEDULER_POLICIES",
    "STATIC_POLICIES",
    "Arrivals",
    "AutoRule",
    "Autoscaler",
    "BatchDecision",
    "BatchPlan",
    "BudgetBand",
    "BudgetPlanner",
    "BudgetPlannerConfig",
    "CacheSmithConfig",
    "ChunkRef",
    "Clock",
    "CostModel",
    "CostProfile",
    "DemandAnchor",
    "DemandBucket",
    "DemandCurves",
    "DemandProfile",
    "Deviation",
    "EngineInfo",
    "EngineLoad",
    "FcfsScheduler",
    "LayerTimes",
    "Link",
    "LoadSignal",
    "MeasuredPhase",
    "MonotonicClock",
    "PatchDemand",
    "PhaseFit",
    "PlanCandidate",
    "PlanExplanation",
    "PlanInput",
    "PolicyConfig",
    "PrefillResult",
    "PrefillShape",
    "PrefillTimings",
    "QueueFullError",
    "QueueLimits",
    "RagRequest",
    "RecomputeConfig",
    "RecomputePlanner",
    "RefusalReason",
    "RefusedRequest",
    "ReplicaState",
    "RequestPlan",
    "RequestProfile",
    "SamplingOptions",
    "ScalingConfig",
    "ScalingDecision",
    "ServiceTimes",
    "ServingProfile",
    "Signal",
    "SlackPlanner",
    "SlackPlannerConfig",
    "SloScheduler",
    "Ticket",
    "Timeline",
    "Work",
    "arrivals_ms",
    "build_scheduler",
    "built_in_demand",
    "fit_cost_model",
    "fit_phases",
    "layer_times",
    "phase_works",
    "plan_input",
    "policy_names",
    "prefill_work",
    "request_shape",
    "resolve_coverages",
    "run_timeline",
]
