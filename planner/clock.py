"""Time as a value that can be passed in, so that tests and the simulator own it."""

import time
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> float:
        """Milliseconds of a clock that never goes back."""
        ...


class MonotonicClock:
    def now_ms(self) -> float:
        return time.monotonic() * 1e3
