"""Connections of one node: slow, hung, refused, left over from another Redis, or old."""

import socket
import threading
import time

import pytest

from kv_tier.redis import node as node_module
from kv_tier.redis.errors import DeadlineError, LinkError
from kv_tier.redis.node import RedisNode
from kv_tier.redis.resp import RespConnection
from tests.kv_tier.redis.cases import LONG_MS
from tests.kv_tier.redis.peers import make_node
from tests.kv_tier.redis.servers import eventually


def in_s(seconds: float) -> float:
    return time.monotonic() + seconds


class Opener:
    """Opens connections of which each has an answer waiting."""

    def __init__(self) -> None:
        self.may_open = threading.Event()
        self.may_open.set()
        self.is_refused = False
        self.opened: list[tuple[RespConnection, socket.socket]] = []

    def __call__(self) -> RespConnection:
        self.may_open.wait(60.0)
        if self.is_refused:
            raise LinkError("refused")
        ours, theirs = socket.socketpair()
        theirs.sendall(b"+PONG\r\n")
        connection = RespConnection(ours)
        self.opened.append((connection, theirs))
        return connection


def is_closed(connection: RespConnection) -> bool:
    return connection._sock.fileno() < 0


def test_a_slow_set_up_is_no_failure_and_serves_who_comes_later() -> None:
    opener = Opener()
    opener.may_open.clear()
    node = make_node(opener, max_failures=1)
    for _ in range(3):
        with pytest.raises(DeadlineError):
            node.acquire(in_s(0.005))
    assert not node.breaker.is_open
    opener.may_open.set()
    connection = node.acquire(in_s(60))
    assert not is_closed(connection)
    assert len(opener.opened) == 1
    node.close()


def test_a_set_up_that_hangs_is_a_failure_and_does_not_stop_others() -> None:
    opener = Opener()
    opener.may_open.clear()
    node = make_node(opener, connect_deadline_ms=5.0, probe_interval_ms=LONG_MS)
    with pytest.raises(DeadlineError):
        node.acquire(in_s(0.03))
    first_hangs = opener.may_open
    opener.may_open = threading.Event()
    opener.may_open.set()
    node.give_back(node.acquire(in_s(60)))  # by another thread
    node.forget_idle()
    opener.may_open.clear()
    for _ in range(2):
        with pytest.raises(DeadlineError):
            node.acquire(in_s(0.03))
    assert node.breaker.is_open
    first_hangs.set()
    opener.may_open.set()
    node.close()


def test_the_probe_s_connection_is_the_next_caller_s() -> None:
    opener = Opener()
    opener.is_refused = True
    node = make_node(opener, max_failures=1)
    with pytest.raises(LinkError):
        node.acquire(in_s(60))
    opener.is_refused = False
    eventually(lambda: not node.breaker.is_open)
    eventually(lambda: node._idle)
    connection = node.acquire(in_s(0))
    assert [connection] == [opened for opened, _ in opener.opened]
    node.close()


def test_without_threads_a_connection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    node = make_node(Opener(), max_failures=2)

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for _ in range(3):
            with pytest.raises(LinkError):
                node.acquire(in_s(60))
        for _ in range(2):
            node.failed()
        assert not node.breaker.is_open  # nobody would close it
    node.give_back(node.acquire(in_s(60)))
    node.close()


def test_what_was_lent_before_all_were_forgotten_is_not_lent_again() -> None:
    opener = Opener()
    node = make_node(opener)
    lent = node.acquire(in_s(60))
    node.forget_idle()
    node.give_back(lent)
    assert is_closed(lent)
    other = node.acquire(in_s(60))
    assert other is not lent
    node.give_back(other)
    assert not is_closed(other)
    node.close()


def test_old_connections_are_closed_though_newer_ones_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opener = Opener()
    node = make_node(opener)
    first, second = node.acquire(in_s(60)), node.acquire(in_s(60))
    node.give_back(first)
    monkeypatch.setattr(node_module, "_MAX_IDLE_S", 0.0)
    node.give_back(second)
    assert is_closed(first) and not is_closed(second)
    node.close()


def late(node: RedisNode, num_read: int) -> None:
    """A call that ends by its deadline after so many bytes."""

    def run(connection: RespConnection) -> None:
        deadline_s = in_s(0.01)
        if num_read:
            connection.read_reply(deadline_s)
        connection.read_reply(deadline_s)

    with pytest.raises(DeadlineError):
        node.call(run, in_s(60))


def test_a_call_that_had_some_answers_in_time_is_no_failure() -> None:
    opener = Opener()
    node = make_node(opener, max_failures=1, probe_interval_ms=LONG_MS)
    late(node, num_read=1)
    assert not node.breaker.is_open
    silent = node.acquire(in_s(60))
    silent.read_reply(in_s(60))
    node.give_back(silent)
    late(node, num_read=0)
    assert node.breaker.is_open
    node.close()
