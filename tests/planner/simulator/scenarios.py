"""Small scenarios that the tests change."""

from planner.simulator import Scenario, Simulation, Summary, named_policy, prepare

BASE = {
    "num_requests": 120,
    "arrivals": {"kind": "gamma", "cv": 2.0},
    "load": {"of_full_prefill": 0.8},
    "slo": {"times_full_prefill": 1.5},
    "tasks": "mhqa",
}


def scenario(fleet=None, **changes) -> Scenario:
    return Scenario.model_validate({**BASE, "models": [{"fleet": fleet or {}}], **changes})


def run(settings: Scenario, policy: str = "cacheblend", *, seed: int = 0) -> Simulation:
    """After its run."""
    spec = named_policy(policy) if isinstance(policy, str) else policy
    simulation = Simulation(prepare(settings, seed=seed), spec)
    simulation.run()
    return simulation


def summary(simulation: Simulation) -> Summary:
    return simulation.summary()
