"""How many replicas there should be: a function from what waits and what will come to a number.

Needed is the largest of three numbers, all at the time when a replica that is ordered now would
serve, one lead time ahead. That is what the latest orders took, and at least a model's load:

- offered load: requests that come in a millisecond times what one takes, in Erlangs, over the
  target utilisation. What one takes is between the floor's and the saturation's plan.
- backlog (a fluid queue): the work at the floor that waits, is in prefill, or comes during the lead
  time, less what the ready replicas do until then, is done within one objective beside what comes
  then. What would be late by then in any case is left out: more replicas do not help it.
- deadlines: the processor demand of earliest-deadline-first scheduling. Of the requests that wait,
  those whose deadline is past the lead time are met, with the ready replicas from now on and others
  from then on.

More are wanted at once, fewer once the smaller number has been enough for a while: the largest of
that stabilisation window holds. Pure: time and the signal arrive as arguments.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from planner.arrival_forecast import ArrivalForecast, Arrivals, MeanRequest

ROUNDING = 1e-9  # of a replica


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """coverage_share: the capacity planned for, from the floor's plan (0) to the saturation's (1).

    down_after_s: how long fewer replicas have to be enough before any leaves
    scale_to_zero_after_s: how long nothing may happen before the last one leaves; None: it stays
    level_s, trend_s, mean_s: of `ArrivalForecast`
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_utilisation: float = 0.7
    down_after_s: float = 60.0
    scale_to_zero_after_s: float | None = None
    coverage_share: float = 0.5
    level_s: float = 5.0
    trend_s: float = 10.0
    mean_s: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(f"need 1 <= min_replicas <= max_replicas, got {self}")
        if not 0.0 < self.target_utilisation <= 1.0:
            raise ValueError(f"need 0 < target_utilisation <= 1, got {self.target_utilisation}")
        if not 0.0 <= self.coverage_share <= 1.0:
            raise ValueError(f"coverage_share must be within 0 and 1, got {self.coverage_share}")
        for name in ("down_after_s", "scale_to_zero_after_s"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSignal:
    """A scheduler's load at one moment, in milliseconds of its clock.

    waiting: (slack, work at the floor) of each request without a ticket; the work is 0 while no
    replica has said what it costs
    prefill_ms: planned work that is left of the batches in prefill
    num_active: requests with a ticket, until their end
    load_ms: what a replica has measured of its model's load; None: none has yet
    """

    epoch: str  # names the scheduler's life
    at_ms: float
    waiting: tuple[tuple[float, float], ...] = ()
    prefill_ms: float = 0.0
    num_active: int = 0
    num_ready: int = 0
    load_ms: float | None = None
    arrived: Arrivals = field(default_factory=Arrivals)

    @property
    def work_ms(self) -> float:
        return self.prefill_ms + sum(floor_ms for _, floor_ms in self.waiting)

    @property
    def tightest_slack_ms(self) -> float | None:
        return min((slack_ms for slack_ms, _ in self.waiting), default=None)


class Forecast(Protocol):
    @property
    def mean(self) -> MeanRequest: ...

    def rate(self, ahead_ms: float = 0.0) -> float: ...

    def count(self, ahead_ms: float) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Replicas by each of the three rules, fractions of one among them; see the module."""

    offered_load: float = 0.0
    backlog: float = 0.0
    deadlines: float = 0.0

    @property
    def replicas(self) -> int:
        return math.ceil(max(self.offered_load, self.backlog, self.deadlines) - ROUNDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """wanted: after bounds and the stabilisation window; need, lead_ms: at this moment"""

    wanted: int
    need: Need
    lead_ms: float


def need_of(
    signal: LoadSignal, forecast: Forecast, config: ScalingConfig, *, lead_ms: float
) -> Need:
    """What the module says, without bounds. lead_ms: from an order until the replica serves"""
    mean, rate = forecast.mean, forecast.rate(lead_ms)
    service_ms = mean.service_ms(config.coverage_share)
    return Need(
        offered_load=rate * service_ms / config.target_utilisation,
        backlog=_for_backlog(signal, forecast, lead_ms),
        deadlines=replicas_for_deadlines(
            signal.waiting,
            num_ready=signal.num_ready,
            lead_ms=lead_ms,
            prefill_ms=signal.prefill_ms,
        ),
    )


def replicas_for_deadlines(
    waiting: Sequence[tuple[float, float]],
    *,
    num_ready: int,
    lead_ms: float = 0.0,
    prefill_ms: float = 0.0,
) -> float:
    """The least number of replicas with which the work due by each deadline fits before it.

    waiting: (slack ms, floor ms). Who is late anyway is left out, and a deadline by which no new
    replica could have done the request asks for none. Work is taken for divisible.
    """
    most, due_ms = 0.0, prefill_ms
    for slack_ms, floor_ms in sorted(waiting):
        if slack_ms <= 0.0 or floor_ms > slack_ms:
            continue
        due_ms += floor_ms
        helped_ms = slack_ms - lead_ms
        needed = due_ms / slack_ms
        if needed > num_ready:
            needed = float(num_ready)
            if 0.0 < floor_ms <= helped_ms:
                needed += (due_ms - num_ready * slack_ms) / helped_ms
        most = max(most, needed)
    return most


def _for_backlog(signal: LoadSignal, forecast: Forecast, lead_ms: float) -> float:
    mean, rate = forecast.mean, forecast.rate(lead_ms)
    if mean.objective_ms <= 0.0:
        return 0.0
    coming_ms = forecast.count(lead_ms) * mean.floor_ms
    left_ms = signal.work_ms + coming_ms - signal.num_ready * lead_ms
    in_time_ms = sum(floor_ms for slack_ms, floor_ms in signal.waiting if slack_ms > lead_ms)
    in_time_ms += rate * mean.floor_ms * min(lead_ms, mean.objective_ms)
    backlog_ms = max(0.0, min(left_ms, in_time_ms))
    return rate * mean.floor_ms + backlog_ms / mean.objective_ms


class LeadTime:
    """How long orders of replicas took until so many were ready, the latest ones most."""

    def __init__(self) -> None:
        self.ms = 0.0  # 0: no order has been seen through
        self._num_target: int | None = None
        self._open: list[tuple[int, float]] = []  # so many were ordered, and when

    def observe(self, *, num_target: int, num_ready: int, now_s: float) -> None:
        if self._num_target is not None and num_target > self._num_target:
            self._open.append((num_target, now_s))
        self._num_target = num_target
        self._open = [order for order in self._open if order[0] <= num_target]
        for ordered, at_s in [order for order in self._open if order[0] <= num_ready]:
            self._open.remove((ordered, at_s))
            took_ms = (now_s - at_s) * 1e3
            self.ms = took_ms if self.ms == 0.0 else 0.5 * (self.ms + took_ms)


class Autoscaler:
    """The rule with its memory: forecast, lead time, stabilisation window, since when it is idle.

    A new one does not know what was needed before it: until its window has passed it keeps at least
    the number that it found.
    """

    def __init__(self, config: ScalingConfig) -> None:
        self._config = config
        self._forecast = ArrivalForecast(
            level_s=config.level_s, trend_s=config.trend_s, mean_s=config.mean_s
        )
        self._lead = LeadTime()
        # (when, how many): what is needed, older and larger ones first
        self._needed: deque[tuple[float, int]] = deque()
        self._busy_at_s: float | None = None
        self._seen: tuple[str, int] | None = None  # epoch, and requests that had come by then

    def decide(self, signal: LoadSignal, *, num_target: int, now_s: float) -> ScalingDecision:
        """num_target: replicas as ordered now; now_s: of a clock that never goes back"""
        config = self._config
        self._forecast.observe(signal.arrived, epoch=signal.epoch, at_ms=signal.at_ms)
        self._lead.observe(num_target=num_target, num_ready=signal.num_ready, now_s=now_s)
        lead_ms = max(self._lead.ms, signal.load_ms or 0.0)
        need = need_of(signal, self._forecast, config, lead_ms=lead_ms)
        if self._busy_at_s is None:
            self._busy_at_s = now_s if num_target else -math.inf
            self._remember(num_target, now_s)
        is_starting = signal.num_ready < num_target
        if signal.waiting or signal.num_active or is_starting or self._has_arrived(signal):
            self._busy_at_s = now_s
        if (
            config.scale_to_zero_after_s is not None
            and now_s - self._busy_at_s >= config.scale_to_zero_after_s
        ):
            self._needed.clear()
            return ScalingDecision(wanted=0, need=need, lead_ms=lead_ms)
        self._remember(need.replicas, now_s)
        wanted = min(config.max_replicas, max(config.min_replicas, self._needed[0][1]))
        return ScalingDecision(wanted=wanted, need=need, lead_ms=lead_ms)

    def _has_arrived(self, signal: LoadSignal) -> bool:
        """Whether somebody has come since the latest signal, as far as that can be said."""
        before, self._seen = self._seen, (signal.epoch, signal.arrived.count)
        return before is not None and before != self._seen and signal.arrived.count > 0

    def _remember(self, needed: int, now_s: float) -> None:
        """Keep the largest of the window at its front."""
        window = self._needed
        while window and window[-1][1] <= needed:
            window.pop()
        window.append((now_s, needed))
        while window[0][0] < now_s - self._config.down_after_s:
            window.popleft()
