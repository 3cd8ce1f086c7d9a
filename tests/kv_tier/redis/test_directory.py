"""Which node has a key: learnt in the background, and forgotten when a node has left."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from redis.cluster import RedisCluster

from kv_tier.redis import Miss
from kv_tier.redis.directory import NodeDirectory
from kv_tier.redis.errors import LinkError, UnavailableError
from kv_tier.redis.node import RedisNode
from kv_tier.redis.topology import Client, RedisTopology
from tests.kv_tier.redis.cases import LONG_MS, Arena, config, fetch, open_tier
from tests.kv_tier.redis.servers import eventually


class FakeTopology(RedisTopology):
    """Keys, not slots, and what a refresh finds is the test's."""

    def __init__(self, found: dict[bytes, str]) -> None:
        super().__init__(config("redis://nobody", mode="cluster"))
        self.found = found
        self.known: dict[bytes, str] = {}
        self.num_refreshes = 0
        self.may_refresh = threading.Event()
        self.may_refresh.set()

    def node_of(self, name: bytes) -> str | None:
        return self.known.get(name)

    def nodes(self) -> set[str]:
        return set(self.known.values())

    def refresh(self) -> None:
        self.num_refreshes += 1
        assert self.may_refresh.wait(60.0)
        self.known = dict(self.found)


def open_directory(
    topology: RedisTopology, on_gone: Callable[[RedisNode], None] = lambda node: None
) -> NodeDirectory:
    return NodeDirectory(config("redis://nobody", mode="cluster"), topology, on_gone=on_gone)


def in_s(seconds: float) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_tier.redis.directory._REFRESH_INTERVAL_S", 0.0)


def test_who_asks_first_waits_for_the_slots() -> None:
    directory = open_directory(FakeTopology({b"k": "a"}))
    assert directory.node_for(b"k", in_s(60)).name == "a"
    assert [node.name for node in directory.nodes()] == ["a"]


def test_an_unknown_slot_is_a_miss_at_once_and_asked_for_in_the_background(
    no_interval: None,
) -> None:
    topology = FakeTopology({b"k": "a"})
    directory = open_directory(topology)
    directory.node_for(b"k", in_s(60))
    topology.found[b"late"] = "a"
    topology.may_refresh.clear()
    with pytest.raises(LinkError):
        directory.node_for(b"late", in_s(60))  # else it would wait
    topology.may_refresh.set()
    eventually(lambda: topology.known.get(b"late"))
    assert directory.node_for(b"late", in_s(60)).name == "a"


def test_slots_are_asked_for_no_more_often_than_that() -> None:
    topology = FakeTopology({b"k": "a"})
    directory = open_directory(topology)
    node = directory.node_for(b"k", in_s(60))
    for _ in range(20):
        with pytest.raises(LinkError):
            directory.node_for(b"other", in_s(60))
        directory.redirected(node)
    assert topology.num_refreshes <= 2


def test_a_node_that_has_left_is_closed(no_interval: None) -> None:
    topology = FakeTopology({b"k": "a", b"l": "b"})
    gone: list[RedisNode] = []
    directory = open_directory(topology, gone.append)
    left, stays = directory.node_for(b"k", in_s(60)), directory.node_for(b"l", in_s(60))
    topology.found = {b"k": "b", b"l": "b"}
    directory.redirected(left)
    eventually(lambda: gone == [left])
    assert directory.nodes() == [stays]
    with pytest.raises(UnavailableError):
        left.acquire(in_s(60))
    assert directory.node_for(b"k", in_s(60)) is stays


def test_the_readers_of_a_node_that_has_left_end(arena: Arena) -> None:
    with open_tier("redis://nobody", arena) as tier:
        node = tier._directory.node_for(b"k", in_s(60))
        node.acquire = None  # type: ignore[assignment, method-assign]  # nobody asks it
        tier._reader(node)
        tier._node_gone(node)
        assert fetch(tier, [arena.place(1)]).chunks[0].miss is Miss.UNAVAILABLE


def test_a_closed_one_keeps_nobody_waiting() -> None:
    topology = FakeTopology({})
    topology.may_refresh.clear()
    directory = open_directory(topology)
    timer = threading.Timer(0.02, directory.close)
    timer.start()
    with pytest.raises(UnavailableError):
        directory.node_for(b"k", in_s(LONG_MS))
    timer.join()
    topology.may_refresh.set()


def test_the_configured_start_nodes_are_asked_for_ever() -> None:
    topology = RedisTopology(config("redis://a:1", mode="cluster", nodes=("b:2", "[::1]:3")))
    asked: list[list[tuple[str, int]]] = []

    def initialize(*, additional_startup_nodes_info: list[tuple[str, int]]) -> None:
        asked.append(additional_startup_nodes_info)

    client = RedisCluster.__new__(RedisCluster)
    client.nodes_manager = SimpleNamespace(initialize=initialize, slots_cache={})
    topology._client = client
    topology.refresh()
    assert asked == [[("a", 1), ("b", 2), ("::1", 3)]]


def test_closing_does_not_wait_for_who_connects() -> None:
    may_connect, made = threading.Event(), SimpleNamespace(num_closed=0)

    def close() -> None:
        made.num_closed += 1

    made.close = close

    class Slow(RedisTopology):
        def _make_client(self) -> Client:
            assert may_connect.wait(60.0)
            return made  # type: ignore[return-value]

    topology = Slow(config("redis://nobody"))
    failures: list[Exception] = []

    def connect() -> None:
        try:
            topology.client()
        except UnavailableError as exc:
            failures.append(exc)

    thread = threading.Thread(target=connect)
    thread.start()
    topology.close()  # it would wait for ever
    may_connect.set()
    thread.join()
    assert len(failures) == made.num_closed == 1


def test_an_option_of_a_sentinel_url_goes_before_ours() -> None:
    settings = config("redis://service?socket_timeout=1", mode="sentinel", nodes=("[::1]:26379",))
    client = RedisTopology(settings).client()
    assert client.connection_pool.connection_kwargs["socket_timeout"] == 1.0
    (sentinel,) = client.connection_pool.sentinel_manager.sentinels
    assert sentinel.connection_pool.connection_kwargs["host"] == "::1"
