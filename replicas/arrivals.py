"""When the stored KV of each layer is there to be read."""

import time
from collections.abc import Callable
from typing import Protocol

from planner.clock import Clock


class LayerArrivals(Protocol):
    """The transfer of one batch's stored KV, layer by layer, ahead of the compute."""

    def is_ready(self, layer: int) -> bool:
        """Whether this rank can read the layer now."""
        ...

    def expected_ms(self, layer: int) -> float:
        """From now; 0 when it is there."""
        ...

    def wait(self, layer: int, timeout_ms: float) -> None:
        """Sleep until the layer is there, at most so long."""
        ...


class PacedArrivals:
    """A link of a given bandwidth in front of memory that has everything: for experiments.

    layer_bytes: of one layer of the batch's stored KV; the layers from `first_layer` on start to
    move, one after another, when this is made
    """

    def __init__(
        self,
        clock: Clock,
        *,
        first_layer: int,
        layer_bytes: int,
        bytes_per_ms: float,
        sleep_s: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep_s = sleep_s
        self._start_ms = clock.now_ms()
        self._first_layer = first_layer
        self._layer_ms = layer_bytes / bytes_per_ms

    def is_ready(self, layer: int) -> bool:
        return self.expected_ms(layer) <= 0.0

    def expected_ms(self, layer: int) -> float:
        moved = max(0, layer - self._first_layer + 1)
        return max(0.0, self._start_ms + moved * self._layer_ms - self._clock.now_ms())

    def wait(self, layer: int, timeout_ms: float) -> None:
        self._sleep_s(min(timeout_ms, self.expected_ms(layer)) / 1e3)
