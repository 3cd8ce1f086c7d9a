"""Stores for an operator to work on: a node's arena with what is in Redis, and the fake of both."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kv_tier import ArenaView, HostTier, HostTierConfig
from kv_tier.extents import GRANULE_BYTES
from kv_tier.redis import ChunkWrite, RedisTier
from kv_tier.redis.values import layer_name
from replicas.cache_admin import CacheAdmin
from replicas.cache_types import CacheOperations
from replicas.interface import StoredChunk
from tests.fakes.fake_cache import FakeCache
from tests.kv_tier.arena_cases import write_heads
from tests.kv_tier.redis.cases import LAYOUT, LONG_MS, NUM_TOKENS, config, query

LAST_LAYER = LAYOUT.num_layers - 1


def chunk_id(chunk: int) -> str:
    return f"chunk-{chunk}"


class StoreCase(Protocol):
    """A store with known contents."""

    @property
    def cache(self) -> CacheOperations: ...

    def put(self, *chunks: int) -> None:
        """Into the host tier."""
        ...

    def put_in_redis(self, *chunks: int) -> None: ...

    def damage(self, chunk: int) -> None:
        """Its last layer, in the host tier."""
        ...

    def damage_in_redis(self, chunk: int) -> None: ...

    def in_host(self, chunks: Sequence[int]) -> set[int]: ...

    def in_redis(self, chunks: Sequence[int]) -> set[int]: ...


class FakeStore:
    def __init__(self, *, has_redis: bool) -> None:
        self.cache = FakeCache({} if has_redis else None)

    def put(self, *chunks: int) -> None:
        self.cache.host.update({chunk_id(chunk): _stored(chunk) for chunk in chunks})

    def put_in_redis(self, *chunks: int) -> None:
        assert self.cache.redis is not None
        self.cache.redis.update({chunk_id(chunk): _stored(chunk) for chunk in chunks})

    def damage(self, chunk: int) -> None:
        self.cache.damaged.add(chunk_id(chunk))

    damage_in_redis = damage

    def in_host(self, chunks: Sequence[int]) -> set[int]:
        return {chunk for chunk in chunks if chunk_id(chunk) in self.cache.host}

    def in_redis(self, chunks: Sequence[int]) -> set[int]:
        assert self.cache.redis is not None
        return {chunk for chunk in chunks if chunk_id(chunk) in self.cache.redis}


class NodeStore:
    """A node: its arena, a replica's Redis tier on it, and the operations on both."""

    def __init__(self, folder: Path, redis_url: str | None = None, **changes: object) -> None:
        """changes: of the Redis tier's config"""
        self.tier = HostTier(
            HostTierConfig(directory=folder, capacity_bytes=512 * GRANULE_BYTES, layout=LAYOUT)
        )
        self.view = ArenaView(folder, LAYOUT)
        self.remote: RedisTier | None = None
        if redis_url is not None:
            arena = memoryview(self.view.mapping.numpy())
            self.remote = RedisTier(config(redis_url, **changes), LAYOUT, arena)
        self.cache = CacheAdmin(self.tier, self.remote)

    def put(self, *chunks: int) -> None:
        for chunk in chunks:
            wanted = query(chunk)
            reservation = self.tier.reserve(
                wanted.key, wanted.token_ids, recompute_ms=1.5, content_id=chunk_id(chunk)
            )
            assert reservation is not None
            write_heads(self.view, reservation.location, chunk, 0, LAYOUT.num_kv_heads)
            assert self.tier.commit(reservation)

    def put_in_redis(self, *chunks: int) -> None:
        """By way of the host tier, which it does not stay in unless it was there."""
        assert self.remote is not None
        for chunk in chunks:
            was_there = bool(self.in_host([chunk]))
            if not was_there:
                self.put(chunk)
            assert self.write_behind(chunk)
            assert self.remote.flush(LONG_MS)
            if not was_there:
                self.tier.discard(query(chunk).key)

    def write_behind(self, chunk: int) -> bool:
        lease = self.tier.hold(query(chunk).key)
        assert lease is not None and self.remote is not None
        return self.remote.write_behind(
            ChunkWrite(
                location=lease.location,
                token_ids=query(chunk).token_ids,
                recompute_ms=1.5,
                content_id=chunk_id(chunk),
                release=lambda: self.tier.release([lease]),
            )
        )

    def damage(self, chunk: int) -> None:
        lease = self.tier.hold(query(chunk).key)
        assert lease is not None
        offset = lease.location.offset + LAYOUT.layer_offset(NUM_TOKENS, LAST_LAYER)
        self.view.mapping[offset] ^= 1
        self.tier.release([lease])

    def damage_in_redis(self, chunk: int) -> None:
        assert self.remote is not None
        client = self.remote.client()
        name = layer_name("cachesmith", query(chunk).key, LAST_LAYER)
        value = bytearray(client.get(name))
        value[-1] ^= 1
        client.set(name, bytes(value))

    def in_host(self, chunks: Sequence[int]) -> set[int]:
        found = self.tier.contains([query(chunk).key for chunk in chunks])
        return {chunk for chunk, is_there in zip(chunks, found, strict=True) if is_there}

    def in_redis(self, chunks: Sequence[int]) -> set[int]:
        assert self.remote is not None
        found = self.remote.lookup([query(chunk) for chunk in chunks])
        return {chunk for chunk, one in zip(chunks, found, strict=True) if one is not None}

    def close(self) -> None:
        if self.remote is not None:
            self.remote.close()
        self.tier.close()


def _stored(chunk: int) -> StoredChunk:
    return StoredChunk(
        chunk_id=chunk_id(chunk),
        num_tokens=NUM_TOKENS,
        nbytes=LAYOUT.entry_bytes(NUM_TOKENS),
        tier="host",
    )
