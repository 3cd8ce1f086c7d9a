"""From Redis to the arena of a node: once, whoever asks, and only whole chunks stay."""

import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_tier import ArenaUnavailableError, ArenaView, ChunkQuery, HostTier, Reservation
from kv_tier.arrival import Arrival
from kv_tier.redis import (
    ArrivingChunk,
    ChunkWrite,
    Count,
    Fetch,
    LinkLimit,
    Manifest,
    Miss,
    Promoter,
    RedisTier,
    RemoteTier,
)
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
SLOW = LinkLimit(latency_ms=50.0)


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
    eventually(lambda: host.stats().used_bytes == 0)
    view.mapping.zero_()


def promote(
    host: HostTier, view: ArenaView, remote: RemoteTier, *chunks: int
) -> list[ArrivingChunk | None]:
    wanted = [query(chunk) for chunk in chunks]
    return Promoter(host, remote, view).promote(wanted, LAYERS, deadline_ms=LONG_MS)


def wait_whole(view: ArenaView, *arriving: ArrivingChunk | None) -> None:
    for chunk in arriving:
        assert chunk is not None
        eventually(lambda chunk=chunk: view.arrival(chunk.location) is Arrival.WHOLE)


def test_chunks_come_from_redis_and_stay(
    host: HostTier, view: ArenaView, remote: RemoteTier
) -> None:
    store(host, view, remote, 1, 2)
    found = promote(host, view, remote, 1, 3, 2, 1)
    first, absent, second, again = found
    assert absent is None and first is not None and second is not None
    assert again is first  # wanted twice, fetched once
    wait_whole(view, first, second)
    assert holds(view, first.location, 1, *HEADS) and holds(view, second.location, 2, *HEADS)
    eventually(lambda: resident(host, range(5)) == {1, 2})
    assert host.stats().num_leases == 2  # of those who read them
    for chunk in (first, second, first):
        chunk.release()
    eventually(lambda: host.stats().num_leases == 0)
    (info,) = host.find("chunk-1")
    assert (info.recompute_ms, info.num_leases) == (7.0, 0)
    assert host.stats().num_reservations == 0
    assert host.check_integrity() == []


def test_what_is_resident_is_not_fetched(
    host: HostTier, view: ArenaView, remote: RemoteTier
) -> None:
    store(host, view, remote, 1)
    (chunk,) = promote(host, view, remote, 1)
    wait_whole(view, chunk)
    eventually(lambda: resident(host, [1]) == {1})
    chunk.release()
    assert promote(host, view, remote, 1) == [None]
    eventually(lambda: host.stats().num_leases == 0)
    assert remote.stats().counts[Count.CHUNKS_READ] == 1


def test_a_chunk_that_misses_leaves_no_space_taken(
    host: HostTier, view: ArenaView, remote: RemoteTier
) -> None:
    store(host, view, remote, 1)
    (chunk,) = Promoter(host, remote, view).promote([query(1)], LAYERS, deadline_ms=0.0)
    assert chunk is not None
    eventually(lambda: view.arrival(chunk.location) is Arrival.GONE)
    eventually(lambda: host.stats().num_reservations == 0)
    assert host.stats().used_bytes > 0  # its reader may still be at it
    (again,) = promote(host, view, remote, 1)  # its key is free
    wait_whole(view, again)
    assert again.location.offset != chunk.location.offset
    assert holds(view, again.location, 1, *HEADS)
    chunk.release()
    again.release()
    eventually(lambda: host.stats().num_leases == host.stats().num_retired == 0)
    assert resident(host, range(3)) == {1}
    assert misses(remote) == {Miss.DEADLINE: 1}
    assert host.check_integrity() == []


def test_a_hold_that_can_not_be_ended_is_ended_with_the_next(
    host: HostTier, view: ArenaView, remote: RemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(host, view, remote, 1, 2)
    promoter = Promoter(host, remote, view)
    with monkeypatch.context() as patch:
        patch.setattr(host, "commit", locked)
        (first,) = promoter.promote([query(1)], LAYERS, deadline_ms=LONG_MS)
        wait_whole(view, first)
        first.release()
        eventually(lambda: host.stats().num_leases == 0)
        assert host.stats().num_reservations == 1
    (second,) = promoter.promote([query(2)], LAYERS, deadline_ms=LONG_MS)
    second.release()
    eventually(lambda: host.stats().num_reservations == host.stats().num_leases == 0)
    eventually(lambda: resident(host, range(3)) == {1, 2})


def locked(_: object) -> bool:
    raise ArenaUnavailableError("the index is locked")


@pytest.mark.redis
def test_a_chunk_that_nobody_wants_any_more_is_not_kept(
    host: HostTier, view: ArenaView, server: RedisServer
) -> None:
    arena = memoryview(view.mapping.numpy())
    slow = LinkLimit(latency_ms=200.0)
    with RedisTier(cases.config(server.url, limit=slow), LAYOUT, arena) as remote:
        store(host, view, remote, 1)
        promoter = Promoter(host, remote, view)
        (first,) = promoter.promote([query(1)], LAYERS, deadline_ms=LONG_MS)
        (second,) = promoter.promote([query(1)], LAYERS, deadline_ms=LONG_MS)
        assert first is not None and second is not None and first is not second
        first.release(is_wanted=False)
        assert view.arrival(second.location) is not Arrival.GONE  # one reader is left
        second.release(is_wanted=False)
        eventually(lambda: host.stats().used_bytes == 0)
        assert misses(remote) == {Miss.CANCELLED: 1}
        assert resident(host, [1]) == set()


@pytest.mark.redis
def test_a_chunk_goes_on_arriving_behind_a_reader_that_is_done(
    host: HostTier, view: ArenaView, server: RedisServer
) -> None:
    arena = memoryview(view.mapping.numpy())
    with RedisTier(cases.config(server.url, limit=SLOW), LAYOUT, arena) as remote:
        store(host, view, remote, 1)
        promoter = Promoter(host, remote, view)
        (first,) = promoter.promote([query(1)], LAYERS, deadline_ms=LONG_MS)
        assert first is not None
        first.release()
        (second,) = promoter.promote([query(1)], LAYERS, deadline_ms=LONG_MS)
        wait_whole(view, second)
        eventually(lambda: resident(host, [1]) == {1})
        assert host.stats().num_leases == 1
        second.release()
        eventually(lambda: host.stats().num_leases == 0)
        assert remote.stats().counts[Count.CHUNKS_READ] == 1


def test_layers_that_can_not_be_leave_no_space_taken(
    host: HostTier, view: ArenaView, remote: RemoteTier
) -> None:
    store(host, view, remote, 1)
    with pytest.raises(ValueError, match="layers"):
        Promoter(host, remote, view).promote([query(1)], [0, 0], deadline_ms=LONG_MS)
    eventually(lambda: host.stats().used_bytes == 0)


@pytest.mark.parametrize("layers", [[0], [0, 0], [*LAYERS, 99]])
def test_an_entry_is_fetched_with_all_its_layers(
    host: HostTier, view: ArenaView, layers: list[int]
) -> None:
    remote = MemoryRemoteTier(LAYOUT, memoryview(view.mapping.numpy()))
    with pytest.raises(ValueError, match="layers"):
        Promoter(host, remote, view).promote([query(1)], layers, deadline_ms=LONG_MS)


class WatchedHost:
    """A host tier of which single calls are the test's."""

    def __init__(self, host: HostTier, **calls: object) -> None:
        self._host = host
        self.__dict__.update(calls)

    def __getattr__(self, name: str) -> object:
        return getattr(self._host, name)


def test_a_locked_index_holds_up_nobody_who_fetches(
    host: HostTier, view: ArenaView, remote: RemoteTier
) -> None:
    store(host, view, remote, 1)
    may_commit = threading.Event()

    def commit(reservation: Reservation) -> bool:
        assert may_commit.wait(60.0)
        return host.commit(reservation)

    promoter = Promoter(WatchedHost(host, commit=commit), remote, view)
    (chunk,) = promoter.promote([query(1)], LAYERS, deadline_ms=LONG_MS)
    wait_whole(view, chunk)
    remote.close()  # it waits for its readers
    may_commit.set()
    promoter.close()
    assert resident(host, [1]) == {1}
    chunk.release()


@pytest.mark.parametrize("failing", ["reserve", "lease_unfinished"])
def test_an_index_that_fails_half_way_leaves_no_space_taken(
    host: HostTier, view: ArenaView, remote: RemoteTier, failing: str
) -> None:
    store(host, view, remote, 1, 2)
    num_calls = 0

    def fail_later(*args: object, **options: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise ArenaUnavailableError("the index is locked")
        return getattr(host, failing)(*args, **options)

    promoter = Promoter(WatchedHost(host, **{failing: fail_later}), remote, view)
    with pytest.raises(ArenaUnavailableError):
        promoter.promote([query(1), query(2)], LAYERS, deadline_ms=LONG_MS)
    promoter.close()
    stats = host.stats()
    assert (stats.num_reservations, stats.num_leases, stats.used_bytes) == (0, 0, 0)
    assert host.check_integrity() == []


def test_the_deadline_is_that_of_lookup_and_fetch(host: HostTier, view: ArenaView) -> None:
    deadlines_ms: list[float] = []

    class Slow(MemoryRemoteTier):
        def lookup(self, wanted: Sequence[ChunkQuery]) -> list[Manifest | None]:
            found = super().lookup(wanted)
            time.sleep(0.02)
            return found

        def fetch(self, *args: Any, deadline_ms: float, **options: Any) -> Fetch:
            deadlines_ms.append(deadline_ms)
            return super().fetch(*args, deadline_ms=deadline_ms, **options)

    remote = Slow(LAYOUT, memoryview(view.mapping.numpy()))
    store(host, view, remote, 1)
    (chunk,) = promote(host, view, remote, 1)
    chunk.release()
    assert deadlines_ms[0] <= LONG_MS - 20.0


def test_no_room_is_a_miss(host: HostTier, view: ArenaView, remote: RemoteTier) -> None:
    store(host, view, remote, 1)
    kept = [reserve(host, 100 + i, 1) for i in range(16)]
    assert None not in kept
    assert promote(host, view, remote, 1) == [None]


def test_a_chunk_that_is_computed_meanwhile_is_a_miss(
    host: HostTier, view: ArenaView, remote: RemoteTier
) -> None:
    """Who computes it may have to wait for those who would wait for it."""
    store(host, view, remote, 1)
    reservation = reserve(host, 1)
    view.write_header(reservation.location)  # of an entry that was there before, the same chunk's
    assert promote(host, view, remote, 1) == [None]
    eventually(lambda: host.stats().num_leases == 0)


@pytest.mark.redis
def test_a_chunk_that_another_process_fetches_is_read_along(
    host: HostTier, view: ArenaView, server: RedisServer
) -> None:
    arena = memoryview(view.mapping.numpy())
    with RedisTier(cases.config(server.url, limit=SLOW), LAYOUT, arena) as remote:
        store(host, view, remote, 1)
        (first,) = promote(host, view, remote, 1)
        assert first is not None
        with open_tier(host.config.directory, num_granules=16) as other:
            (second,) = promote(other, view, remote, 1)
            assert second is not None and second.location == first.location
            first.release()
            eventually(lambda: view.has_arrived(second.location, 0, *HEADS))
            wait_whole(view, second)
            assert holds(view, second.location, 1, *HEADS)
            second.release()
        assert remote.stats().counts[Count.CHUNKS_READ] == 1
    eventually(lambda: host.stats().num_leases == 0)
    assert resident(host, [1]) == {1}


def test_threads_that_want_one_chunk_fetch_it_once(
    host: HostTier, view: ArenaView, remote: RemoteTier
) -> None:
    store(host, view, remote, 1, 2, 3)
    promoter = Promoter(host, remote, view)
    wanted = [query(chunk) for chunk in (1, 2, 3)]

    def bring(_: int) -> None:
        for chunk in promoter.promote(wanted, LAYERS, deadline_ms=LONG_MS):
            if chunk is not None:
                wait_whole(view, chunk)
                chunk.release()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(bring, range(32)))
    assert remote.stats().counts[Count.CHUNKS_READ] == 3
    assert misses(remote) == {}
    assert resident(host, range(5)) == {1, 2, 3}
    eventually(lambda: host.stats().num_leases == 0)


def promote_in_a_process(directory: Path, url: str, results: "multiprocessing.Queue[int]") -> None:
    """Fetch the chunks, or read along with who does; how many layers were read here."""
    torch.set_num_threads(1)
    with open_tier(directory, num_granules=16) as host:
        view = ArenaView(directory, LAYOUT)
        with RedisTier(cases.config(url), LAYOUT, memoryview(view.mapping.numpy())) as remote:
            found = promote(host, view, remote, 1, 2, 3, 4, 5)
            for number, chunk in enumerate(found, start=1):
                if chunk is not None:
                    wait_whole(view, chunk)
                    assert holds(view, chunk.location, number, *HEADS)
                    chunk.release()
            eventually(lambda: resident(host, range(6)) == {1, 2, 3, 4, 5})
            results.put(remote.stats().counts[Count.LAYERS_READ])


@pytest.mark.redis
def test_two_processes_of_a_node_fetch_once(
    host: HostTier, view: ArenaView, server: RedisServer
) -> None:
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
    assert host.check_integrity() == []


def test_a_key_of_other_tokens_is_a_miss(
    host: HostTier, view: ArenaView, remote: RemoteTier
) -> None:
    store(host, view, remote, 1)
    promoter = Promoter(host, remote, view)
    collision = ChunkQuery(key=key_of(1), token_ids=tokens_of(2))
    assert promoter.promote([collision], LAYERS, deadline_ms=LONG_MS) == [None]
    assert misses(remote) == {Miss.COLLISION: 1}
    both = [query(1), collision, query(1)]
    first, other, again = promoter.promote(both, LAYERS, deadline_ms=LONG_MS)
    assert first is again is not None and other is None
    first.release()
