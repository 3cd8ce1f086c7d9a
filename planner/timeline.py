"""When each layer of a prefill runs: the recurrence that planner, simulator and traces share.

The stored KV of layers w..L-1 loads in order from time 0. WarmUp layers run back to back and need
none of it. Each Probe layer and each Patch layer starts at the later of "the one before is done"
and "its stored KV is there". Patch goes back to layer w. The fixed time (admission, engine steps,
the last token) is added at the end, so it hides no loading.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.cost_model import CostModel, PrefillShape, Work, layer_works
from planner.types import PhaseSpan, Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What the stored KV of a batch comes over."""

    bytes_per_ms: float = math.inf  # infinite: all of it is in host memory
    latency_ms: float = 0.0  # until the first byte

    def __post_init__(self) -> None:
        if math.isnan(self.bytes_per_ms) or self.bytes_per_ms <= 0:
            raise ValueError(f"bytes_per_ms must be positive, got {self.bytes_per_ms}")
        if not math.isfinite(self.latency_ms) or self.latency_ms < 0:
            raise ValueError(f"latency_ms must be finite and not negative, got {self.latency_ms}")


def arrivals_ms(layer_bytes: Sequence[float], link: Link | None) -> list[float]:
    """When the stored KV of each layer is there, from now.

    layer_bytes: of each layer, in the order of their loading
    link: None where all is in host memory; what reading it costs is then `CostModel.reuse_ms`
    Raises ValueError for a size that is negative or not finite.
    """
    if not all(math.isfinite(size) and size >= 0 for size in layer_bytes):
        raise ValueError(f"layer_bytes must be finite and not negative, got {list(layer_bytes)}")
    if link is None:
        return [0.0] * len(layer_bytes)
    return [
        link.latency_ms + moved / link.bytes_per_ms if moved > 0 else 0.0
        for moved in accumulate(layer_bytes)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """How long each layer of a planned prefill computes, in milliseconds."""

    num_layers: int
    warmup_depth: int
    warmup_ms: float  # of each layer
    patch_ms: float  # of each layer
    fixed_ms: float = 0.0
    probe_ms: tuple[float, ...] = ()  # layer by layer from `probe_first` on; empty: no Probe
    probe_first: int | None = None  # None: the layer behind WarmUp
    alone_ms: tuple[float, ...] = ()  # layers that Probe walks before, over no stored KV, from 0 on

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_depth <= self.num_layers or self.num_layers < 1:
            raise ValueError(
                f"warmup_depth must be within 0 and num_layers, got {self.warmup_depth} of "
                f"{self.num_layers}"
            )
        if self.first_probed + len(self.probe_ms) > self.num_layers:
            raise ValueError(
                f"{len(self.probe_ms)} Probe layers from layer {self.first_probed} on are more "
                f"than {self.num_layers} layers have"
            )
        times = (self.warmup_ms, self.patch_ms, self.fixed_ms, *self.probe_ms, *self.alone_ms)
        if not all(math.isfinite(ms) and ms >= 0 for ms in times):
            raise ValueError(f"times must be finite and not negative, got {self}")

    @property
    def first_probed(self) -> int:
        return self.warmup_depth if self.probe_first is None else self.probe_first

    def steps(self) -> Iterator[tuple[str, int, float, bool]]:
        """(phase, layer, ms, whether it needs the layer's stored KV), in the order they run."""
        for layer in range(self.warmup_depth):
            yield "warmup", layer, self.warmup_ms, False
        for layer, ms in enumerate(self.alone_ms):
            yield "probe", layer, ms, False
        for layer, ms in enumerate(self.probe_ms, self.first_probed):
            yield "probe", layer, ms, True
        for layer in range(self.warmup_depth, self.num_layers):
            yield "patch", layer, self.patch_ms, True


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Ends in milliseconds from now. A phase that does not run ends with the one before."""

    warmup_end_ms: float
    probe_end_ms: float
    patch_end_ms: float
    total_ms: float  # with the fixed time
    stall_ms: float  # spent waiting for stored KV
    spans: tuple[PhaseSpan, ...]  # the phases and the stalls, layer by layer


def run_timeline(times: LayerTimes, arrivals: Sequence[float] = ()) -> Timeline:
    """The recurrence, with a span for each layer and for each wait.

    arrivals: when the stored KV of layers w..L-1 is there, in ms from now; empty: it is there
    Raises ValueError if there are arrivals, but not as many as layers behind WarmUp.
    """
    _check_arrivals(times, arrivals)
    spans = []
    now = stall = 0.0
    ends = {"warmup": 0.0}
    for phase, layer, ms, needs_kv in times.steps():
        ready = _ready_ms(times, arrivals, layer) if needs_kv else 0.0
        if ready > now:
            spans.append(
                PhaseSpan(phase="stall", layer=layer, start_ms=now, duration_ms=ready - now)
            )
            stall += ready - now
            now = ready
        spans.append(PhaseSpan(phase=phase, layer=layer, start_ms=now, duration_ms=ms))
        now += ms
        ends[phase] = now
    probe_end = ends.get("probe", ends["warmup"])
    return Timeline(
        warmup_end_ms=ends["warmup"],
        probe_end_ms=probe_end,
        patch_end_ms=ends.get("patch", probe_end),
        total_ms=now + times.fixed_ms,
        stall_ms=stall,
        spans=tuple(spans),
    )


def total_ms(times: LayerTimes, arrivals: Sequence[float] = ()) -> float:
    """`run_timeline(...).total_ms` without making the spans."""
    _check_arrivals(times, arrivals)
    w, behind = times.warmup_depth, times.num_layers - times.warmup_depth
    now = w * times.warmup_ms + sum(times.alone_ms)
    if not arrivals:
        return now + sum(times.probe_ms) + behind * times.patch_ms + times.fixed_ms
    for layer, ms in enumerate(times.probe_ms, times.first_probed):
        now = max(now, _ready_ms(times, arrivals, layer)) + ms
    for arrival in arrivals:
        now = max(now, arrival) + times.patch_ms
    return now + times.fixed_ms


def _check_arrivals(times: LayerTimes, arrivals: Sequence[float]) -> None:
    behind = times.num_layers - times.warmup_depth
    if arrivals and len(arrivals) != behind:
        raise ValueError(f"need arrivals of {behind} layers behind WarmUp, got {len(arrivals)}")


def _ready_ms(times: LayerTimes, arrivals: Sequence[float], layer: int) -> float:
    """0 for a layer that WarmUp computed: its KV is exact."""
    idx = layer - times.warmup_depth
    return arrivals[idx] if arrivals and idx >= 0 else 0.0


def layer_times(
    shapes: Sequence[PrefillShape],
    coverages: Sequence[float],
    *,
    signal: Signal,
    warmup_depth: int,
    probe_len: int,
    cost: CostModel,
) -> LayerTimes:
    """The work of the plan, layer by layer, at the prices of `cost`.

    Without waits the timeline's total is `cost.work_ms(prefill_work(...))`.
    Raises ValueError for depths outside the model.
    """
    num_layers = cost.num_layers
    if warmup_depth < 0 or probe_len < 0 or warmup_depth + probe_len > num_layers:
        raise ValueError(
            f"warmup_depth and probe_len must be 0 or more and within {num_layers} layers, "
            f"got {warmup_depth} and {probe_len}"
        )
    works = layer_works(
        shapes,
        coverages,
        signal=signal,
        warmup_depth=warmup_depth,
        probe_len=probe_len,
        num_layers=num_layers,
    )
    return LayerTimes(
        num_layers=num_layers,
        warmup_depth=warmup_depth,
        warmup_ms=cost.work_ms(works.warmup),
        patch_ms=cost.work_ms(works.patch),
        fixed_ms=cost.work_ms(works.fixed),
        probe_ms=_prices(works.probe, cost),
        probe_first=num_layers - 1 if signal is Signal.QCI_FINAL else None,
        alone_ms=_prices(works.alone, cost),
    )


def _prices(works: Sequence[Work], cost: CostModel) -> tuple[float, ...]:
    """Layers of one signal often share their work."""
    prices = {id(work): cost.work_ms(work) for work in {id(work): work for work in works}.values()}
    return tuple([prices[id(work)] for work in works])
