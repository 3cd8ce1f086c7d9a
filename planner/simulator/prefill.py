"""How a batch's prefill goes: the planner's timeline with a real link and a real machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.cost_model import CostModel, PrefillShape
from planner.coverage_resolver import PatchDemand, resolve_coverages
from planner.timeline import LayerTimes, Link, arrivals_ms, layer_times, total_ms
from planner.types import RequestPlan


@dataclass(frozen=True, slots=True)
class PrefillRun:
    """stall_ms: waits for stored KV; alone_ms: without them, on an undisturbed machine

    coverages: that the requests got
    """

    total_ms: float
    stall_ms: float
    alone_ms: float
    coverages: tuple[float, ...]

    @property
    def busy_ms(self) -> float:
        return self.total_ms - self.stall_ms


def run_prefill(
    plans: Sequence[RequestPlan],
    shapes: Sequence[PrefillShape],
    *,
    layer_bytes: float,
    link: Link | None,
    cost: CostModel,
    known: CostModel | None = None,
    slowness: float,
    pause_ms: float = 0.0,
) -> PrefillRun:
    """The first tokens of the batch come at `total_ms`.

    layer_bytes: of the batch's stored KV in one layer, as far as the link has to bring it
    cost: of the machine as it is; known: what the engine solves coverages with; None: the same
    slowness: how much longer this batch computes than `cost` says; pause_ms: behind each layer, in
    which others decode

    Coverages are solved again behind the Probe, where a plan leaves them open: by then the time
    that WarmUp and Probe took is known, and how fast the link is. The engine does it behind WarmUp
    too, which the one behind the Probe overrules.
    """
    first = plans[0]
    coverages = [plan.coverage for plan in plans]
    w = first.warmup_depth

    def times_at(coverages: Sequence[float], probe_len: int) -> LayerTimes:
        return layer_times(
            shapes,
            coverages,
            signal=first.signal,
            warmup_depth=w,
            probe_len=probe_len,
            cost=cost,
        )

    alone = times_at(coverages, first.probe_len)
    times = _disturbed(alone, slowness, pause_ms)
    arrivals: list[float] = []
    if link is not None and layer_bytes > 0.0:
        arrivals = arrivals_ms([layer_bytes] * (cost.num_layers - w), link)
    if w < cost.num_layers and any(plan.band is not None for plan in plans):
        probed_ms = _probed_ms(times, arrivals)
        solved = resolve_coverages(
            [_demand(plan, shape) for plan, shape in zip(plans, shapes, strict=True)],
            time_left_ms=first.target_ms - probed_ms,
            arrivals_ms=[max(0.0, at - probed_ms) for at in arrivals]
            or [0.0] * (cost.num_layers - w),
            cost=known or cost,
        )
        if solved != coverages:
            coverages = solved
            patch_ms = times_at(coverages, 0).patch_ms  # whatever the Probe was
            alone = replace(alone, patch_ms=patch_ms)
            times = replace(times, patch_ms=slowness * patch_ms + pause_ms)
    total = total_ms(times, arrivals)
    stall = max(0.0, total - total_ms(times)) if arrivals else 0.0
    return PrefillRun(total, stall, total_ms(alone), tuple(coverages))


def _disturbed(times: LayerTimes, slowness: float, pause_ms: float) -> LayerTimes:
    if slowness == 1.0 and pause_ms == 0.0:
        return times
    return replace(
        times,
        warmup_ms=slowness * times.warmup_ms + pause_ms,
        patch_ms=slowness * times.patch_ms + pause_ms,
        fixed_ms=slowness * times.fixed_ms,
        probe_ms=tuple([slowness * ms + pause_ms for ms in times.probe_ms]),
        alone_ms=tuple([slowness * ms + pause_ms for ms in times.alone_ms]),
    )


def _probed_ms(times: LayerTimes, arrivals: Sequence[float]) -> float:
    """When the Probe is over. Only adaptive plans ask: their Probe begins behind WarmUp."""
    now = times.warmup_depth * times.warmup_ms
    for idx, ms in enumerate(times.probe_ms):
        now = max(now, arrivals[idx] if arrivals else 0.0) + ms
    return now


def _demand(plan: RequestPlan, shape: PrefillShape) -> PatchDemand:
    floor, saturation = plan.band or (plan.coverage, plan.coverage)
    return PatchDemand(
        num_cached=shape.num_cached,
        num_always=shape.num_always,
        num_keys=shape.num_tokens,
        planned=plan.coverage,
        floor=floor,
        saturation=saturation,
    )
