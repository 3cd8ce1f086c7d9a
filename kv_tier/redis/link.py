"""How fast the link to Redis is: measured all the time, and slowed down for experiments."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

SMOOTHING_MS = 200.0  # of busy time: older observations weigh 1/e


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimit:
    """A link to emulate: all values of this process share its bandwidth."""

    bytes_per_ms: float = math.inf  # 1 GB/s is 1e6
    latency_ms: float = 0.0  # from a request to the first byte of its answer

    def __post_init__(self) -> None:
        if not self.bytes_per_ms > 0 or not 0 <= self.latency_ms < math.inf:
            raise ValueError(f"need bytes_per_ms > 0 and a finite latency_ms >= 0, got {self}")


class EmulatedLink:
    """Says when a value would have come over the limited link. Thread-safe."""

    def __init__(self, limit: LinkLimit | None = None) -> None:
        """limit: None for a link that holds nothing back"""
        self._limit = limit or LinkLimit()
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def replace(self, limit: LinkLimit | None) -> None:
        """From now on another link, with nothing on it yet. Values that were given their time
        keep it."""
        with self._lock:
            self._limit = limit or LinkLimit()
            self._free_at_s = 0.0

    def arrives_at_s(self, requested_at_s: float, num_bytes: int) -> float:
        """Takes the link for the value's transfer, behind those that took it before."""
        with self._lock:
            starts_at_s = max(requested_at_s + self._limit.latency_ms / 1e3, self._free_at_s)
            self._free_at_s = starts_at_s + num_bytes / self._limit.bytes_per_ms / 1e3
            return self._free_at_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Smoothed; zero until something was observed."""

    bytes_per_ms: float  # over all connections together, while something was awaited
    latency_ms: float  # of a lookup's round trip


class LinkMeter:
    """Smoothed bandwidth and latency of what was read. Thread-safe.

    Bandwidth is bytes over busy time. A link is busy while any value is awaited, so reading with
    more connections does not count the same time twice, and idle time does not count at all.
    """

    def __init__(self, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._num_awaited = 0
        self._busy_since_s = 0.0
        self._bytes = 0.0  # decayed sums: their quotient is the smoothed bandwidth
        self._busy_ms = 0.0
        self._latency_ms = 0.0

    def awaiting(self) -> None:
        """A value was asked for."""
        with self._lock:
            if self._num_awaited == 0:
                self._busy_since_s = self._monotonic_s()
            self._num_awaited += 1

    def ended(self, num_bytes: int) -> None:
        """An awaited value came with so many bytes; 0 if it did not come."""
        with self._lock:
            now_s = self._monotonic_s()
            busy_ms = (now_s - self._busy_since_s) * 1e3
            decay = math.exp(-busy_ms / SMOOTHING_MS)
            self._bytes = self._bytes * decay + num_bytes
            self._busy_ms = self._busy_ms * decay + busy_ms
            self._busy_since_s = now_s
            self._num_awaited -= 1

    def round_trip(self, latency_ms: float) -> None:
        with self._lock:
            known = self._latency_ms
            self._latency_ms = latency_ms if known == 0.0 else known + (latency_ms - known) / 8

    @property
    def is_busy(self) -> bool:
        return self._num_awaited > 0

    def speed(self) -> LinkSpeed:
        with self._lock:
            bandwidth = self._bytes / self._busy_ms if self._busy_ms else 0.0
            return LinkSpeed(bytes_per_ms=bandwidth, latency_ms=self._latency_ms)
