"""Chunks into the store: ahead of use when asked, or after a miss while nobody waits."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from kv_tier.host_tier import HostTier
from kv_tier.keys import KeySpace, content_id
from kv_tier.store import ChunkQuery
from replicas.batch import SegmentKind
from replicas.connector_scheduler import HOST_TIER
from replicas.connector_types import RequestParams, ResultParams, SegmentSpan
from replicas.interface import EngineDeadError, StoredChunk
from replicas.remote_chunks import RemoteChunks
from replicas.segment_keys import segment_query

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedChunk:
    """A chunk or prompt prefix whose isolated KV is wanted in the store."""

    token_ids: tuple[int, ...]
    cache_salt: str = ""
    kind: SegmentKind = SegmentKind.CHUNK


class PrefillPrompt(Protocol):
    """Run one prompt through the engine and say what its prefill did."""

    async def __call__(
        self, token_ids: list[int], params: RequestParams
    ) -> ResultParams | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class IngesterConfig:
    num_layers: int
    max_model_len: int
    max_backlog: int = 1024


class ChunkIngester:
    """Computes chunks alone behind the anchor, each once, whoever asks for it.

    Missed chunks wait in a backlog, latest first, until `set_idle(True)`: nobody waits for a first
    token then. One that cannot be stored is dropped.
    """

    def __init__(
        self,
        tier: HostTier,
        keys: KeySpace,
        prefill: PrefillPrompt,
        config: IngesterConfig,
        *,
        recompute_ms: Callable[[int], float],
        remote: RemoteChunks | None = None,
    ) -> None:
        self._remote = remote
        self._tier = tier
        self._keys = keys
        self._prefill = prefill
        self._config = config
        self._recompute_ms = recompute_ms  # of so many tokens: what a hit saves
        self._backlog: OrderedDict[bytes, WantedChunk] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[StoredChunk]] = {}
        self._batch_ids = count(-1, -1)  # apart from the scheduler's
        self._idle = True
        self._wake = asyncio.Event()

    @property
    def num_open(self) -> int:
        """Chunks that are waiting or being computed."""
        return len(self._backlog) + len(self._running)

    def set_idle(self, idle: bool) -> None:
        self._idle = idle
        self._wake.set()

    def remember(self, wanted: WantedChunk) -> None:
        """Keep a missed chunk for idle time; the oldest ones fall out of a full backlog."""
        key = self._query(wanted).key
        self._backlog[key] = wanted
        self._backlog.move_to_end(key)
        while len(self._backlog) > self._config.max_backlog:
            self._backlog.popitem(last=False)
        self._wake.set()

    def forget(self, chunk_id: str | None = None) -> None:
        """Do not compute this missed chunk when idle, or any of them: it was deleted."""
        kept = {} if chunk_id is None else self._backlog
        self._backlog = OrderedDict(
            (key, wanted)
            for key, wanted in kept.items()
            if content_id(wanted.token_ids, cache_salt=wanted.cache_salt) != chunk_id
        )

    async def run(self) -> None:
        """Work on the backlog until cancelled, or until the engine is dead."""
        while True:
            await self._wake.wait()
            if not self._backlog or not self._idle:
                self._wake.clear()
                continue
            _, wanted = self._backlog.popitem(last=True)
            try:
                await self.ingest(wanted)
            except EngineDeadError:
                return
            except ValueError:
                continue  # too long, or no room now
            except Exception:
                logger.exception("a missed chunk could not be computed")

    async def ingest(self, wanted: WantedChunk) -> StoredChunk:
        """Compute and store one chunk, or find it stored. A caller that leaves does not stop it.

        Raises ValueError for a chunk that cannot be stored, EngineDeadError.
        """
        num_tokens = len(wanted.token_ids)
        if num_tokens == 0:
            raise ValueError("a chunk needs at least one token")
        if self._num_prompt_tokens(wanted) >= self._config.max_model_len:
            raise ValueError(
                f"a chunk of {num_tokens} tokens does not fit the model's "
                f"{self._config.max_model_len}"
            )
        query = self._query(wanted)
        key = query.key
        self._backlog.pop(key, None)
        if not self._is_stored(key):
            task = self._running.get(key)
            if task is None:
                task = self._running[key] = asyncio.create_task(self._obtain(query, wanted))
                task.add_done_callback(lambda _: self._running.pop(key, None))
            return await asyncio.shield(task)
        self._keep(wanted, query)
        return self._describe(wanted)

    async def close(self) -> None:
        for task in list(self._running.values()):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task

    async def _obtain(self, query: ChunkQuery, wanted: WantedChunk) -> StoredChunk:
        """From Redis, or computed."""
        if self._remote is not None and await self._remote.fetch(query):
            return self._describe(wanted)
        try:
            stored = await self._compute(query.key, wanted)
        except ValueError:
            if self._remote is None or not await self._remote.make_room():
                raise
            stored = await self._compute(query.key, wanted)
        self._keep(wanted, query)
        return stored

    def _keep(self, wanted: WantedChunk, query: ChunkQuery) -> None:
        """Behind the request's back, also in Redis."""
        if self._remote is not None:
            self._remote.keep(
                query,
                recompute_ms=self._recompute_ms(self._num_prompt_tokens(wanted)),
                content_id=self._content_id(wanted),
            )

    async def _compute(self, key: bytes, wanted: WantedChunk) -> StoredChunk:
        anchor = self._anchor(wanted)
        token_ids = [*anchor, *wanted.token_ids]
        stored = self._describe(wanted)
        params = RequestParams(
            segments=[SegmentSpan(kind=wanted.kind, start=len(anchor), end=len(token_ids))],
            cache_salt=wanted.cache_salt,
            warmup_depth=self._config.num_layers,
            probe_len=0,
            batch_id=next(self._batch_ids),
            ingest_content_id=self._content_id(wanted),
            recompute_ms=self._recompute_ms(len(token_ids)),
        )
        result = await self._prefill(token_ids, params)
        # another replica of the node may have been faster
        if not (result is not None and result.stored) and not self._is_stored(key):
            raise ValueError(
                f"no room in the {HOST_TIER} tier for a chunk of {stored.num_tokens} tokens "
                f"({stored.nbytes} bytes)"
            )
        return stored

    def _describe(self, wanted: WantedChunk) -> StoredChunk:
        num_tokens = len(wanted.token_ids)
        return StoredChunk(
            chunk_id=content_id(wanted.token_ids, cache_salt=wanted.cache_salt),
            num_tokens=num_tokens,
            nbytes=self._tier.config.layout.entry_bytes(num_tokens),
            tier=HOST_TIER,
        )

    def _content_id(self, wanted: WantedChunk) -> str:
        """A prefix is nobody's chunk: no listing shows it."""
        is_chunk = wanted.kind is SegmentKind.CHUNK
        return content_id(wanted.token_ids, cache_salt=wanted.cache_salt) if is_chunk else ""

    def _is_stored(self, key: bytes) -> bool:
        (is_stored,) = self._tier.contains([key])
        return is_stored

    def _anchor(self, wanted: WantedChunk) -> tuple[int, ...]:
        return self._keys.anchor_ids if wanted.kind is SegmentKind.CHUNK else ()

    def _num_prompt_tokens(self, wanted: WantedChunk) -> int:
        return len(self._anchor(wanted)) + len(wanted.token_ids)

    def _query(self, wanted: WantedChunk) -> ChunkQuery:
        return segment_query(
            self._keys, wanted.kind, wanted.token_ids, cache_salt=wanted.cache_salt
        )
