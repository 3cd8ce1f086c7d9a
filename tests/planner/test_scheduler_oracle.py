"""The scheduler against the best batches, order, replicas and budgets, on cases small enough.

python -m tests.planner.test_scheduler_oracle 1000     # the report, on so many cases
"""

import random
import sys
from statistics import mean

import pytest

from planner.batch_choice import CacheSmithConfig
from planner.slo_scheduler import CacheSmithScheduler
from tests.planner.scheduler_worlds import best_passes, random_case, replica, run_to_the_end


def shares(seeds, **rules):
    """Of the best expected passes, what the scheduler gets; cases where nobody can pass left out.

    The grid of budgets is coarse, so the scheduler may be a little better; that counts as 1.
    """
    found = {}
    for seed in seeds:
        rng = random.Random(seed)
        num_requests, num_replicas = rng.randint(1, 5), rng.randint(1, 2)
        profiles, planner = random_case(rng, num_requests=num_requests)
        levels = 6 if num_requests < 5 else 4
        best = best_passes(profiles, planner, num_replicas=num_replicas, levels=levels)
        if best == 0.0:
            continue
        scheduler = CacheSmithScheduler(CacheSmithConfig(**rules), planner)
        for profile in profiles:
            scheduler.submit(profile, now_ms=0.0)
        passes, _ = run_to_the_end(scheduler, [replica(f"r{i}") for i in range(num_replicas)])
        assert scheduler.num_waiting == 0
        found[seed] = min(1.0, passes / best)
    return found


@pytest.mark.parametrize("rules", [{}, {"max_exhaustive": 0}])
def test_it_comes_close_to_the_best_schedule(rules):
    found = shares(range(40), **rules).values()
    assert mean(found) >= 0.98
    assert min(found) >= (0.9 if not rules else 0.75)


def main(num_cases: int) -> None:
    for rules in ({}, {"max_exhaustive": 0}):
        found = shares(range(num_cases), **rules)
        worst = sorted(found, key=found.__getitem__)[:5]
        values = list(found.values())
        print(
            f"{rules or 'default'}: {len(values)} cases, mean {mean(values):.4f}, "
            f"minimum {min(values):.3f}, under 0.98: {sum(v < 0.98 for v in values)}, "
            f"under 0.90: {sum(v < 0.9 for v in values)}, "
            f"worst {[(seed, round(found[seed], 3)) for seed in worst]}"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))
