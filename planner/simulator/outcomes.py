"""What became of the requests: columns while the simulation runs, one summary at its end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from planner.simulator.part import Part

Floats = NDArray[np.float64]


class Ending(IntEnum):
    """How a request ended."""

    NONE = 0  # it has not
    ANSWERED = 1
    REFUSED = 2  # queue full, hopeless or impossible
    CANCELLED = 3  # waited too long
    FAILED = 4  # lost with a replica, after its first token or once too often


class Summary(Part):
    """Of one policy in one setting. Shares are of all requests unless they say otherwise.

    qsa: gate passed and first token in time; accuracy: gate passed, of those answered;
    late: answered, but not in time; stall_share: of all prefills' time, waiting for stored KV;
    mean_waiting, mean_prefilling: requests in the scheduler's queue and in prefill, over time;
    qsa_by: of the requests of each task and of each model, where there are several
    """

    simulated: bool = True
    num_requests: int
    answered: int
    refused: int
    cancelled: int
    failed: int
    late: int
    qsa: float
    accuracy: float
    slo_attainment: float
    p50_ttft_ms: float | None = Field(description="of those answered; None: nobody was")
    p99_ttft_ms: float | None
    mean_coverage: float
    stall_share: float
    busy_share: float  # of the replicas' time, in prefill
    num_batches: int
    replica_seconds: float
    num_readmitted: int
    num_deaths: int
    mean_waiting: float
    mean_prefilling: float
    length_s: float
    qsa_by: dict[str, float]


@dataclass(slots=True)
class Outcomes:
    """[num_requests] columns, by the request's place in the workload."""

    arrival_ms: Floats
    slo_ms: Floats
    ending: NDArray[np.int8] = field(init=False)
    ttft_ms: Floats = field(init=False)
    passed: NDArray[np.bool_] = field(init=False)
    coverage: NDArray[np.float32] = field(init=False)
    ended_ms: Floats = field(init=False)
    num_ended: int = 0
    num_batches: int = 0
    num_readmitted: int = 0
    num_deaths: int = 0
    prefill_ms: float = 0.0
    stall_ms: float = 0.0
    replica_ms: float = 0.0
    waiting_area: float = 0.0  # request-milliseconds
    prefilling_area: float = 0.0

    def __post_init__(self) -> None:
        count = len(self.arrival_ms)
        self.ending = np.zeros(count, np.int8)
        self.ttft_ms = np.full(count, np.nan)
        self.passed = np.zeros(count, np.bool_)
        self.coverage = np.full(count, np.nan, np.float32)
        self.ended_ms = np.full(count, np.nan)

    def first_token(self, idx: int, *, now_ms: float, passed: bool, coverage: float) -> None:
        """The first one counts, also if the request has to be run again."""
        if np.isnan(self.ttft_ms[idx]):
            self.ttft_ms[idx] = now_ms - self.arrival_ms[idx]
            self.passed[idx] = passed
            self.coverage[idx] = coverage

    def end(self, idx: int, ending: Ending, *, now_ms: float) -> None:
        """Raises ValueError for a request that has ended."""
        if self.ending[idx] != Ending.NONE:
            raise ValueError(f"request {idx} has ended as {Ending(self.ending[idx]).name}")
        self.ending[idx] = ending
        self.ended_ms[idx] = now_ms
        self.num_ended += 1

    def summary(self, *, length_ms: float, groups: Mapping[str, NDArray[np.bool_]]) -> Summary:
        """groups: of requests, by name, for `qsa_by`"""
        answered = self.ending == Ending.ANSWERED
        on_time = answered & (self.ttft_ms <= self.slo_ms)
        good = on_time & self.passed
        num_answered = int(answered.sum())
        ttft = self.ttft_ms[answered]
        p50, p99 = (float(np.quantile(ttft, q)) if num_answered else None for q in (0.5, 0.99))
        return Summary(
            num_requests=len(answered),
            answered=num_answered,
            refused=int((self.ending == Ending.REFUSED).sum()),
            cancelled=int((self.ending == Ending.CANCELLED).sum()),
            failed=int((self.ending == Ending.FAILED).sum()),
            late=num_answered - int(on_time.sum()),
            qsa=float(good.mean()),
            accuracy=float(self.passed[answered].mean()) if num_answered else 0.0,
            slo_attainment=float(on_time.mean()),
            p50_ttft_ms=p50,
            p99_ttft_ms=p99,
            mean_coverage=float(self.coverage[answered].mean()) if num_answered else 0.0,
            stall_share=self.stall_ms / self.prefill_ms if self.prefill_ms else 0.0,
            busy_share=self.prefill_ms / self.replica_ms if self.replica_ms else 0.0,
            num_batches=self.num_batches,
            replica_seconds=self.replica_ms / 1e3,
            num_readmitted=self.num_readmitted,
            num_deaths=self.num_deaths,
            mean_waiting=self.waiting_area / length_ms if length_ms else 0.0,
            mean_prefilling=self.prefilling_area / length_ms if length_ms else 0.0,
            length_s=length_ms / 1e3,
            qsa_by={name: float(good[of].mean()) for name, of in groups.items() if of.any()},
        )
