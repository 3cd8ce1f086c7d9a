"""Why a batch got its plan: what else was weighed, as values and as a table."""

from dataclasses import dataclass

from planner.types import BatchPlan, Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCandidate:
    """One (S, w, p) that was weighed. Coverages stand in the order of the requests."""

    signal: Signal
    warmup_depth: int
    probe_len: int
    floor_ms: float
    saturation_ms: float
    coverages: tuple[float, ...]
    expected_ms: float
    expected_passes: float
    stall_ms: float  # of expected_ms: waiting for stored KV
    is_chosen: bool

    @property
    def rank_depth(self) -> int:
        return self.warmup_depth + self.probe_len


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanExplanation:
    """Why a batch got its plan; candidates by expected passes, the chosen one first."""

    plan: BatchPlan
    target_ms: float  # the budget less the reserve
    rule: str
    candidates: tuple[PlanCandidate, ...]

    def text(self) -> str:
        """A table for people."""
        head = (
            f"{len(self.plan.requests)} requests, budget {self.plan.budget_ms:.1f} ms, "
            f"{self.target_ms:.1f} ms less the reserve: {self.rule}"
        )
        titles = (
            "",
            "signal",
            "w",
            "p",
            "floor ms",
            "full ms",
            "ms",
            "stall",
            "passes",
            "coverage",
        )
        rows = [
            (
                "*" if c.is_chosen else "",
                str(c.signal),
                str(c.warmup_depth),
                str(c.probe_len),
                f"{c.floor_ms:.1f}",
                f"{c.saturation_ms:.1f}",
                f"{c.expected_ms:.1f}",
                f"{c.stall_ms:.1f}",
                f"{c.expected_passes:.3f}",
                " ".join(f"{r:.3f}" for r in c.coverages),
            )
            for c in self.candidates
        ]
        widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles) - 1)]
        lines = [
            "  ".join([*(cell.rjust(n) for cell, n in zip(row, widths, strict=False)), row[-1]])
            for row in [titles, *rows]
        ]
        return "\n".join([head, *lines])
