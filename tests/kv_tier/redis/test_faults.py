"""What can happen to a Redis: each time a miss or the right bytes, a count, and no long wait."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kv_tier import KvLayout
from kv_tier.redis import ChunkFetch, ChunkWrite, Count, LinkLimit, Miss, RedisTier
from tests.kv_tier.redis.cases import (
    LONG_MS,
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
from tests.kv_tier.redis.servers import RedisServer, eventually, free_port

pytestmark = pytest.mark.redis

# Deadlines of the tests that run into them, and a bound that a busy machine keeps.
SHORT_MS = 300.0
BOUND_S = 20.0
SHORT = {
    "lookup_deadline_ms": SHORT_MS,
    "value_deadline_ms": SHORT_MS,
    "connect_deadline_ms": SHORT_MS,
}
# 512 KiB a layer: more than a socket holds, so that a read has a middle.
LARGE = KvLayout(num_layers=16, num_kv_heads=4, head_dim=64, dtype="float32")
LARGE_TOKENS = 256
LARGE_BYTES = 1 << 27


@contextmanager
def bounded() -> Iterator[None]:
    started_s = time.monotonic()
    yield
    assert time.monotonic() - started_s < BOUND_S


def large_arena() -> Arena:
    return Arena(LARGE, LARGE_BYTES)


def fetch_large(
    tier: RedisTier, arena: Arena, on_layer: Callable[[ChunkFetch, int], None]
) -> ChunkFetch:
    """Fetch chunk 1, which must be there, and wait until that has ended."""
    place = arena.place(1, LARGE_TOKENS)
    layers = range(LARGE.num_layers)
    fetched = tier.fetch([request(place)], layers, deadline_ms=LONG_MS, on_layer=on_layer)
    assert fetched.wait_quiet()
    return fetched.chunks[0]


def once(run: Callable[[], None]) -> Callable[[ChunkFetch, int], None]:
    """A callback that does it when the first layer is ready."""
    is_first = threading.Lock()

    def on_layer(chunk: ChunkFetch, layer: int) -> None:
        if is_first.acquire(blocking=False):
            run()

    return on_layer


def test_redis_absent_at_start_and_there_later(folder: Path, arena: Arena) -> None:
    server = RedisServer(folder)
    with open_tier(server.url, arena) as tier, bounded():
        for _ in range(10):
            assert lookup(tier, 1) == [None]
        found = misses(tier)
        assert found == {Miss.CONNECTION: 3, Miss.UNAVAILABLE: 7}
        assert tier.stats().nodes_unavailable == ("redis",)
        assert fetch(tier, [arena.place(1)]).chunks[0].miss is Miss.UNAVAILABLE
        with server:
            eventually(lambda: not tier.stats().nodes_unavailable)
            write(tier, arena, 1)
            assert lookup(tier, 1) != [None]
            assert tier.stats().breaker_openings == 1


def test_writes_to_an_absent_redis_are_dropped(folder: Path, arena: Arena) -> None:
    with open_tier(f"redis://127.0.0.1:{free_port()}", arena, **SHORT) as tier, bounded():
        for chunk in range(8):
            assert offer(tier, arena.fill(chunk), chunk)
        assert tier.flush(LONG_MS)
        assert counted(tier, Count.WRITES_FAILED) == 3
        assert counted(tier, Count.WRITES_DROPPED) == 5


def test_redis_killed_in_mid_read(server: RedisServer) -> None:
    arena = large_arena()
    with open_tier(server.url, arena) as tier, bounded():
        write(tier, arena, 1, num_tokens=LARGE_TOKENS)
        chunk = fetch_large(tier, arena, once(server.kill))
        assert chunk.miss in (Miss.CONNECTION, Miss.UNAVAILABLE)
        assert misses(tier) == {chunk.miss: 1}
        assert lookup(tier, 1) == [None]


def test_redis_restarted_in_mid_read(server: RedisServer) -> None:
    """The lost connections' layers are asked for again: of an empty Redis, in this case."""
    arena = large_arena()

    def restart() -> None:
        server.kill()
        server.start()

    with open_tier(server.url, arena) as tier, bounded():
        write(tier, arena, 1, num_tokens=LARGE_TOKENS)
        assert fetch_large(tier, arena, once(restart)).miss in (
            Miss.MISSING,
            Miss.CONNECTION,
            Miss.UNAVAILABLE,
        )
        eventually(lambda: not tier.stats().nodes_unavailable)
        write(tier, arena, 2, num_tokens=LARGE_TOKENS)
        assert tier.lookup([query(2, LARGE_TOKENS)]) != [None]


def test_connections_that_were_dropped_are_opened_again(server: RedisServer) -> None:
    arena = large_arena()
    drop = server.client(socket_timeout=60.0, retry=None)  # a slow answer is no second kill
    with open_tier(server.url, arena) as tier:
        write(tier, arena, 1, num_tokens=LARGE_TOKENS)
        drop.client_kill_filter(_type="normal")
        assert tier.lookup([query(1, LARGE_TOKENS)]) != [None]
        chunk = fetch_large(tier, arena, once(lambda: drop.client_kill_filter(_type="normal")))
        assert chunk.miss is None and chunk.is_complete
        assert misses(tier) == {}


def test_redis_paused_before_a_lookup(server: RedisServer, arena: Arena) -> None:
    with open_tier(server.url, arena) as writer:
        write(writer, arena, 1)
    with open_tier(server.url, arena, **SHORT) as tier:
        eventually(lambda: lookup(tier, 1) != [None])
        before = misses(tier)
        server.pause()
        with bounded():
            for _ in range(10):
                assert lookup(tier, 1) == [None]
        found = misses(tier)
        assert set(found) <= {Miss.DEADLINE, Miss.UNAVAILABLE}
        assert 0 < found[Miss.DEADLINE] - before.get(Miss.DEADLINE, 0) <= 3
        server.resume()
        eventually(lambda: not tier.stats().nodes_unavailable)
        eventually(lambda: lookup(tier, 1) != [None])


def test_redis_paused_in_mid_read(server: RedisServer) -> None:
    arena = large_arena()
    with open_tier(server.url, arena) as writer:
        write(writer, arena, 1, num_tokens=LARGE_TOKENS)
    with open_tier(server.url, arena, **SHORT) as tier, bounded():
        chunk = fetch_large(tier, arena, once(server.pause))
        assert chunk.miss is Miss.DEADLINE
        server.resume()
        eventually(lambda: tier.lookup([query(1, LARGE_TOKENS)]) != [None])
        eventually(lambda: fetch_large(tier, arena, lambda chunk, layer: None).is_complete)


def test_a_read_only_redis_serves_and_refuses(server: RedisServer, arena: Arena) -> None:
    with open_tier(server.url, arena) as tier:
        write(tier, arena, 1)
        server.client().replicaof("127.0.0.1", free_port())
        write(tier, arena, 2)
        assert counted(tier, Count.WRITES_REFUSED) == 1
        assert [one is None for one in lookup(tier, 1, 2)] == [False, True]
        assert fetch(tier, [arena.place(1)]).chunks[0].is_complete


def test_a_full_redis_refuses_and_keeps_no_half_chunk(server: RedisServer) -> None:
    arena = large_arena()
    client = server.client()
    with open_tier(server.url, arena) as tier:
        write(tier, arena, 1, num_tokens=LARGE_TOKENS)
        used = client.info("memory")["used_memory"]
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", used + 5 * LARGE.layer_bytes(LARGE_TOKENS))
        write(tier, arena, 2, num_tokens=LARGE_TOKENS)
        assert counted(tier, Count.WRITES_REFUSED) == 1
        assert client.dbsize() == 1 + LARGE.num_layers
        found = tier.lookup([query(1, LARGE_TOKENS), query(2, LARGE_TOKENS)])
        assert [one is None for one in found] == [False, True]
        assert not tier.stats().nodes_unavailable


def test_a_redis_that_evicts_gives_misses_or_right_bytes(server: RedisServer) -> None:
    """allkeys-random takes single layers; what is left of their chunks is removed."""
    arena = large_arena()
    client = server.client()
    with open_tier(server.url, arena) as tier:
        used = client.info("memory")["used_memory"]
        client.config_set("maxmemory-policy", "allkeys-random")
        client.config_set("maxmemory", used + 40 * LARGE.layer_bytes(LARGE_TOKENS))
        sources = {chunk: arena.fill(chunk, LARGE_TOKENS) for chunk in range(4)}
        for chunk, source in sources.items():
            assert offer(tier, source, chunk)
        assert tier.flush(LONG_MS)
        num_hits = 0
        for chunk, source in sources.items():
            if tier.lookup([query(chunk, LARGE_TOKENS)]) == [None]:
                continue
            place = arena.place(chunk, LARGE_TOKENS)
            if fetch(tier, [place], layers=range(LARGE.num_layers)).chunks[0].is_complete:
                num_hits += 1
                assert arena.bytes_of(place) == arena.bytes_of(source)
        assert num_hits < 4
        assert set(misses(tier)) <= {Miss.ABSENT, Miss.INCOMPLETE, Miss.MISSING}


def test_a_redis_that_forbids_is_a_miss(server: RedisServer, arena: Arena) -> None:
    admin = server.client()
    with open_tier(server.url, arena) as tier:
        write(tier, arena, 1)
        admin.execute_command("ACL", "SETUSER", "default", "-get")
        assert lookup(tier, 1) == [None]
        assert fetch(tier, [arena.place(1)]).chunks[0].miss is Miss.SERVER
        assert misses(tier) == {Miss.SERVER: 2}
        admin.execute_command("ACL", "SETUSER", "default", "+get")
        assert fetch(tier, [arena.place(1)]).chunks[0].is_complete  # the connections are good


def test_a_slow_link_costs_time_and_is_measured(server: RedisServer) -> None:
    arena = large_arena()
    limit = LinkLimit(bytes_per_ms=20_000.0, latency_ms=2.0)
    with open_tier(server.url, arena, limit=limit) as tier:
        write(tier, arena, 1, num_tokens=LARGE_TOKENS)
        started_s = time.monotonic()
        chunk = fetch_large(tier, arena, lambda chunk, layer: None)
        spent_ms = (time.monotonic() - started_s) * 1e3
        assert chunk.is_complete
        link_ms = counted(tier, Count.BYTES_READ) / limit.bytes_per_ms
        assert spent_ms > 0.9 * link_ms
        assert 0.9 * link_ms < counted(tier, Count.READ_MS) < spent_ms + 1.0
        assert 0.0 < tier.speed().bytes_per_ms < 1.1 * limit.bytes_per_ms


def test_another_link_can_be_emulated_while_layers_are_on_their_way(server: RedisServer) -> None:
    arena = large_arena()
    with open_tier(server.url, arena) as tier, bounded():
        write(tier, arena, 1, num_tokens=LARGE_TOKENS)
        tier.emulate(LinkLimit(bytes_per_ms=20_000.0))
        started_s = time.monotonic()
        assert fetch_large(tier, arena, lambda chunk, layer: None).is_complete
        spent_ms = (time.monotonic() - started_s) * 1e3
        assert spent_ms > 0.9 * counted(tier, Count.BYTES_READ) / 20_000.0
        assert fetch_large(tier, arena, lambda chunk, layer: tier.emulate(None)).is_complete


def test_a_link_too_slow_for_the_deadline_is_a_miss(server: RedisServer) -> None:
    arena = large_arena()
    limit = LinkLimit(bytes_per_ms=100.0)
    with open_tier(server.url, arena) as writer:
        write(writer, arena, 1, num_tokens=LARGE_TOKENS)
    with open_tier(server.url, arena, limit=limit, **SHORT) as tier, bounded():
        assert fetch_large(tier, arena, lambda chunk, layer: None).miss is Miss.DEADLINE


def test_nobody_answers_at_the_port(arena: Arena) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        with open_tier(url, arena, **SHORT) as tier, bounded():
            for _ in range(6):
                assert lookup(tier, 1) == [None]
            assert fetch(tier, [arena.place(1)]).chunks[0].miss is not None
            assert not misses(tier).keys() - {Miss.DEADLINE, Miss.CONNECTION, Miss.UNAVAILABLE}


def test_something_else_answers_at_the_port(arena: Arena) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            while True:
                try:
                    sock, _ = other.accept()
                except OSError:
                    return
                with sock:
                    sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)

        threading.Thread(target=answer, daemon=True).start()
        url = f"redis://127.0.0.1:{other.getsockname()[1]}"
        with open_tier(url, arena, **SHORT) as tier, bounded():
            for _ in range(6):
                assert lookup(tier, 1) == [None]
            assert not misses(tier).keys() - {Miss.DEADLINE, Miss.CONNECTION, Miss.UNAVAILABLE}
        other.shutdown(socket.SHUT_RDWR)


def test_cancelled_fetches_write_nothing_after_they_are_quiet(server: RedisServer) -> None:
    arena = large_arena()
    limit = LinkLimit(bytes_per_ms=200_000.0)
    with open_tier(server.url, arena, limit=limit) as tier, bounded():
        write(tier, arena, 1, num_tokens=LARGE_TOKENS)
        place = arena.place(1, LARGE_TOKENS)
        layers = range(LARGE.num_layers)
        kept = tier.fetch([request(arena.place(1, LARGE_TOKENS))], layers, deadline_ms=LONG_MS)
        gone = tier.fetch([request(place)], layers, deadline_ms=LONG_MS)
        gone.chunks[0].wait_layer(2)
        gone.cancel()
        assert gone.wait_quiet()
        content = arena.memory[place.offset : place.offset + place.nbytes]
        content[:] = bytes(len(content))
        again = tier.fetch([request(arena.place(1, LARGE_TOKENS))], layers, deadline_ms=LONG_MS)
        assert kept.wait_quiet() and again.wait_quiet()
        assert not any(content)
        assert kept.chunks[0].is_complete and again.chunks[0].is_complete
        assert misses(tier) == {Miss.CANCELLED: 1}


def test_a_cancelled_fetch_does_not_wait_for_what_was_not_asked_for(server: RedisServer) -> None:
    arena = large_arena()
    limit = LinkLimit(bytes_per_ms=1000.0)  # half a second a layer
    with open_tier(server.url, arena, limit=limit) as tier, bounded():
        write(tier, arena, 1, num_tokens=LARGE_TOKENS)
        layers = range(LARGE.num_layers)
        gone = tier.fetch([request(arena.place(1, LARGE_TOKENS))], layers, deadline_ms=LONG_MS)
        time.sleep(0.05)
        gone.cancel()
        assert gone.wait_quiet()
        assert not gone.wait_layer(0)[0]


def test_closing_leaves_no_thread_behind(server: RedisServer, arena: Arena) -> None:
    def names() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("redis-")}

    eventually(lambda: not names())  # of tests before
    with (
        open_tier(server.url, arena) as tier,
        open_tier(f"redis://127.0.0.1:{free_port()}", arena) as dead,
    ):
        write(tier, arena, 1)
        assert fetch(tier, [arena.place(1)]).chunks[0].is_complete
        for _ in range(4):
            assert lookup(dead, 1) == [None]
        assert {"redis-write", "redis-probe-redis"} <= names()
    eventually(lambda: not names())


def test_closing_ends_a_fetch(server: RedisServer) -> None:
    arena = large_arena()
    limit = LinkLimit(bytes_per_ms=1000.0)
    tier = open_tier(server.url, arena, limit=limit)
    with bounded():
        write(tier, arena, 1, num_tokens=LARGE_TOKENS)
        layers = range(LARGE.num_layers)
        gone = tier.fetch([request(arena.place(1, LARGE_TOKENS))], layers, deadline_ms=LONG_MS)
        time.sleep(0.02)
        tier.close()
        assert gone.chunks[0].is_quiet and gone.chunks[0].miss is Miss.UNAVAILABLE


@pytest.mark.parametrize("where", ["on_layer", "on_quiet", "release"])
def test_closing_in_a_callback_waits_for_nobody(
    server: RedisServer, arena: Arena, where: str
) -> None:
    closed = threading.Event()

    def close(*_: object) -> None:
        tier.close()
        closed.set()

    with open_tier(server.url, arena) as tier:
        write(tier, arena, 1)
        if where == "release":
            tier.write_behind(
                ChunkWrite(location=arena.fill(2), token_ids=query(2).token_ids, release=close)
            )
        else:
            layers = range(arena.layout.num_layers)
            place = request(arena.place(1))
            tier.fetch([place], layers, deadline_ms=LONG_MS, **{where: close})
        assert closed.wait(BOUND_S)
