"""The ways on the simulator's virtual clock: many seeds, long loads, no noise of the machine."""

from statistics import mean

from benchmarks.burst.setting import Burst, Outcome, Way, scenario_of
from planner.simulator import Simulation, named_policy, prepare


def simulate(burst: Burst, way: Way, *, seeds: range) -> Outcome:
    """Means over the seeds, which are the same for every way."""
    found = []
    for seed in seeds:
        prepared = prepare(scenario_of(burst, way), seed=seed)
        simulation = Simulation(prepared, named_policy("cachesmith"))
        simulation.run()
        found.append(simulation.summary())
    ttfts = [each.p99_ttft_ms for each in found if each.p99_ttft_ms is not None]
    return Outcome(
        way=way.name,
        is_fixed=way.is_fixed,
        qsa=mean(each.qsa for each in found),
        replica_s=mean(each.replica_seconds for each in found),
        p99_ttft_ms=mean(ttfts) if ttfts else None,
        errors=sum(each.refused + each.cancelled + each.failed for each in found),
    )
