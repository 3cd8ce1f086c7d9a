"""Virtual time: what happens next, and when."""

import heapq
import math
from collections.abc import Callable

Action = Callable[[], None]


class EventQueue:
    """Actions in order of time; of the same moment, in the order they were planned.

    It is the simulation's `Clock`: time stands still while an action runs.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Action]] = []
        self._now_ms = 0.0
        self._planned = 0
        self.num_run = 0

    def now_ms(self) -> float:
        return self._now_ms

    def at(self, time_ms: float, action: Action) -> None:
        """Raises ValueError for a moment that has passed, or is none."""
        if not math.isfinite(time_ms) or time_ms < self._now_ms:
            raise ValueError(f"cannot plan for {time_ms} ms, it is {self._now_ms} ms")
        self._planned += 1
        heapq.heappush(self._heap, (time_ms, self._planned, action))

    def after(self, delay_ms: float, action: Action) -> None:
        self.at(self._now_ms + delay_ms, action)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Until it is over, or nothing is planned any more."""
        heap = self._heap
        while heap and not is_over():
            self._now_ms, _, action = heapq.heappop(heap)
            self.num_run += 1
            action()
