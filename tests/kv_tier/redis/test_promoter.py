"""From Redis to the arena of a node: once, whoever asks, and only whole chunks stay."""

import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kv_tier import ArenaView, ChunkQuery, HostTier
from kv_tier.redis import ChunkWrite, Miss, Promoter, Promotion, RemoteTier
from tests.fakes.memory_remote_tier import MemoryRemoteTier
from tests.kv_tier.arena_cases import (
    LAYOUT,
    holds,
    key_of,
    open_tier,
    query,
    reserve,
    resident,
    tokens_of,
    write_heads,
)
from tests.kv_tier.redis import cases
from tests.kv_tier.redis.cases import LONG_MS, misses
from tests.kv_tier.redis.servers import RedisServer, eventually

LAYERS = range(LAYOUT.num_layers)
HEADS = (0, LAYOUT.num_kv_heads)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostTier]:
    with open_tier(tmp_path, num_granules=16) as opened:
        yield opened


@pytest.fixture
def view(host: HostTier) -> ArenaView:
    return ArenaView(host.config.directory, LAYOUT)


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
def remote(request: pytest.FixtureRequest, view: ArenaView) -> Iterator[RemoteTier]:
    arena = memoryview(view.mapping.numpy())
    if request.param == "memory":
        yield MemoryRemoteTier(LAYOUT, arena)
        return
    from kv_tier.redis import RedisTier

    server = request.getfixturevalue("server")
    with RedisTier(cases.config(server.url), LAYOUT, arena) as tier:
        yield tier


def store(host: HostTier, view: ArenaView, remote: RemoteTier, *chunks: int) -> None:
    """Compute chunks, copy them to the second level, and forget them here."""
    for chunk in chunks:
        reservation = reserve(host, chunk)
        assert reservation is not None
        write_heads(view, reservation.location, chunk, *HEADS)
        assert host.commit(reservation)
        (lease,) = host.lookup([query(chunk)])
        assert lease is not None
        remote.write_behind(
            ChunkWrite(
                location=lease.location,
                token_ids=tokens_of(chunk),
                recompute_ms=7.0,
                content_id=f"chunk-{chunk}",
                release=lambda lease=lease: host.release([lease]),
            )
        )
    assert remote.flush(LONG_MS)
    host.clear()
    assert host.stats().used_bytes == 0
    view.mapping.zero_()


def promote(host: HostTier, remote: RemoteTier, *chunks: int) -> list[Promotion | None]:
    wanted = [query(chunk) for chunk in chunks]
    return Promoter(host, remote).promote(wanted, LAYERS, deadline_ms=LONG_MS)


def test_chunks_come_from_redis_and_stay(
    host: HostTier, view: ArenaView, remote: RemoteTier
) -> None:
    store(host, view, remote, 1, 2)
    found = promote(host, remote, 1, 3, 2, 1)
    first, absent, second, again = found
    assert absent is None and first is not None and second is not None
    assert again is first  # wanted twice, fetched once
    for layer in LAYERS:
        assert first.wait_layer(layer) and second.wait_layer(layer)
    assert not first.was_resident
    assert holds(view, first.location, 1, *HEADS) and holds(view, second.location, 2, *HEADS)
    assert resident(host, range(5)) == set()  # reserved until its readers are done
    for promotion in (first, second, first):
        promotion.finish()
    assert resident(host, range(5)) == {1, 2}
    (info,) = host.find("chunk-1")
    assert (info.recompute_ms, info.num_leases) == (7.0, 0)
    assert host.stats().num_reservations == 0
    assert host.check_integrity() == []


def test_what_is_resident_is_leased(host: HostTier, view: ArenaView, remote: RemoteTier) -> None:
    store(host, view, remote, 1)
    for was_resident in (False, True):
        (promotion,) = promote(host, remote, 1)
        assert promotion is not None and promotion.was_resident is was_resident
        assert promotion.wait_layer(0) and promotion.wait_layer(1)
        assert host.stats().num_leases == was_resident
        promotion.finish()
    assert host.stats().num_leases == 0


def test_a_chunk_that_misses_leaves_no_space_taken(
    host: HostTier, view: ArenaView, remote: RemoteTier
) -> None:
    store(host, view, remote, 1)
    (promotion,) = Promoter(host, remote).promote([query(1)], LAYERS, deadline_ms=0.0)
    assert promotion is not None
    assert not promotion.wait_layer(1)
    assert promotion.has_missed
    assert host.stats().num_reservations == 1
    promotion.finish()
    eventually(lambda: host.stats().num_reservations == 0)
    assert host.stats().used_bytes == 0
    assert misses(remote) == {Miss.DEADLINE: 1}


def test_layers_that_can_not_be_leave_no_space_taken(
    host: HostTier, view: ArenaView, remote: RemoteTier
) -> None:
    store(host, view, remote, 1)
    with pytest.raises(ValueError, match="layers"):
        Promoter(host, remote).promote([query(1)], [0, 0], deadline_ms=LONG_MS)
    assert host.stats().num_reservations == 0


def test_no_room_is_a_miss(host: HostTier, view: ArenaView, remote: RemoteTier) -> None:
    store(host, view, remote, 1)
    kept = [reserve(host, 100 + i, 1) for i in range(16)]
    assert None not in kept
    assert promote(host, remote, 1) == [None]


def test_a_chunk_that_another_process_fetches_is_waited_for(
    host: HostTier, view: ArenaView, remote: RemoteTier
) -> None:
    store(host, view, remote, 1)
    (first,) = promote(host, remote, 1)
    assert first is not None
    with open_tier(host.config.directory, num_granules=16) as other:
        assert promote(other, remote, 1) == [None]  # no time to wait
        first.wait_layer(1)
        timer = threading.Timer(0.05, first.finish)
        timer.start()
        (second,) = Promoter(other, remote).promote(
            [query(1)], LAYERS, deadline_ms=LONG_MS, wait_ms=LONG_MS
        )
        timer.join()
        assert second is not None and second.was_resident
        assert second.location == first.location
        second.finish()


def promote_in_a_process(directory: Path, url: str, results: "multiprocessing.Queue[int]") -> None:
    """Fetch the chunks, or wait for those who do; how many layers were read here."""
    from kv_tier.redis import Count, RedisTier

    torch.set_num_threads(1)
    with open_tier(directory, num_granules=16) as host:
        view = ArenaView(directory, LAYOUT)
        with RedisTier(cases.config(url), LAYOUT, memoryview(view.mapping.numpy())) as remote:
            found = Promoter(host, remote).promote(
                [query(chunk) for chunk in range(1, 6)],
                LAYERS,
                deadline_ms=LONG_MS,
                wait_ms=0.0,
            )
            for chunk, promotion in enumerate(found, start=1):
                if promotion is None:
                    continue
                assert promotion.wait_layer(LAYERS[-1])
                assert promotion.fetch is None or promotion.fetch.wait_quiet()
                assert holds(view, promotion.location, chunk, *HEADS)
                promotion.finish()
            results.put(remote.stats().counts[Count.LAYERS_READ])


@pytest.mark.redis
def test_two_processes_of_a_node_fetch_once(
    host: HostTier, view: ArenaView, server: RedisServer
) -> None:
    from kv_tier.redis import RedisTier

    arena = memoryview(view.mapping.numpy())
    with RedisTier(cases.config(server.url), LAYOUT, arena) as remote:
        store(host, view, remote, 1, 2, 3, 4, 5)
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[int] = context.Queue()
    arguments = (host.config.directory, server.url, results)
    processes = [context.Process(target=promote_in_a_process, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    num_read = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sum(num_read) == 5 * LAYOUT.num_layers
    assert resident(host, range(6)) == {1, 2, 3, 4, 5}
    assert host.check_integrity() == []


def test_a_key_of_other_tokens_is_a_miss(
    host: HostTier, view: ArenaView, remote: RemoteTier
) -> None:
    store(host, view, remote, 1)
    collision = ChunkQuery(key=key_of(1), token_ids=tokens_of(2))
    (found,) = Promoter(host, remote).promote([collision], LAYERS, deadline_ms=LONG_MS)
    assert found is None
    assert misses(remote) == {Miss.COLLISION: 1}
    both = [query(1), collision, query(1)]
    first, other, again = Promoter(host, remote).promote(both, LAYERS, deadline_ms=LONG_MS)
    assert first is again is not None and other is None
    first.finish()
