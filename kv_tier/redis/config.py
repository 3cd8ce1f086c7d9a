"""Where Redis is, and how long anybody waits for it. Constructing one does no I/O."""

from dataclasses import dataclass, field
from typing import Literal

from redis.connection import parse_url

from kv_tier.redis.encoding import Encoding
from kv_tier.redis.link import LinkLimit

MAX_DEADLINE_MS = 1e9  # eleven days: no clock or lock overflows

_PREFIX_FORBIDS = frozenset("{}*?[]\\^")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisTierConfig:
    """What the Redis tier reads of the settings.

    url: `redis://user:password@host:port/db`, `rediss://` for TLS, `unix:///path?db=0`; further
    options in the query as redis-py's `from_url` takes them, for example
    `rediss://cache:6379?ssl_ca_certs=/etc/ssl/ca.pem`. With `sentinel` the host is the name of the
    service. With `cluster` the host is one start node, and there is only database 0.
    """

    url: str = field(repr=False)  # it may hold a password
    mode: Literal["standalone", "sentinel", "cluster"] = "standalone"
    nodes: tuple[str, ...] = ()  # host:port, the Sentinels, or further start nodes of the cluster
    sentinel_password: str | None = field(default=None, repr=False)
    key_prefix: str = "cachesmith"  # every key starts with it and a colon
    ttl_s: float | None = None  # from the last write; None leaves eviction to Redis
    encoding: Encoding = Encoding.RAW  # of what this process writes; it reads any

    num_connections: int = 3  # to read with, for each Redis node
    depth: int = 2  # requests in flight on each of them
    lookup_deadline_ms: float = 50.0  # of one lookup, over all its chunks
    value_deadline_ms: float = 500.0  # of one layer's value, from its turn to its last byte
    write_deadline_ms: float = 1000.0  # of one value that is written
    fetch_deadline_ms: float = 5000.0  # of all layers of the chunks that one request brings in
    connect_deadline_ms: float = 500.0  # of each step of a connection's set-up
    breaker_failures: int = 3  # in a row, until reads become misses at once
    probe_interval_ms: float = 500.0  # between probes of a node whose breaker is open
    write_backlog_bytes: int = 1 << 30  # arena bytes that wait to be written, at most
    limit: LinkLimit | None = None  # emulates a slower link, for experiments

    def __post_init__(self) -> None:
        if not self.url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("url must start with redis://, rediss:// or unix://")
        try:
            parse_url(self.url)
        except ValueError:  # its text may hold a piece of the password
            raise ValueError("url can not be parsed: quote what is special in it") from None
        if self.mode not in ("standalone", "sentinel", "cluster"):
            raise ValueError(f"mode must be standalone, sentinel or cluster, got {self.mode!r}")
        if self.mode != "standalone" and self.url.startswith("unix://"):
            raise ValueError(f"a unix socket is one standalone Redis, not a {self.mode}")
        if self.mode == "sentinel" and not self.nodes:
            raise ValueError("sentinel needs the Sentinels' addresses in nodes")
        for node in self.nodes:
            host, _, port = node.rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError(f"a node is host:port, got {node!r}")
        check_key_prefix(self.key_prefix)
        if min(self.num_connections, self.depth, self.breaker_failures) < 1:
            raise ValueError(f"need at least one connection, request and failure, got {self}")
        deadlines = (
            self.lookup_deadline_ms,
            self.value_deadline_ms,
            self.write_deadline_ms,
            self.fetch_deadline_ms,
            self.connect_deadline_ms,
            self.probe_interval_ms,
        )
        if not all(0 < deadline_ms <= MAX_DEADLINE_MS for deadline_ms in deadlines):
            raise ValueError(f"deadlines must be positive, up to {MAX_DEADLINE_MS}, got {self}")
        if self.write_backlog_bytes < 0:
            raise ValueError(f"the backlog must not be below 0, got {self}")
        if self.ttl_s is not None and not 0.001 <= self.ttl_s <= MAX_DEADLINE_MS:
            raise ValueError(f"ttl_s must be at least a millisecond, and finite, got {self}")


def check_key_prefix(prefix: str) -> None:
    """Raises ValueError for one that keys can not start with."""
    if not prefix or not prefix.isprintable() or " " in prefix:
        raise ValueError(f"key_prefix must be printable, without spaces, got {prefix!r}")
    if _PREFIX_FORBIDS & set(prefix):
        raise ValueError(f"key_prefix must have none of {{}}*?[]\\^, got {prefix!r}")
