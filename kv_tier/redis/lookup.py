"""Finds which chunks Redis has whole, within one deadline."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from kv_tier.keys import token_bytes
from kv_tier.layout import KvLayout
from kv_tier.redis.config import RedisTierConfig
from kv_tier.redis.counters import Count, Counters
from kv_tier.redis.directory import NodeDirectory
from kv_tier.redis.errors import DeadlineError, RedisCallError, ReplyError, UnavailableError
from kv_tier.redis.layer_read import MOVED_CODES
from kv_tier.redis.link import LinkMeter
from kv_tier.redis.misses import IS_DAMAGE, Miss
from kv_tier.redis.node import RedisNode
from kv_tier.redis.resp import Buffer, Reply, RespConnection, command
from kv_tier.redis.values import Manifest, chunk_names, manifest_name, parse_manifest
from kv_tier.store import ChunkQuery

_MAX_AT_ONCE = 16  # nodes that are asked, over all lookups


class ManifestLookup:
    """Asks each node once for all its chunks: the manifest, and how many of the keys exist.

    Thread-safe.
    """

    def __init__(
        self,
        config: RedisTierConfig,
        layout: KvLayout,
        directory: NodeDirectory,
        counters: Counters,
        meter: LinkMeter,
        *,
        on_damage: Callable[[bytes], None],
    ) -> None:
        self._config = config
        self._layout = layout
        self._directory = directory
        self._counters = counters
        self._meter = meter
        self._on_damage = on_damage
        self._pool = ThreadPoolExecutor(_MAX_AT_ONCE, thread_name_prefix="redis-lookup")

    def close(self) -> None:
        self._pool.shutdown()

    def find(self, wanted: Sequence[ChunkQuery]) -> list[Manifest | None]:
        """In the order of the queries; None is a miss, and counted by its reason."""
        deadline_s = time.monotonic() + self._config.lookup_deadline_ms / 1e3
        keys = list(dict.fromkeys(query.key for query in wanted))
        found: dict[bytes, Manifest | Miss] = {}
        by_node: dict[RedisNode, list[bytes]] = defaultdict(list)
        for key in keys:
            name = manifest_name(self._config.key_prefix, key)
            try:
                by_node[self._directory.node_for(name, deadline_s)].append(key)
            except RedisCallError as exc:
                found[key] = as_miss(exc)
        for answers in self._ask_all(by_node, deadline_s):
            found |= answers
        return [self._judge(query, found[query.key]) for query in wanted]

    def _ask_all(
        self, by_node: dict[RedisNode, list[bytes]], deadline_s: float
    ) -> Iterator[dict[bytes, Manifest | Miss]]:
        """Every node at the same time: one that does not answer takes no time from the others."""
        if len(by_node) <= 1:
            return (self._ask(node, keys, deadline_s) for node, keys in by_node.items())
        return self._pool.map(
            lambda asked: self._ask(asked[0], asked[1], deadline_s), by_node.items()
        )

    def _ask(
        self, node: RedisNode, keys: list[bytes], deadline_s: float
    ) -> dict[bytes, Manifest | Miss]:
        prefix, num_layers = self._config.key_prefix, self._layout.num_layers
        parts: list[Buffer] = []
        for key in keys:
            names = chunk_names(prefix, key, num_layers)
            parts += command(b"GET", names[0])
            parts += command(b"EXISTS", *names)

        def run(connection: RespConnection) -> list[Reply | ReplyError]:
            started_s = time.monotonic()
            connection.send(parts, deadline_s)
            replies = [_reply_or_error(connection, deadline_s) for _ in range(2 * len(keys))]
            self._meter.round_trip((time.monotonic() - started_s) * 1e3)
            return replies

        try:
            replies = node.call(run, deadline_s)
        except RedisCallError as exc:
            return dict.fromkeys(keys, as_miss(exc))
        if any(isinstance(reply, ReplyError) and reply.code in MOVED_CODES for reply in replies):
            self._directory.redirected(node)
        return {
            key: self._read(manifest, num_there)
            for key, manifest, num_there in zip(keys, replies[::2], replies[1::2], strict=True)
        }

    def _read(self, value: Reply | ReplyError, num_there: Reply | ReplyError) -> Manifest | Miss:
        if isinstance(value, ReplyError) or isinstance(num_there, ReplyError):
            return Miss.SERVER
        if value is None:
            return Miss.ABSENT
        if not isinstance(value, bytes):
            return Miss.FOREIGN
        manifest = parse_manifest(value)
        if isinstance(manifest, Miss):
            return manifest
        return manifest if num_there == 1 + self._layout.num_layers else Miss.INCOMPLETE

    def _judge(self, query: ChunkQuery, found: Manifest | Miss) -> Manifest | None:
        if isinstance(found, Manifest):
            if found.key != query.key or found.shape.layout != self._layout:
                found = Miss.FOREIGN
            elif found.token_bytes != token_bytes(query.token_ids):
                found = Miss.COLLISION
        if isinstance(found, Miss):
            self._counters.miss(found)
            if found in IS_DAMAGE:
                self._on_damage(query.key)
            return None
        self._counters.add(Count.LOOKUP_HITS)
        return found


def _reply_or_error(connection: RespConnection, deadline_s: float) -> Reply | ReplyError:
    try:
        return connection.read_reply(deadline_s)
    except ReplyError as exc:
        return exc


def as_miss(error: RedisCallError) -> Miss:
    """The reason of a miss that a failed call is."""
    if isinstance(error, UnavailableError):
        return Miss.UNAVAILABLE
    return Miss.DEADLINE if isinstance(error, DeadlineError) else Miss.CONNECTION
