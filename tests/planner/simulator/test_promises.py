"""What the scheduler promises is what happens, where nothing comes between."""

import numpy as np
import pytest

from planner.simulator import PolicySpec, Simulation, prepare
from tests.planner.simulator.scenarios import scenario


class Watched:
    """A scheduler whose decisions are kept, with their time."""

    def __init__(self, scheduler):
        self._scheduler = scheduler
        self.decided = []

    def __getattr__(self, name):
        return getattr(self._scheduler, name)

    def next_batch(self, replicas, *, now_ms):
        decision = self._scheduler.next_batch(replicas, now_ms=now_ms)
        if decision is not None:
            self.decided.append((now_ms, decision))
        return decision


def watched_run(**changes):
    settings = scenario(
        {"noise": 0.0, "slice_layers": None}, num_requests=400, tasks="mix", **changes
    )
    models = [settings.models[0].model_copy(update={"believes": "task"})]
    settings = settings.model_copy(update={"models": tuple(models)})
    spec = PolicySpec(name="cachesmith", resolve=False)
    simulation = Simulation(prepare(settings, seed=4), spec, schedulers=Watched)
    simulation.run()
    (scheduler,) = simulation.schedulers
    return simulation.outcomes, scheduler.decided


def test_a_batch_ends_when_its_plan_says():
    outcomes, decided = watched_run()
    assert len(decided) > 100
    for now_ms, decision in decided:
        for profile in decision.requests:
            idx = int(profile.request_id)
            ends_ms = outcomes.arrival_ms[idx] + outcomes.ttft_ms[idx]
            assert ends_ms == pytest.approx(now_ms + decision.plan.expected_ms, rel=1e-6)


def test_as_many_pass_as_the_plans_expect_if_the_planner_knows_the_task():
    outcomes, decided = watched_run()
    expected = [
        (int(profile.request_id), plan.pass_probability)
        for _, decision in decided
        for profile, plan in zip(decision.requests, decision.plan.requests, strict=True)
    ]
    places, chances = (np.array(column) for column in zip(*expected, strict=True))
    error = np.sqrt((chances * (1 - chances)).sum()) / len(chances)
    assert outcomes.passed[places].mean() == pytest.approx(chances.mean(), abs=3 * error + 0.03)
