"""`CacheOperations` without a store: chunks in dictionaries, damage as a test says."""

from dataclasses import replace
from itertools import islice

from kv_tier import TierStats
from replicas.cache_types import (
    CacheEntry,
    CacheError,
    CacheStats,
    DamagedEntry,
    EntryPage,
    NoRedisTierError,
    RedisKeys,
    RedisReport,
    Tier,
    TierReport,
    VerifyReport,
)
from replicas.interface import StoredChunk

CAPACITY_BYTES = 1 << 20


class FakeCache:
    """A node's host tier, and a Redis that several of these may share.

    `host` and `redis` hold chunks by content id, those used last at the end; `redis` is None
    without a Redis tier. `damaged` names those that do not verify, in any tier. `fail_with` is
    raised by every operation.
    """

    def __init__(self, redis: dict[str, StoredChunk] | None = None) -> None:
        self.host: dict[str, StoredChunk] = {}
        self.redis = redis
        self.damaged: set[str] = set()
        self.removed: list[str] = []  # from the host tier, in order
        self.counts = RedisReport(counts={"lookup_hits": 3}, misses={"absent": 2})
        self.fail_with: CacheError | None = None

    def report(self) -> TierReport:
        used_bytes = sum(chunk.nbytes for chunk in self.host.values())
        host = TierStats(
            capacity_bytes=CAPACITY_BYTES,
            used_bytes=used_bytes,
            largest_free_bytes=CAPACITY_BYTES - used_bytes,
            num_entries=len(self.host),
            num_leases=0,
            num_reservations=0,
            num_retired=0,
            num_owners=1,
            hits=7,
            misses=5,
            collisions=1,
            evictions=2,
            refused=0,
        )
        return TierReport(host=host, redis=None if self.redis is None else self.counts)

    async def stats(self, *, redis_keys: bool = False) -> CacheStats:
        self._check()
        keys = None
        if redis_keys:
            chunks = self._redis().values()
            keys = RedisKeys(
                num_keys=len(chunks),
                num_chunks=len(chunks),
                num_tokens=sum(chunk.num_tokens for chunk in chunks),
                nbytes=sum(chunk.nbytes for chunk in chunks),
            )
        return CacheStats(tiers=self.report(), keys=keys)

    async def entries(self, tier: Tier, limit: int) -> EntryPage:
        self._check()
        chunks = list(self._chunks(tier).values())[::-1]
        return EntryPage(
            entries=tuple(_entry(chunk, tier) for chunk in islice(chunks, limit)),
            has_more=len(chunks) > limit,
        )

    async def discard(self, chunk_id: str) -> bool:
        self._check()
        self.removed.append(chunk_id)
        return self.host.pop(chunk_id, None) is not None

    async def remove_from_redis(self, chunk_id: str) -> bool:
        self._check()
        return self.redis is not None and self.redis.pop(chunk_id, None) is not None

    async def clear_host(self) -> int:
        self._check()
        return self._clear(self.host)

    async def drop_backlog(self) -> int:
        self._check()
        return 0

    async def clear_redis(self) -> int:
        self._check()
        return self._clear(self._redis())

    async def verify(self, tier: Tier, *, repair: bool) -> VerifyReport:
        self._check()
        chunks = self._chunks(tier)
        num_checked, damaged = len(chunks), [i for i in chunks if i in self.damaged]
        for chunk_id in damaged if repair else ():
            if tier == "host":
                self.removed.append(chunk_id)
            del chunks[chunk_id]
        return VerifyReport(
            num_checked=num_checked,
            damaged=tuple(
                DamagedEntry(
                    key=chunk_id,
                    reason="corrupt",
                    content_id=chunk_id if tier == "host" else "",
                    layer=0,
                )
                for chunk_id in damaged
            ),
            num_removed=len(damaged) if repair else 0,
        )

    def _check(self) -> None:
        if self.fail_with is not None:
            raise self.fail_with

    def _chunks(self, tier: Tier) -> dict[str, StoredChunk]:
        return self.host if tier == "host" else self._redis()

    def _redis(self) -> dict[str, StoredChunk]:
        if self.redis is None:
            raise NoRedisTierError("this server has no Redis tier")
        return self.redis

    def _clear(self, chunks: dict[str, StoredChunk]) -> int:
        num_removed = len(chunks)
        if chunks is self.host:
            self.removed.extend(chunks)
        chunks.clear()
        return num_removed


def _entry(chunk: StoredChunk, tier: Tier) -> CacheEntry:
    entry = CacheEntry(
        content_id=chunk.chunk_id,
        key=chunk.chunk_id,
        num_tokens=chunk.num_tokens,
        nbytes=chunk.nbytes,
        recompute_ms=1.5,
    )
    return replace(entry, uses=1, num_leases=0) if tier == "host" else replace(entry, ttl_s=60.0)
