"""The second level as a replica uses it: chunks on their way in before a prefill, out behind it."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from kv_tier.arena_view import ArenaView
from kv_tier.arrival import Arrival
from kv_tier.errors import KvTierError
from kv_tier.host_tier import HostTier
from kv_tier.keys import KeySpace
from kv_tier.redis import ArrivingChunk, ChunkWrite, Promoter, RedisTier, RedisTierConfig
from kv_tier.store import ChunkQuery
from planner.clock import Clock
from planner.link_tracker import LinkTracker
from planner.timeline import Link
from planner.types import PrefillResult
from replicas.batch import ArrivalTerms
from replicas.connector_scheduler import REMOTE_TIER
from replicas.connector_types import ArrivingSegment, RequestParams
from replicas.handover import Handover, hand_over
from replicas.segment_keys import segment_queries

log = logging.getLogger(__name__)

ASSUMED_BYTES_PER_MS = 1e6  # of a link that nothing has come over yet
_POLL_S = 0.002
_PATIENCE_MS = 100.0  # over a lookup's deadline, for threads and the arena's index


class HeldChunks:
    """The chunks that one request brings in; none at first."""

    def __init__(self, chunks: Iterable[ArrivingChunk] = ()) -> None:
        self._chunks = tuple(chunks)
        self.keys = frozenset(chunk.location.key for chunk in self._chunks)

    def release(self, *, is_wanted: bool = True) -> None:
        """Its prefill is done, or it has gone. May be called twice."""
        for chunk in self._chunks:
            chunk.release(is_wanted=is_wanted)


class RemoteChunks:
    """Chunks in Redis, for one engine; all but `close` on the event loop."""

    def __init__(
        self,
        config: RedisTierConfig,
        host: HostTier,
        keys: KeySpace,
        clock: Clock,
        *,
        max_lookups: int,
    ) -> None:
        """max_lookups: at the same time"""
        layout = host.config.layout
        self._config = config
        self._host = host
        self._keys = keys
        self._clock = clock
        self._num_layers = layout.num_layers
        self._view = ArenaView(host.config.directory, layout)
        self.tier = RedisTier(config, layout, memoryview(self._view.mapping.numpy()))
        self._promoter = Promoter(host, self.tier, self._view)
        self._pool = ThreadPoolExecutor(max_lookups, thread_name_prefix="promote")
        limit = config.limit
        bytes_per_ms = ASSUMED_BYTES_PER_MS
        if limit is not None:
            bytes_per_ms = min(bytes_per_ms, limit.bytes_per_ms)
        latency_ms = 0.0 if limit is None else limit.latency_ms
        self._tracker = LinkTracker(
            Link(bytes_per_ms=bytes_per_ms, latency_ms=latency_ms), is_guess=True
        )

    @property
    def link(self) -> Link:
        return self._tracker.link

    @property
    def can_load(self) -> bool:
        """Whether Redis is asked at all."""
        return not self.tier.nodes_unavailable()

    @property
    def loaded_share(self) -> float:
        return self._tracker.loaded_share

    async def bring(
        self, params: RequestParams, prompt_ids: Sequence[int]
    ) -> tuple[RequestParams, HeldChunks]:
        """Start to fetch what the node lacks of the request's segments, and Redis has.

        returns: the parameters with what is on its way, and the hold on it
        """
        warmup_depth = params.warmup_depth
        if warmup_depth >= self._num_layers:  # nothing stored is needed
            return params, HeldChunks()
        queries = segment_queries(
            self._keys, params.segments, prompt_ids, cache_salt=params.cache_salt
        )
        arriving = await self._promote(queries, first_layer=warmup_depth)
        segments = [
            ArrivingSegment(segment_idx=i, location=chunk.location)
            for i, chunk in enumerate(arriving)
            if chunk is not None
        ]
        if not segments:
            return params, HeldChunks()
        terms = ArrivalTerms(
            bytes_per_ms=self.link.bytes_per_ms,
            deadline_ms=self._clock.now_ms() + self._config.fetch_deadline_ms,
        )
        held = HeldChunks(chunk for chunk in arriving if chunk is not None)
        return replace(params, arriving=segments, arrival=terms), held

    async def fetch(self, query: ChunkQuery) -> bool:
        """Bring one chunk in and wait for it; whether it has come whole."""
        (chunk,) = await self._promote([query], first_layer=0)
        if chunk is None:
            return False
        # the process that fetches it may have died
        end_ms = self._clock.now_ms() + self._config.fetch_deadline_ms
        try:
            while self._view.arrival(chunk.location) is Arrival.ARRIVING:
                if self._clock.now_ms() >= end_ms:
                    return False
                await asyncio.sleep(_POLL_S)
            return self._view.arrival(chunk.location) is Arrival.WHOLE
        finally:
            chunk.release()

    def keep(self, query: ChunkQuery, *, recompute_ms: float, content_id: str) -> None:
        """Copy a resident chunk to Redis when there is time, unless it is there."""
        with suppress(RuntimeError):  # closed
            self._pool.submit(self._keep, query, recompute_ms, content_id)

    def _keep(self, query: ChunkQuery, recompute_ms: float, content_id: str) -> None:
        try:
            lease = self._host.hold(query.key)
        except KvTierError:
            log.exception("a chunk is not copied to Redis")
            return
        if lease is None:
            return
        self.tier.write_behind(
            ChunkWrite(
                location=lease.location,
                token_ids=query.token_ids,
                recompute_ms=recompute_ms,
                content_id=content_id,
                release=lambda: self._host.release([lease]),
            )
        )

    def discard(self, keys: Iterable[bytes]) -> None:
        """Of chunks that are no use although they verify, or that somebody deleted."""
        for key in keys:
            self.tier.remove(key)

    async def make_room(self) -> bool:
        """Give up what waits to be written: its leases keep the arena full. Whether that helps."""
        shed = self.tier.shed_backlog
        return await asyncio.get_running_loop().run_in_executor(self._pool, shed) > 0

    def observe(self, result: PrefillResult) -> None:
        """Let the link follow what a prefill saw of it."""
        speed = self.tier.speed()
        loaded = result.cached_tokens.get(REMOTE_TIER, 0)
        self._tracker.observe(
            loaded=loaded,
            stored=sum(result.cached_tokens.values()),
            batch_size=result.batch_size,
            bytes_per_ms=speed.bytes_per_ms if loaded and speed.bytes_per_ms else None,
            latency_ms=speed.latency_ms if loaded and speed.latency_ms else None,
        )

    def hand_over(self, timeout_ms: float) -> Handover:
        """Before `close`: what the node has and Redis lacks goes there. Blocks, nothing else runs.

        Returns what was done.
        """
        self._pool.shutdown()  # what it was to hand to the writer is there then
        return hand_over(self._host, self.tier, timeout_ms=timeout_ms)

    def close(self) -> None:
        """Ends every fetch with a miss."""
        self._pool.shutdown()
        self.tier.close()
        self._promoter.close()

    async def _promote(
        self, queries: Sequence[ChunkQuery], *, first_layer: int
    ) -> list[ArrivingChunk | None]:
        """In the order of the layers that a prefill needs; those before `first_layer` are last."""
        layers = [*range(first_layer, self._num_layers), *range(first_layer)]

        def promote() -> list[ArrivingChunk | None]:
            return self._promoter.promote(
                queries, layers, deadline_ms=self._config.fetch_deadline_ms
            )

        nothing: list[ArrivingChunk | None] = [None] * len(queries)
        try:
            running = asyncio.get_running_loop().run_in_executor(self._pool, promote)
        except RuntimeError:  # no thread to be had
            log.exception("nothing is brought in from Redis")
            return nothing
        timeout_s = (self._config.lookup_deadline_ms + _PATIENCE_MS) / 1e3
        try:
            return await asyncio.wait_for(asyncio.shield(running), timeout_s)
        except asyncio.CancelledError:
            running.add_done_callback(_forget)
            raise
        except TimeoutError:
            running.add_done_callback(_forget)
            log.warning("a lookup in Redis took more than %.0f ms", timeout_s * 1e3)
        except Exception:
            log.exception("nothing is brought in from Redis")
        return nothing


def _forget(running: "asyncio.Future[list[ArrivingChunk | None]]") -> None:
    """The request has gone while its chunks were looked up."""
    if not running.cancelled() and running.exception() is None:
        HeldChunks(chunk for chunk in running.result() if chunk is not None).release(
            is_wanted=False
        )
