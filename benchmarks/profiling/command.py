"""`cachesmith profile`: measure a model on this machine, and write what the planner goes by.

Nothing heavy is imported before the arguments are known to be good.
"""

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.console import fail, say
from deploy.models import ModelUnavailableError, resolve_model

if TYPE_CHECKING:
    from benchmarks.profiling.cost_grid import GridPoint, MeasuredPoint
    from benchmarks.profiling.demand import Demand, DemandOptions
    from benchmarks.profiling.partial import PartialFile
    from benchmarks.profiling.progress import Progress
    from benchmarks.quality.suites import Suite
    from planner.serving_profile import CostProfile, ServingProfile

REQUESTS, QUICK_REQUESTS = 64, 24
ROUNDS, QUICK_ROUNDS = 3, 1  # over all batches
QUICK_STEP = 2  # every other batch
DTYPES = ("auto", "bfloat16", "float16", "float32")

_EPILOG = """\
It runs batches of many shapes on an engine of its own and fits prices to their times, phase by
phase. Then it asks the model generated questions with known answers, and looks for the smallest
coverage at which the answer is still right. Keep the machine otherwise idle, above all for the
costs. Interrupted, the same command goes on where it stopped.

A server takes the profile from the setting `planner.profile`, from cachesmith-profile.json in the
model's folder, or from those that come with CacheSmith. Costs count on a machine like this one
only, the demand wherever the model is served.

examples:
  cachesmith profile --model cachesmith-english --out english.json
  cachesmith profile --model ./my-model --out my.json --tp 2 --dtype bfloat16 --plots pictures
  cachesmith profile --model ./my-model --out my.json --costs-only      the demand stays as it is
  cachesmith profile --model ./my-model --out my.json --demand-only --task ref vt1
  cachesmith profile --model ./my-model --out look.json --quick         a first look
  cachesmith profile --show my.json --plots pictures
"""


class ProfileError(RuntimeError):
    """Nothing can be measured so; the message says why."""


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "profile",
        help="measure a model's costs and demand for the planner",
        description="Measure what prefills of a model cost on this machine and how much its "
        "requests need to have recomputed, and write both to a file.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="DIR_OR_NAME", help="as for `cachesmith serve`")
    what.add_argument(
        "--show", type=Path, metavar="FILE", help="print the report of a profile, measure nothing"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="the profile to write")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="also draw pictures into DIR")
    parser.add_argument(
        "--quick", action="store_true", help="fewer batches and requests, for a first look"
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument(
        "--costs-only", action="store_true", help="keep the demand that --out has already"
    )
    part.add_argument(
        "--demand-only", action="store_true", help="keep the costs that --out has already"
    )
    parser.add_argument("--force", action="store_true", help="replace --out if it exists")
    parser.add_argument(
        "--restart", action="store_true", help="throw away what an interrupted run has measured"
    )

    engine = parser.add_argument_group("the engine, as it will serve")
    engine.add_argument(
        "--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default: 1)"
    )
    engine.add_argument("--dtype", choices=DTYPES, default="auto", help="default: the model's own")
    engine.add_argument(
        "--threads", type=int, metavar="N", help="compute threads of each rank without a GPU"
    )

    demand = parser.add_argument_group("the requests of the demand")
    demand.add_argument(
        "--task",
        nargs="+",
        metavar="TASK",
        help="tasks of the model's suite, by turns (default: passage retrieval, `pr`, then what "
        "else the suite has if that tells nothing); `cachesmith bench quality --qualify` shows "
        "which tell something",
    )
    demand.add_argument(
        "--documents",
        nargs="+",
        type=int,
        metavar="N",
        help="documents of a request; each number becomes a bucket of context lengths",
    )
    demand.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help=f"requests for each number of documents (default: {REQUESTS}, quick: "
        f"{QUICK_REQUESTS})",
    )
    demand.add_argument(
        "--device", metavar="DEVICE", help="where they are asked (default: cuda if there is one)"
    )
    demand.add_argument("--seed", type=int, default=0, help="of the requests (default: 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        if args.show is not None:
            return _show(args)
        return _measure(args)
    except (ProfileError, ModelUnavailableError) as exc:
        return fail(str(exc))


def _show(args: argparse.Namespace) -> int:
    from planner.serving_profile import ServingProfile

    try:
        profile = ServingProfile.load(args.show)
    except (OSError, ValueError) as exc:
        raise ProfileError(str(exc)) from None
    _report(profile, args.plots)
    return 0


def _report(profile: "ServingProfile", plots: Path | None) -> None:
    from benchmarks.profiling import report

    report.print_report(profile)
    if plots is None:
        return
    try:
        for path in report.plot(profile, plots):
            say(f"drew {path}")
    except ImportError:
        raise ProfileError(
            "pictures need matplotlib: install it, or leave out --plots; the profile is complete"
        ) from None
    except OSError as exc:
        raise ProfileError(f"can not draw into {plots}: {exc}") from None


# --- measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """What an engine told of itself. num_layers: of the model"""

    profile: "CostProfile"
    num_layers: int
    kv_token_bytes: float


def _measure(args: argparse.Namespace) -> int:
    _check(args)
    _prepare_environment()
    model_dir = resolve_model(args.model)
    from benchmarks.profiling.progress import Progress
    from benchmarks.quality.suites import suite_of
    from kv_tier.errors import ModelIdentityError
    from kv_tier.keys import model_fingerprint

    has_vllm = find_spec("vllm") is not None
    if args.costs_only and not has_vllm:
        raise ProfileError("costs are measured on vLLM, which is not installed here")
    try:
        fingerprint = model_fingerprint(model_dir)
        suite = suite_of(model_dir)
        options = _demand_options(args, suite)
        old = _old_profile(args, fingerprint)
        partial = _partial_file(args, _header(args, fingerprint, options, has_vllm=has_vllm))
    except (ModelIdentityError, ValueError, OSError) as exc:
        raise ProfileError(str(exc)) from None
    if not partial.is_empty:
        say(f"going on with what {partial.path} has")
    progress = Progress()
    try:
        costs = None
        if args.demand_only:
            pass
        elif has_vllm:
            costs = asyncio.run(_measured_costs(args, model_dir, partial, progress))
        else:
            say("vLLM is not installed here: the demand is measured, costs are not")
        demand = None
        num_layers = costs.num_layers if costs else 0
        if not args.costs_only:
            demand, num_layers = _measured_demand(
                args, model_dir, suite, options, partial, progress
            )
    except KeyboardInterrupt:
        progress.end()
        partial.close()
        say(f"stopped; the same command goes on with what {partial.path} has")
        return 130
    profile = _profile(model_dir, fingerprint, num_layers, costs, demand, old)
    _save(profile, args.out)
    partial.remove()
    _report(profile, args.plots)
    say(f"wrote {args.out}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Of the arguments alone, and of where they point."""
    if args.out is None:
        raise ProfileError("--out says where the profile goes")
    if args.out.is_dir():
        raise ProfileError(f"--out {args.out} is a folder, not a file")
    for name in ("tp", "threads", "requests"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ProfileError(f"--{name} must be 1 or more, got {value}")
    if min(args.documents or [1]) < 1:
        raise ProfileError(f"--documents must be 1 or more, got {min(args.documents)}")
    adds_to_it = args.costs_only or args.demand_only
    if args.out.exists() and not (args.force or adds_to_it):
        raise ProfileError(
            f"{args.out} exists: --force replaces it, --costs-only and --demand-only measure one "
            "half of it anew"
        )


def _prepare_environment() -> None:
    """Before torch is imported: threads that spin keep a busy machine's cores from each other."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _demand_options(args: argparse.Namespace, suite: "Suite") -> "DemandOptions":
    """Raises ValueError for a task that the suite does not have, or not of this size."""
    from benchmarks.profiling.demand import usual_options

    usual_requests = QUICK_REQUESTS if args.quick else REQUESTS
    options = usual_options(suite, num_requests=args.requests or usual_requests)
    usual_sizes = options.sizes[:1] if args.quick else options.sizes
    sizes = tuple(sorted(set(args.documents or usual_sizes)))
    tasks = (tuple(dict.fromkeys(args.task)),) if args.task else options.tasks
    if not args.costs_only:
        for task, size in product(chain(*tasks), sizes):
            next(suite.questions(task, size, args.seed, 1))
    return replace(options, tasks=tasks, sizes=sizes, seed=args.seed)


def _old_profile(args: argparse.Namespace, fingerprint: str) -> "ServingProfile | None":
    """The one to take a half over from. Raises ValueError if it is of another model."""
    from planner.serving_profile import ServingProfile

    if not (args.costs_only or args.demand_only) or not args.out.exists():
        return None
    old = ServingProfile.load(args.out)
    old.check_model(fingerprint)
    return old


def _header(
    args: argparse.Namespace, fingerprint: str, options: "DemandOptions", *, has_vllm: bool
) -> dict[str, Any]:
    """What measurements must share to be counted together."""
    header: dict[str, Any] = {"fingerprint": fingerprint, "dtype": args.dtype, "quick": args.quick}
    if not args.demand_only and has_vllm:
        from replicas.config import EngineConfig
        from replicas.vllm_args import machine_facts

        config = EngineConfig(model_dir=args.model)
        header |= {
            "machine": machine_facts(config, dtype=args.dtype)["device"],
            "cores": len(os.sched_getaffinity(0)),
            "tp": args.tp,
            "threads": args.threads,
        }
    if not args.costs_only:
        header |= {
            "task": [list(tasks) for tasks in options.tasks],
            "documents": list(options.sizes),
            "requests": options.num_requests,
            "seed": options.seed,
        }
    return header


def _partial_file(args: argparse.Namespace, header: dict[str, Any]) -> "PartialFile":
    """Beside the profile."""
    from benchmarks.profiling.partial import PartialFile

    path = args.out.with_name(f"{args.out.name}.partial.jsonl")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return PartialFile(path, header, restart=args.restart)
    except OSError as exc:
        raise ProfileError(f"can not write {path}: {exc.strerror}") from None


async def _measured_costs(
    args: argparse.Namespace, model_dir: Path, partial: "PartialFile", progress: "Progress"
) -> _Costs:
    from benchmarks.engine import running_engine
    from benchmarks.profiling.cost_grid import cost_profile, grid, measure_point

    async with AsyncExitStack() as stack:
        try:
            engine, info = await stack.enter_async_context(
                running_engine(
                    str(model_dir),
                    tensor_parallel_size=args.tp,
                    dtype=args.dtype,
                    cpu_threads=args.threads,
                )
            )
        except Exception as exc:  # vLLM's own, of many kinds
            raise ProfileError(f"the engine did not start: {type(exc).__name__}: {exc}") from exc
        if info.reuse_refusal:
            raise ProfileError(
                f"{info.model} is served without chunk reuse ({info.reuse_refusal}), so there is "
                "nothing to plan and nothing to profile"
            )
        try:
            points = grid(info.num_layers, info.max_model_len)
            found = await measured_rounds(
                lambda point: measure_point(engine, point, repeats=1),
                points[::QUICK_STEP] if args.quick else points,
                partial,
                progress,
                num_rounds=QUICK_ROUNDS if args.quick else ROUNDS,
            )
            costs = cost_profile(found, **engine.machine)
        except (ValueError, RuntimeError) as exc:
            raise ProfileError(f"the costs of {info.model} can not be measured: {exc}") from exc
        return _Costs(profile=costs, num_layers=info.num_layers, kv_token_bytes=info.kv_token_bytes)


async def measured_rounds(
    measure: Callable[["GridPoint"], Awaitable["MeasuredPoint"]],
    points: Sequence["GridPoint"],
    partial: "PartialFile",
    progress: "Progress",
    *,
    num_rounds: int,
) -> list["MeasuredPoint"]:
    """All points once a round, since what disturbs one round may be over in the next.

    Runs that `partial` has are not repeated; all are returned.
    """
    wanted = {point.key for point in points}
    found = [measured for measured in partial.points if measured.point.key in wanted]
    num_runs = Counter(measured.point.key for measured in found)
    progress.start("costs", num_rounds * len(points), done=len(found))
    for round_idx in range(num_rounds):
        for point in points:
            if num_runs[point.key] > round_idx:
                continue
            measured = await measure(point)
            partial.add_point(measured)
            found.append(measured)
            progress.advance()
    progress.end()
    return found


def _measured_demand(
    args: argparse.Namespace,
    model_dir: Path,
    suite: "Suite",
    options: "DemandOptions",
    partial: "PartialFile",
    progress: "Progress",
) -> tuple["Demand", int]:
    """And the model's number of layers."""
    import torch
    from transformers.utils import logging as transformers_logging

    from benchmarks.profiling.demand import measure_demand
    from benchmarks.quality.walked_answers import walked_answers

    transformers_logging.disable_progress_bar()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    say("the model is loaded for the demand")
    with ExitStack() as stack:
        try:
            dtype = _dtype(args.dtype, model_dir)
            answers = stack.enter_context(
                walked_answers(model_dir, suite.form, dtype=dtype, device=device)
            )
        except (ValueError, RuntimeError, OSError) as exc:
            raise ProfileError(
                f"the demand of {model_dir.name} can not be measured: {exc}"
            ) from exc
        demand = measure_demand(answers, suite, options, partial, progress, model=model_dir.name)
        return demand, answers.num_layers


def _dtype(name: str, model_dir: Path) -> str:
    """The model's own for `auto`, as vLLM takes it."""
    if name != "auto":
        return name
    from transformers import AutoConfig

    own = AutoConfig.from_pretrained(model_dir, local_files_only=True).dtype
    return "float32" if own is None else str(own).removeprefix("torch.")


def _profile(
    model_dir: Path,
    fingerprint: str,
    num_layers: int,
    costs: _Costs | None,
    demand: "Demand | None",
    old: "ServingProfile | None",
) -> "ServingProfile":
    from planner.serving_profile import ServingProfile

    kept_bytes = old.kv_token_bytes if old else 0.0
    kept_note = old.demand_note if old else "not measured"
    try:
        return ServingProfile(
            model=model_dir.name,
            fingerprint=fingerprint,
            num_layers=num_layers,
            kv_token_bytes=costs.kv_token_bytes if costs else kept_bytes,
            costs=costs.profile if costs else old.costs if old else None,
            demand=demand.profile if demand else old.demand if old else None,
            demand_note=demand.note if demand else kept_note,
        )
    except ValueError as exc:
        if costs is None and demand is not None and demand.profile is None:
            raise ProfileError(f"there is nothing to write: {demand.note}") from None
        raise ProfileError(str(exc)) from None


def _save(profile: "ServingProfile", out: Path) -> None:
    """Whole or not at all."""
    unfinished = out.with_name(f".{out.name}.writing")
    profile.save(unfinished)
    unfinished.replace(out)
