"""A damaged value in Redis: the whole chunk is a miss, with its reason, and removed."""

import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import redis
from xxhash import xxh3_64_intdigest

from kv_tier.redis import Count, Encoding, Miss, RedisTier, StoredShape
from kv_tier.redis.values import layer_name, manifest_name, pack_prefix
from tests.kv_tier.redis.cases import (
    LAYERS,
    LAYOUT,
    LONG_MS,
    NUM_TOKENS,
    WRITE_ID,
    Arena,
    as_of_another_kind,
    counted,
    fetch,
    lookup,
    misses,
    offer,
    open_tier,
    query,
    request,
    write,
)
from tests.kv_tier.redis.servers import RedisServer

pytestmark = pytest.mark.redis

KEY = query(1).key
SHAPE = StoredShape(layout=LAYOUT, num_tokens=NUM_TOKENS, encoding=Encoding.RAW)
DAMAGED = 1  # layer
NAME = layer_name("cachesmith", KEY, DAMAGED)


def flip(value: bytes, position: int) -> bytes:
    changed = bytearray(value)
    changed[position] ^= 0x10
    return bytes(changed)


def with_version(value: bytes, *, value_version: int = 1, layout_version: int = 1) -> bytes:
    """The same value as another version would write it, its checksum right."""
    fields = value[:8] + struct.pack("<II", value_version, layout_version) + value[16:120]
    table = value[128 : SHAPE.prefix_bytes]
    digest = struct.pack("<Q", xxh3_64_intdigest(fields + table))
    return fields + digest + table + value[SHAPE.prefix_bytes :]


def with_shape(value: bytes, shape: StoredShape) -> bytes:
    prefix = pack_prefix(KEY, shape, WRITE_ID, DAMAGED, value[128 : SHAPE.prefix_bytes])
    return prefix + value[SHAPE.prefix_bytes :]


def other_dtype() -> StoredShape:
    return replace(SHAPE, layout=replace(LAYOUT, num_kv_heads=4, head_dim=16, dtype="bfloat16"))


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], Miss]] = {
    "cut by one byte": (lambda v: v[:-1], Miss.TRUNCATED),
    "cut in the header": (lambda v: v[:50], Miss.TRUNCATED),
    "one byte more": (lambda v: v + b"\0", Miss.TRUNCATED),
    "magic": (lambda v: flip(v, 0), Miss.CORRUPT),
    "header field": (lambda v: flip(v, 20), Miss.CORRUPT),
    "header checksum": (lambda v: flip(v, 121), Miss.CORRUPT),
    "table": (lambda v: flip(v, 130), Miss.CORRUPT),
    "first byte of K": (lambda v: flip(v, SHAPE.prefix_bytes), Miss.CORRUPT),
    "last byte of V": (lambda v: flip(v, -1), Miss.CORRUPT),
    "other value version": (lambda v: with_version(v, value_version=2), Miss.CORRUPT),
    "other layout version": (lambda v: with_version(v, layout_version=2), Miss.CORRUPT),
    "other dtype": (lambda v: with_shape(v, other_dtype()), Miss.CORRUPT),
}


@pytest.fixture
def client(server: RedisServer) -> redis.Redis:
    return server.client()


def was_removed(tier: RedisTier, client: redis.Redis) -> bool:
    assert tier.flush(LONG_MS)
    return client.dbsize() == 1 + LAYOUT.num_layers  # the other chunk's keys


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_layer(tier: RedisTier, arena: Arena, client: redis.Redis, name: str) -> None:
    damage, reason = DAMAGES[name]
    write(tier, arena, 1, 2)
    client.set(NAME, damage(client.get(NAME)))
    assert None not in lookup(tier, 1, 2)
    fetched = fetch(tier, [arena.place(1), arena.place(2)])
    assert [chunk.miss for chunk in fetched.chunks] == [reason, None]
    assert misses(tier) == {reason: 1}
    assert was_removed(tier, client)
    assert [one is None for one in lookup(tier, 1, 2)] == [True, False]


def test_a_layer_deleted_before_the_lookup(
    tier: RedisTier, arena: Arena, client: redis.Redis
) -> None:
    write(tier, arena, 1, 2)
    client.delete(NAME)
    assert [one is None for one in lookup(tier, 1, 2)] == [True, False]
    assert misses(tier) == {Miss.INCOMPLETE: 1}
    assert was_removed(tier, client)


def test_a_layer_evicted_between_lookup_and_read(
    tier: RedisTier, arena: Arena, client: redis.Redis
) -> None:
    write(tier, arena, 1, 2)
    assert None not in lookup(tier, 1)
    client.delete(NAME)
    place = arena.place(1)
    fetched = tier.fetch([request(place)], LAYERS, deadline_ms=LONG_MS)
    assert fetched.wait_quiet()
    assert fetched.chunks[0].miss is Miss.MISSING
    assert misses(tier) == {Miss.MISSING: 1}
    assert was_removed(tier, client)


def test_a_value_of_another_place(tier: RedisTier, arena: Arena, client: redis.Redis) -> None:
    write(tier, arena, 1, 2)
    client.set(NAME, client.get(layer_name("cachesmith", KEY, 2)))
    assert fetch(tier, [arena.place(1)]).chunks[0].miss is Miss.CORRUPT
    assert tier.flush(LONG_MS)
    write(tier, arena, 1)
    client.set(NAME, client.get(layer_name("cachesmith", query(2).key, DAMAGED)))
    assert fetch(tier, [arena.place(1)]).chunks[0].miss is Miss.CORRUPT


def test_a_key_of_another_kind(tier: RedisTier, arena: Arena, client: redis.Redis) -> None:
    write(tier, arena, 1)
    client.delete(NAME)
    client.lpush(NAME, "x")
    assert fetch(tier, [arena.place(1)]).chunks[0].miss is Miss.SERVER
    assert fetch(tier, [arena.place(1)]).chunks[0].miss is Miss.SERVER


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda v: v[:60], Miss.TRUNCATED),
        (lambda v: v[:-3], Miss.TRUNCATED),
        (lambda v: flip(v, 2), Miss.CORRUPT),
        (lambda v: flip(v, 130), Miss.CORRUPT),
        (lambda v: flip(v, 122), Miss.CORRUPT),
        (lambda v: b"", Miss.TRUNCATED),
    ],
)
def test_a_damaged_manifest(
    tier: RedisTier,
    arena: Arena,
    client: redis.Redis,
    damage: Callable[[bytes], bytes],
    reason: Miss,
) -> None:
    write(tier, arena, 1, 2)
    name = manifest_name("cachesmith", KEY)
    client.set(name, damage(client.get(name)))
    assert [one is None for one in lookup(tier, 1, 2)] == [True, False]
    assert misses(tier) == {reason: 1}
    assert was_removed(tier, client)
    write(tier, arena, 1)
    assert lookup(tier, 1) != [None]


def test_a_chunk_of_another_model_shape(server: RedisServer, arena: Arena) -> None:
    other = Arena(replace(LAYOUT, num_layers=2))
    with open_tier(server.url, other) as writer, open_tier(server.url, arena) as reader:
        write(writer, other, 1)
        assert lookup(reader, 1) == [None]
        assert misses(reader) == {Miss.FOREIGN: 1}
        assert reader.flush(LONG_MS)
        assert lookup(writer, 1) != [None]  # it stays for whom it is for


def test_a_manifest_of_an_unknown_kind_is_kept(
    tier: RedisTier, arena: Arena, client: redis.Redis
) -> None:
    write(tier, arena, 1)
    name = manifest_name("cachesmith", KEY)
    client.set(name, as_of_another_kind(client.get(name)))
    assert lookup(tier, 1) == [None]
    assert misses(tier) == {Miss.FOREIGN: 1}
    assert tier.flush(LONG_MS)
    assert client.dbsize() == 1 + LAYOUT.num_layers


def test_a_large_value_of_others_in_the_place_of_a_manifest(
    server: RedisServer, arena: Arena, client: redis.Redis
) -> None:
    client.set(manifest_name("cachesmith", KEY), bytes((1 << 24) + 1))
    with open_tier(server.url, arena, breaker_failures=1) as tier:
        for _ in range(3):
            assert lookup(tier, 1) == [None]
        assert misses(tier) == {Miss.FOREIGN: 3}
        assert tier.flush(LONG_MS)
        assert client.dbsize() == 1


def test_arena_bytes_that_are_damaged_are_not_written(
    tier: RedisTier, arena: Arena, client: redis.Redis
) -> None:
    place = arena.fill(1)
    arena.entry(place).layer(2)[5] ^= 1
    assert offer(tier, place, 1)
    assert tier.flush(LONG_MS)
    assert counted(tier, Count.WRITES_DAMAGED) == 1
    assert client.dbsize() == 0
