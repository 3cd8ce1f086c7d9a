"""Answers in pieces of any size, late, wrong and cut off, over a pair of sockets."""

import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kv_tier.redis.errors import DeadlineError, LinkError, OversizeError, ReplyError
from kv_tier.redis.resp import RespConnection, command
from kv_tier.redis.topology import ONLY_NODE, RedisTopology
from tests.kv_tier.redis.cases import config
from tests.kv_tier.redis.servers import RedisServer


@pytest.fixture
def pair() -> Iterator[tuple[RespConnection, socket.socket]]:
    ours, theirs = socket.socketpair()
    with RespConnection(ours) as connection, theirs:
        yield connection, theirs


def in_s(seconds: float) -> float:
    return time.monotonic() + seconds


def test_requests_are_words_with_their_lengths() -> None:
    assert b"".join(command(b"GET", b"key")) == b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n"
    large = bytes(5000)
    parts = command(b"SET", b"k", large, b"PX", b"9")
    assert any(part is large for part in parts)
    assert b"".join(parts) == (
        b"*5\r\n$3\r\nSET\r\n$1\r\nk\r\n$5000\r\n" + large + b"\r\n$2\r\nPX\r\n$1\r\n9\r\n"
    )


@pytest.mark.parametrize("seed", range(20))
def test_answers_in_pieces_of_any_size(
    pair: tuple[RespConnection, socket.socket], seed: int
) -> None:
    connection, theirs = pair
    rng = random.Random(seed)
    values = [rng.randbytes(rng.choice([0, 1, 40, 300, 70_000])) for _ in range(12)]
    stream = b""
    for value in values:
        stream += b"$%d\r\n%s\r\n" % (len(value), value)
        stream += b"$-1\r\n:42\r\n+OK\r\n:-7\r\n$1\r\nx\r\n"

    def send() -> None:
        position = 0
        while position < len(stream):
            size = rng.choice([1, 2, 5, 100, 4000, 100_000])
            theirs.sendall(stream[position : position + size])
            position += size

    thread = threading.Thread(target=send)
    thread.start()
    deadline_s = in_s(30)
    for value in values:
        size = connection.read_value_size(deadline_s, expected_bytes=rng.choice([0, 16, 200]))
        assert size == len(value)
        if rng.random() < 0.3:
            connection.skip(size, deadline_s)
        else:
            head, rest = bytearray(min(16, size)), bytearray(max(0, size - 16))
            connection.read_into(memoryview(head), deadline_s)
            connection.read_into(memoryview(rest), deadline_s)
            assert bytes(head + rest) == value
        connection.end_value(deadline_s)
        assert connection.read_value_size(deadline_s, expected_bytes=100) is None
        assert connection.read_reply(deadline_s) == 42
        assert connection.read_reply(deadline_s) == b"OK"
        assert connection.read_reply(deadline_s) == -7
        assert connection.read_reply(deadline_s) == b"x"
    thread.join()


def test_one_deadline_for_an_answer_that_trickles(
    pair: tuple[RespConnection, socket.socket],
) -> None:
    connection, theirs = pair
    is_over = threading.Event()

    def trickle() -> None:
        theirs.sendall(b"$1000\r\n")
        while not is_over.wait(0.01):
            theirs.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    started_s = time.monotonic()
    try:
        deadline_s = in_s(0.2)
        assert connection.read_value_size(deadline_s, expected_bytes=0) == 1000
        with pytest.raises(DeadlineError):
            connection.read_into(memoryview(bytearray(1000)), deadline_s)
        assert time.monotonic() - started_s < 5.0
    finally:
        is_over.set()
        thread.join()


def test_a_send_that_nobody_takes_ends_at_its_deadline(
    pair: tuple[RespConnection, socket.socket],
) -> None:
    connection, _ = pair
    with pytest.raises(DeadlineError):
        connection.send([bytes(1 << 24)], in_s(0.1))
    with pytest.raises(DeadlineError):
        connection.send([b"x"], in_s(-1.0))


@pytest.mark.parametrize("left_s", [1e-9, 0.9999999, 1.0, 1.9999999, 99.9999999])
def test_any_time_may_be_left(pair: tuple[RespConnection, socket.socket], left_s: float) -> None:
    """The kernel takes seconds and microseconds apart."""
    connection, theirs = pair
    theirs.sendall(b":1\r\n")
    try:
        assert connection.read_reply(in_s(left_s)) == 1
    except DeadlineError:
        assert left_s < 1e-3


def test_a_connection_that_is_cut(pair: tuple[RespConnection, socket.socket]) -> None:
    connection, theirs = pair
    theirs.sendall(b"$10\r\nabc")
    theirs.close()
    assert connection.read_value_size(in_s(5), expected_bytes=0) == 10
    with pytest.raises(LinkError):
        connection.read_into(memoryview(bytearray(10)), in_s(5))


def test_closing_wakes_who_waits(pair: tuple[RespConnection, socket.socket]) -> None:
    connection, _ = pair
    timer = threading.Timer(0.05, connection.close)
    timer.start()
    with pytest.raises(LinkError):
        connection.read_reply(in_s(30))
    timer.join()
    connection.close()


@pytest.mark.parametrize(
    "stream",
    [
        b"HTTP/1.1 200 OK\r\n",
        b"$x\r\n",
        b"$\r\n",
        b"*1\r\n" * 10_000,  # no answer of ours is an array
        b"%1\r\n",
        b"x" * 20_000,
        b"$3\r\nabcde",
    ],
)
def test_what_is_not_redis(pair: tuple[RespConnection, socket.socket], stream: bytes) -> None:
    connection, theirs = pair
    theirs.sendall(stream)
    with pytest.raises(LinkError):
        connection.read_reply(in_s(5))


def test_an_error_leaves_the_connection_good(pair: tuple[RespConnection, socket.socket]) -> None:
    connection, theirs = pair
    theirs.sendall(b"-MOVED 1 host:1\r\n-ERR no\r\n:1\r\n")
    with pytest.raises(ReplyError) as caught:
        connection.read_value_size(in_s(5), expected_bytes=10)
    assert caught.value.is_redirect
    with pytest.raises(ReplyError) as caught:
        connection.read_reply(in_s(5))
    assert not caught.value.is_redirect
    assert connection.read_reply(in_s(5)) == 1


def test_a_value_that_is_none_of_ours_leaves_the_connection_good(
    pair: tuple[RespConnection, socket.socket],
) -> None:
    connection, theirs = pair
    size = (1 << 24) + 1
    stream = b"$%d\r\n%s\r\n:1\r\n" % (size, bytes(size))
    thread = threading.Thread(target=theirs.sendall, args=(stream,))
    thread.start()
    with pytest.raises(OversizeError):
        connection.read_reply(in_s(30))
    assert connection.read_reply(in_s(30)) == 1
    thread.join()


def test_an_alarm_rings_once_and_the_value_still_comes(
    pair: tuple[RespConnection, socket.socket],
) -> None:
    connection, theirs = pair
    theirs.sendall(b"$4\r\nab")  # the rest comes when the alarm has rung
    rings: list[float] = []

    def ring() -> None:
        rings.append(time.monotonic())
        theirs.sendall(b"cd\r\n")

    at_s = in_s(0.02)
    connection.set_alarm(at_s, ring)
    assert connection.read_reply(in_s(30)) == b"abcd"
    assert len(rings) == 1 and rings[0] >= at_s
    assert connection.num_received == len(b"$4\r\nabcd\r\n")


def test_no_system_call_waits_longer_than_the_kernel_can_count(
    pair: tuple[RespConnection, socket.socket],
) -> None:
    connection, theirs = pair
    theirs.sendall(b":1\r\n")
    assert connection.read_reply(in_s(1e300)) == 1
    connection.send([b"x"], in_s(1e300))


@pytest.mark.redis
def test_the_socket_that_redis_py_connects_is_ours(server: RedisServer) -> None:
    topology = RedisTopology(config(server.url))
    with topology.open(ONLY_NODE) as connection:
        connection.send(command(b"SET", b"k", bytes(3000)), in_s(5))
        assert connection.read_reply(in_s(5)) == b"OK"
        topology.close()
        connection.send(command(b"STRLEN", b"k"), in_s(5))
        assert connection.read_reply(in_s(5)) == 3000
