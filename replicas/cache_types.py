"""What operating the chunk store takes and gives: plain values that travel between processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kv_tier.store import TierStats

Tier = Literal["host", "redis"]


class CacheError(Exception):
    """An operation that can not be done. The message says why, and names no secret."""

    status = 503
    code = "cache_unavailable"


class CacheUnavailableError(CacheError):
    """The arena, its index or Redis does not answer, or refuses."""


class NoRedisTierError(CacheError):
    """The server has no Redis tier."""

    status = 400
    code = "no_redis_tier"


class VerificationRunningError(CacheError):
    """This process verifies already."""

    status = 409
    code = "verification_running"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisReport:
    """What one process's Redis tier did since it was opened, and its levels now."""

    counts: Mapping[str, int] = field(default_factory=dict)  # names: kv_tier.redis.Count
    misses: Mapping[str, int] = field(default_factory=dict)  # chunks by kv_tier.redis.Miss
    bytes_per_ms: float = 0.0  # smoothed; 0 until something was read
    latency_ms: float = 0.0  # of a lookup's round trip, smoothed
    backlog_bytes: int = 0  # arena bytes that wait to be written
    num_backlog: int = 0  # chunks
    nodes_unavailable: tuple[str, ...] = ()  # whose breaker is open
    breaker_openings: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """The tiers as one replica sees them; None for a tier that it does not have."""

    host: TierStats | None = None  # of the node: its replicas report the same store
    redis: RedisReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisKeys:
    """What is below the Redis tier's prefix."""

    num_keys: int
    num_chunks: int
    num_tokens: int
    nbytes: int  # as Redis counts memory


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyProgress:
    """A verification that is under way."""

    tier: Tier
    num_checked: int
    num_entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """A replica's tiers, and what else an operator may ask about them."""

    tiers: TierReport
    verifying: VerifyProgress | None = None
    keys: RedisKeys | None = None  # only when asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """A chunk, or a prompt's prefix, in one tier. None where the tier does not know."""

    content_id: str  # "": a prefix, or another entry that is nobody's chunk
    key: str  # hex
    num_tokens: int
    nbytes: int
    recompute_ms: float
    uses: int | None = None
    num_leases: int | None = None
    ttl_s: float | None = None
    is_whole: bool = True  # False: layers are missing, so that it is a miss


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPage:
    """The first entries of a tier. In the host tier those used last come first."""

    entries: tuple[CacheEntry, ...] = ()
    has_more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedEntry:
    """An entry that would be a miss."""

    key: str  # hex
    reason: str
    content_id: str = ""  # "" also where it can not be known
    layer: int | None = None  # None: header, or manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification of one tier found."""

    num_checked: int = 0
    damaged: tuple[DamagedEntry, ...] = ()
    num_removed: int = 0  # of the damaged ones
    index_problems: tuple[str, ...] = ()  # in the host tier's own accounts; never repaired


class CacheOperations(Protocol):
    """What an operator does with the tiers that one replica reaches.

    The host tier is the node's, Redis the cluster's: whoever serves many replicas asks one a node
    for the first, and any one for the second. All raise CacheError; what is about Redis raises
    NoRedisTierError where there is none, unless it says otherwise.
    """

    def report(self) -> TierReport:
        """Quick: it is sent to the scheduler twice a second."""
        ...

    async def stats(self, *, redis_keys: bool = False) -> CacheStats:
        """redis_keys: also what is below the prefix, by a scan of Redis"""
        ...

    async def entries(self, tier: Tier, limit: int) -> EntryPage: ...

    async def discard(self, chunk_id: str) -> bool:
        """From the host tier, and from what this process is to write to Redis."""
        ...

    async def remove_from_redis(self, chunk_id: str) -> bool:
        """Every model's. False where there is no Redis tier."""
        ...

    async def clear_host(self) -> int:
        """Returns how many entries were resident."""
        ...

    async def drop_backlog(self) -> int:
        """Forget what waits to be written to Redis. 0 where there is no Redis tier."""
        ...

    async def clear_redis(self) -> int:
        """Returns how many Redis keys there were."""
        ...

    async def verify(self, tier: Tier, *, repair: bool) -> VerifyReport:
        """Check every entry's checksums. With repair, remove what is damaged.

        Raises VerificationRunningError. Cancelling it stops the work.
        """
        ...
