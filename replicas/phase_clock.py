"""Where a prefill's time goes, by phase and layer, on the clock of the device that works."""

import time
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

import torch


class Phase(StrEnum):
    LOAD = "load"
    WARMUP = "warmup"
    PROBE = "probe"
    PATCH = "patch"
    FILL = "fill"  # recomputing the front of the context while stored KV is on its way
    STALL = "stall"  # idle
    WRITE = "write"  # finished KV into the paged cache, or a parked prompt's into host memory


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work, in seconds from the clock's start."""

    phase: Phase
    layer: int
    start_s: float
    end_s: float


class PhaseClock:
    """Collects spans, which do not overlap. On a GPU they are pairs of events, read at the end."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._origin_s = time.perf_counter()
        self._origin = self._event() if self._on_gpu else None
        self._spans: list[Span] = []
        self._events: list[tuple[Phase, int, torch.cuda.Event, torch.cuda.Event]] = []

    def span(self, phase: Phase, layer: int) -> "_OpenSpan":
        """A context manager around the work."""
        return _OpenSpan(self, phase, layer)

    def spans(self) -> list[Span]:
        """All that has ended, in order of their starts; waits for the GPU."""
        for phase, layer, start, end in self._events:
            end.synchronize()
            times_s = [self._origin.elapsed_time(event) / 1e3 for event in (start, end)]
            self._spans.append(Span(phase, layer, *times_s))
        self._events.clear()
        return sorted(self._spans, key=lambda span: span.start_s)

    def totals_s(self) -> dict[Phase, float]:
        totals: dict[Phase, float] = defaultdict(float)
        for span in self.spans():
            totals[span.phase] += span.end_s - span.start_s
        return totals

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._origin_s

    def _event(self) -> "torch.cuda.Event":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _OpenSpan:
    def __init__(self, clock: PhaseClock, phase: Phase, layer: int) -> None:
        self._clock = clock
        self._phase = phase
        self._layer = layer
        # a stall is the host's: the GPU has nothing to do then
        self._by_events = clock._on_gpu and phase is not Phase.STALL

    def __enter__(self) -> None:
        self._start = self._clock._event() if self._by_events else self._clock.elapsed_s()

    def __exit__(self, *exc: object) -> None:
        clock = self._clock
        if self._by_events:
            clock._events.append((self._phase, self._layer, self._start, clock._event()))
        else:
            clock._spans.append(Span(self._phase, self._layer, self._start, clock.elapsed_s()))
