"""What do WarmUp, Probe and Patch cost on this machine? A grid of batches on a running engine.

`grid` says which batches, `measure_point` runs one and returns where its time went, `cost_profile`
fits one set of prices to all. On a machine that others use too, measure the whole grid in several
rounds rather than each point several times in a row: a phase counts by the median of its runs, and
what disturbs one round may be over in the next.
"""

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from statistics import median
from typing import get_args

from benchmarks.profiling.cost_points import (
    GridPoint,
    GridRequest,
    MeasuredPoint,
    PointTimes,
    grid,
    merged,
)
from planner import (
    CUSTOM,
    CostProfile,
    MeasuredPhase,
    PhaseFit,
    PrefillResult,
    RagRequest,
    RequestPlan,
    SamplingOptions,
    Ticket,
    fit_phases,
)
from planner.serving_profile import Phase
from replicas.phase_times import phase_times
from replicas.vllm_engine import VllmEngine

__all__ = [
    "GridPoint",
    "GridRequest",
    "MeasuredPoint",
    "PointTimes",
    "cost_profile",
    "grid",
    "measure_point",
    "merged",
]

SALT = "cost-grid"
MAX_TRIES = 3  # of a run whose batch did not run as one
_batch_ids = itertools.count(1)


async def measure_point(engine: VllmEngine, point: GridPoint, *, repeats: int = 3) -> MeasuredPoint:
    """Run one batch on an idle engine. Its chunks are stored first, under a salt of their own.

    Raises RuntimeError if the batch does not run as one, however often it is tried, and ValueError
    if the engine can not store chunks.
    """
    requests, num_bytes = await stored_requests(engine, point)
    runs = []
    for _ in range(repeats):
        for _ in range(MAX_TRIES):
            times = await _run(engine, point, requests, num_bytes)
            if times is not None:
                break
        else:
            raise RuntimeError(f"the batch did not run as planned, {MAX_TRIES} times: {point.key}")
        runs.append(times)
    return MeasuredPoint(point=point, num_layers=engine.cost.num_layers, runs=tuple(runs))


async def stored_requests(engine: VllmEngine, point: GridPoint) -> tuple[list[RagRequest], int]:
    """Random prompts for a point with their chunks in the store, and the bytes of those."""
    requests, num_bytes = [], 0
    idx = itertools.count()
    for member in point.requests:
        chunks = []
        for length in member.chunks:
            rng = random.Random(f"{next(idx)} {length}")  # the same chunks in many points
            chunks.append(_tokens(rng, length, engine.vocab_size))
        for chunk in chunks:
            num_bytes += (await engine.ingest(chunk, cache_salt=SALT)).nbytes
        requests.append(
            RagRequest(
                request_id="cost-grid",
                prefix_ids=(),
                chunks=tuple(chunks),
                suffix_ids=_tokens(random.Random(), member.num_always, engine.vocab_size),
                ttft_slo_ms=1e9,
                cache_salt=SALT,
                sampling=SamplingOptions(max_tokens=1, temperature=0.0, ignore_eos=True),
                wants_timeline=True,
            )
        )
    return requests, num_bytes


def _tokens(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab_size) for _ in range(count))


async def _run(
    engine: VllmEngine, point: GridPoint, requests: Sequence[RagRequest], num_bytes: int
) -> PointTimes | None:
    """All members at once, to their first tokens; None if something else than the plan ran."""
    ticket = Ticket(
        replica_id="",
        batch_id=next(_batch_ids),
        batch_size=len(requests),
        plan=RequestPlan(
            policy=CUSTOM,
            signal=point.signal,
            warmup_depth=point.warmup_depth,
            probe_len=point.probe_len,
            coverage=point.coverage,
            expected_ms=0.0,
            budget_ms=0.0,
        ),
        queue_ms=0.0,
    )
    results = await asyncio.gather(*(_first_token(engine, r, ticket) for r in requests))
    for result in results:
        is_planned = result.batch_size == len(requests) and result.num_miss_tokens == 0
        if not is_planned or result.parked or result.recovered or result.full_prefill:
            return None
    times = phase_times(results[0])
    total_ms = max(result.timings.first_token_ms for result in results)
    return PointTimes(
        warmup_ms=times.warmup_ms,
        probe_ms=times.probe_ms,
        patch_ms=times.patch_ms,
        stall_ms=times.stall_ms,
        fixed_ms=max(0.0, total_ms - times.total_ms),
        load_ms=times.load_ms,
        loaded_bytes=num_bytes / engine.cost.num_layers * times.num_loads,
    )


async def _first_token(engine: VllmEngine, request: RagRequest, ticket: Ticket) -> PrefillResult:
    result = None
    async for delta in engine.generate(request, ticket):
        result = delta.result or result
    assert result is not None, "a generation ends with its result"
    return result


# ---- prices ----


def cost_profile(
    measured: Sequence[MeasuredPoint],
    *,
    device: str,
    num_threads: int | None,
    tensor_parallel_size: int,
    dtype: str,
) -> CostProfile:
    """One set of prices for all phases of all points, and how well they explain them.

    Runs of the same point count together, wherever they stand, and each phase by its median run:
    the fastest ones would be right where all points had one, which on a shared machine only some
    have. The keywords are those of `VllmEngine.machine`.

    Raises ValueError if nothing is measured, the points are of different models, or a phase that
    ran took no time at all.
    """
    found = merged(measured)
    if not found:
        raise ValueError("no point is measured")
    num_layers = found[0].num_layers
    if any(one.num_layers != num_layers for one in found):
        raise ValueError("the points are of models with different numbers of layers")
    ran = [(one, one.point.works(num_layers), one.median_ms) for one in found]
    cost = fit_phases(
        [[(work, typical[phase]) for phase, work in works.items()] for _, works, typical in ran],
        num_layers=num_layers,
    )
    samples = tuple(
        _sample(one.point, phase, measured_ms=typical[phase], expected_ms=cost.work_ms(work))
        for one, works, typical in ran
        for phase, work in works.items()
    )
    loads = [run for one in found for run in one.runs if run.load_ms > 0.0]
    if not loads:
        raise ValueError("no point has loaded stored KV")
    return CostProfile(
        device=device,
        num_threads=num_threads,
        tensor_parallel_size=tensor_parallel_size,
        dtype=dtype,
        cost=cost,
        host_bytes_per_ms=median(run.loaded_bytes / run.load_ms for run in loads),
        fits=tuple(_fits(samples)),
        samples=samples,
    )


def _sample(
    point: GridPoint, phase: Phase, *, measured_ms: float, expected_ms: float
) -> MeasuredPhase:
    shapes = [member.shape for member in point.requests]
    return MeasuredPhase(
        phase=phase,
        signal=point.signal,
        warmup_depth=point.warmup_depth,
        probe_len=point.probe_len,
        coverage=point.coverage,
        num_requests=len(shapes),
        num_cached=sum(shape.num_cached for shape in shapes),
        num_always=sum(shape.num_always for shape in shapes),
        measured_ms=measured_ms,
        expected_ms=expected_ms,
    )


def _fits(samples: Sequence[MeasuredPhase]) -> Iterator[PhaseFit]:
    for phase in get_args(Phase):
        errors = [
            abs(sample.expected_ms / sample.measured_ms - 1.0)
            for sample in samples
            if sample.phase == phase
        ]
        if errors:
            yield PhaseFit(
                phase=phase,
                num_samples=len(errors),
                median_error=median(errors),
                worst_error=max(errors),
            )
