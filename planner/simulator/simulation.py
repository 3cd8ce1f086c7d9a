"""One policy in one scenario, from the first arrival to the last ending."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from planner.demand import DemandCurves
from planner.demand_profile import DemandProfile
from planner.scheduler import SloScheduler
from planner.serving_profile import ServingProfile
from planner.simulator.belief import believed_profile
from planner.simulator.cell import Cell
from planner.simulator.demand_truth import AssumedTruth, DemandTruth, MeasuredTruth
from planner.simulator.event_queue import EventQueue
from planner.simulator.fleet import Fleet
from planner.simulator.gauge import Gauge
from planner.simulator.hardware import MACHINES, Machine
from planner.simulator.outcomes import Outcomes, Summary
from planner.simulator.policies import PolicySpec
from planner.simulator.random_streams import Purpose, stream
from planner.simulator.replica import SimRequest
from planner.simulator.scenario import ModelSpec, Scenario
from planner.simulator.tasks import PR
from planner.simulator.workload import Workload, make_workload
from planner.types import RequestProfile

Progress = Callable[[int, int], None]  # requests that have ended, of how many
PROGRESS_STEPS = 200


@dataclass(frozen=True, slots=True)
class Prepared:
    """What all policies of a scenario share."""

    scenario: Scenario
    seed: int
    machines: list[Machine]
    workload: Workload
    truths: list[list[DemandTruth]]  # by model, by task
    beliefs: list[DemandCurves]  # by model


def prepare(scenario: Scenario, *, seed: int) -> Prepared:
    """Raises ValueError for a trace or a profile that cannot be used."""
    machines = [machine_of(model) for model in scenario.models]
    truths = [_truths(scenario, *pair) for pair in zip(scenario.models, machines, strict=True)]
    beliefs = [
        DemandCurves(_belief(scenario, model, machine, truth))
        for model, machine, truth in zip(scenario.models, machines, truths, strict=True)
    ]
    workload = make_workload(scenario, machines, seed=seed)
    return Prepared(scenario, seed, machines, workload, truths, beliefs)


def machine_of(model: ModelSpec) -> Machine:
    """With the measured costs where a profile is given; the rest stays arithmetic's."""
    machine = MACHINES[model.machine]
    if model.profile is None:
        return machine
    profile = ServingProfile.load(model.profile)
    if profile.costs is None:
        raise ValueError(f"{model.profile} has no costs")
    return Machine(
        name=profile.model,
        source=f"measured on {profile.costs.device}, decoding by arithmetic",
        cost=profile.costs.cost,
        kv_token_bytes=profile.kv_token_bytes,
        kv_capacity_tokens=machine.kv_capacity_tokens,
        decode_ms=machine.decode_ms,
        decode_seq_ms=machine.decode_seq_ms,
    )


def assumptions(scenario: Scenario) -> list[str]:
    """What of it was measured and what was not, a line each."""
    lines = []
    for model in scenario.models:
        machine = machine_of(model)
        lines.append(f"{model.name}: times of {machine.name}, {machine.source}")
        if model.truth is None:
            lines.append(f"{model.name}: demand of requests assumed")
        else:
            lines.append(f"{model.name}: demand of requests as in {model.truth}")
        lines.append(f"{model.name}: the planner believes the demand of: {model.believes}")
    return lines


def _truths(scenario: Scenario, model: ModelSpec, machine: Machine) -> list[DemandTruth]:
    layers = machine.cost.num_layers
    if model.truth is not None:
        measured: DemandTruth = MeasuredTruth(DemandProfile.load(model.truth), layers)
        return [measured for _ in scenario.task_specs]
    accuracy = scenario.entropy_accuracy
    return [
        AssumedTruth(spec.demand, layers, entropy_accuracy=accuracy) for spec in scenario.task_specs
    ]


def _belief(
    scenario: Scenario, model: ModelSpec, machine: Machine, truths: list[DemandTruth]
) -> DemandProfile:
    layers = machine.cost.num_layers
    if model.believes == "task":
        weights = [spec.weight for spec in scenario.task_specs]
        weighted = list(zip(weights, truths, strict=True))
        return believed_profile(weighted, num_layers=layers, task="its own")
    if model.believes == "pr":
        truth = AssumedTruth(PR.demand, layers, entropy_accuracy=scenario.entropy_accuracy)
        return believed_profile([(1.0, truth)], num_layers=layers, task="pr")
    return DemandProfile.load(model.believes)


class Simulation:
    """Every request ends once. The same arguments give the same outcomes, bit for bit."""

    def __init__(
        self,
        prepared: Prepared,
        policy: PolicySpec,
        progress: Progress | None = None,
        *,
        schedulers: Callable[[SloScheduler], Any] | None = None,
    ) -> None:
        """schedulers: what to put around each scheduler, to watch it"""
        self._prepared = prepared
        self._policy = policy
        self._progress = progress
        self._wrap = schedulers
        self.events = EventQueue()
        workload = prepared.workload
        self.outcomes = Outcomes(arrival_ms=workload.arrival_ms, slo_ms=workload.slo_ms)
        self._waiting, self._prefilling = Gauge(), Gauge()
        self.schedulers: list[Any] = []
        self._fleets = [self._fleet(i, model) for i, model in enumerate(prepared.scenario.models)]
        self._config = policy.request_config
        self._next = 0

    def run(self) -> Outcomes:
        outcomes, events, count = self.outcomes, self.events, len(self._prepared.workload)
        events.at(float(outcomes.arrival_ms[0]), self._arrive)
        events.after(self._prepared.scenario.limits.tick_ms, self._tick)
        step, shown = max(1, count // PROGRESS_STEPS), 0

        def is_over() -> bool:
            nonlocal shown
            if self._progress is not None and outcomes.num_ended >= shown + step:
                shown = outcomes.num_ended
                self._progress(shown, count)
            return outcomes.num_ended == count

        with _few_collections():
            events.run(is_over)
        now = events.now_ms()
        outcomes.waiting_area = self._waiting.area(now_ms=now)
        outcomes.prefilling_area = self._prefilling.area(now_ms=now)
        for fleet in self._fleets:
            fleet.close(now_ms=now)
        return outcomes

    def summary(self) -> Summary:
        """After the run."""
        scenario, workload = self._prepared.scenario, self._prepared.workload
        groups = {}
        if len(scenario.task_specs) > 1:
            for i, task in enumerate(scenario.task_specs):
                groups[f"task {task.name}"] = workload.task == i
        if len(scenario.models) > 1:
            for i, model in enumerate(scenario.models):
                groups[f"model {model.name}"] = workload.model == i
        return self.outcomes.summary(length_ms=self.events.now_ms(), groups=groups)

    def _fleet(self, number: int, model: ModelSpec) -> Fleet:
        prepared, spec = self._prepared, model.fleet
        machine, workload = prepared.machines[number], prepared.workload
        planner = self._policy.planner(prepared.beliefs[number])
        fleet = Fleet(
            model.name,
            spec,
            machine=machine,
            planner=planner,
            events=self.events,
            outcomes=self.outcomes,
            rng=stream(prepared.seed, Purpose.FAULTS, number),
            popular=[workload.corpus[place] for place in workload.popular.tolist()],
        )
        limits, rng = prepared.scenario.limits, stream(prepared.seed, Purpose.NOISE, number)
        cells = []
        for _ in range(spec.schedulers):
            scheduler = self._policy.scheduler_of(planner, limits.fcfs)
            if self._wrap is not None:
                scheduler = self._wrap(scheduler)
            self.schedulers.append(scheduler)
            cells.append(
                Cell(
                    scheduler,
                    events=self.events,
                    outcomes=self.outcomes,
                    machine=machine,
                    fleet=spec,
                    limits=limits,
                    knows_link=self._policy.knows_link,
                    entropy_accuracy=prepared.scenario.entropy_accuracy,
                    rng=rng,
                    waiting=self._waiting,
                    prefilling=self._prefilling,
                    when_idle=fleet.gone_if_drained,
                )
            )
        fleet.open(cells)
        return fleet

    def _tick(self) -> None:
        for fleet in self._fleets:
            fleet.tick()
        self.events.after(self._prepared.scenario.limits.tick_ms, self._tick)

    def _arrive(self) -> None:
        idx, workload = self._next, self._prepared.workload
        self._next += 1
        if self._next < len(workload):
            at_ms = float(workload.arrival_ms[self._next])
            self.events.at(max(at_ms, self.events.now_ms()), self._arrive)
        number = int(workload.model[idx])
        self._fleets[number].submit(self._request(idx, number))

    def _request(self, idx: int, number: int) -> SimRequest:
        workload, chunks = self._prepared.workload, self._prepared.workload.chunks(idx)
        config = self._config
        if config is not None and config.tokens_per_chunk is not None:
            config = config.for_chunks([chunk.num_tokens for chunk in chunks])
        profile = RequestProfile(
            request_id=str(idx),
            num_prefix_tokens=int(workload.prefix[idx]),
            chunks=chunks,
            num_suffix_tokens=int(workload.suffix[idx]),
            ttft_slo_ms=float(workload.slo_ms[idx]),
            policy=self._policy.runs,
            config=config,
        )
        return SimRequest(
            idx=idx,
            profile=profile,
            output_tokens=int(workload.output[idx]),
            truth=self._prepared.truths[number][workload.task[idx]],
            difficulty=float(workload.difficulty[idx]),
            taste=float(workload.taste[idx]),
            vote=float(workload.vote[idx]),
        )


@contextmanager
def _few_collections() -> Iterator[None]:
    """Nearly all objects of a run are freed by their counts; looking for cycles takes a fifth."""
    thresholds = gc.get_threshold()
    gc.set_threshold(1_000_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
