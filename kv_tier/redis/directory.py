"""All nodes of one Redis, by the keys that they have."""

import threading
import time
from contextlib import suppress

from kv_tier.redis.config import RedisTierConfig
from kv_tier.redis.errors import LinkError, UnavailableError
from kv_tier.redis.node import RedisNode
from kv_tier.redis.resp import RespConnection
from kv_tier.redis.topology import Client, RedisTopology

_REFRESH_INTERVAL_S = 0.5  # at most so often, whatever the nodes answer


class NodeDirectory:
    """Finds the node of a key, learns of changes in the background. Thread-safe."""

    def __init__(self, config: RedisTierConfig) -> None:
        self._config = config
        self._topology = RedisTopology(config)
        self._lock = threading.Lock()
        self._by_name: dict[str, RedisNode] = {}
        self._refreshed_at_s = 0.0
        self._closed = False

    def node_for(self, name: bytes, deadline_s: float) -> RedisNode:
        """The node that has a Redis key. Raises LinkError or DeadlineError while nobody knows."""
        node = self._topology.node_of(name)
        if node is None:
            asking = self._node("cluster")
            asking.give_back(asking.acquire(deadline_s))
            node = self._topology.node_of(name)
            if node is None:
                raise LinkError("no node has the key's slot")
        return self._node(node)

    def redirected(self, node: RedisNode) -> None:
        """A node answered MOVED, READONLY or the like: what is known is out of date."""
        node.forget_idle()  # a Sentinel's next connection goes to the new master
        with self._lock:
            if self._closed or time.monotonic() - self._refreshed_at_s < _REFRESH_INTERVAL_S:
                return
            self._refreshed_at_s = time.monotonic()
        threading.Thread(target=self._refresh, name="redis-refresh", daemon=True).start()

    def client(self) -> Client:
        """redis-py's client, for the operations. Raises LinkError."""
        return self._topology.client()

    def nodes(self) -> list[RedisNode]:
        with self._lock:
            return list(self._by_name.values())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            nodes = list(self._by_name.values())
        for node in nodes:
            node.close()
        self._topology.close()

    def _node(self, name: str) -> RedisNode:
        with self._lock:
            if self._closed:
                raise UnavailableError("the Redis tier is closed")
            if name not in self._by_name:
                self._by_name[name] = RedisNode(
                    name,
                    open_connection=lambda: self._open(name),
                    refresh=self._topology.refresh,
                    max_failures=self._config.breaker_failures,
                    probe_interval_ms=self._config.probe_interval_ms,
                    connect_deadline_ms=self._config.connect_deadline_ms,
                )
            return self._by_name[name]

    def _open(self, name: str) -> RespConnection:
        if name != "cluster":
            return self._topology.open(name)
        self._topology.refresh()  # before anything is known of a cluster
        return self._topology.open_any()

    def _refresh(self) -> None:
        with suppress(LinkError):  # the nodes' own probes go on asking
            self._topology.refresh()
