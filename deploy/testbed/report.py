"""The result of a run: what is kept in a file, and the tables that are printed."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from deploy.testbed.accounting import Second, Tally
from deploy.testbed.recovery import FaultResult

MAX_ERROR_SHARE = 0.01


class RunResult(BaseModel):
    """`result.json`. Times in the unit of their names, counts of requests."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    commit: str
    engine: str
    num_hosts: int
    rate: float  # requests a second
    seconds: float  # of load
    tally: Tally
    served: int  # `cachesmith_requests_total{outcome="ok"}`, over the scheduler's lives
    faults: tuple[FaultResult, ...]
    is_whole: bool  # whether all was as before at the end
    left_processes: dict[str, tuple[str, ...]]  # by host, after `ray down`
    steps_s: dict[str, float]  # how long each step of the run took
    by_second: tuple[Second, ...]

    @property
    def failures(self) -> list[str]:
        """What the run was to show and did not, a line each."""
        t = self.tally
        found = [
            f"{number} requests {what}"
            for number, what in ((t.lost, "lost"), (t.wrong, "wrong"), (t.doubled, "doubled"))
            if number
        ]
        if t.num_errors > MAX_ERROR_SHARE * t.sent:
            found.append(f"{t.num_errors} errors, more than {MAX_ERROR_SHARE:.0%} of {t.sent}")
        if self.served > t.sent:
            found.append(f"{self.served} requests served, {t.sent} sent")
        if not self.is_whole:
            found.append("the cluster did not recover")
        for host, titles in self.left_processes.items():
            found.append(f"left on {host}: {', '.join(titles)}")
        return found


def tables(result: RunResult) -> str:
    """What the command prints at its end."""
    t = result.tally
    lines = [
        f"{result.num_hosts} hosts, {result.engine} engine, {result.rate:g} requests/s "
        f"for {result.seconds:g} s",
        "",
        _table(
            (
                "fault",
                "hit",
                "at s",
                "detected s",
                "recovered s",
                "sent",
                "errors",
                "worst TTFT ms",
            ),
            [
                (
                    str(fault.kind),
                    fault.host,
                    f"{fault.at_s:.1f}",
                    _seconds(fault.detected_s),
                    _seconds(fault.recovered_s),
                    fault.num_requests,
                    fault.num_errors,
                    f"{fault.worst_ttft_ms:.0f}",
                )
                for fault in result.faults
            ],
        ),
        "",
        _table(
            ("requests", "number"),
            [
                *(
                    (f.name.replace("_", " "), _number(getattr(t, f.name)))
                    for f in dataclasses.fields(t)
                    if f.name != "errors"
                ),
                ("errors", t.num_errors),
                *((f"  {kind}", number) for kind, number in sorted(t.errors.items())),
                ("served, by the outcome counter", result.served),
            ],
        ),
        "",
        "steps: " + ", ".join(f"{name} {s:.0f} s" for name, s in result.steps_s.items()),
    ]
    lines += [f"FAILED: {failure}" for failure in result.failures] or ["all as it should be"]
    return "\n".join(lines)


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _number(value: float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
