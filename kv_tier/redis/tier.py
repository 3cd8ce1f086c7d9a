"""The Redis tier: chunks in Redis, read layer by layer into the arena, written behind from it."""

import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from kv_tier.layout import KvLayout
from kv_tier.redis.config import RedisTierConfig
from kv_tier.redis.counters import Count, Counters, RedisTierStats
from kv_tier.redis.directory import NodeDirectory
from kv_tier.redis.encoding import Encoding
from kv_tier.redis.entry_memory import EntryMemory
from kv_tier.redis.errors import RedisCallError, UnavailableError
from kv_tier.redis.fetch import (
    ChunkFetch,
    Fetch,
    FetchRequest,
    check_fetch,
    deadline_from_now_s,
)
from kv_tier.redis.link import EmulatedLink, LinkLimit, LinkMeter, LinkSpeed
from kv_tier.redis.lookup import ManifestLookup, as_miss
from kv_tier.redis.misses import IS_DAMAGE
from kv_tier.redis.node import RedisNode
from kv_tier.redis.reader import NodeReader, Piece
from kv_tier.redis.remote import ChunkWrite
from kv_tier.redis.topology import Client, RedisTopology
from kv_tier.redis.values import WRITE_ID_BYTES, Manifest, layer_name, manifest_name
from kv_tier.redis.writer import WriteBehind
from kv_tier.store import ChunkQuery


class RedisTier:
    """A `RemoteTier` in Redis. Thread-safe; not fork-safe. Opening it connects to nothing yet.

    Threads and connections come when they are needed. Redis may be absent at any time.
    """

    def __init__(
        self,
        config: RedisTierConfig,
        layout: KvLayout,
        arena: memoryview,
        *,
        new_write_id: Callable[[], bytes] = lambda: secrets.token_bytes(WRITE_ID_BYTES),
    ) -> None:
        """arena: [arena_bytes], the writable mapping, `memoryview(view.mapping.numpy())`.

        A process that only looks chunks up passes an empty one.
        """
        if layout.itemsize == 1 and config.encoding is not Encoding.RAW:
            raise ValueError(f"{layout.dtype} has one byte a number: encode it raw")
        self.config = config
        self.layout = layout
        self._arena = arena
        self._counters = Counters()
        self._meter = LinkMeter()
        self._link = EmulatedLink(config.limit)
        topology = RedisTopology(config)
        self._directory = NodeDirectory(config, topology, on_gone=self._node_gone)
        self._writer = WriteBehind(
            config,
            layout,
            arena,
            self._directory,
            self._counters,
            reads_are_under_way=lambda: self._meter.is_busy,
            new_write_id=new_write_id,
        )
        self._lookup = ManifestLookup(
            config,
            layout,
            self._directory,
            self._counters,
            self._meter,
            on_damage=self._writer.remove_damaged,
        )
        self._lock = threading.Lock()
        self._readers: dict[RedisNode, NodeReader] = {}
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def lookup(self, wanted: Sequence[ChunkQuery]) -> list[Manifest | None]:
        return self._lookup.find(wanted)

    def fetch(
        self,
        requests: Sequence[FetchRequest],
        layers: Sequence[int],
        *,
        deadline_ms: float,
        on_layer: Callable[[ChunkFetch, int], None] | None = None,
        on_quiet: Callable[[ChunkFetch], None] | None = None,
    ) -> Fetch:
        """In a cluster that nobody has asked for its slots yet, this waits as a lookup does."""
        check_fetch(layers, self.layout, deadline_ms)
        deadline_s = deadline_from_now_s(deadline_ms)

        def ended(chunk: ChunkFetch) -> None:
            self._count(chunk)
            if on_quiet is not None:
                on_quiet(chunk)

        chunks = {
            request: ChunkFetch(
                EntryMemory(self._arena, request.location, self.layout),
                request,
                layers,
                deadline_s=deadline_s,
                on_layer=on_layer,
                on_quiet=ended,
            )
            for request in dict.fromkeys(requests)
        }
        for reader, pieces in self._route(list(chunks.values()), layers).items():
            reader.submit(pieces)
        return Fetch([chunks[request] for request in requests])

    def write_behind(self, write: ChunkWrite) -> bool:
        return self._writer.offer(write)

    def shed_backlog(self) -> int:
        return self._writer.shed()

    def cancel_writes(self, content_id: str) -> int:
        return self._writer.cancel(content_id)

    def flush(self, timeout_ms: float) -> bool:
        return self._writer.flush(timeout_ms)

    def remove(self, key: bytes) -> None:
        self._writer.remove(key)

    def speed(self) -> LinkSpeed:
        return self._meter.speed()

    def emulate(self, limit: LinkLimit | None) -> None:
        """Another link than `config.limit`, for values that have not come yet; None: no limit."""
        self._link.replace(limit)

    def nodes_unavailable(self) -> tuple[str, ...]:
        """Nodes whose breaker is open."""
        return tuple(node.name for node in self._directory.nodes() if node.breaker.is_open)

    def stats(self) -> RedisTierStats:
        nodes = self._directory.nodes()
        return RedisTierStats(
            counts=self._counters.counts(),
            misses=self._counters.misses(),
            speed=self._meter.speed(),
            backlog_bytes=self._writer.backlog_bytes,
            num_backlog=self._writer.num_backlog,
            nodes_unavailable=self.nodes_unavailable(),
            breaker_openings=sum(node.breaker.num_opened for node in nodes),
        )

    def client(self) -> Client:
        """redis-py's client of the same Redis, for `operations`. Raises LinkError."""
        return self._directory.client()

    def close(self) -> None:
        """Drop the backlog, end every fetch with a miss. Returns when all is quiet.

        In a callback it returns before, as it can not wait for the callback's own thread.
        """
        self._writer.close()
        with self._lock:
            self._closed = True
            readers = list(self._readers.values())
        for reader in readers:
            reader.close()
        self._directory.close()  # so that none of them waits for a connection
        for reader in readers:
            reader.join()
        self._lookup.close()

    def _route(
        self, chunks: Sequence[ChunkFetch], layers: Sequence[int]
    ) -> dict[NodeReader, list[Piece]]:
        """Pieces by node: the first layer of every chunk, then the second, and so on."""
        deadline_s = deadline_from_now_s(self.config.lookup_deadline_ms)
        reader_of: dict[ChunkFetch, NodeReader] = {}
        for chunk in chunks:
            name = manifest_name(self.config.key_prefix, chunk.location.key)
            try:
                reader_of[chunk] = self._reader(self._directory.node_for(name, deadline_s))
            except RedisCallError as exc:
                chunk.fail(as_miss(exc))
        pieces: dict[NodeReader, list[Piece]] = defaultdict(list)
        for turn, layer in enumerate(layers):
            for chunk, reader in reader_of.items():
                name = layer_name(self.config.key_prefix, chunk.location.key, layer)
                pieces[reader].append(Piece(chunk, layer, name, turn))
        return pieces

    def _reader(self, node: RedisNode) -> NodeReader:
        with self._lock:
            if self._closed:
                raise UnavailableError("the Redis tier is closed")
            if node not in self._readers:
                self._readers[node] = NodeReader(
                    node,
                    num_connections=self.config.num_connections,
                    depth=self.config.depth,
                    value_deadline_ms=self.config.value_deadline_ms,
                    meter=self._meter,
                    link=self._link,
                    counters=self._counters,
                    on_redirect=self._directory.redirected,
                )
            return self._readers[node]

    def _node_gone(self, node: RedisNode) -> None:
        with self._lock:
            reader = self._readers.get(node)  # it stays: `close` waits for what it has in flight
        if reader is not None:
            reader.close()

    def _count(self, chunk: ChunkFetch) -> None:
        if chunk.miss is None:
            self._counters.add(Count.CHUNKS_READ)
            self._counters.add(Count.READ_MS, round(chunk.elapsed_ms))
            return
        self._counters.miss(chunk.miss)
        if chunk.miss in IS_DAMAGE:
            self._writer.remove_damaged(chunk.location.key, chunk.write_id)
