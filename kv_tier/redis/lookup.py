"""Finds which chunks Redis has whole, within one deadline."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kv_tier.keys import token_bytes
from kv_tier.layout import KvLayout
from kv_tier.redis.config import RedisTierConfig
from kv_tier.redis.counters import Count, Counters
from kv_tier.redis.directory import NodeDirectory
from kv_tier.redis.errors import (
    DeadlineError,
    OversizeError,
    RedisCallError,
    ReplyError,
    UnavailableError,
)
from kv_tier.redis.link import LinkMeter
from kv_tier.redis.misses import IS_DAMAGE, Miss
from kv_tier.redis.node import RedisNode
from kv_tier.redis.resp import Buffer, Reply, RespConnection, command
from kv_tier.redis.values import Manifest, chunk_names, manifest_name, parse_manifest, write_id_in
from kv_tier.store import ChunkQuery

log = logging.getLogger(__name__)

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
        on_damage: Callable[[bytes, bytes], None],
    ) -> None:
        """on_damage: called with the key of a chunk, and what stands for its write id"""
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
        found |= self._ask_all(by_node, deadline_s)
        return [self._judge(query, found[query.key]) for query in wanted]

    def _ask_all(
        self, by_node: dict[RedisNode, list[bytes]], deadline_s: float
    ) -> dict[bytes, Manifest | Miss]:
        """Every node at the same time: one that does not answer takes no time from the others."""
        if len(by_node) == 1:
            ((node, keys),) = by_node.items()
            return self._ask(node, keys, deadline_s)
        answers: dict[bytes, Manifest | Miss] = {}
        asked: list[Future[dict[bytes, Manifest | Miss]]] = []
        for node, keys in by_node.items():
            try:
                asked.append(self._pool.submit(self._ask, node, keys, deadline_s))
            except RuntimeError:  # closed meanwhile, or no thread to be had
                answers |= self._ask(node, keys, deadline_s)
        for future in asked:
            answers |= future.result()
        return answers

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
            replies = [_reply_or_error(connection, deadline_s)]
            # The others' time is that of their number, and no latency.
            self._meter.round_trip((time.monotonic() - started_s) * 1e3)
            replies += [_reply_or_error(connection, deadline_s) for _ in range(2 * len(keys) - 1)]
            return replies

        try:
            replies = node.call(run, deadline_s)
            if any(isinstance(reply, ReplyError) and reply.is_redirect for reply in replies):
                self._directory.redirected(node)
            answers = zip(keys, replies[::2], replies[1::2], strict=True)
            return {key: self._read(key, value, num_there) for key, value, num_there in answers}
        except RedisCallError as exc:
            return dict.fromkeys(keys, as_miss(exc))
        except Exception:
            log.exception("a lookup failed")
            return dict.fromkeys(keys, Miss.CONNECTION)

    def _read(
        self, key: bytes, value: Reply | ReplyError, num_there: Reply | ReplyError
    ) -> Manifest | Miss:
        if isinstance(value, OversizeError):
            return Miss.FOREIGN
        if isinstance(value, ReplyError) or isinstance(num_there, ReplyError):
            return Miss.SERVER
        if value is None:
            return Miss.ABSENT
        if not isinstance(value, bytes):
            return Miss.SERVER
        found = parse_manifest(value)
        if isinstance(found, Manifest):
            if found.key != key:
                found = Miss.CORRUPT
            elif found.shape.layout != self._layout:
                found = Miss.FOREIGN
            elif num_there != 1 + self._layout.num_layers:
                found = Miss.INCOMPLETE
        if isinstance(found, Miss) and found in IS_DAMAGE:
            self._on_damage(key, write_id_in(value))
        return found

    def _judge(self, query: ChunkQuery, found: Manifest | Miss) -> Manifest | None:
        if isinstance(found, Manifest) and found.token_bytes != token_bytes(query.token_ids):
            found = Miss.COLLISION
        if isinstance(found, Miss):
            self._counters.miss(found)
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
