"""The contract of `CacheOperations`: the fake, an arena, an arena and Redis."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from replicas.cache_types import NoRedisTierError
from tests.kv_tier.redis.cases import LAYOUT, NUM_TOKENS
from tests.kv_tier.redis.servers import RedisServer
from tests.replicas.cache_cases import FakeStore, NodeStore, StoreCase, chunk_id

ALL = range(1, 6)
REDIS = pytest.param("redis", marks=pytest.mark.redis)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreCase]:
    """By name: `fake` and `redis` have a Redis tier, `fake alone` and `arena` have none."""
    if request.param.startswith("fake"):
        yield FakeStore(has_redis=request.param == "fake")
    elif request.param == "arena":
        node = NodeStore(tmp_path / "arena")
        yield node
        node.close()
    else:
        with RedisServer(tmp_path / "redis") as server:
            node = NodeStore(tmp_path / "arena", server.url)
            yield node
            node.close()


every_store = pytest.mark.parametrize(
    "store", ["fake", "fake alone", "arena", REDIS], indirect=True
)
with_redis = pytest.mark.parametrize("store", ["fake", REDIS], indirect=True)
without_redis = pytest.mark.parametrize("store", ["fake alone", "arena"], indirect=True)


@every_store
async def test_stats_say_what_the_host_tier_holds(store: StoreCase):
    store.put(1, 2)
    stats = await store.cache.stats()
    assert stats.tiers.host is not None
    assert stats.tiers.host.num_entries == 2
    assert stats.tiers.host.used_bytes >= 2 * LAYOUT.entry_bytes(NUM_TOKENS)
    assert (stats.keys, stats.verifying) == (None, None)
    assert store.cache.report() == stats.tiers


@every_store
async def test_host_entries_come_last_used_first(store: StoreCase):
    store.put(1, 2, 3)
    page = await store.cache.entries("host", 2)
    assert [entry.content_id for entry in page.entries] == [chunk_id(3), chunk_id(2)]
    assert page.has_more
    first = page.entries[0]
    assert (first.num_tokens, first.recompute_ms, first.num_leases) == (NUM_TOKENS, 1.5, 0)
    assert (first.uses, first.is_whole) == (1, True)
    assert not (await store.cache.entries("host", 3)).has_more


@every_store
async def test_a_discarded_chunk_is_gone_from_the_host_tier(store: StoreCase):
    store.put(1, 2)
    assert await store.cache.discard(chunk_id(1)) is True
    assert await store.cache.discard(chunk_id(1)) is False
    assert store.in_host(ALL) == {2}


@every_store
async def test_clearing_the_host_tier(store: StoreCase):
    store.put(*ALL)
    assert await store.cache.clear_host() == len(ALL)
    assert await store.cache.clear_host() == 0
    assert store.in_host(ALL) == set()


@every_store
async def test_verifying_the_host_tier(store: StoreCase):
    store.put(1, 2, 3)
    sound = await store.cache.verify("host", repair=True)
    assert (sound.num_checked, sound.damaged, sound.num_removed) == (3, (), 0)
    store.damage(2)
    report = await store.cache.verify("host", repair=False)
    (damaged,) = report.damaged
    assert (damaged.content_id, damaged.reason) == (chunk_id(2), "corrupt")
    assert (report.num_checked, report.num_removed, report.index_problems) == (3, 0, ())
    assert store.in_host(ALL) == {1, 2, 3}
    repaired = await store.cache.verify("host", repair=True)
    assert (len(repaired.damaged), repaired.num_removed) == (1, 1)
    assert store.in_host(ALL) == {1, 3}


@without_redis
async def test_without_redis_there_is_nothing_to_remove_and_nothing_to_show(store: StoreCase):
    assert store.cache.report().redis is None
    assert await store.cache.remove_from_redis(chunk_id(1)) is False
    assert await store.cache.drop_backlog() == 0
    for asked in (
        store.cache.stats(redis_keys=True),
        store.cache.entries("redis", 1),
        store.cache.clear_redis(),
        store.cache.verify("redis", repair=False),
    ):
        with pytest.raises(NoRedisTierError):
            await asked


@with_redis
async def test_redis_is_shown(store: StoreCase):
    store.put_in_redis(1, 2)
    stats = await store.cache.stats(redis_keys=True)
    assert stats.tiers.redis is not None and "lookup_hits" in stats.tiers.redis.counts
    assert stats.keys is not None
    assert (stats.keys.num_chunks, stats.keys.num_tokens) == (2, 2 * NUM_TOKENS)
    page = await store.cache.entries("redis", 2)
    assert {entry.content_id for entry in page.entries} == {chunk_id(1), chunk_id(2)}
    assert not page.has_more and (await store.cache.entries("redis", 1)).has_more
    assert page.entries[0].recompute_ms == 1.5 and page.entries[0].uses is None


@with_redis
async def test_tiers_are_emptied_apart(store: StoreCase):
    store.put(1, 2)
    store.put_in_redis(1, 2)
    assert await store.cache.remove_from_redis(chunk_id(1)) is True
    assert await store.cache.remove_from_redis(chunk_id(1)) is False
    assert (store.in_host(ALL), store.in_redis(ALL)) == ({1, 2}, {2})
    await store.cache.clear_host()
    assert (store.in_host(ALL), store.in_redis(ALL)) == (set(), {2})
    assert await store.cache.clear_redis() > 0
    assert await store.cache.clear_redis() == 0
    assert store.in_redis(ALL) == set()


@with_redis
async def test_verifying_redis(store: StoreCase):
    store.put_in_redis(1, 2)
    assert (await store.cache.verify("redis", repair=True)).num_checked == 2
    store.damage_in_redis(1)
    report = await store.cache.verify("redis", repair=False)
    assert [damaged.reason for damaged in report.damaged] == ["corrupt"]
    assert (report.num_checked, report.num_removed) == (2, 0)
    assert (await store.cache.verify("redis", repair=True)).num_removed == 1
    assert store.in_redis(ALL) == {2}
