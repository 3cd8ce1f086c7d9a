"""Write-behind: nobody waits, what waits is bounded, and every lease comes back."""

import threading
import time

import pytest

from kv_tier.redis import ChunkWrite, Count, Encoding, Miss, RedisTier
from tests.kv_tier.redis.cases import (
    LAYERS,
    LAYOUT,
    LONG_MS,
    NUM_TOKENS,
    Arena,
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
        assert fetched.chunks[0].miss is Miss.FOREIGN
        assert fetch(tier, [arena.place(1)]).chunks[0].miss is not None  # asked for as raw


def test_half_written_chunks_are_written_again(server: RedisServer, arena: Arena) -> None:
    with open_tier(server.url, arena) as tier:
        write(tier, arena, 1)
        client = server.client()
        client.delete(min(client.keys("*:1")))
        write(tier, arena, 1)
        assert counted(tier, Count.CHUNKS_WRITTEN) == 2
        assert lookup(tier, 1) != [None]


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
