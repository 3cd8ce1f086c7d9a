"""Chunks on their way from Redis into the arena, as those that wait for them see it."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_tier.layout import KvLayout
from kv_tier.redis.config import MAX_DEADLINE_MS
from kv_tier.redis.encoding import Encoding
from kv_tier.redis.entry_memory import EntryMemory
from kv_tier.redis.misses import Miss
from kv_tier.redis.values import StoredShape
from kv_tier.store import ChunkLocation

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """One chunk to read into space that is reserved for it."""

    location: ChunkLocation
    encoding: Encoding  # as the lookup found it
    write_id: bytes  # as the lookup found it


class ChunkFetch:
    """One chunk of a `Fetch`. Thread-safe.

    It ends complete, when every wanted layer is ready, or with a miss, by the first layer that is
    not had. After a miss, requests that were under way may still write to the entry: its space must
    not be given back before the fetch is quiet.
    """

    def __init__(
        self,
        entry: EntryMemory,
        request: FetchRequest,
        layers: Sequence[int],
        *,
        deadline_s: float,
        on_layer: "Callable[[ChunkFetch, int], None] | None" = None,
        on_quiet: "Callable[[ChunkFetch], None] | None" = None,
    ) -> None:
        """Callbacks run in a reader's thread; `on_quiet` also in one that starts a fetch, waits for
        it, cancels it, or closes the tier. Keep them short.

        deadline_s: `time.monotonic()` seconds; what is not there then is a miss
        """
        self.entry = entry
        self.shape = StoredShape(
            layout=entry.layout, num_tokens=request.location.num_tokens, encoding=request.encoding
        )
        self.write_id = request.write_id
        self.layer_bytes = self.shape.value_bytes  # in Redis; asked for more than once a layer
        entry.begin_arrival()
        self.deadline_s = deadline_s
        self._on_layer = on_layer
        self._on_quiet = on_quiet
        self._changed = threading.Condition()
        self._wanted = frozenset(layers)
        self._ready: set[int] = set()
        self._num_active = 0
        self._miss: Miss | None = None
        self._is_quiet = False
        self.stopped = threading.Event()  # complete or missed
        self._started_s = time.monotonic()

    @property
    def elapsed_ms(self) -> float:
        """Since the fetch began."""
        return (time.monotonic() - self._started_s) * 1e3

    @property
    def location(self) -> ChunkLocation:
        return self.entry.location

    @property
    def miss(self) -> Miss | None:
        return self._miss

    @property
    def is_complete(self) -> bool:
        return self._ready == self._wanted

    @property
    def is_quiet(self) -> bool:
        """Ended, and nothing writes to the entry any more."""
        return self._is_quiet

    def is_ready(self, layer: int) -> bool:
        """Whether the layer is in the arena, verified, with its checksums."""
        return layer in self._ready

    def wait_layer(self, layer: int, timeout_ms: float | None = None) -> bool:
        """Wait until the layer is ready: True; or it will not be, or the time is over: False."""
        self._wait(
            lambda: layer in self._ready or self._miss is not None or self.is_complete, timeout_ms
        )
        return layer in self._ready

    def wait_quiet(self, timeout_ms: float | None = None) -> bool:
        """Wait until the fetch is quiet; with no time given, as long as that takes."""
        end_s = None if timeout_ms is None else deadline_from_now_s(timeout_ms)
        self._wait(lambda: self._miss is not None or self.is_complete, timeout_ms)
        left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
        with self._changed:
            return self._changed.wait_for(lambda: self._is_quiet, left_s)

    def cancel(self) -> None:
        """Nobody wants it any more. Returns at once; does nothing if it has ended."""
        self.fail(Miss.CANCELLED)

    def fail(self, miss: Miss) -> None:
        with self._changed:
            if self._miss is None and not self.is_complete:
                self._miss = miss
                self.entry.fail_arrival()
                self.stopped.set()
                self._changed.notify_all()
        self._settle()

    def fail_if_late(self) -> None:
        if time.monotonic() >= self.deadline_s:
            self.fail(Miss.DEADLINE)

    def begin(self) -> bool:
        """A reader is about to ask for a layer. True: `end` follows; False: nobody needs it now."""
        self.fail_if_late()
        with self._changed:
            if self._miss is not None:
                return False
            self._num_active += 1
            return True

    def end(self) -> None:
        """The reader that began does not touch the entry any more."""
        with self._changed:
            self._num_active -= 1
        self._settle()

    def layer_ready(self, layer: int) -> None:
        """Called between `begin` and `end`."""
        with self._changed:
            if self._miss is not None:
                return
            if len(self._ready | {layer}) == self.entry.layout.num_layers:
                self.entry.write_header()
            self._ready.add(layer)
            if self.is_complete:
                self.stopped.set()
            self._changed.notify_all()
        if self._on_layer is not None:
            try:
                self._on_layer(self, layer)
            except Exception:
                log.exception("a callback failed when a layer was ready")

    def _settle(self) -> None:
        with self._changed:
            has_ended = self._miss is not None or self.is_complete
            if self._is_quiet or not has_ended or self._num_active > 0:
                return
            self._is_quiet = True
            self._changed.notify_all()
        if self._on_quiet is not None:
            try:
                self._on_quiet(self)
            except Exception:
                log.exception("a callback failed when a fetch was quiet")

    def _wait(self, is_over: Callable[[], bool], timeout_ms: float | None) -> None:
        """Wait for it, no longer than to the deadline, which then makes the chunk a miss."""
        left_s = max(0.0, self.deadline_s - time.monotonic())
        limit_s = left_s if timeout_ms is None else min(left_s, timeout_ms / 1e3)
        with self._changed:
            if self._changed.wait_for(is_over, limit_s):
                return
        self.fail_if_late()


@dataclass(frozen=True, slots=True)
class Fetch:
    """A batch of chunks on their way, in the order of the requests. Thread-safe.

    Equal requests share one `ChunkFetch`.
    """

    chunks: Sequence[ChunkFetch]

    def wait_layer(self, layer: int, timeout_ms: float | None = None) -> list[bool]:
        """Wait for one layer of every chunk that has not missed. Returns which are ready."""
        end_s = None if timeout_ms is None else deadline_from_now_s(timeout_ms)
        return [chunk.wait_layer(layer, _left_ms(end_s)) for chunk in self.chunks]

    def wait_quiet(self, timeout_ms: float | None = None) -> bool:
        """Wait until nothing of it writes to the arena any more."""
        end_s = None if timeout_ms is None else deadline_from_now_s(timeout_ms)
        return all(chunk.wait_quiet(_left_ms(end_s)) for chunk in self.chunks)

    def cancel(self) -> None:
        for chunk in self.chunks:
            chunk.cancel()


def check_fetch(layers: Sequence[int], layout: KvLayout, deadline_ms: float) -> None:
    """Raises ValueError if a fetch could not read these layers, or not wait so long."""
    if not deadline_ms <= MAX_DEADLINE_MS:
        raise ValueError(f"deadline_ms must be at most {MAX_DEADLINE_MS}, got {deadline_ms}")
    if not layers or len(set(layers)) != len(layers):
        raise ValueError(f"layers must be distinct, and at least one, got {layers}")
    if not 0 <= min(layers) <= max(layers) < layout.num_layers:
        raise ValueError(f"there are {layout.num_layers} layers, got {layers}")


def deadline_from_now_s(deadline_ms: float) -> float:
    """`time.monotonic()` seconds"""
    return time.monotonic() + deadline_ms / 1e3


def _left_ms(end_s: float | None) -> float | None:
    return None if end_s is None else max(0.0, (end_s - time.monotonic()) * 1e3)
