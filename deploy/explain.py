"""`cachesmith explain`: why a batch gets its plan, from a profile or from a running server."""

import argparse
from pathlib import Path
from typing import Any

from deploy.client import DEFAULT_URL, add_api_key, ask_with_timeline
from deploy.console import fail, say
from deploy.settings import load_settings

_EPILOG = """\
With --tokens it plans a batch as a server with this profile would: nothing has to run. With
--request it sends the request to a running server, and tells why its batch was formed and planned
as it was.

In the table, w and p are the layers of WarmUp and Probe, `floor ms` and `full ms` the times at both
ends of the coverage band, `ms` and `stall` the planned time and what of it is waiting for stored
KV, `passes` the requests whose coverage is expected to be enough. The star marks what runs.

examples:
  cachesmith explain --model cachesmith-english --tokens 600 900 --budget-ms 400
  cachesmith explain --profile my.json --tokens 8000 --budget-ms 300 --bandwidth-mb-s 2000
  cachesmith explain --request ask.json --url http://127.0.0.1:8000
"""


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="show why a batch gets its plan",
        description="Print the candidates that the planner weighs, their times and expected "
        "passes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--tokens", type=int, nargs="+", metavar="N", help="context tokens of each request"
    )
    what.add_argument("--request", type=Path, metavar="JSON", help="a request's body, to be sent")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"of --request (default: {DEFAULT_URL})")
    add_api_key(parser)
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings")
    parser.add_argument("--model", metavar="DIR_OR_NAME", help="whose profile is taken")
    parser.add_argument("--profile", metavar="FILE", help="a profile, instead of the model's own")
    parser.add_argument(
        "--budget-ms", type=float, default=500.0, metavar="MS", help="of the batch (default: 500)"
    )
    parser.add_argument(
        "--suffix", type=int, default=40, metavar="N", help="tokens after the context (default: 40)"
    )
    parser.add_argument(
        "--stored",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="share of the context with stored KV (default: 1)",
    )
    parser.add_argument(
        "--bandwidth-mb-s",
        type=float,
        metavar="MB/S",
        help="of the link that stored KV comes over; without it, the KV is in host memory",
    )
    parser.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> int:
    if args.request is not None:
        return _explain_answer(args)
    from deploy.app import planner_config, profile_of  # imports Ray, which takes seconds

    if min(args.tokens) < 1 or args.suffix < 1:
        return fail("--tokens and --suffix must be 1 or more")
    if not 0.0 <= args.stored <= 1.0:
        return fail("--stored must be within 0 and 1")
    overrides: dict[str, dict[str, str]] = {}
    if args.model is not None:
        overrides["model"] = {"name_or_dir": args.model}
    if args.profile is not None:
        overrides["planner"] = {"profile": args.profile}
    settings = load_settings(config_file=args.config, overrides=overrides)
    profile = profile_of(settings)
    if profile is None or profile.costs is None:
        return fail(
            f"there is no profile with costs of {settings.model.name_or_dir}; make one with "
            "`cachesmith profile` and give it as --profile"
        )
    try:
        say(_explained(args, profile, planner_config(settings.planner)))
    except ValueError as exc:
        return fail(str(exc))
    return 0


def _explained(args: argparse.Namespace, profile: Any, config: Any) -> str:
    """Raises ValueError for what cannot be planned."""
    from planner import (
        BudgetPlanner,
        DemandCurves,
        Link,
        PlanInput,
        PrefillShape,
        built_in_demand,
    )

    link = None
    if args.bandwidth_mb_s is not None:
        if profile.kv_token_bytes == 0.0:
            raise ValueError("the profile does not say how large stored KV is: no --bandwidth-mb-s")
        link = Link(bytes_per_ms=args.bandwidth_mb_s * 1e3)
    demand = profile.demand or built_in_demand(profile.num_layers, config.signal)
    requests = []
    for num_context in args.tokens:
        num_cached = round(args.stored * num_context)
        requests.append(
            PlanInput(
                shape=PrefillShape(
                    num_cached=num_cached, num_always=num_context - num_cached + args.suffix
                ),
                num_context_tokens=num_context,
                layer_bytes=profile.kv_token_bytes * num_cached,
            )
        )
    explained = BudgetPlanner(config, DemandCurves(demand)).explain(
        requests, budget_ms=args.budget_ms, cost=profile.costs.cost, link=link
    )
    source = f"demand of {demand.task}" if profile.demand else "demand assumed, not measured"
    return f"{profile.model}, {profile.costs.device}, {source}\n{explained.text()}"


def _explain_answer(args: argparse.Namespace) -> int:
    report = ask_with_timeline(args)
    if isinstance(report, str):
        return fail(report)
    say(
        report["explanation"]
        or "nothing was planned: the scheduler was away, or the policy is another"
    )
    say(
        f"it ran {report['signal']} w={report['warmup_depth']} p={report['probe_len']} "
        f"r={report['coverage']:.3f}: expected {report['expected_ms']:.1f} ms, took "
        f"{report['compute_ms']:.1f} ms of compute, TTFT {report['ttft_ms']:.1f} ms of "
        f"{report['slo_ttft_ms']:.0f} ms"
    )
    return 0
