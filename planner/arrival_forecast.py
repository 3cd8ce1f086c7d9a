"""How fast requests will come: Holt's linear exponential smoothing with a damped trend."""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Sums over all requests that have come since `epoch` began; they never fall.

    floor_ms, saturation_ms: what each takes alone, at the floor's and at the saturation's plan;
    objective_ms: time to the first token that each asks for; num_sized: of how many these are
    """

    count: int = 0
    num_sized: int = 0
    floor_ms: float = 0.0
    saturation_ms: float = 0.0
    objective_ms: float = 0.0

    def counted(self) -> "Arrivals":
        """And one that has just come, and of which nothing is known yet."""
        return replace(self, count=self.count + 1)

    def sized(self, floor_ms: float, saturation_ms: float, objective_ms: float) -> "Arrivals":
        """With what one of those counted takes."""
        return replace(
            self,
            num_sized=self.num_sized + 1,
            floor_ms=self.floor_ms + floor_ms,
            saturation_ms=self.saturation_ms + saturation_ms,
            objective_ms=self.objective_ms + objective_ms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanRequest:
    """Means over the requests that came lately, in milliseconds; 0 before the first."""

    floor_ms: float = 0.0
    saturation_ms: float = 0.0
    objective_ms: float = 0.0

    def service_ms(self, share: float) -> float:
        """share: of the way from the floor to the saturation, 0-1"""
        return self.floor_ms + share * max(0.0, self.saturation_ms - self.floor_ms)


class ArrivalForecast:
    """Follows the counts; the time between two looks may be any.

    level_s: how long a change of the rate takes to be believed (to 1 - 1/e); trend_s: the same of
    its slope, which also fades by as much over the horizon; mean_s: of the requests' means
    """

    def __init__(self, *, level_s: float, trend_s: float, mean_s: float) -> None:
        for name, value in (("level_s", level_s), ("trend_s", trend_s), ("mean_s", mean_s)):
            if not value > 0.0:
                raise ValueError(f"{name} must be more than 0, got {value}")
        self._level_ms = level_s * 1e3
        self._trend_ms = trend_s * 1e3
        self._mean_ms = mean_s * 1e3
        self._rate = 0.0  # requests in a millisecond
        self._slope = 0.0  # of the rate, in a millisecond
        self._latest: tuple[str, float, Arrivals] | None = None
        self._weight = 0.0  # of the sums below, in requests
        self._floor_ms = self._saturation_ms = self._objective_ms = 0.0

    def observe(self, arrived: Arrivals, *, epoch: str, at_ms: float) -> None:
        """epoch: whose sums they are, another one starts from nothing; at_ms: of its clock."""
        before, self._latest = self._latest, (epoch, at_ms, arrived)
        if before is None or before[0] != epoch:
            return
        elapsed_ms = at_ms - before[1]
        if elapsed_ms <= 0.0:
            self._latest = before
            return
        self._follow_rate((arrived.count - before[2].count) / elapsed_ms, elapsed_ms)
        self._follow_means(arrived, before[2], elapsed_ms)

    @property
    def mean(self) -> MeanRequest:
        if self._weight <= 0.0:
            return MeanRequest()
        return MeanRequest(
            floor_ms=self._floor_ms / self._weight,
            saturation_ms=self._saturation_ms / self._weight,
            objective_ms=self._objective_ms / self._weight,
        )

    def rate(self, ahead_ms: float = 0.0) -> float:
        """Requests in a millisecond, so far ahead. A falling trend is not counted on."""
        return self._rate + max(0.0, self._slope) * self._faded_ms(ahead_ms)

    def count(self, ahead_ms: float) -> float:
        """Requests that will have come by then."""
        slope, faded_ms = max(0.0, self._slope), self._faded_ms(ahead_ms)
        return self._rate * ahead_ms + slope * self._trend_ms * (ahead_ms - faded_ms)

    def _faded_ms(self, ahead_ms: float) -> float:
        """What the trend counts of the horizon."""
        return self._trend_ms * (1.0 - math.exp(-ahead_ms / self._trend_ms))

    def _follow_rate(self, seen: float, elapsed_ms: float) -> None:
        before = self._rate
        expected = max(0.0, before + self._slope * self._faded_ms(elapsed_ms))
        self._rate = expected + _weight(elapsed_ms, self._level_ms) * (seen - expected)
        slope = (self._rate - before) / elapsed_ms
        self._slope += _weight(elapsed_ms, self._trend_ms) * (slope - self._slope)

    def _follow_means(self, now: Arrivals, before: Arrivals, elapsed_ms: float) -> None:
        num_new = now.num_sized - before.num_sized
        if num_new <= 0:  # nobody came: what is known does not fade
            return
        kept = 1.0 - _weight(elapsed_ms, self._mean_ms)
        self._weight = kept * self._weight + num_new
        self._floor_ms = kept * self._floor_ms + now.floor_ms - before.floor_ms
        self._saturation_ms = kept * self._saturation_ms + now.saturation_ms - before.saturation_ms
        self._objective_ms = kept * self._objective_ms + now.objective_ms - before.objective_ms


def _weight(elapsed_ms: float, constant_ms: float) -> float:
    """Of something new, where what is known fades with this time constant."""
    return 1.0 - math.exp(-elapsed_ms / constant_ms)
