"""From runs to a comparison: means over seeds, the best static configuration, gains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from planner.scheduler_policies import EDF, FCFS
from planner.simulator.experiment import Experiment, Setting
from planner.simulator.outcomes import Summary
from planner.simulator.policies import BEST_STATIC

T = TypeVar("T")
Runs = Sequence[Mapping[str, Summary]]  # by policy, of each seed


@dataclass(frozen=True, slots=True)
class Row:
    """One policy in one setting, means over the seeds. `runs`: what `best_static` stands for."""

    policy: str
    runs: str
    values: dict[str, float]


def compare(
    experiment: Experiment, settings: Sequence[Setting], runs: Sequence[Runs]
) -> list[list[Row]]:
    """For each setting its policies in the order of the experiment.

    `best_static` is the configuration with the highest mean QSA over all settings that agree on
    the axes of `best_static_by`, the first of equals.
    """
    named = [spec.name for spec in experiment.policy_specs]
    best = _best_static(experiment, settings, runs) if experiment.wants_best_static else []
    rows = []
    for place, of_setting in enumerate(runs):
        rows.append([Row(name, name, means(of_setting, name)) for name in named])
        if best:
            chosen = best[place]
            rows[-1].append(Row(BEST_STATIC, chosen, means(of_setting, chosen)))
    return rows


def with_label(settings: Sequence[Setting], values: Sequence[T], axis: str, label: str) -> list[T]:
    """The values of the settings that have this value of an axis. values: one a setting"""
    pairs = zip(settings, values, strict=True)
    return [value for setting, value in pairs if setting.labels[axis] == label]


def means(runs: Runs, policy: str) -> dict[str, float]:
    """Of the numbers of a summary, over the seeds where there is one."""
    result = {}
    for name in Summary.model_fields:
        values = [getattr(run[policy], name) for run in runs]
        numbers = [float(value) for value in values if isinstance(value, (int, float))]
        if numbers and name != "simulated":
            result[name] = sum(numbers) / len(numbers)
    return result


def own_best_static(experiment: Experiment, runs: Runs) -> tuple[str, float]:
    """The static configuration that is best in this one setting, and its QSA."""
    scores = {name: means(runs, name)["qsa"] for name in _static_names(experiment, runs)}
    name = max(scores, key=lambda each: scores[each])
    return name, scores[name]


def _static_names(experiment: Experiment, runs: Runs) -> list[str]:
    """All that ran, but those whose planner or scheduler chooses."""
    choosing = {
        spec.name
        for spec in experiment.policy_specs
        if spec.request_config is None or spec.scheduler not in (FCFS, EDF)
    }
    return [name for name in runs[0] if name not in choosing]


def _best_static(
    experiment: Experiment, settings: Sequence[Setting], runs: Sequence[Runs]
) -> list[str]:
    groups: dict[tuple[str, ...], list[int]] = {}
    for place, setting in enumerate(settings):
        key = tuple(setting.labels[axis] for axis in experiment.best_static_by)
        groups.setdefault(key, []).append(place)
    chosen = [""] * len(settings)
    for places in groups.values():
        names = _static_names(experiment, runs[places[0]])
        scores = {name: sum(means(runs[place], name)["qsa"] for place in places) for name in names}
        best = max(names, key=lambda each: scores[each])
        for place in places:
            chosen[place] = best
    return chosen
