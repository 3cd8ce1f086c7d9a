"""A replica that leaves hands its node's chunks to Redis: hottest first, while it may."""

import fcntl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_tier import ArenaView, HostTier
from kv_tier.arena_dir import ArenaDir
from kv_tier.redis import ChunkWrite, Count, Promoter, RedisTier
from planner import MonotonicClock
from replicas.handover import hand_over, hottest_first
from replicas.remote_chunks import RemoteChunks
from tests.kv_tier.arena_cases import (
    LAYOUT,
    holds,
    key_of,
    open_tier,
    query,
    reserve,
    tokens_of,
    write_heads,
)
from tests.kv_tier.redis import cases
from tests.kv_tier.redis.cases import LONG_MS, counted
from tests.kv_tier.redis.servers import RedisServer, eventually, running_redis

pytestmark = pytest.mark.redis

NUM_CHUNKS = 6


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as started:
        yield started


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostTier]:
    with open_tier(tmp_path / "arena", num_granules=16) as opened:
        view = ArenaView(opened.config.directory, LAYOUT)
        for chunk in range(NUM_CHUNKS):
            reservation = reserve(opened, chunk, recompute_ms=chunk + 1.0)
            assert reservation is not None
            write_heads(view, reservation.location, chunk, 0, LAYOUT.num_kv_heads)
            assert opened.commit(reservation)
        yield opened


def open_redis(server: RedisServer, host: HostTier, **changes: object) -> RedisTier:
    view = ArenaView(host.config.directory, LAYOUT)
    memory = memoryview(view.mapping.numpy())
    return RedisTier(cases.config(server.url, **changes), LAYOUT, memory)


def use(host: HostTier, *chunks: int) -> None:
    for chunk in chunks:
        host.release([lease for lease in host.lookup([query(chunk)]) if lease is not None])


def found(tier: RedisTier) -> list[int]:
    manifests = tier.lookup([query(chunk) for chunk in range(NUM_CHUNKS)])
    return [chunk for chunk, manifest in enumerate(manifests) if manifest is not None]


def test_what_redis_lacks_goes_there_whole(server: RedisServer, host: HostTier):
    with open_redis(server, host) as tier:
        first = hand_over(host, tier, timeout_ms=LONG_MS)
        assert (first.num_offered, first.num_left, first.is_flushed) == (NUM_CHUNKS, 0, True)
        assert counted(tier, Count.CHUNKS_WRITTEN) == NUM_CHUNKS
        manifests = tier.lookup([query(chunk) for chunk in range(NUM_CHUNKS)])
        for chunk, manifest in enumerate(manifests):  # the lookup has compared the tokens
            assert manifest is not None and manifest.key == key_of(chunk)
            assert manifest.content_id == f"chunk-{chunk}"
            assert manifest.recompute_ms == chunk + 1.0
        # what is there is not written again
        hand_over(host, tier, timeout_ms=LONG_MS)
        assert counted(tier, Count.CHUNKS_WRITTEN) == NUM_CHUNKS
        assert counted(tier, Count.WRITES_NOT_NEEDED) == NUM_CHUNKS
    assert host.stats().num_leases == 0


def test_a_chunk_comes_back_from_redis_as_it_was(
    server: RedisServer, host: HostTier, tmp_path: Path
):
    with open_redis(server, host) as tier:
        hand_over(host, tier, timeout_ms=LONG_MS)
    with open_tier(tmp_path / "another", num_granules=16) as other:
        view = ArenaView(other.config.directory, LAYOUT)
        with open_redis(server, other) as tier:
            promoter = Promoter(other, tier, view)
            layers = range(LAYOUT.num_layers)
            (arriving,) = promoter.promote([query(3)], layers, deadline_ms=LONG_MS)
            assert arriving is not None
            eventually(lambda: other.contains([key_of(3)])[0])
            assert holds(view, arriving.location, 3, 0, LAYOUT.num_kv_heads)
            arriving.release()
            promoter.close()


def test_the_hottest_go_first(host: HostTier):
    use(host, 4, 4, 1, 4, 1, 5)
    order = [entry.key for entry in hottest_first(host.entries())]
    assert order[:3] == [key_of(4), key_of(1), key_of(5)]
    # of those that were used equally often, the one that was last
    assert order[3:] == [key_of(3), key_of(2), key_of(0)]


def test_a_backlog_is_written_before_anything_else(
    server: RedisServer,
    host: HostTier,
):
    with open_redis(server, host) as tier:
        server.pause()
        held = host.hold(key_of(2))
        assert held is not None
        tier.write_behind(
            ChunkWrite(
                location=held.location,
                token_ids=tokens_of(2),
                release=lambda: host.release([held]),
            )
        )
        server.resume()
        hand_over(host, tier, timeout_ms=LONG_MS)
        assert found(tier) == list(range(NUM_CHUNKS))
        assert tier.stats().num_backlog == 0


def test_a_redis_that_hangs_keeps_nobody(server: RedisServer, host: HostTier):
    with open_redis(server, host, write_deadline_ms=300.0) as tier:
        server.pause()
        done = threading.Event()

        def run() -> None:
            handed = hand_over(host, tier, timeout_ms=200.0)
            assert handed.num_offered <= 1 and handed.num_left >= NUM_CHUNKS - 1
            done.set()

        thread = threading.Thread(target=run)
        thread.start()
        assert done.wait(30.0)
        thread.join()
        server.resume()
    assert host.stats().num_leases == 0


def test_a_redis_that_is_away_is_no_error(host: HostTier):
    config = cases.config("redis://127.0.0.1:1", connect_deadline_ms=100.0)
    view = ArenaView(host.config.directory, LAYOUT)
    with RedisTier(config, LAYOUT, memoryview(view.mapping.numpy())) as tier:
        assert hand_over(host, tier, timeout_ms=LONG_MS).is_flushed
        assert counted(tier, Count.CHUNKS_WRITTEN) == 0
    assert host.stats().num_leases == 0


def test_one_replica_of_a_node_copies_at_a_time(
    server: RedisServer,
    host: HostTier,
):
    with open_redis(server, host) as tier:
        with ArenaDir(host.config.directory).handover.open("wb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            assert hand_over(host, tier, timeout_ms=100.0).num_offered == 0
        assert hand_over(host, tier, timeout_ms=LONG_MS).num_offered == NUM_CHUNKS


def test_the_arena_can_be_removed_afterwards(
    server: RedisServer,
    host: HostTier,
):
    with open_redis(server, host) as tier:
        hand_over(host, tier, timeout_ms=LONG_MS)
    directory = host.config.directory
    host.close()
    HostTier.destroy(directory)
    assert not directory.exists()


def test_an_engines_second_level_hands_over_what_it_was_still_to_keep(
    server: RedisServer, host: HostTier
):
    remote = RemoteChunks(
        cases.config(server.url), host, cases.SPACE, MonotonicClock(), max_lookups=2
    )
    server.pause()
    remote.keep(query(2), recompute_ms=5.0, content_id="chunk-2")
    server.resume()
    handed = remote.hand_over(LONG_MS)
    assert (handed.num_left, handed.is_flushed) == (0, True)
    assert found(remote.tier) == list(range(NUM_CHUNKS))
    remote.close()
    assert host.stats().num_leases == 0
