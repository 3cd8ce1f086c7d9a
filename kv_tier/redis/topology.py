"""Which Redis node has a chunk, and how to connect to it: standalone, Sentinel, Cluster.

redis-py does the work: URLs, TLS, authentication, Sentinel's discovery, the cluster's slot map.
"""

import threading
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import ConnectionPool, SSLConnection, parse_url
from redis.crc import key_slot
from redis.exceptions import RedisClusterException
from redis.retry import Retry
from redis.sentinel import Sentinel

from kv_tier.redis.config import RedisTierConfig
from kv_tier.redis.errors import DeadlineError, LinkError, UnavailableError
from kv_tier.redis.resp import RespConnection

ONLY_NODE = "redis"  # name of the one node of a standalone or Sentinel Redis

Client = redis.Redis | RedisCluster

# The second is no subclass of the first.
_LIBRARY_ERRORS = (redis.RedisError, RedisClusterException, OSError)


class RedisTopology:
    """Names the nodes and opens connections to them. Thread-safe. Constructing it does no I/O.

    Every method but `node_of` and `nodes` may block for several connect deadlines: call them where
    no request waits.
    """

    def __init__(self, config: RedisTierConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._closed = False
        self._slots: dict[int, str] = {}

    def node_of(self, name: bytes) -> str | None:
        """The node that has a Redis key, by what is known; None where no node is known to."""
        if self._config.mode != "cluster":
            return ONLY_NODE
        return self._slots.get(key_slot(name))

    def nodes(self) -> set[str]:
        """Those that have keys, by what is known."""
        return {ONLY_NODE} if self._config.mode != "cluster" else set(self._slots.values())

    def refresh(self) -> None:
        """Learn who has what, of a cluster. Raises LinkError when no start node answers."""
        if self._config.mode != "cluster":
            return
        client = self.client()
        assert isinstance(client, RedisCluster)
        try:
            # redis-py asks the nodes that it knows; all of them may be gone by now.
            client.nodes_manager.initialize(additional_startup_nodes_info=self._start_nodes())
        except _LIBRARY_ERRORS as exc:
            raise LinkError(f"no node of the cluster answers: {exc}") from exc
        self._read_slots(client)

    def open(self, node: str) -> RespConnection:
        """Connect, authenticate, choose the database. Raises LinkError or DeadlineError."""
        try:
            pool = self._pool(node)
            options = pool.connection_kwargs | {"protocol": 2}  # whatever the URL says
            connection = pool.connection_class(**options)
            connection.connect()
            sock = connection._sock  # no public name; test_resp.py holds redis-py to it
            connection._sock = None  # ours now: redis-py would close it with its connection
        except redis.TimeoutError as exc:
            raise DeadlineError(f"{node} does not answer: {exc}") from exc
        except _LIBRARY_ERRORS as exc:
            raise LinkError(f"can not connect to {node}: {exc}") from exc
        return RespConnection(sock)

    def client(self) -> Client:
        """redis-py's client, for the operations. Raises LinkError."""
        client = self._client
        if client is None:
            try:
                client = self._make_client()  # may take long: who closes must not wait for it
            except _LIBRARY_ERRORS as exc:
                raise LinkError(f"can not reach Redis: {exc}") from exc
            client = self._keep(client)
        if isinstance(client, RedisCluster) and not self._slots:
            self._read_slots(client)
        return client

    def close(self) -> None:
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _keep(self, made: Client) -> Client:
        """The client that is kept: this one, or another thread's that was faster."""
        with self._lock:
            if not self._closed and self._client is None:
                self._client = made
            kept = self._client
        if kept is not made:
            made.close()
        if kept is None:
            raise UnavailableError("the Redis tier is closed")
        return kept

    def _pool(self, node: str) -> ConnectionPool:
        client = self.client()
        if not isinstance(client, RedisCluster):
            return client.connection_pool
        found = client.get_node(node_name=node)
        if found is None:
            raise LinkError(f"{node} is not in the cluster any more")
        return client.get_redis_connection(found).connection_pool

    def _make_client(self) -> Client:
        config = self._config
        timeout_s = config.connect_deadline_ms / 1e3
        options: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 0),  # a caller with a deadline decides, not the library
            "protocol": 2,  # RESP3 may push messages between answers
        }
        if config.mode == "standalone":
            return redis.Redis.from_url(config.url, **options)
        url_options = parse_url(config.url)
        is_tls = url_options.pop("connection_class", None) is SSLConnection
        if config.mode == "cluster":
            options |= url_options | {"ssl": is_tls}
            for name in ("db", "host", "port"):
                options.pop(name, None)
            return RedisCluster(
                startup_nodes=[ClusterNode(*address) for address in self._start_nodes()],
                require_full_coverage=False,
                **options,
            )
        service = _host_as_written(config.url)
        url_options.pop("host", None)
        sentinel_options = options | {"password": config.sentinel_password, "ssl": is_tls}
        sentinel_options |= {k: v for k, v in url_options.items() if k.startswith("ssl_")}
        addresses = [_address(node) for node in config.nodes]
        sentinels = Sentinel(addresses, sentinel_kwargs=sentinel_options)
        options |= url_options | {"ssl": is_tls}
        master: redis.Redis = sentinels.master_for(service, **options)
        return master

    def _start_nodes(self) -> list[tuple[str, int]]:
        """Those that are configured, of a cluster."""
        options = parse_url(self._config.url)
        start = (options.get("host", "localhost"), options.get("port", 6379))
        return [start, *map(_address, self._config.nodes)]

    def _read_slots(self, client: RedisCluster) -> None:
        slots = client.nodes_manager.slots_cache
        self._slots = {slot: holders[0].name for slot, holders in slots.items() if holders}


def _host_as_written(url: str) -> str:
    """A Sentinel's services are told apart by case, which `urlsplit().hostname` drops."""
    return unquote(urlsplit(url).netloc.rpartition("@")[2].partition(":")[0])


def _address(node: str) -> tuple[str, int]:
    host, _, port = node.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
