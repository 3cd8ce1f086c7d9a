"""What an operator sees and removes: our keys, and nobody else's."""

from collections.abc import Iterator

import pytest
import redis

from kv_tier.redis import Miss, RedisTier, operations
from kv_tier.redis.values import layer_name, manifest_name
from tests.kv_tier.redis.cases import (
    LAYOUT,
    NUM_TOKENS,
    Arena,
    as_of_another_kind,
    lookup,
    open_tier,
    query,
    write,
)
from tests.kv_tier.redis.servers import RedisServer

pytestmark = pytest.mark.redis

PREFIX = "cachesmith"
NUM_OTHERS = 10_000
OLD = b"cachesmith:v0:{%s}:0" % query(7).key.hex().encode()
KEYS_A_CHUNK = 1 + LAYOUT.num_layers


@pytest.fixture
def others(server: RedisServer) -> Iterator[dict[bytes, bytes]]:
    """Keys of other people, some of them close to ours; all still there at the end."""
    client = server.client()
    names = [b"cart:%d" % i for i in range(NUM_OTHERS)]
    names += [b"cachesmith", b"cachesmith2:v1:{x}:0", b"cachesmit:1", b"xcachesmith:v1:1"]
    names += [b"cachesmith:sessions:%d" % i for i in range(NUM_OTHERS)]
    names += [b"cachesmith:v0:{old}:0", b"cachesmith:v0:{%s}:0" % (b"z" * 64), OLD + b"x"]
    keys = {name: name for name in names}
    client.mset(keys)
    yield keys
    assert dict(zip(names, client.mget(names), strict=True)) == keys


def test_ls_and_stats(tier: RedisTier, arena: Arena, others: dict[bytes, bytes]) -> None:
    write(tier, arena, 1, 2, 3)
    client = tier.client()
    found = {chunk.manifest.key: chunk for chunk in operations.ls(client, PREFIX)}
    assert set(found) == {query(chunk).key for chunk in (1, 2, 3)}
    first = found[query(1).key]
    assert first.is_whole and first.ttl_s is None
    assert first.manifest.content_id == "chunk-1"
    assert first.nbytes == LAYOUT.num_layers * first.manifest.shape.value_bytes
    stats = operations.stats(client, PREFIX)
    assert (stats.num_chunks, stats.num_keys) == (3, 3 * KEYS_A_CHUNK)
    assert stats.num_tokens == 3 * NUM_TOKENS
    assert stats.nbytes > 3 * first.nbytes


def test_rm(tier: RedisTier, arena: Arena, others: dict[bytes, bytes]) -> None:
    write(tier, arena, 1, 2)
    client = tier.client()
    assert operations.rm(client, PREFIX, content_id="chunk-9") == 0
    assert operations.rm(client, PREFIX, content_id="chunk-1") == 1
    assert operations.remove_chunk(client, PREFIX, query(1).key) == 0
    assert [one is None for one in lookup(tier, 1, 2)] == [True, False]
    client.delete(manifest_name(PREFIX, query(2).key))
    assert operations.remove_chunk(client, PREFIX, query(2).key) == LAYOUT.num_layers


def test_clear(server: RedisServer, arena: Arena, others: dict[bytes, bytes]) -> None:
    with (
        open_tier(server.url, arena) as tier,
        open_tier(server.url, arena, key_prefix="cachesmith:b") as nested,
        open_tier(server.url, arena, key_prefix="team") as other,
    ):
        for opened in (tier, nested, other):
            write(opened, arena, 1)
        server.client().set(OLD, "x")
        assert operations.clear(nested.client(), "cachesmith:b") == KEYS_A_CHUNK
        assert operations.clear(tier.client(), PREFIX) == KEYS_A_CHUNK + 1
        assert operations.clear(tier.client(), PREFIX) == 0
        assert lookup(other, 1) != [None]


def test_a_chunk_is_removed_with_what_other_versions_have_of_it(
    tier: RedisTier, arena: Arena, others: dict[bytes, bytes]
) -> None:
    write(tier, arena, 7)
    client = tier.client()
    client.set(OLD, "x")
    assert operations.remove_chunk(client, PREFIX, query(7).key) == KEYS_A_CHUNK + 1


@pytest.mark.parametrize("prefix", ["", "*", "cache?mith", "a b", "{x}"])
def test_a_prefix_that_can_not_be(tier: RedisTier, prefix: str) -> None:
    for run in (operations.clear, operations.stats):
        with pytest.raises(ValueError, match="key_prefix"):
            run(tier.client(), prefix)


def test_no_content_id_is_not_that_of_all_who_have_none(tier: RedisTier) -> None:
    with pytest.raises(ValueError, match="content_id"):
        operations.rm(tier.client(), PREFIX, content_id="")


class RepeatingClient:
    """SCAN may name a key twice."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)

    def scan_iter(self, **options: object) -> list[bytes]:
        return 2 * list(self._client.scan_iter(**options))


def test_a_chunk_is_listed_and_counted_once(tier: RedisTier, arena: Arena) -> None:
    write(tier, arena, 1)
    client = RepeatingClient(tier.client())
    assert len(list(operations.ls(client, PREFIX))) == 1
    assert operations.stats(client, PREFIX).num_keys == KEYS_A_CHUNK


def test_a_manifest_of_an_unknown_kind_is_reported_and_kept(tier: RedisTier, arena: Arena) -> None:
    write(tier, arena, 1)
    client = tier.client()
    name = manifest_name(PREFIX, query(1).key)
    client.set(name, as_of_another_kind(client.get(name)))
    (problem,) = operations.verify(client, PREFIX, repair=True)
    assert problem.reason is Miss.FOREIGN
    assert operations.stats(client, PREFIX).num_keys == KEYS_A_CHUNK


def test_verify_and_repair(tier: RedisTier, arena: Arena, others: dict[bytes, bytes]) -> None:
    write(tier, arena, 1, 2, 3, 4, 5)
    client = tier.client()
    assert operations.verify(client, PREFIX) == []
    _damage(client)
    problems = {p.key: (p.reason, p.layer) for p in operations.verify(client, PREFIX)}
    assert problems == {
        query(1).key: (Miss.CORRUPT, 2),
        query(2).key: (Miss.MISSING, 0),
        query(3).key: (Miss.ABSENT, None),
        query(4).key: (Miss.TRUNCATED, None),
    }
    assert len(operations.verify(client, PREFIX, repair=True)) == 4
    assert operations.verify(client, PREFIX) == []
    assert [one is None for one in lookup(tier, 1, 2, 3, 4, 5)] == [True] * 4 + [False]
    assert operations.stats(client, PREFIX).num_keys == KEYS_A_CHUNK


def test_a_verification_says_how_far_it_is_and_can_be_stopped(
    tier: RedisTier, arena: Arena
) -> None:
    write(tier, arena, 1, 2)
    told: list[tuple[int, int]] = []
    operations.verify(tier.client(), PREFIX, on_chunk=lambda *now: told.append(now))
    assert told == [(0, 2), (1, 2), (2, 2)]

    def stop(num_checked: int, num_chunks: int) -> None:
        if num_checked:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        operations.verify(tier.client(), PREFIX, on_chunk=stop)


def _damage(client: redis.Redis) -> None:
    """A bit of the first chunk, a layer of the second, two manifests."""
    name = layer_name(PREFIX, query(1).key, 2)
    value = bytearray(client.get(name))
    value[-1] ^= 1
    client.set(name, bytes(value))
    client.delete(layer_name(PREFIX, query(2).key, 0))
    client.delete(manifest_name(PREFIX, query(3).key))
    client.set(manifest_name(PREFIX, query(4).key), b"CSMITHMF")
