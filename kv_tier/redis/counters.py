"""What the Redis tier of this process did."""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kv_tier.redis.link import LinkSpeed
from kv_tier.redis.misses import Miss


class Count(StrEnum):
    """What is counted beside misses."""

    LOOKUP_HITS = "lookup_hits"  # chunks
    LAYERS_READ = "layers_read"  # verified, in the arena
    BYTES_READ = "bytes_read"  # of those layers' values, as they are in Redis
    CHUNKS_READ = "chunks_read"  # all layers that were wanted
    READ_MS = "read_ms"  # from the fetch to the last layer, of each of these chunks
    CHUNKS_WRITTEN = "chunks_written"
    BYTES_WRITTEN = "bytes_written"
    WRITES_NOT_NEEDED = "writes_not_needed"  # another node had written the chunk
    WRITES_DROPPED = "writes_dropped"  # from the backlog, for want of room or of Redis
    WRITES_REFUSED = "writes_refused"  # Redis out of memory, read-only, or forbidding it
    WRITES_FAILED = "writes_failed"  # no answer in time, or the connection lost
    WRITES_DAMAGED = "writes_damaged"  # the arena's own bytes did not verify
    CHUNKS_REMOVED = "chunks_removed"  # found damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisTierStats:
    """Counts since this process opened the tier, and levels now."""

    counts: Mapping[Count, int]
    misses: Mapping[Miss, int]  # chunks, by reason
    speed: LinkSpeed
    backlog_bytes: int  # arena bytes that wait to be written
    num_backlog: int  # chunks
    nodes_unavailable: tuple[str, ...]  # nodes whose breaker is open
    breaker_openings: int


class Counters:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Count] = Counter()
        self._misses: Counter[Miss] = Counter()

    def add(self, count: Count, amount: int = 1) -> None:
        with self._lock:
            self._counts[count] += amount

    def layer_read(self, num_bytes: int) -> None:
        with self._lock:
            self._counts[Count.LAYERS_READ] += 1
            self._counts[Count.BYTES_READ] += num_bytes

    def miss(self, reason: Miss) -> None:
        with self._lock:
            self._misses[reason] += 1

    def counts(self) -> dict[Count, int]:
        """Every count, those of zero too."""
        with self._lock:
            return {count: self._counts[count] for count in Count}

    def misses(self) -> dict[Miss, int]:
        with self._lock:
            return {reason: self._misses[reason] for reason in Miss}
