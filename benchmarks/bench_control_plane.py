"""What do ingress, scheduler and router add to a request, and when is the scheduler the bottleneck?

Everything is the product's own on a Ray of the benchmark's own, but the engine, which computes
nothing, so that only the control plane's time is left.

- `steps`: CPU of what the ingress does with a request, and of its values' way to other processes.
- `path`: requests over HTTP at Poisson times. `to replica` is from when the client begins to send
  until the call is in the replica, `first byte` until the stream's first byte is at the client.
  `bare` (the ceiling) is a Serve application with the same hops that does nothing at any of them:
  proxy, ingress, one call of an actor, one streaming call of a replica. `gather0` is CacheSmith
  with `scheduler.gather_ms` 0, `gather5` with the default, which waits on purpose. Rounds of all
  in random order. `ratio` is of the samples of all rounds to those of `bare`, `ratio of rounds` is
  median and range of each round's.
  CPU is that of all processes but the client, less what they take idle. Goal: at most 1.3 at P50
  and P99, with gather0.
- `scheduler`: admissions in a closed loop, each followed by what a served request tells. So many
  are under way at any time; emulated replicas report as busy ones do and take no time. `CPU` is the
  actor's for one admission, reports included: its inverse is what one core could admit, whatever
  else the machine does.
- `idle`: one admission at a time, no gathering, beside a call of an actor that does nothing.
- `schedulers`: one actor, and two at once, as two applications have, each with its own callers.

    cachesmith bench control-plane
    cachesmith bench control-plane --parts path --rates 10 --rounds 15
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from benchmarks.report import argument_parser, print_json, print_table
from deploy.local_ray import prepare_environment

PARTS = ("steps", "path", "scheduler", "idle", "schedulers")
MAX_DOCUMENTS = 64


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("control-plane", __doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokenizer serves")
    parser.add_argument("--rates", type=float, nargs="+", default=[5.0, 20.0, 50.0], help="per s")
    parser.add_argument("--documents", type=int, nargs="+", default=[0, 8], help="of 480 words")
    parser.add_argument("--requests", type=int, default=20, help="of each application a round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--waiting", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each admission load")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if not 0 <= min(args.documents) <= max(args.documents) <= MAX_DOCUMENTS:
        parser.error(f"--documents must be from 0 to {MAX_DOCUMENTS}")
    if min(args.requests, args.rounds, *args.waiting, *args.replicas) < 1 or args.seconds <= 0:
        parser.error("--requests, --rounds, --waiting, --replicas, --seconds: more than 0")
    if min(args.rates) <= 0:
        parser.error("--rates must be more than 0")
    prepare_environment()  # before anything imports Ray
    from benchmarks.control_plane.path_rows import path_rows
    from benchmarks.control_plane.scheduler_rows import idle_rows, scheduler_rows, schedulers_rows
    from benchmarks.control_plane.step_rows import step_rows
    from benchmarks.own_serve import own_ray

    rows_of = {
        "steps": step_rows,
        "path": path_rows,
        "scheduler": scheduler_rows,
        "idle": idle_rows,
        "schedulers": schedulers_rows,
    }
    results: list[dict[str, Any]] = []
    with own_ray() if set(args.parts) != {"steps"} else nullcontext():
        for part in args.parts:
            results += rows_of[part](args)
    for part in PARTS:
        if rows := [
            {k: v for k, v in r.items() if k != "part"} for r in results if r["part"] == part
        ]:
            print_table(list(rows[0]), [list(row.values()) for row in rows])
            print()
    print_json("control_plane", seed=args.seed, results=results)


if __name__ == "__main__":
    main()
