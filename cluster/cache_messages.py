"""What an ingress has a replica do with its tiers: each message runs on its operations."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from replicas.cache_types import CacheOperations, CacheStats, EntryPage, Tier, VerifyReport

T_co = TypeVar("T_co", covariant=True)


class CacheCommand(Protocol[T_co]):
    async def run(self, cache: CacheOperations) -> T_co:
        """Raises CacheError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowStats:
    redis_keys: bool = False

    async def run(self, cache: CacheOperations) -> CacheStats:
        return await cache.stats(redis_keys=self.redis_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListEntries:
    tier: Tier
    limit: int

    async def run(self, cache: CacheOperations) -> EntryPage:
        return await cache.entries(self.tier, self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardChunk:
    """From the host tier, and from what waits to be written to Redis."""

    chunk_id: str

    async def run(self, cache: CacheOperations) -> bool:
        return await cache.discard(self.chunk_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveFromRedis:
    chunk_id: str

    async def run(self, cache: CacheOperations) -> bool:
        return await cache.remove_from_redis(self.chunk_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearHost:
    async def run(self, cache: CacheOperations) -> int:
        return await cache.clear_host()


@dataclass(frozen=True, slots=True, kw_only=True)
class DropBacklog:
    async def run(self, cache: CacheOperations) -> int:
        return await cache.drop_backlog()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearRedis:
    async def run(self, cache: CacheOperations) -> int:
        return await cache.clear_redis()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyTier:
    tier: Tier
    repair: bool

    async def run(self, cache: CacheOperations) -> VerifyReport:
        return await cache.verify(self.tier, repair=self.repair)
