"""`cachesmith simulate`: compare policies in simulated settings."""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from benchmarks.profiling.progress import Progress
from deploy.console import fail, say
from deploy.simulation_report import all_assumptions, report
from planner.simulator import (
    Experiment,
    Row,
    Setting,
    Summary,
    compare,
    parse_experiment,
    run_setting,
    settings_of,
)

_EPILOG = """\
An experiment file says who asks for what, what serves it, and which policies are compared
(benchmarks/experiments has some). The scheduler and the planner are those of a server; time,
machines, links and requests are simulated. So is every number that comes out.

QSA is the share of requests that got their first token in time and enough coverage for their
quality gate; `accuracy` the share of those answered that passed the gate; `SLO` the share of all
that were in time; `stall` the share of prefill time spent waiting for stored KV.

examples:
  cachesmith simulate --config benchmarks/experiments/quick.yaml
  cachesmith simulate --config benchmarks/experiments/settings_96.yaml --jobs 2 --out 96.json
  cachesmith simulate --config benchmarks/experiments/bandwidth.yaml --plots plots/
"""


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "simulate",
        help="compare policies in simulated settings",
        description="Simulate a cluster under several policies and print what becomes of the "
        "requests.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="experiment")
    parser.add_argument("--seed", type=int, metavar="N", help="instead of the experiment's seeds")
    parser.add_argument("--out", type=Path, metavar="JSON", help="write all results")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw each axis (matplotlib)")
    parser.add_argument("--quick", action="store_true", help="fewer requests and settings")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="settings at the same time (default: 1)"
    )
    parser.set_defaults(run=_simulate)


def _simulate(args: argparse.Namespace) -> int:
    try:
        experiment = _load(args)
        settings = settings_of(experiment)
        if args.jobs < 1:
            raise ValueError("--jobs must be 1 or more")
        for folder in (args.plots, args.out and args.out.parent):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        started_s = time.monotonic()
        runs = _run(experiment, settings, jobs=args.jobs)
    except (ValueError, OSError) as exc:
        return fail(f"{args.config}: {exc}")
    took_s = time.monotonic() - started_s
    rows = compare(experiment, settings, runs)
    report(experiment, settings, rows, runs, took_s=took_s)
    if args.out is not None:
        args.out.write_text(json.dumps(_result(experiment, settings, runs, rows), indent=1) + "\n")
        say(f"written to {args.out}")
    if args.plots is not None:
        from deploy.simulation_plots import draw  # needs matplotlib

        for path in draw(experiment, settings, rows, folder=args.plots):
            say(f"drawn: {path}")
    return 0


def _load(args: argparse.Namespace) -> Experiment:
    """Raises ValueError, OSError for a file that is no experiment."""
    try:
        raw = yaml.safe_load(args.config.read_text())
    except yaml.YAMLError as exc:
        raise ValueError(f"is not YAML: {exc}") from None
    experiment = parse_experiment(raw)
    if args.seed is not None:
        experiment = experiment.model_copy(update={"seeds": (args.seed,)})
    return experiment.quickened() if args.quick else experiment


def _run(
    experiment: Experiment, settings: Sequence[Setting], *, jobs: int
) -> list[list[dict[str, Summary]]]:
    """By setting, by seed."""
    tasks = [(setting, seed) for setting in settings for seed in experiment.seeds]
    done: list[dict[str, Summary]] = []
    progress = Progress()
    progress.start("simulated settings × seeds", len(tasks))
    try:
        for result in _results(experiment, tasks, jobs=jobs, within=progress.note):
            done.append(result)
            progress.advance()
    finally:
        progress.end()
    per = len(experiment.seeds)
    return [done[i : i + per] for i in range(0, len(done), per)]


def _results(
    experiment: Experiment,
    tasks: Sequence[tuple[Setting, int]],
    *,
    jobs: int,
    within: Callable[[str], None],
) -> Iterator[dict[str, Summary]]:
    """In the order of the tasks, however many run at the same time."""
    if jobs == 1:
        for setting, seed in tasks:
            yield run_setting(experiment, setting, seed=seed, progress=within)
        return
    with ProcessPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_setting, experiment, s, seed=seed) for s, seed in tasks]
        try:
            for future in futures:
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _result(
    experiment: Experiment,
    settings: Sequence[Setting],
    runs: Sequence[list[dict[str, Summary]]],
    rows: Sequence[list[Row]],
) -> dict[str, Any]:
    return {
        "version": 1,
        "simulated": True,
        "assumptions": all_assumptions(settings),
        "experiment": experiment.model_dump(mode="json"),
        "settings": [
            {
                "labels": setting.labels,
                "means": {row.policy: {"runs": row.runs, **row.values} for row in of_setting},
                "by_seed": {
                    str(seed): {name: each.model_dump() for name, each in run.items()}
                    for seed, run in zip(experiment.seeds, of_seeds, strict=True)
                },
            }
            for setting, of_seeds, of_setting in zip(settings, runs, rows, strict=True)
        ],
    }
