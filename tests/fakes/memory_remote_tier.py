"""A second level in this process's memory: the contract of `RemoteTier`, without Redis or threads.

What is fetched is there when `fetch` returns. Values are kept raw. `fail_with` makes every lookup
and fetch a miss.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from kv_tier import ChunkQuery, KvLayout
from kv_tier.keys import token_bytes
from kv_tier.redis import (
    ChunkFetch,
    ChunkWrite,
    Count,
    Encoding,
    Fetch,
    FetchRequest,
    LinkSpeed,
    Manifest,
    Miss,
    RedisTierStats,
    StoredShape,
)
from kv_tier.redis.counters import Counters
from kv_tier.redis.entry_memory import EntryMemory
from kv_tier.redis.fetch import check_fetch, deadline_from_now_s
from kv_tier.redis.values import WRITE_ID_BYTES


class MemoryRemoteTier:
    def __init__(
        self,
        layout: KvLayout,
        arena: memoryview,
        *,
        new_write_id: Callable[[], bytes] = lambda: secrets.token_bytes(WRITE_ID_BYTES),
    ) -> None:
        self.fail_with: Miss | None = None
        self._layout = layout
        self._arena = arena
        self._stored: dict[bytes, tuple[Manifest, memoryview]] = {}  # manifest and entry
        self._new_write_id = new_write_id
        self._counters = Counters()

    def lookup(self, wanted: Sequence[ChunkQuery]) -> list[Manifest | None]:
        return [self._find(query) for query in wanted]

    def fetch(
        self,
        requests: Sequence[FetchRequest],
        layers: Sequence[int],
        *,
        deadline_ms: float,
        on_layer: Callable[[ChunkFetch, int], None] | None = None,
        on_quiet: Callable[[ChunkFetch], None] | None = None,
    ) -> Fetch:
        check_fetch(layers, self._layout, deadline_ms)

        def ended(chunk: ChunkFetch) -> None:
            if chunk.miss is None:
                self._counters.add(Count.CHUNKS_READ)
            else:
                self._counters.miss(chunk.miss)
            if on_quiet is not None:
                on_quiet(chunk)

        chunks = {
            request: ChunkFetch(
                EntryMemory(self._arena, request.location, self._layout),
                request,
                layers,
                deadline_s=deadline_from_now_s(deadline_ms),
                on_layer=on_layer,
                on_quiet=ended,
            )
            for request in dict.fromkeys(requests)
        }
        for layer in layers:
            for chunk in chunks.values():
                self._copy(chunk, layer)
        return Fetch([chunks[request] for request in requests])

    def write_behind(self, write: ChunkWrite) -> bool:
        location = write.location
        content = bytes(self._arena[location.offset : location.offset + location.nbytes])
        shape = StoredShape(
            layout=self._layout, num_tokens=location.num_tokens, encoding=Encoding.RAW
        )
        manifest = Manifest(
            key=location.key,
            shape=shape,
            write_id=self._new_write_id(),
            token_bytes=token_bytes(write.token_ids),
            recompute_ms=write.recompute_ms,
            content_id=write.content_id,
        )
        is_new = location.key not in self._stored
        self._stored.setdefault(location.key, (manifest, memoryview(content)))
        self._counters.add(Count.CHUNKS_WRITTEN if is_new else Count.WRITES_NOT_NEEDED)
        write.release()
        return True

    def shed_backlog(self) -> int:
        return 0

    def cancel_writes(self, content_id: str) -> int:
        return 0

    def flush(self, timeout_ms: float) -> bool:
        return True

    def remove(self, key: bytes) -> None:
        self._stored.pop(key, None)

    def speed(self) -> LinkSpeed:
        return LinkSpeed(bytes_per_ms=0.0, latency_ms=0.0)

    def stats(self) -> RedisTierStats:
        return RedisTierStats(
            counts=self._counters.counts(),
            misses=self._counters.misses(),
            speed=self.speed(),
            backlog_bytes=0,
            num_backlog=0,
            nodes_unavailable=(),
            breaker_openings=0,
        )

    def close(self) -> None:
        self.fail_with = Miss.UNAVAILABLE

    def _find(self, query: ChunkQuery) -> Manifest | None:
        miss = self.fail_with
        manifest, _ = self._stored.get(query.key, (None, None))
        if miss is None and manifest is None:
            miss = Miss.ABSENT
        elif miss is None and manifest.token_bytes != token_bytes(query.token_ids):
            miss = Miss.COLLISION
        if miss is not None:
            self._counters.miss(miss)
            return None
        self._counters.add(Count.LOOKUP_HITS)
        return manifest

    def _copy(self, chunk: ChunkFetch, layer: int) -> None:
        if not chunk.begin():
            return
        manifest, content = self._stored.get(chunk.location.key, (None, None))
        miss = self.fail_with
        if miss is None and manifest is None:
            miss = Miss.MISSING
        elif miss is None and manifest.write_id != chunk.write_id:
            miss = Miss.REPLACED
        if miss is not None:
            chunk.fail(miss)
        else:
            place = replace(chunk.location, offset=0)
            source = EntryMemory(content, place, self._layout)
            chunk.entry.layer(layer)[:] = source.layer(layer)
            chunk.entry.put_checksums(layer, source.checksums(layer))
            self._counters.add(Count.LAYERS_READ)
            chunk.layer_ready(layer)
        chunk.end()
