"""All nodes of one Redis, by the keys that they have."""

import logging
import threading
import time
from collections.abc import Callable

from kv_tier.redis.config import RedisTierConfig
from kv_tier.redis.errors import LinkError, UnavailableError
from kv_tier.redis.node import RedisNode
from kv_tier.redis.topology import Client, RedisTopology

log = logging.getLogger(__name__)

_REFRESH_INTERVAL_S = 0.5  # at most so often, whatever the nodes answer


class NodeDirectory:
    """Finds the node of a key, learns of changes in the background. Thread-safe."""

    def __init__(
        self,
        config: RedisTierConfig,
        topology: RedisTopology,
        *,
        on_gone: Callable[[RedisNode], None],
    ) -> None:
        """on_gone: called with a node that was closed, because it has left the cluster"""
        self._config = config
        self._topology = topology
        self._on_gone = on_gone
        self._changed = threading.Condition()
        self._by_name: dict[str, RedisNode] = {}
        self._refreshed_at_s = float("-inf")  # when that began last
        self._is_refreshing = False
        self._was_refreshed = False
        self._closed = False

    def node_for(self, name: bytes, deadline_s: float) -> RedisNode:
        """The node that has a Redis key. Raises LinkError while nobody knows.

        Who asks first waits for the cluster's slots; later nobody does.
        """
        node = self._topology.node_of(name)
        if node is None:
            self._start_refresh()
            with self._changed:
                left_s = max(0.0, deadline_s - time.monotonic())
                self._changed.wait_for(
                    lambda: self._was_refreshed or self._closed or not self._is_refreshing, left_s
                )
            node = self._topology.node_of(name)
        with self._changed:
            if self._closed:
                raise UnavailableError("the Redis tier is closed")
            if node is None:
                raise LinkError("no node has the key's slot")
            if node not in self._by_name:
                self._by_name[node] = self._new_node(node)
            return self._by_name[node]

    def redirected(self, node: RedisNode) -> None:
        """A node answered MOVED, READONLY or the like: what is known is out of date."""
        node.forget_idle()  # a Sentinel's next connection goes to the new master
        self._start_refresh()

    def client(self) -> Client:
        """redis-py's client, for the operations. Raises LinkError."""
        return self._topology.client()

    def nodes(self) -> list[RedisNode]:
        with self._changed:
            return list(self._by_name.values())

    def close(self) -> None:
        with self._changed:
            self._closed = True
            nodes = list(self._by_name.values())
            self._changed.notify_all()
        for node in nodes:
            node.close()
        self._topology.close()

    def _new_node(self, name: str) -> RedisNode:
        return RedisNode(
            name,
            open_connection=lambda: self._topology.open(name),
            refresh=self._refresh,
            max_failures=self._config.breaker_failures,
            probe_interval_ms=self._config.probe_interval_ms,
            connect_deadline_ms=self._config.connect_deadline_ms,
        )

    def _start_refresh(self) -> None:
        """In the background, unless one was begun a moment ago, or has not ended."""
        with self._changed:
            is_due = time.monotonic() - self._refreshed_at_s >= _REFRESH_INTERVAL_S
            if self._closed or self._is_refreshing or not is_due:
                return
            thread = threading.Thread(target=self._refresh_once, name="redis-refresh", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:
                log.error("no thread to ask the cluster who has what: %s", exc)
                return
            self._is_refreshing = True
            self._refreshed_at_s = time.monotonic()

    def _refresh_once(self) -> None:
        try:
            self._refresh()
        except LinkError as exc:
            log.warning("who has what is not known: %s", exc)
        except Exception as exc:
            log.error("asking who has what failed: %r", exc)
        with self._changed:
            self._is_refreshing = False
            self._was_refreshed = True
            self._changed.notify_all()

    def _refresh(self) -> None:
        """Learn who has what, and forget nodes that have nothing any more."""
        self._topology.refresh()
        there = self._topology.nodes()
        with self._changed:
            gone = [node for name, node in self._by_name.items() if name not in there]
            for node in gone:
                del self._by_name[node.name]
        for node in gone:
            node.close()
            self._on_gone(node)
