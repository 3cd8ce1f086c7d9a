"""When requests come: at a mean rate, in a pattern.

`gamma` has gaps of shape 1/CV² and scale CV²/rate, and is not rescaled to its mean afterwards. In
`step` and `burst` the rate changes over time: requests come as Poisson's at each moment's rate, or,
with a `cv` other than 1, with Gamma's gaps, stretched by it.
"""

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from planner.simulator.part import Count, Part, Positive, Share

Floats = NDArray[np.float64]


class PoissonArrivals(Part):
    kind: Literal["poisson"] = "poisson"

    @property
    def label(self) -> str:
        return "poisson"


class GammaArrivals(Part):
    kind: Literal["gamma"]
    cv: Positive  # standard deviation of the gaps over their mean

    @property
    def label(self) -> str:
        return f"gamma cv {self.cv:g}"


class StepArrivals(Part):
    """The rate is `factor` times that before, from `at` of the run on; the mean is kept."""

    kind: Literal["step"]
    factor: Positive = 2.0
    at: Share = 0.5
    cv: Positive = 1.0

    @property
    def label(self) -> str:
        return f"step x{self.factor:g}"


class BurstArrivals(Part):
    """For `share` of each period the rate is `factor` times that of the rest."""

    kind: Literal["burst"]
    factor: Positive = 6.0
    share: Share = 0.1
    num_bursts: Count = 5  # in the run
    cv: Positive = 1.0

    @property
    def label(self) -> str:
        return f"burst x{self.factor:g}"


class TraceArrivals(Part):
    """Times of a trace, stretched to the rate; its lengths too if `lengths` is `trace`."""

    kind: Literal["trace"]
    format: Literal["ragpulse", "azure", "mooncake"]
    path: Path  # RAGPulse: the folder
    lengths: Literal["trace", "task"] = "task"
    keep_rate: bool = False  # as recorded, whatever the load

    @property
    def label(self) -> str:
        return self.format


Arrivals = Annotated[
    PoissonArrivals | GammaArrivals | StepArrivals | BurstArrivals | TraceArrivals,
    Field(discriminator="kind"),
]
Pattern = PoissonArrivals | GammaArrivals | StepArrivals | BurstArrivals


def arrival_times_ms(
    pattern: Pattern, *, count: int, rate_per_s: float, rng: np.random.Generator
) -> Floats:
    """[count], ascending, of a run that starts at 0."""
    gap_ms = 1e3 / rate_per_s
    cv = getattr(pattern, "cv", 1.0)
    if isinstance(pattern, GammaArrivals):
        return np.cumsum(rng.gamma(1.0 / cv**2, cv**2 * gap_ms, count))
    gaps = rng.exponential(1.0, count) if cv == 1.0 else rng.gamma(1.0 / cv**2, cv**2, count)
    work = np.cumsum(gaps)  # in requests that are expected to have come
    if isinstance(pattern, PoissonArrivals):
        return work * gap_ms
    if isinstance(pattern, StepArrivals):
        pieces = [(pattern.at, 1.0), (1.0 - pattern.at, pattern.factor)]
    else:
        period = 1.0 / pattern.num_bursts
        quiet = (period * (1.0 - pattern.share), 1.0)
        pieces = [quiet, (period * pattern.share, pattern.factor)] * pattern.num_bursts
    return _at_changing_rate(work, pieces, length_ms=count * gap_ms, mean=count)


def _at_changing_rate(
    work: Floats, pieces: list[tuple[float, float]], *, length_ms: float, mean: int
) -> Floats:
    """Stretch time so that each piece has its own rate.

    pieces: (share of the run, weight of its rate), repeated if the run takes longer
    """
    shares = np.array([share for share, _ in pieces])
    expected = shares * np.array([weight for _, weight in pieces])
    expected *= mean / expected.sum()
    turns = int(work[-1] // mean) + 1
    ends = np.concatenate([[0.0], np.cumsum(np.tile(expected, turns))])
    times = np.concatenate([[0.0], np.cumsum(np.tile(shares, turns))]) * length_ms
    return np.asarray(np.interp(work, ends, times), np.float64)
