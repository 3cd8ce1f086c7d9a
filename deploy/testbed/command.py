"""`cachesmith testbed`: a cluster of several hosts on this machine, under load and faults."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from deploy.console import fail, say

_DESCRIPTION = """\
Start several test hosts on this machine, make a Ray cluster of them by `ray up`, deploy CacheSmith
with a tiny model, send requests at a fixed rate while things are broken as the plan says, and print
what became of them. At the end, and after Ctrl-C, everything is taken down.

Needs root, iproute2, openssh-server, rsync and redis-server.
"""

_EPILOG = """\
A plan is a YAML file; docs/testbed.md has all kinds of faults:

  version: 1
  faults:
    - {at_s: 10, kind: kill_replica}
    - {at_s: 20, kind: crash_host, host: 3}
    - {at_s: 30, kind: boot_host, host: 3}

The exit code is 1 where a request was lost, wrong or doubled, more than 1% failed, the cluster did
not recover, or `ray down` left a process.

examples:
  cachesmith testbed
  cachesmith testbed --engine emulated --rate 20 --seconds 150
  cachesmith testbed --plan my-faults.yaml --out /tmp/run
"""


def add_parser(commands: Any) -> None:
    from deploy.testbed.fault_plan import DEFAULT_PLAN

    parser = commands.add_parser(
        "testbed",
        help="test a cluster of several hosts on this machine, with faults",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--hosts", type=int, default=3, metavar="N", help="the head among them (default: 3)"
    )
    parser.add_argument(
        "--plan",
        type=Path,
        default=DEFAULT_PLAN,
        metavar="FILE",
        help="what breaks when (default: everything once)",
    )
    parser.add_argument(
        "--rate", type=float, default=20.0, metavar="N", help="requests a second (default: 20)"
    )
    parser.add_argument(
        "--seconds", type=float, default=150.0, metavar="S", help="of load, at least (default: 150)"
    )
    parser.add_argument(
        "--engine",
        choices=["vllm", "emulated"],
        default="vllm",
        help="emulated: no model, for machines that can not hold the rate (default: vllm)",
    )
    parser.add_argument("--settings", type=Path, metavar="FILE", help="YAML over the testbed's own")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="result, answers and logs (default: a new folder)"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from deploy.testbed import interrupts
    from deploy.testbed.errors import TestbedError
    from deploy.testbed.fault_plan import load_plan
    from deploy.testbed.report import tables
    from deploy.testbed.run import RunOptions, run

    interrupts.take()
    out = args.out or Path(tempfile.mkdtemp(prefix="cachesmith-testbed-"))
    try:
        options = RunOptions(
            num_hosts=args.hosts,
            plan=load_plan(args.plan),
            rate=args.rate,
            seconds=args.seconds,
            engine=args.engine,
            out=out,
            settings=args.settings,
        )
        result = run(options, say)
    except TestbedError as exc:
        return fail(str(exc))
    (out / "result.json").write_text(result.model_dump_json(indent=1) + "\n")
    say(f"\n{tables(result)}\n\n{out / 'result.json'}")
    return 1 if result.failures else 0
