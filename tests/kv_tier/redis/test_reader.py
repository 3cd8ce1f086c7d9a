"""Reading threads, over connections whose other end is the test's."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kv_tier.redis import Miss
from kv_tier.redis.counters import Counters
from kv_tier.redis.errors import DeadlineError
from kv_tier.redis.fetch import ChunkFetch, deadline_from_now_s
from kv_tier.redis.link import LinkMeter
from kv_tier.redis.node import RedisNode
from kv_tier.redis.reader import NodeReader, Piece
from kv_tier.redis.resp import Buffer, RespConnection
from tests.kv_tier.redis.cases import LAYERS, LONG_MS, Arena, request
from tests.kv_tier.redis.peers import Peer, make_node, name_of, stored_layers
from tests.kv_tier.redis.servers import eventually

MakeReader = Callable[..., NodeReader]


@pytest.fixture
def make_reader() -> Iterator[MakeReader]:
    made: list[NodeReader] = []

    def make(node: RedisNode, **changes: object) -> NodeReader:
        options: dict[str, object] = {
            "num_connections": 1,
            "depth": 1,
            "value_deadline_ms": LONG_MS,
            "meter": LinkMeter(),
            "link": None,
            "counters": Counters(),
            "on_redirect": lambda node: None,
            **changes,
        }
        made.append(NodeReader(node, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for reader in made:
        reader.close()
        reader.join()


def start(
    arena: Arena, chunk: int, layers: Sequence[int] = LAYERS, *, deadline_ms: float = LONG_MS
) -> tuple[ChunkFetch, list[Piece]]:
    place = arena.place(chunk)
    fetch = ChunkFetch(
        arena.entry(place), request(place), layers, deadline_s=deadline_from_now_s(deadline_ms)
    )
    pieces = [Piece(fetch, layer, name_of(chunk, layer), i) for i, layer in enumerate(layers)]
    return fetch, pieces


def test_first_layers_come_first_whichever_batch_they_are_of(
    arena: Arena, make_reader: MakeReader
) -> None:
    values, all_there = stored_layers(arena, 1, 2), threading.Event()

    def answer(sock: socket.socket, name: bytes) -> None:
        all_there.wait(60.0)
        sock.sendall(values[name])

    peer = Peer(answer)
    reader = make_reader(make_node(peer.open))
    first, pieces = start(arena, 1)
    reader.submit(pieces)
    eventually(lambda: peer.asked)
    second, pieces = start(arena, 2, [2, 1, 0])
    reader.submit(pieces)
    all_there.set()
    assert first.wait_quiet() and second.wait_quiet()
    assert first.is_complete and second.is_complete
    order = [(1, 0), (2, 2), (1, 1), (2, 1), (1, 2), (2, 0)]
    assert peer.asked == [name_of(chunk, layer) for chunk, layer in order]


@pytest.mark.parametrize(("num_sent", "is_failure"), [(0, True), (300, False)])
def test_a_value_that_is_late_is_a_failure_of_a_silent_node_only(
    arena: Arena, make_reader: MakeReader, num_sent: int, is_failure: bool
) -> None:
    values = stored_layers(arena, 1)
    peer = Peer(lambda sock, name: sock.sendall(values[name][:num_sent]))
    node = make_node(peer.open, max_failures=1, probe_interval_ms=LONG_MS)
    reader = make_reader(node, value_deadline_ms=50.0)
    fetch, pieces = start(arena, 1)
    reader.submit(pieces)
    assert fetch.wait_quiet()
    assert fetch.miss is Miss.DEADLINE
    assert node.breaker.is_open == is_failure
    node.close()


def test_a_late_chunk_is_announced_and_its_connection_stays_good(
    arena: Arena, make_reader: MakeReader
) -> None:
    """Nobody waits for the chunk, and the rest of the value comes when it has missed."""
    values = stored_layers(arena, 1, 2)
    fetch, pieces = start(arena, 1, deadline_ms=1_000.0)  # it must be asked for before
    was_quiet: list[bool] = []

    def answer(sock: socket.socket, name: bytes) -> None:
        if name != name_of(1, 0):
            sock.sendall(values[name])
            return
        sock.sendall(values[name][:300])
        assert fetch.stopped.wait(60.0)
        was_quiet.append(fetch.is_quiet)
        sock.sendall(values[name][300:])

    peer = Peer(answer)
    reader = make_reader(make_node(peer.open))
    reader.submit(pieces)
    eventually(lambda: fetch.is_quiet)
    assert fetch.miss is Miss.DEADLINE and was_quiet == [False]
    other, pieces = start(arena, 2)
    reader.submit(pieces)
    assert other.wait_quiet() and other.is_complete
    assert peer.num_opened == 1


def test_who_could_not_be_asked_for_is_late_and_not_who_is_read(
    arena: Arena, make_reader: MakeReader
) -> None:
    class Stuck(RespConnection):
        """Can not send a second time."""

        num_sent = 0

        def send(self, parts: Sequence[Buffer], deadline_s: float) -> None:
            self.num_sent += 1
            if self.num_sent == 2:
                raise DeadlineError("the kernel takes no more")
            super().send(parts, deadline_s)

    values = stored_layers(arena, 1, 2)
    peer = Peer(lambda sock, name: sock.sendall(values[name]))

    def open_connection() -> RespConnection:
        connection = peer.open()
        if peer.num_opened == 1:
            connection.__class__ = Stuck
        return connection

    reader = make_reader(make_node(open_connection), depth=2)
    first, pieces = start(arena, 1)
    second, more = start(arena, 2)
    reader.submit([pieces[0], more[0], *pieces[1:], *more[1:]])
    assert first.wait_quiet() and second.wait_quiet()
    assert first.is_complete
    assert second.miss is Miss.DEADLINE


def test_threads_that_can_not_be_started_are_misses_and_no_errors(
    arena: Arena, make_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = stored_layers(arena, 1)
    peer = Peer(lambda sock, name: sock.sendall(values[name]))
    reader = make_reader(make_node(peer.open), num_connections=3)

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        fetch, pieces = start(arena, 1)
        reader.submit(pieces)
        assert fetch.miss is Miss.UNAVAILABLE and fetch.is_quiet
    fetch, pieces = start(arena, 1, [0])
    reader.submit(pieces)  # one piece, one thread
    assert fetch.wait_quiet() and fetch.is_complete
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        fetch, pieces = start(arena, 1)
        reader.submit(pieces)  # with those that there are
        assert fetch.wait_quiet() and fetch.is_complete


def test_a_layer_that_was_not_asked_for_is_not_waited_for(
    arena: Arena, make_reader: MakeReader
) -> None:
    values = stored_layers(arena, 1)
    peer = Peer(lambda sock, name: sock.sendall(values[name]))
    reader = make_reader(make_node(peer.open))
    fetch, pieces = start(arena, 1, [1])
    reader.submit(pieces)
    assert not fetch.wait_layer(0)
    assert time.monotonic() < fetch.deadline_s
    assert fetch.is_complete and fetch.miss is None
