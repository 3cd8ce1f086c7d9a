"""The contract of a second level behind the host tier, shared by nodes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_tier.redis.counters import RedisTierStats
from kv_tier.redis.fetch import ChunkFetch, Fetch, FetchRequest
from kv_tier.redis.link import LinkSpeed
from kv_tier.redis.values import Manifest
from kv_tier.store import ChunkLocation, ChunkQuery


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkWrite:
    """One committed entry to copy to the second level."""

    location: ChunkLocation
    token_ids: Sequence[int]
    recompute_ms: float = 0.0
    content_id: str = ""
    release: Callable[[], None]  # called once, from any thread: its bytes are not needed any more

    def __post_init__(self) -> None:
        if not 0.0 <= self.recompute_ms < math.inf:
            raise ValueError(f"recompute_ms must be finite and >= 0, got {self}")


class RemoteTier(Protocol):
    """Chunks that other nodes can read too. What goes wrong is a miss with a count, no exception.

    Thread-safe. Whoever fetches has reserved the entries in the arena, and commits or aborts them
    when the fetch is quiet.
    """

    def lookup(self, wanted: Sequence[ChunkQuery]) -> list[Manifest | None]:
        """What is there whole, with these tokens, in this process's model shape.

        Blocks at most for the lookup deadline. A key that is wanted twice is asked for once.
        """
        ...

    def fetch(
        self,
        requests: Sequence[FetchRequest],
        layers: Sequence[int],
        *,
        deadline_ms: float,
        on_layer: Callable[[ChunkFetch, int], None] | None = None,
        on_quiet: Callable[[ChunkFetch], None] | None = None,
    ) -> Fetch:
        """Start to read these layers of these chunks into the arena. Returns at once.

        requests: equal ones are read once
        layers: distinct, in the order they are needed; the first of every chunk comes before the
        second of any. All of them, if the entries are to be committed.
        deadline_ms: from now, finite; a chunk that is not complete then is a miss
        on_layer: called in a reader's thread, for every layer that is ready
        on_quiet: called once for every chunk when nothing writes to its entry any more: in a
        reader's thread, or in one that waits or cancels, or in this call itself
        """
        ...

    def write_behind(self, write: ChunkWrite) -> bool:
        """Copy an entry when there is time. Never blocks. False if it is not taken at all.

        A lease, or its like, must keep the entry until `release` is called, which happens in every
        case. When the backlog is full, its oldest chunks are dropped for it.
        """
        ...

    def shed_backlog(self) -> int:
        """Drop what waits to be written, for example when its leases leave the arena no room.

        returns: how many chunks
        """
        ...

    def cancel_writes(self, content_id: str) -> int:
        """Drop what waits to be written of a public id, and take back what is being written.

        Blocks until the latter is done, for a write's deadline at most.
        returns: how many chunks
        """
        ...

    def flush(self, timeout_ms: float) -> bool:
        """Wait until nothing waits to be written or removed. False if the time was not enough."""
        ...

    def remove(self, key: bytes) -> None:
        """Remove a chunk when there is time."""
        ...

    def speed(self) -> LinkSpeed:
        """Bandwidth and latency as they were seen lately."""
        ...

    def stats(self) -> RedisTierStats: ...

    def close(self) -> None:
        """Drop the backlog, end every fetch with a miss. Returns when all is quiet."""
        ...
