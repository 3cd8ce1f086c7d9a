"""Who is likely to come next: as many as came lately, and like those."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.pass_curves import Pace, Times
from planner.waiting_table import LONGEST_ROW, NUM_FLOATS, times_of

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NUM_SEEN = 32


@dataclass(frozen=True, slots=True)
class ComingRequests:
    """slack_ms: from now, [num]; times: of their curves; timely: can be on time at the floor"""

    slack_ms: Floats
    times: Times
    timely: Bools


class ArrivalForecast:
    """Of the requests of one scheduler.

    A batch takes time from those that come while it runs, too. They are expected at the rate of
    the latest `NUM_SEEN` arrivals, each with the slack and the curve of one of these in turn.
    """

    def __init__(self) -> None:
        self._at_ms = np.zeros(NUM_SEEN)
        self._curves = np.zeros((NUM_FLOATS, NUM_SEEN))
        self._count = 0

    def note(self, curve: Floats, *, now_ms: float) -> None:
        """A request has come. curve: its column of a `WaitingTable`, [NUM_FLOATS]"""
        place = self._count % NUM_SEEN
        self._at_ms[place] = now_ms
        self._curves[:, place] = curve
        self._count += 1

    def interval_ms(self, now_ms: float) -> float | None:
        """Between two arrivals; None: not known."""
        if self._count < NUM_SEEN:
            return None
        since_ms = now_ms - float(self._at_ms[self._count % NUM_SEEN])
        return since_ms / NUM_SEEN if since_ms > 0.0 else None

    def coming(self, num: int, *, now_ms: float, pace: Pace) -> ComingRequests:
        """The next `num`, on a machine of this pace; none where the rate is not known."""
        interval_ms = self.interval_ms(now_ms)
        if interval_ms is None:
            num, interval_ms = 0, 0.0
        steps = np.arange(num)
        places = (self._count - 1 - steps) % NUM_SEEN
        curves = self._curves.take(places, axis=1)
        own_ms, times = curves[LONGEST_ROW], times_of(curves, pace)
        slack_ms = interval_ms * (0.5 + steps) + own_ms
        return ComingRequests(slack_ms, times, own_ms >= times.floor_ms)
