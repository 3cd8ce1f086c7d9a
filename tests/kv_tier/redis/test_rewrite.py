"""Chunks that are written anew: layers of two writes are never one chunk, nor the new one lost."""

from collections.abc import Iterator

import pytest
import redis

from kv_tier.redis import ChunkFetch, Count, Encoding, FetchRequest, Manifest, Miss, RedisTier
from kv_tier.redis.values import manifest_name
from tests.kv_tier.redis.cases import (
    LAYERS,
    LAYOUT,
    LONG_MS,
    Arena,
    config,
    counted,
    lookup,
    misses,
    query,
    write,
)
from tests.kv_tier.redis.peers import name_of
from tests.kv_tier.redis.servers import RedisServer

pytestmark = pytest.mark.redis

KEY = query(1).key
NUM_KEYS = 1 + LAYOUT.num_layers


@pytest.fixture
def client(server: RedisServer) -> redis.Redis:
    return server.client()


@pytest.fixture
def tiers(server: RedisServer, arena: Arena) -> Iterator[list[RedisTier]]:
    """Three nodes' tiers, with write ids of their own; the second writes int8."""
    settings = {"num_connections": 1, "depth": 1}
    opened = [
        RedisTier(config(server.url, **settings, **changes), LAYOUT, arena.memory)
        for changes in ({}, {"encoding": Encoding.INT8}, {})
    ]
    yield opened
    for tier in opened:
        tier.close()


def found(tier: RedisTier) -> Manifest:
    (manifest,) = lookup(tier, 1)
    assert manifest is not None
    return manifest


def fetch(tier: RedisTier, arena: Arena, manifest: Manifest, on_layer=None) -> ChunkFetch:
    request = FetchRequest(
        location=arena.place(1), encoding=manifest.shape.encoding, write_id=manifest.write_id
    )
    fetched = tier.fetch([request], LAYERS, deadline_ms=LONG_MS, on_layer=on_layer)
    assert fetched.wait_quiet()
    return fetched.chunks[0]


def rewrite(tier: RedisTier, arena: Arena, client: redis.Redis) -> None:
    client.delete(manifest_name("cachesmith", KEY))  # evicted
    write(tier, arena, 1)


def test_every_write_has_an_id_of_its_own(
    tiers: list[RedisTier], arena: Arena, client: redis.Redis
) -> None:
    write(tiers[0], arena, 1)
    before = found(tiers[2])
    assert fetch(tiers[2], arena, before).is_complete
    rewrite(tiers[0], arena, client)
    assert found(tiers[2]).write_id != before.write_id


@pytest.mark.parametrize("writer", [0, 1], ids=["raw", "int8"])
def test_a_chunk_rewritten_between_lookup_and_fetch_is_a_miss_and_kept(
    tiers: list[RedisTier], arena: Arena, client: redis.Redis, writer: int
) -> None:
    write(tiers[0], arena, 1)
    manifest = found(tiers[2])
    rewrite(tiers[writer], arena, client)
    assert fetch(tiers[2], arena, manifest).miss is Miss.REPLACED
    assert misses(tiers[2]) == {Miss.REPLACED: 1}
    assert tiers[2].flush(LONG_MS)
    assert client.dbsize() == NUM_KEYS
    assert fetch(tiers[2], arena, found(tiers[2])).is_complete


def test_a_chunk_rewritten_in_mid_fetch_is_a_miss_and_kept(
    tiers: list[RedisTier], arena: Arena, client: redis.Redis
) -> None:
    write(tiers[0], arena, 1)

    def on_layer(chunk: ChunkFetch, layer: int) -> None:
        rewrite(tiers[0], arena, client)

    assert fetch(tiers[2], arena, found(tiers[2]), on_layer).miss is Miss.REPLACED
    assert tiers[2].flush(LONG_MS)
    assert client.dbsize() == NUM_KEYS


def test_a_chunk_of_two_writers_is_a_miss_and_removed(
    tiers: list[RedisTier], arena: Arena, client: redis.Redis
) -> None:
    """A write that died, or a SET that came late, has left its layer in another's chunk."""
    write(tiers[0], arena, 1)
    late = client.get(name_of(1, 0))
    rewrite(tiers[0], arena, client)
    client.set(name_of(1, 0), late)
    assert fetch(tiers[2], arena, found(tiers[2])).miss is Miss.REPLACED
    assert tiers[2].flush(LONG_MS)
    assert client.dbsize() == 0
    assert counted(tiers[2], Count.CHUNKS_REMOVED) == 1
    write(tiers[0], arena, 1)
    assert fetch(tiers[2], arena, found(tiers[2])).is_complete


def test_a_late_removal_spares_what_was_written_since(
    tiers: list[RedisTier], arena: Arena, client: redis.Redis
) -> None:
    write(tiers[0], arena, 1)
    manifest = found(tiers[2])
    rewrite(tiers[0], arena, client)
    tiers[2]._writer.remove_damaged(KEY, manifest.write_id)
    assert tiers[2].flush(LONG_MS)
    assert client.dbsize() == NUM_KEYS
    assert counted(tiers[2], Count.CHUNKS_REMOVED) == 0


def test_a_chunk_that_is_being_written_is_not_removed(
    tiers: list[RedisTier], arena: Arena, client: redis.Redis
) -> None:
    """It has no manifest yet."""
    write(tiers[0], arena, 1)
    manifest = found(tiers[2])
    client.delete(manifest_name("cachesmith", KEY))
    tiers[2]._writer.remove_damaged(KEY, manifest.write_id)
    assert tiers[2].flush(LONG_MS)
    assert client.dbsize() == LAYOUT.num_layers
