"""Many settings, several policies: what an experiment file says, and how one setting is run."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from planner.simulator.outcomes import Summary
from planner.simulator.part import Count, Part
from planner.simulator.policies import (
    BEST_STATIC,
    ORDERS,
    PolicySpec,
    named_policy,
    static_grid,
)
from planner.simulator.scenario import Scenario
from planner.simulator.simulation import Prepared, Progress, Simulation, prepare


class AxisValue(Part):
    """set: dotted keys of the scenario, such as `models.0.fleet.replicas`, and their values."""

    label: str
    set: dict[str, Any]


class Axis(Part):
    name: str
    values: Annotated[tuple[AxisValue, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _labels_differ(self) -> "Axis":
        labels = [value.label for value in self.values]
        if len(set(labels)) < len(labels):
            raise ValueError(f"two values of {self.name!r} have the same label")
        return self


class QuickRun(Part):
    """What `--quick` does instead: fewer requests, and the first values of each axis."""

    num_requests: Count = 150
    values: Count = 2


class Experiment(Part):
    """base: a scenario; sweep: every combination of the axes' values is a setting.

    best_static_by: the axes within whose values one static configuration has to do for everything;
    best_static_orders: the schedulers it may have, as in `planner/simulator/policies.py`.
    """

    version: Literal[1] = 1
    name: str
    description: str = ""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (1,)
    base: dict[str, Any]
    sweep: tuple[Axis, ...] = ()
    policies: Annotated[tuple[str | PolicySpec, ...], Field(min_length=1)]
    best_static_by: tuple[str, ...] = ()
    best_static_orders: Annotated[tuple[str, ...], Field(min_length=1)] = ("fcfs1",)
    quick: QuickRun = QuickRun()

    @model_validator(mode="after")
    def _fits_together(self) -> "Experiment":
        names = [axis.name for axis in self.sweep]
        for name in self.best_static_by:
            if name not in names:
                raise ValueError(f"best_static_by: {name!r} is no axis of the sweep")
        for name in self.best_static_orders:
            if name not in ORDERS:
                known = ", ".join(ORDERS)
                raise ValueError(f"best_static_orders: {name!r} is none of {known}")
        specs = [spec.name for spec in self.policy_specs]
        for name in (*names, *specs):
            if (*names, *specs).count(name) > 1:
                raise ValueError(f"{name!r} is the name of two policies or axes")
        return self

    @property
    def policy_specs(self) -> list[PolicySpec]:
        """Those that are named, without `best_static`. Raises ValueError for an unknown name."""
        return [
            named_policy(policy) if isinstance(policy, str) else policy
            for policy in self.policies
            if policy != BEST_STATIC
        ]

    @property
    def wants_best_static(self) -> bool:
        return BEST_STATIC in self.policies

    def quickened(self) -> "Experiment":
        base = {**self.base, "num_requests": self.quick.num_requests}
        sweep = tuple(
            axis.model_copy(update={"values": axis.values[: self.quick.values]})
            for axis in self.sweep
        )
        return self.model_copy(update={"base": base, "sweep": sweep, "seeds": self.seeds[:1]})


@dataclass(frozen=True, slots=True)
class Setting:
    """labels: of the axes' values, by the axes' names"""

    labels: dict[str, str]
    scenario: Scenario

    @property
    def name(self) -> str:
        return ", ".join(self.labels.values()) or "base"


def parse_experiment(raw: object) -> Experiment:
    """From a YAML file's content. Raises ValueError that names each wrong key."""
    try:
        return Experiment.model_validate(raw)
    except ValidationError as exc:
        raise ValueError(_lines(exc, "")) from None


def settings_of(experiment: Experiment) -> list[Setting]:
    """Raises ValueError that names the setting and each wrong key."""
    settings = []
    for values in product(*(axis.values for axis in experiment.sweep)):
        raw = copy.deepcopy(experiment.base)
        labels = {}
        for axis, value in zip(experiment.sweep, values, strict=True):
            labels[axis.name] = value.label
            for key, wanted in value.set.items():
                _put(raw, key, copy.deepcopy(wanted))
        try:
            scenario = Scenario.model_validate(raw)
        except ValidationError as exc:
            where = f" (with {', '.join(labels.values())})" if labels else ""
            raise ValueError(_lines(exc, "base.") + where) from None
        settings.append(Setting(labels, scenario))
    return settings


def _put(raw: dict[str, Any], key: str, value: Any) -> None:
    """Raises ValueError for a key that goes through something that is no mapping or list."""
    place: Any = raw
    *path, last = key.split(".")
    for part in path:
        if isinstance(place, list) and part.isdigit() and int(part) < len(place):
            place = place[int(part)]
        elif isinstance(place, dict):
            place = place.setdefault(part, {})
        else:
            raise ValueError(f"sweep: there is no {key} in base ({part} is not there)")
    if not isinstance(place, dict):
        raise ValueError(f"sweep: there is no {key} in base")
    place[last] = value


def _lines(exc: ValidationError, prefix: str) -> str:
    return "\n".join(
        f"{prefix}{'.'.join(map(str, error['loc'])) or 'the file'}: "
        f"{error['msg'].removeprefix('Value error, ')}"
        for error in exc.errors()
    )


def policies_for(experiment: Experiment, prepared: Prepared) -> list[PolicySpec]:
    """Those named and, for `best_static`, the grid of the first model's layers."""
    specs = list(experiment.policy_specs)
    if experiment.wants_best_static:
        known = {spec.name for spec in specs}
        layers = prepared.machines[0].cost.num_layers
        for order in experiment.best_static_orders:
            specs += [spec for spec in static_grid(layers, order) if spec.name not in known]
    return specs


def _teller(progress: Callable[[str], None] | None, policy: str) -> Progress | None:
    if progress is None:
        return None
    return lambda ended, count: progress(f"{policy}: {ended:,} of {count:,} requests")


def run_setting(
    experiment: Experiment,
    setting: Setting,
    *,
    seed: int,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Summary]:
    """Every policy on the same requests; by the policies' names.

    progress: is told now and then, in words, how far it is
    """
    prepared = prepare(setting.scenario, seed=seed)
    results = {}
    for spec in policies_for(experiment, prepared):
        simulation = Simulation(prepared, spec, _teller(progress, spec.name))
        simulation.run()
        results[spec.name] = simulation.summary()
    return results
