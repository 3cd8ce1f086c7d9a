"""When the stored KV of each layer is there to be read."""

import time
from collections.abc import Callable, Iterable, Set
from typing import Protocol

from kv_tier.arena_view import ArenaView
from kv_tier.arrival import Arrival
from kv_tier.store import ChunkLocation
from planner.clock import Clock
from replicas.batch import ArrivalTerms

_POLL_S = 0.0005


class LayerArrivals(Protocol):
    """The transfer of one batch's stored KV, layer by layer, ahead of the compute."""

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Of the chunks that may turn out not to come."""
        ...

    def have_missed(self) -> list[bool]:
        """Which of `keys` will not come, as far as this rank knows."""
        ...

    def do_without(self, keys: Set[bytes]) -> None:
        """Nobody waits for these any more."""
        ...

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

    keys = ()  # of a link to what is there, none can be missing

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

    def have_missed(self) -> list[bool]:
        return []

    def do_without(self, keys: Set[bytes]) -> None:
        pass

    def is_ready(self, layer: int) -> bool:
        return self.expected_ms(layer) <= 0.0

    def expected_ms(self, layer: int) -> float:
        moved = max(0, layer - self._first_layer + 1)
        return max(0.0, self._start_ms + moved * self._layer_ms - self._clock.now_ms())

    def wait(self, layer: int, timeout_ms: float) -> None:
        self._sleep_s(min(timeout_ms, self.expected_ms(layer)) / 1e3)


class ArenaArrivals:
    """Chunks that another process is fetching into the arena, as far as one rank's heads go.

    locations: of the batch's chunks that are on their way
    heads: first of this rank's KV heads, and how many
    """

    def __init__(
        self,
        arena: ArenaView,
        locations: Iterable[ChunkLocation],
        heads: tuple[int, int],
        terms: ArrivalTerms,
        clock: Clock,
        *,
        first_layer: int,
        sleep_s: Callable[[float], None] = time.sleep,
    ) -> None:
        self._arena = arena
        self._locations = {location.key: location for location in locations}
        self._heads = heads
        self._terms = terms
        self._clock = clock
        self._first_layer = first_layer
        self._sleep_s = sleep_s
        # by key: how many layers from the first on are there, without a gap
        self._num_there = dict.fromkeys(self._locations, 0)
        self._whole: set[bytes] = set()

    @property
    def keys(self) -> tuple[bytes, ...]:
        return tuple(self._locations)

    def do_without(self, keys: Set[bytes]) -> None:
        for key in keys:
            self._locations.pop(key, None)

    def have_missed(self) -> list[bool]:
        is_late = self._clock.now_ms() >= self._terms.deadline_ms
        return [self._has_missed(place, is_late) for place in self._locations.values()]

    def is_ready(self, layer: int) -> bool:
        return all(self._is_there(location, layer) for location in self._locations.values())

    def expected_ms(self, layer: int) -> float:
        """The layers arrive in order, the first of all chunks before the second of any."""
        missing_bytes = 0
        num_wanted = layer + 1 - self._first_layer
        for key, location in self._locations.items():
            num_there = self._num_there[key]
            while num_there < num_wanted and self._is_there(
                location, self._first_layer + num_there
            ):
                num_there += 1
            self._num_there[key] = num_there
            num_missing = max(0, num_wanted - num_there)
            missing_bytes += num_missing * self._arena.layout.layer_bytes(location.num_tokens)
        return missing_bytes / self._terms.bytes_per_ms

    def wait(self, layer: int, timeout_ms: float) -> None:
        end_ms = self._clock.now_ms() + timeout_ms
        while self._clock.now_ms() < end_ms:
            if self.is_ready(layer) or any(self.have_missed()):
                return
            self._sleep_s(_POLL_S)

    def _is_there(self, location: ChunkLocation, layer: int) -> bool:
        is_whole = location.key in self._whole
        return is_whole or self._arena.has_arrived(location, layer, *self._heads)

    def _has_missed(self, location: ChunkLocation, is_late: bool) -> bool:
        if location.key in self._whole:
            return False
        arrival = self._arena.arrival(location)
        if arrival is Arrival.WHOLE:
            self._whole.add(location.key)
            return False
        if not is_late and arrival is Arrival.ARRIVING:
            return False
        # its first layers come last, and nobody needs them
        needed = range(self._first_layer, self._arena.layout.num_layers)
        return not all(self._is_there(location, layer) for layer in needed)
