"""What do replicas that follow the load keep of the requests in a burst, and what do they cost?

Arrivals have Gamma gaps with a coefficient of variation of 3, and a rate that rises tenfold and
falls again. The sizings are ours (`slo`), Ray Serve's default policy as it comes (`serve`) and with
its delays taken out (`serve quick`), and every fixed number of replicas. All face the same
arrivals.

QSA: share of all requests whose first token came within the objective and whose coverage was enough
for them. replica-s: seconds of replicas, from each order to its end. What a prefill costs and how
much coverage requests need was measured of the synthetic model.

A real Ray Serve with scheduler, router and HTTP runs an engine that sleeps as long as the cost
model says. Its clock is stretched (--stretch): Ray's own time then weighs less against the
prefills'. All numbers are printed in unstretched time. With --simulated the simulator's virtual
clock runs instead, over many seeds.
Ceiling: as many fixed replicas as there may be, all the time.

    cachesmith bench burst --simulated --seeds 20
    cachesmith bench burst --seconds 60 --stretch 3
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.burst.setting import (
    HEADER,
    Burst,
    Outcome,
    best_at_cost,
    cheapest_as_good,
    ways,
)
from benchmarks.burst.simulated import simulate
from benchmarks.report import argument_parser, print_json, print_table, say


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    burst = Burst(
        seconds=args.seconds,
        rate_per_s=args.rate,
        load_s=args.load_s,
        slo_times=args.slo,
        max_replicas=args.max_replicas,
        down_after_s=args.down_after_s,
        num_bursts=args.bursts,
    )
    chosen = [way for way in ways(burst) if not args.only or way.name in args.only]
    outcomes: list[Outcome] = []
    if args.simulated:
        for way in chosen:
            say(way.name)
            seeds = range(args.seed, args.seed + args.seeds)
            outcomes.append(simulate(burst, way, seeds=seeds))
    else:
        from benchmarks.burst.served import served_cluster

        with served_cluster(burst, stretch=args.stretch, seed=args.seed) as serve_way:
            for way in chosen:
                say(way.name)
                outcomes.append(serve_way(way))
                say(f"  {outcomes[-1]}")
    print_table(HEADER, [outcome.row for outcome in outcomes])
    for outcome in outcomes:
        if not outcome.is_fixed:
            _compare(outcome, outcomes)
    results = [asdict(outcome) for outcome in outcomes]
    print_json("burst", seed=args.seed, results=[{**vars(args)}, *results])


def _compare(outcome: Outcome, outcomes: Sequence[Outcome]) -> None:
    for text, other in (
        ("the best fixed size for no more replica-seconds", best_at_cost(outcomes, outcome)),
        ("the cheapest fixed size with no less QSA", cheapest_as_good(outcomes, outcome)),
    ):
        found = "none" if other is None else f"{other.way}, QSA {other.qsa:.3f}"
        cost = "" if other is None else f", {other.replica_s / outcome.replica_s:.2f} of its cost"
        print(f"{outcome.way}: {text}: {found}{cost}")


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser("burst", __doc__)
    parser.add_argument("--simulated", action="store_true", help="on the simulator's clock")
    parser.add_argument("--seconds", type=float, default=240.0, help="of the load, unstretched")
    parser.add_argument("--rate", type=float, default=5.0, help="mean, requests in a second")
    parser.add_argument("--load-s", type=float, default=5.0, help="of a replica's model")
    parser.add_argument("--slo", type=float, default=3.0, help="times a full prefill, alone")
    parser.add_argument("--max-replicas", type=int, default=5)
    parser.add_argument("--down-after-s", type=float, default=20.0)
    parser.add_argument("--bursts", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="names of sizings")
    parser.add_argument("--stretch", type=float, default=3.0, help="of the real run's clock")
    parser.add_argument("--seeds", type=int, default=10, help="of a simulation")
    parser.add_argument("--seed", type=int, default=0)
    return parser
