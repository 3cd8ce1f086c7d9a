"""An operator beside serving: leases, backlogs, Redis that is away, and two at a time."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_tier.redis import Count
from replicas.cache_admin import CacheAdmin
from replicas.cache_types import CacheUnavailableError, VerificationRunningError
from tests.kv_tier.redis.cases import LONG_MS, query
from tests.kv_tier.redis.servers import RedisServer
from tests.replicas.cache_cases import NodeStore, chunk_id


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeStore]:
    opened = NodeStore(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as started:
        yield started


async def test_a_model_without_reuse_has_an_empty_store():
    cache = CacheAdmin(None)
    assert (await cache.stats()).tiers.host is None
    assert (await cache.entries("host", 5)).entries == ()
    assert await cache.discard("x") is False
    assert await cache.clear_host() == 0
    assert (await cache.verify("host", repair=True)).num_checked == 0


async def test_an_entry_that_is_read_stays_until_its_reader_is_done(node: NodeStore):
    node.put(1)
    (lease,) = node.tier.lookup([query(1)])
    assert lease is not None
    assert await node.cache.discard(chunk_id(1))
    assert node.in_host([1]) == set() and node.tier.stats().num_retired == 1
    node.tier.release([lease])
    assert node.tier.stats().used_bytes == 0


async def test_clearing_also_ends_what_is_being_written(node: NodeStore):
    node.put(1)
    reservation = node.tier.reserve(query(2).key, query(2).token_ids, content_id=chunk_id(2))
    assert reservation is not None
    assert await node.cache.clear_host() == 1
    assert not node.tier.commit(reservation)
    assert node.tier.stats().used_bytes == 0


async def test_one_verification_at_a_time_and_it_says_how_far_it_is(node: NodeStore):
    node.put(*range(1, 21))
    first = asyncio.ensure_future(node.cache.verify("host", repair=False))
    await asyncio.sleep(0)
    with pytest.raises(VerificationRunningError):
        await node.cache.verify("host", repair=False)
    seen = []
    while not first.done():
        seen.append((await node.cache.stats()).verifying)
    assert any(now is not None and now.num_entries == 20 for now in seen)
    assert (await first).num_checked == 20
    assert (await node.cache.stats()).verifying is None


async def test_a_cancelled_verification_leaves_no_lease(node: NodeStore):
    node.put(*range(1, 21))
    running = asyncio.ensure_future(node.cache.verify("host", repair=False))
    await asyncio.sleep(0.005)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0.05)  # the step that was under way
    assert node.tier.stats().num_leases == 0
    assert (await node.cache.verify("host", repair=False)).num_checked == 20


async def test_a_closed_store_is_an_error_that_says_so(tmp_path: Path):
    node = NodeStore(tmp_path)
    node.close()
    for asked in (node.cache.stats(), node.cache.discard("x"), node.cache.clear_host()):
        with pytest.raises(CacheUnavailableError, match="closed"):
            await asked


async def test_redis_that_is_away_is_an_error_without_its_password(tmp_path: Path):
    url = "redis://user:secret@127.0.0.1:9/0"
    node = NodeStore(tmp_path, url, connect_deadline_ms=200.0)
    node.put(1)
    for asked in (
        node.cache.remove_from_redis(chunk_id(1)),
        node.cache.clear_redis(),
        node.cache.stats(redis_keys=True),
        node.cache.verify("redis", repair=False),
    ):
        with pytest.raises(CacheUnavailableError) as error:
            await asked
        assert "secret" not in str(error.value)
    assert (await node.cache.stats()).tiers.host is not None  # the rest works
    assert (await node.cache.verify("host", repair=False)).num_checked == 1
    node.close()


@pytest.mark.redis
async def test_what_waits_to_be_written_is_not_written_after_a_discard(
    tmp_path: Path, server: RedisServer
):
    node = NodeStore(tmp_path / "arena", server.url, write_deadline_ms=2000.0)
    assert node.remote is not None
    node.put(1, 2, 3)
    node.put_in_redis(3)  # so that the connection stands
    server.pause()
    assert node.write_behind(1) and node.write_behind(2)  # one is under way, the other waits
    discarding = [asyncio.ensure_future(node.cache.discard(chunk_id(i))) for i in (1, 2)]
    await asyncio.wait(discarding[1:])
    server.resume()
    assert all([await one for one in discarding])
    for chunk in (1, 2):  # one that was written before its turn came
        await node.cache.remove_from_redis(chunk_id(chunk))
    assert node.remote.flush(LONG_MS)
    assert node.in_redis([1, 2, 3]) == {3}
    assert node.tier.stats().num_leases == 0
    assert node.remote.stats().counts[Count.WRITES_DROPPED] >= 1
    node.close()


@pytest.mark.redis
async def test_a_given_up_verification_of_redis_stops_and_another_may_start(
    tmp_path: Path, server: RedisServer
):
    node = NodeStore(tmp_path / "arena", server.url)
    node.put_in_redis(*range(1, 9))
    running = asyncio.ensure_future(node.cache.verify("redis", repair=False))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    report = await node.cache.verify("redis", repair=False)
    assert (report.num_checked, report.damaged) == (8, ())
    node.close()
