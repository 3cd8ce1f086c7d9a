"""How close is the planner's timeline to real prefills?

One engine measures half of the cost grid of `cachesmith profile` and fits its prices. Then random
plans that are not in the grid run on it: any WarmUp depth, Probe length and coverage, one of two
signals, ragged batches of one to four requests. A second engine runs more of them behind an
emulated link, slow enough that loading takes about as long as computing. For each plan the timeline
predicts the time to the first token and that of each phase; what is printed are errors relative to
the measured times. The goal is a median error of the total under 15%.

Grid and plans take turns, in rounds, so that a shared machine hurts all alike, and medians over the
rounds count. `single runs` has every run instead, `following` those without a link, with the prices
scaled by how the runs before went, as a serving engine does. `run to run` is how much longer a
plan's slowest run takes than its fastest.

A wait for the link recomputes the prompt's front, which spares Patch some rows; the timeline counts
it as idle. So behind a link only totals are compared.

    cachesmith bench timeline --plans 60
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, get_args

from benchmarks.engine import DEFAULT_MODEL, running_engine
from benchmarks.profiling.cost_grid import cost_profile, grid, measure_point, merged
from benchmarks.profiling.cost_points import (
    GridPoint,
    GridRequest,
    MeasuredPoint,
    PointTimes,
    chunks_of,
)
from benchmarks.report import argument_parser, print_json, print_table, say
from benchmarks.timing import percentile
from planner import (
    CostModel,
    CostProfile,
    EngineInfo,
    Link,
    ServingProfile,
    Signal,
    arrivals_ms,
    layer_times,
    run_timeline,
)
from planner.cost_model import observed_ratio
from planner.serving_profile import Phase, PhaseFit
from replicas.cost_tracker import OBSERVATION_WEIGHT
from replicas.vllm_engine import VllmEngine

SHORTEST_TOKENS, LONGEST_TOKENS = 200, 2048  # of a batch
BATCH_SIZES = (1, 1, 2, 4)
GRID_STEP = 2  # of the grid's points, every so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Milliseconds of one plan."""

    phases: dict[str, float]
    stall_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One plan: what was predicted, and its runs."""

    point: GridPoint
    has_link: bool
    predicted: Prediction
    runs: tuple[PointTimes, ...]

    @property
    def total_ms(self) -> float:
        return median(run.total_ms for run in self.runs)

    def phase_ms(self, phase: Phase) -> float:
        return median(run.phases[phase] for run in self.runs)

    @property
    def run_to_run(self) -> float:
        totals = [run.total_ms for run in self.runs]
        return max(totals) / min(totals) - 1.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("timeline", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as in `cachesmith serve`")
    parser.add_argument("--plans", type=int, default=24, help="a third of them behind the link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tp", type=int, default=1, help="degree of tensor parallelism")
    args = parser.parse_args(argv)
    if args.plans < 3 or args.rounds < 1:
        parser.error("need 3 plans and 1 round, or more")
    fits, compared = asyncio.run(
        _measure(args.model, args.plans, args.rounds, args.seed, tensor_parallel_size=args.tp)
    )
    print("prices on the grid that they were fitted on")
    header = ["phase", "samples", "median", "worst"]
    fit_rows = [[f.phase, f.num_samples, f.median_error, f.worst_error] for f in fits]
    print_table(header, fit_rows)
    print("\nthe timeline on other plans, relative errors")
    rows = summary(compared)
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    fitted = [dict(zip(header, row, strict=True)) for row in fit_rows]
    results = [
        {"model": args.model, "kind": kind, **row}
        for kind, found in (("fit", fitted), ("timeline", rows))
        for row in found
    ]
    print_json("timeline", seed=args.seed, results=results)


async def _measure(
    model: str, num_plans: int, rounds: int, seed: int, *, tensor_parallel_size: int
) -> tuple[Sequence[PhaseFit], list[Compared]]:
    rng = random.Random(seed)
    num_linked = num_plans // 3
    options: dict[str, Any] = {"tensor_parallel_size": tensor_parallel_size}
    async with running_engine(model, **options) as (engine, info):
        await _warm_up(engine, rng, info)
        points = grid(info.num_layers, info.max_model_len)[::GRID_STEP]
        plans = [random_plan(rng, info) for _ in range(num_plans - num_linked)]
        mixed = [*points, *plans]
        rng.shuffle(mixed)
        measured = await _rounds(engine, mixed, rounds, "grid and plans")
        in_grid = {point.key for point in points}
        costs = cost_profile([m for m in measured if m.point.key in in_grid], **engine.machine)
        runs = [m for m in measured if m.point.key not in in_grid]
        compared = [compare(one, costs.cost, info, link=None) for one in runs]
    link = _slow_link(costs, info)
    options["load_bandwidth_mb_s"] = link.bytes_per_ms / 1e3
    options["profile"] = ServingProfile(
        model=info.model,
        fingerprint=info.fingerprint,
        num_layers=info.num_layers,
        costs=costs,
        demand=None,
    )
    async with running_engine(model, **options) as (engine, _):
        await _warm_up(engine, rng, info)
        plans = [random_plan(rng, info) for _ in range(num_linked)]
        runs = await _rounds(engine, plans, rounds, "plans behind a link")
        compared += [compare(one, costs.cost, info, link=link) for one in runs]
    return costs.fits, compared


async def _warm_up(engine: VllmEngine, rng: random.Random, info: EngineInfo) -> None:
    for _ in range(4):
        await measure_point(engine, random_plan(rng, info), repeats=1)


async def _rounds(
    engine: VllmEngine, points: Sequence[GridPoint], rounds: int, name: str
) -> list[MeasuredPoint]:
    measured = []
    for round_no in range(rounds):
        started = time.perf_counter()
        measured += [await measure_point(engine, point, repeats=1) for point in points]
        say(f"{name}, round {round_no + 1} of {rounds}: {time.perf_counter() - started:.1f} s")
    return merged(measured)


def _slow_link(costs: CostProfile, info: EngineInfo) -> Link:
    """Over which a layer takes as long as Patch at a fifth of the tokens."""
    num_tokens = 1024
    times = layer_times(
        [GridRequest(chunks=chunks_of(num_tokens), num_always=32).shape],
        [0.2],
        signal=Signal.KV_DEV,
        warmup_depth=1,
        probe_len=1,
        cost=costs.cost,
    )
    return Link(bytes_per_ms=info.kv_token_bytes * num_tokens / times.patch_ms)


def random_plan(rng: random.Random, info: EngineInfo) -> GridPoint:
    w = rng.randint(0, info.num_layers - 1)
    longest = min(LONGEST_TOKENS, info.max_model_len - 2)
    num_tokens = SHORTEST_TOKENS * (longest / SHORTEST_TOKENS) ** rng.random()
    weights = [rng.uniform(0.3, 1.7) for _ in range(rng.choice(BATCH_SIZES))]
    requests = []
    for weight in weights:
        mine = int(num_tokens * weight / sum(weights))
        num_always = min(rng.randint(8, 200), mine // 2)
        requests.append(GridRequest(chunks=chunks_of(mine - num_always), num_always=num_always))
    most_probed = min(info.num_layers - w, rng.choice((1, 2, 4, info.num_layers)))
    return GridPoint(
        signal=rng.choice((Signal.KV_DEV, Signal.QCI)),
        warmup_depth=w,
        probe_len=rng.randint(1, most_probed),
        coverage=round(0.02 * 45.0 ** rng.random(), 3),  # 0.02 to 0.9
        requests=tuple(requests),
    )


def compare(
    measured: MeasuredPoint, cost: CostModel, info: EngineInfo, *, link: Link | None
) -> Compared:
    return Compared(
        point=measured.point,
        has_link=link is not None,
        predicted=predict(measured.point, cost, info, link=link),
        runs=measured.runs,
    )


def predict(
    point: GridPoint, cost: CostModel, info: EngineInfo, *, link: Link | None
) -> Prediction:
    shapes = [member.shape for member in point.requests]
    times = layer_times(
        shapes,
        [point.coverage] * len(shapes),
        signal=point.signal,
        warmup_depth=point.warmup_depth,
        probe_len=point.probe_len,
        cost=cost,
    )
    layer_bytes = info.kv_token_bytes * sum(shape.num_cached for shape in shapes)
    layers = info.num_layers - point.warmup_depth
    made = run_timeline(times, arrivals_ms([layer_bytes] * layers, link))
    phases: dict[str, float] = dict.fromkeys(get_args(Phase), 0.0)
    for span in made.spans:
        if span.phase != "stall":
            phases[span.phase] += span.duration_ms
    phases["fixed"] = times.fixed_ms
    return Prediction(phases=phases, stall_ms=made.stall_ms, total_ms=made.total_ms)


# ---- what came of it ----


def summary(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    groups: dict[str, Callable[[Compared], bool]] = {
        "all": lambda _: True,
        "without a link": lambda one: not one.has_link,
        "behind a link": lambda one: one.has_link,
        **{str(s): lambda one, s=s: one.point.signal is s for s in (Signal.KV_DEV, Signal.QCI)},
        **{
            f"batch of {size}": lambda one, size=size: len(one.point.requests) == size
            for size in sorted({*BATCH_SIZES})
        },
    }
    rows = []
    for name, belongs in groups.items():
        mine = [one for one in compared if belongs(one)]
        rows.append(_row(name, [_error(one.predicted.total_ms, one.total_ms) for one in mine]))
    for phase in get_args(Phase):
        errors = [
            _error(one.predicted.phases[phase], one.phase_ms(phase))
            for one in compared
            if not one.has_link and one.predicted.phases[phase] > 0.0
        ]
        rows.append(_row(f"{phase} alone", errors))
    singles = [_error(one.predicted.total_ms, r.total_ms) for one in compared for r in one.runs]
    rows.append(_row("single runs", singles))
    rows.append(_row("following", _following(compared)))
    rows.append(_row("run to run", [one.run_to_run for one in compared]))
    return [row for row in rows if row["count"]]


def _following(compared: Sequence[Compared]) -> list[float]:
    """Errors of single runs in the order in which they ran, as a serving engine predicts them. It
    does not learn from waits, so without a link."""
    mine = [one for one in compared if not one.has_link]
    errors = []
    scale = 1.0
    for round_no in range(max((len(one.runs) for one in mine), default=0)):
        for one in mine:
            actual_ms, expected_ms = one.runs[round_no].total_ms, one.predicted.total_ms
            errors.append(_error(scale * expected_ms, actual_ms))
            scale += OBSERVATION_WEIGHT * (observed_ratio(expected_ms, actual_ms) - scale)
    return errors


def _error(predicted_ms: float, measured_ms: float) -> float:
    return abs(predicted_ms / measured_ms - 1.0)


def _row(name: str, errors: Sequence[float]) -> dict[str, Any]:
    if not errors:
        return {"group": name, "count": 0}
    return {
        "group": name,
        "count": len(errors),
        "median": median(errors),
        "p90": percentile(errors, 0.9),
        "worst": max(errors),
    }


if __name__ == "__main__":
    main()
