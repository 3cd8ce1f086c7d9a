"""Where a measured prefill's time went, by the phases of the planner's timeline.

The timeline knows no spans for loading and writing: what a layer reads, rotates and writes is part
of the layer that does it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.types import PhaseSpan, PrefillResult

PHASES = ("warmup", "probe", "patch")
WAITS = ("stall", "fill")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """Of one batch in milliseconds, from its first layer's start to its last one's end.

    stall_ms: waits for stored KV, used or not
    load_ms: of the phases, reading and rotating stored KV; num_loads: in how many layers
    """

    warmup_ms: float
    probe_ms: float
    patch_ms: float
    stall_ms: float
    load_ms: float
    num_loads: int

    @property
    def total_ms(self) -> float:
        return self.warmup_ms + self.probe_ms + self.patch_ms + self.stall_ms


def phase_times(result: PrefillResult) -> PhaseTimes:
    """From a result with a timeline. Time between two spans belongs to the later one.

    Raises ValueError without a timeline.
    """
    spans = sorted(result.timeline, key=lambda span: span.start_ms)
    if not spans:
        raise ValueError("the result has no timeline; the request has to ask for it")
    owners = _owners(spans)
    totals = dict.fromkeys((*PHASES, "stall"), 0.0)
    now = spans[0].start_ms
    for span, owner in zip(spans, owners, strict=True):
        end = span.start_ms + span.duration_ms
        totals[owner] += end - now
        now = end
    loads = [span.duration_ms for span in spans if span.phase == "load"]
    return PhaseTimes(
        **{f"{phase}_ms": ms for phase, ms in totals.items()},
        load_ms=sum(loads),
        num_loads=len(loads),
    )


def _owners(spans: Sequence[PhaseSpan]) -> list[str]:
    """The phase of each span: a layer is loaded for what follows, and written by what went
    before."""
    following = "patch"
    owners = [""] * len(spans)
    for idx in range(len(spans) - 1, -1, -1):
        phase = spans[idx].phase
        following = phase if phase in PHASES else following
        owners[idx] = "stall" if phase in WAITS else following
    last = "warmup"
    for idx, span in enumerate(spans):
        last = span.phase if span.phase in PHASES else last
        if span.phase == "write":
            owners[idx] = last
    return owners
