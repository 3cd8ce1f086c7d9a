"""A discrete-event simulator that drives the production planner and scheduler."""

from planner.simulator.comparison import Row, compare, means, own_best_static, with_label
from planner.simulator.experiment import (
    Axis,
    Experiment,
    Setting,
    parse_experiment,
    policies_for,
    run_setting,
    settings_of,
)
from planner.simulator.hardware import MACHINES, Machine
from planner.simulator.outcomes import Ending, Outcomes, Summary
from planner.simulator.policies import BEST_STATIC, PolicySpec, named_policy, static_grid
from planner.simulator.scenario import FleetSpec, LimitsSpec, ModelSpec, Scenario
from planner.simulator.simulation import Prepared, Simulation, assumptions, prepare

__all__ = [
    "BEST_STATIC",
    "MACHINES",
    "Axis",
    "Ending",
    "Experiment",
    "FleetSpec",
    "LimitsSpec",
    "Machine",
    "ModelSpec",
    "Outcomes",
    "PolicySpec",
    "Prepared",
    "Row",
    "Scenario",
    "Setting",
    "Simulation",
    "Summary",
    "assumptions",
    "compare",
    "means",
    "named_policy",
    "own_best_static",
    "parse_experiment",
    "policies_for",
    "prepare",
    "run_setting",
    "settings_of",
    "static_grid",
    "with_label",
]
