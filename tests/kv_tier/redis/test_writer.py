"""Write-behind: nobody waits, what waits is bounded, and every lease comes back."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from kv_tier.redis import ChunkWrite, Count, Encoding, Manifest, Miss, RedisTier, StoredShape
from kv_tier.redis.counters import Counters
from kv_tier.redis.directory import NodeDirectory
from kv_tier.redis.entry_memory import EntryMemory
from kv_tier.redis.errors import UnavailableError
from kv_tier.redis.node import RedisNode
from kv_tier.redis.topology import RedisTopology
from kv_tier.redis.values import chunk_names
from kv_tier.redis.writer import WriteBehind, _layer_value
from tests.kv_tier.redis.cases import (
    LAYERS,
    LAYOUT,
    LONG_MS,
    NUM_TOKENS,
    WRITE_ID,
    Arena,
    config,
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
from tests.kv_tier.redis.servers import RedisServer, eventually

pytestmark = pytest.mark.redis

ENTRY_BYTES = LAYOUT.entry_bytes(NUM_TOKENS)


class Leases:
    """Counts what the tier holds of the arena."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.released: list[int] = []

    def write(self, tier: RedisTier, arena: Arena, chunk: int) -> bool:
        def release() -> None:
            with self._lock:
                self.released.append(chunk)

        return tier.write_behind(
            ChunkWrite(
                location=arena.fill(chunk), token_ids=query(chunk).token_ids, release=release
            )
        )


def test_the_oldest_of_a_full_backlog_are_dropped(server: RedisServer, arena: Arena) -> None:
    leases = Leases()
    limits = {"write_backlog_bytes": 3 * ENTRY_BYTES, "write_deadline_ms": 1000.0}
    with open_tier(server.url, arena, **limits) as tier:
        write(tier, arena, 99)  # so that the connection stands
        server.pause()
        started_s = time.monotonic()
        assert all(leases.write(tier, arena, chunk) for chunk in range(8))
        assert time.monotonic() - started_s < 1.0  # nobody waited for Redis
        assert tier.stats().backlog_bytes <= 3 * ENTRY_BYTES
        assert counted(tier, Count.WRITES_DROPPED) >= 4
        server.resume()
        assert tier.flush(LONG_MS)
        assert sorted(leases.released) == list(range(8))
        assert None not in lookup(tier, 6, 7)
        assert tier.stats().backlog_bytes == tier.stats().num_backlog == 0


def test_a_chunk_larger_than_the_backlog_is_not_taken(server: RedisServer, arena: Arena) -> None:
    leases = Leases()
    with open_tier(server.url, arena, write_backlog_bytes=ENTRY_BYTES - 1) as tier:
        assert not leases.write(tier, arena, 1)
        assert leases.released == [1]
        assert counted(tier, Count.WRITES_DROPPED) == 1


def test_the_backlog_can_be_shed(server: RedisServer, arena: Arena) -> None:
    leases = Leases()
    with open_tier(server.url, arena, write_deadline_ms=1000.0) as tier:
        server.pause()
        for chunk in range(5):
            assert leases.write(tier, arena, chunk)
        assert tier.shed_backlog() >= 4
        assert len(leases.released) >= 4
        server.resume()
        assert tier.flush(LONG_MS)
        assert sorted(leases.released) == list(range(5))


def test_closing_gives_every_lease_back(server: RedisServer, arena: Arena) -> None:
    leases = Leases()
    tier = open_tier(server.url, arena, write_deadline_ms=200.0)
    server.pause()
    for chunk in range(5):
        assert leases.write(tier, arena, chunk)
    tier.close()
    assert sorted(leases.released) == list(range(5))
    assert not leases.write(tier, arena, 6)
    assert leases.released[-1] == 6
    tier.close()
    server.resume()


def test_a_release_that_fails_stops_nothing(tier: RedisTier, arena: Arena) -> None:
    def fail() -> None:
        raise RuntimeError("the index is locked")

    tier.write_behind(
        ChunkWrite(location=arena.fill(1), token_ids=query(1).token_ids, release=fail)
    )
    write(tier, arena, 2)
    assert None not in lookup(tier, 1, 2)


@pytest.mark.parametrize("encoding", [Encoding.FP8, Encoding.INT8])
def test_encoded_chunks_are_smaller_and_verify_in_the_arena(
    server: RedisServer, arena: Arena, encoding: Encoding
) -> None:
    with open_tier(server.url, arena, encoding=encoding) as tier:
        write(tier, arena, 1)
        (found,) = lookup(tier, 1)
        assert found is not None and found.shape.encoding is encoding
        whole = arena.place(1)
        fetched = tier.fetch([request(whole, encoding)], LAYERS, deadline_ms=LONG_MS)
        assert fetched.wait_quiet() and fetched.chunks[0].is_complete
        assert all(arena.entry(whole).is_intact(layer) for layer in LAYERS)
    # A process that writes raw reads them too, and the other way round.
    with open_tier(server.url, arena) as tier:
        (found,) = lookup(tier, 1)
        assert found is not None
        place = arena.place(1)
        fetched = tier.fetch([request(place, found.shape.encoding)], LAYERS, deadline_ms=LONG_MS)
        assert fetched.wait_quiet() and fetched.chunks[0].is_complete
        assert arena.bytes_of(place) == arena.bytes_of(whole)


def test_the_wrong_encoding_is_not_misread(server: RedisServer, arena: Arena) -> None:
    with open_tier(server.url, arena, encoding=Encoding.INT8) as tier:
        write(tier, arena, 1)
        fetched = tier.fetch([request(arena.place(1), Encoding.FP8)], LAYERS, deadline_ms=LONG_MS)
        assert fetched.wait_quiet()
        assert fetched.chunks[0].miss is Miss.CORRUPT
        assert fetch(tier, [arena.place(1)]).chunks[0].miss is not None  # asked for as raw


def test_half_written_chunks_are_written_again(server: RedisServer, arena: Arena) -> None:
    with open_tier(server.url, arena) as tier:
        write(tier, arena, 1)
        client = server.client()
        client.delete(min(client.keys("*:1")))
        write(tier, arena, 1)
        assert counted(tier, Count.CHUNKS_WRITTEN) == 2
        assert lookup(tier, 1) != [None]


def write_behind(
    server: RedisServer,
    arena: Arena,
    *,
    is_unavailable: Callable[[bytes], bool] = lambda name: False,
    reads_are_under_way: Callable[[], bool] = lambda: False,
    **changes: object,
) -> tuple[WriteBehind, Counters]:
    """The backlog by itself, with faults of the test's."""
    settings, counters = config(server.url, **changes), Counters()

    class Directory(NodeDirectory):
        def node_for(self, name: bytes, deadline_s: float) -> RedisNode:
            if is_unavailable(name):
                raise UnavailableError("not asked now")
            return super().node_for(name, deadline_s)

    directory = Directory(settings, RedisTopology(settings), on_gone=lambda node: None)
    written = WriteBehind(
        settings,
        LAYOUT,
        arena.memory,
        directory,
        counters,
        reads_are_under_way=reads_are_under_way,
        new_write_id=lambda: WRITE_ID,
    )
    return written, counters


def chunk_write(arena: Arena, chunk: int, num_tokens: int = NUM_TOKENS) -> ChunkWrite:
    return ChunkWrite(
        location=arena.fill(chunk, num_tokens),
        token_ids=query(chunk, num_tokens).token_ids,
        release=lambda: None,
    )


def test_a_node_that_is_away_costs_its_own_chunks(server: RedisServer, arena: Arena) -> None:
    away = query(1).key.hex().encode()
    written, counters = write_behind(server, arena, is_unavailable=lambda name: away in name)
    for chunk in (1, 2, 1, 3):
        assert written.offer(chunk_write(arena, chunk))
    assert written.flush(LONG_MS)
    assert counters.counts()[Count.WRITES_DROPPED] == 2
    assert counters.counts()[Count.CHUNKS_WRITTEN] == 2
    written.close()


def test_a_write_that_fails_in_the_middle_leaves_nothing(server: RedisServer, arena: Arena) -> None:
    looks: list[int] = []

    def fail_later() -> bool:
        looks.append(server.client().dbsize())
        if len(looks) == 3:
            raise RuntimeError("whatever it may be")
        return False

    written, counters = write_behind(server, arena, reads_are_under_way=fail_later)
    assert written.offer(chunk_write(arena, 1))
    assert written.flush(LONG_MS)
    assert looks == [0, 1, 2]
    assert server.client().dbsize() == 0
    assert counters.counts()[Count.WRITES_FAILED] == 1
    assert counters.counts()[Count.CHUNKS_REMOVED] == 0  # nothing was damaged
    written.close()


def test_a_write_whose_node_goes_away_leaves_nothing_when_it_is_back(
    server: RedisServer, arena: Arena
) -> None:
    goes_away = threading.Event()

    def look() -> bool:
        if server.client().dbsize() == 2:
            goes_away.set()
        return False

    def is_unavailable(name: bytes) -> bool:
        is_so = goes_away.is_set()
        goes_away.clear()
        return is_so

    written, counters = write_behind(
        server, arena, is_unavailable=is_unavailable, reads_are_under_way=look
    )
    assert written.offer(chunk_write(arena, 1))
    assert written.flush(LONG_MS)
    assert counters.counts()[Count.WRITES_DROPPED] == 1
    assert server.client().dbsize() == 0
    written.close()


def test_token_ids_that_can_not_be_stored_cost_their_chunk_only(
    server: RedisServer, arena: Arena
) -> None:
    written, counters = write_behind(server, arena)
    assert written.offer(replace(chunk_write(arena, 1), token_ids=[-1]))
    assert written.offer(chunk_write(arena, 2))
    assert written.flush(LONG_MS)
    assert counters.counts()[Count.WRITES_FAILED] == 1
    assert counters.counts()[Count.CHUNKS_WRITTEN] == 1
    assert server.client().dbsize() == 1 + LAYOUT.num_layers
    written.close()


def test_a_refused_chunk_costs_the_backlog_nothing(server: RedisServer, arena: Arena) -> None:
    """There is no room for it beside the one that is being written."""
    is_writing, may_go_on = threading.Event(), threading.Event()

    def hold() -> bool:
        is_writing.set()
        may_go_on.wait(60.0)
        return False

    limits = {"write_backlog_bytes": int(2.5 * ENTRY_BYTES)}
    written, counters = write_behind(server, arena, reads_are_under_way=hold, **limits)
    assert written.offer(chunk_write(arena, 1))
    assert is_writing.wait(60.0)
    assert written.offer(chunk_write(arena, 2))
    assert not written.offer(chunk_write(arena, 3, 2 * NUM_TOKENS))
    assert written.num_backlog == 1
    may_go_on.set()
    assert written.flush(LONG_MS)
    assert counters.counts()[Count.CHUNKS_WRITTEN] == 2
    assert counters.counts()[Count.WRITES_DROPPED] == 1
    written.close()


def test_layers_and_manifest_expire_together(server: RedisServer, arena: Arena) -> None:
    def wait() -> bool:
        time.sleep(0.2)  # a slow link
        return False

    written, _ = write_behind(server, arena, reads_are_under_way=wait, ttl_s=100.0)
    assert written.offer(chunk_write(arena, 1))
    assert written.flush(LONG_MS)
    client = server.client()
    expiries = [client.pexpiretime(name) for name in chunk_names("cachesmith", query(1).key, 3)]
    assert max(expiries) - min(expiries) < 300  # of more than 600 that it took
    written.close()


def test_a_thread_that_can_not_be_started_is_tried_again(
    server: RedisServer, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = Leases()

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with open_tier(server.url, arena) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            assert not leases.write(tier, arena, 1)
            tier.remove(query(1).key)
        assert leases.released == [1]
        assert leases.write(tier, arena, 1)
        assert tier.flush(LONG_MS)
        assert counted(tier, Count.CHUNKS_WRITTEN) == 1


def test_what_is_verified_is_what_is_encoded(arena: Arena) -> None:
    class Changing(EntryMemory):
        """Somebody writes to the entry when its checksums have been read."""

        def checksums(self, layer: int) -> bytes:
            found = super().checksums(layer)
            self.layer(layer)[:] = bytes(len(self.layer(layer)))
            return found

    location = arena.fill(1)
    shape = StoredShape(layout=LAYOUT, num_tokens=NUM_TOKENS, encoding=Encoding.INT8)
    manifest = Manifest(key=location.key, shape=shape, write_id=WRITE_ID, token_bytes=b"")
    wanted = _layer_value(arena.entry(location), manifest, 1)
    assert wanted is not None
    found = _layer_value(Changing(arena.memory, location, LAYOUT), manifest, 1)
    assert found is not None and bytes(found[1]) == bytes(wanted[1])


def test_readers_and_writers_of_one_chunk(server: RedisServer, arena: Arena) -> None:
    """A chunk that is removed and written again and again is whole or a miss, never wrong."""
    source = arena.fill(1)
    wanted = arena.bytes_of(source)
    place = arena.place(1)
    is_over = threading.Event()
    with open_tier(server.url, arena) as writer, open_tier(server.url, arena) as reader:

        def rewrite() -> None:
            while not is_over.is_set():
                offer(writer, source, 1)
                writer.flush(LONG_MS)
                writer.remove(query(1).key)
                writer.flush(LONG_MS)

        thread = threading.Thread(target=rewrite)
        thread.start()
        num_whole = 0
        for _ in range(200):
            if lookup(reader, 1) == [None]:
                continue
            arena.memory[place.offset : place.offset + place.nbytes] = bytes(place.nbytes)
            if fetch(reader, [place]).chunks[0].is_complete:
                num_whole += 1
                assert arena.bytes_of(place) == wanted
        is_over.set()
        thread.join()
        assert set(misses(reader)) <= {Miss.ABSENT, Miss.INCOMPLETE, Miss.MISSING}
        eventually(lambda: reader.flush(LONG_MS))


def test_writes_of_a_public_id_are_cancelled(server: RedisServer, arena: Arena) -> None:
    """The one under way is taken back before `cancel_writes` returns, the others are dropped."""
    with open_tier(server.url, arena) as tier:
        write(tier, arena, 9)  # so that the connection stands
        server.pause()
        for chunk in (1, 2, 3, 2):
            assert offer(tier, arena.fill(chunk), chunk)
        eventually(lambda: tier.stats().num_backlog == 3)  # the first is under way
        assert tier.cancel_writes("chunk-2") == 2
        assert tier.cancel_writes("chunk-4") == 0
        found: list[int] = []
        cancelling = threading.Thread(target=lambda: found.append(tier.cancel_writes("chunk-1")))
        cancelling.start()
        cancelling.join(0.2)
        assert cancelling.is_alive()
        server.resume()
        cancelling.join()
        assert found == [1]
        assert lookup(tier, 1, 2)[:2] == [None, None]
        assert tier.flush(LONG_MS)
        assert [one is None for one in lookup(tier, 1, 2, 3, 9)] == [True, True, False, False]
        assert tier.stats().backlog_bytes == 0
