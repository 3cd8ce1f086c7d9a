"""Brings chunks from Redis to the node's arena, once a node whoever asks."""

import threading
import time
from collections.abc import Sequence

from kv_tier.keys import token_bytes
from kv_tier.redis.fetch import ChunkFetch, FetchRequest
from kv_tier.redis.remote import RemoteTier
from kv_tier.redis.values import Manifest
from kv_tier.store import ChunkLocation, ChunkQuery, ChunkStore, Lease, Reservation

_POLL_S = 0.002


class Promotion:
    """One chunk that is in the arena, or on its way there. `finish` it when its readers are done.

    Thread-safe. A chunk on its way stays reserved until then, so that its space is not given to
    another one while layers of it are read.
    """

    def __init__(
        self,
        host: ChunkStore,
        *,
        lease: Lease | None = None,
        reservation: Reservation | None = None,
    ) -> None:
        held = lease or reservation
        assert held is not None
        self.location: ChunkLocation = held.location
        self.fetch: ChunkFetch | None = None  # None for a chunk that was there
        self._host = host
        self._lease = lease
        self._reservation = reservation
        self._lock = threading.Lock()
        self._is_finished = False

    @property
    def was_resident(self) -> bool:
        return self._lease is not None

    @property
    def has_missed(self) -> bool:
        return self.fetch is not None and self.fetch.miss is not None

    def wait_layer(self, layer: int, timeout_ms: float | None = None) -> bool:
        """Wait until the layer may be read; False if the chunk missed, or the time is over."""
        return self.fetch is None or self.fetch.wait_layer(layer, timeout_ms)

    def finish(self) -> None:
        """Nobody reads it any more. A complete chunk becomes resident, another's space is freed.

        Returns at once: space that a request still writes to is freed when that has ended. May be
        called twice.
        """
        with self._lock:
            if self._is_finished:
                return
            self._is_finished = True
        if self._lease is not None:
            self._host.release([self._lease])
        elif self.fetch is not None:
            self.fetch.cancel()  # nothing to one that is complete
            if self.fetch.is_quiet:
                self._settle(self.fetch)

    def give_up(self) -> None:
        """It was never fetched: its space is free again."""
        with self._lock:
            reservation, self._reservation = self._reservation, None
        if reservation is not None:
            self._host.abort(reservation)

    def became_quiet(self, fetch: ChunkFetch) -> None:
        """The fetch's callback. A missed chunk's space is freed when its readers know of it."""
        with self._lock:
            if not self._is_finished:
                return
        self._settle(fetch)

    def _settle(self, fetch: ChunkFetch) -> None:
        with self._lock:
            reservation, self._reservation = self._reservation, None
        if reservation is None:
            return
        if fetch.is_complete:
            self._host.commit(reservation)
        else:
            self._host.abort(reservation)


class Promoter:
    """Looks chunks up in the arena, then in Redis, and fetches what only Redis has. Thread-safe.

    The arena's reservation lets one process of the node fetch a chunk; the others find it reserved,
    and wait for it, or do without.
    """

    def __init__(self, host: ChunkStore, remote: RemoteTier) -> None:
        self._host = host
        self._remote = remote

    def promote(
        self,
        wanted: Sequence[ChunkQuery],
        layers: Sequence[int],
        *,
        deadline_ms: float,
        wait_ms: float = 0.0,
    ) -> list[Promotion | None]:
        """In the order of the queries; a chunk that is wanted twice is one promotion, twice.

        layers: all layers, in the order they are needed
        deadline_ms: of the fetch, from now
        wait_ms: how long to wait for chunks that other processes of the node are fetching; not
        there in time is None, as a miss is
        """
        end_s = time.monotonic() + wait_ms / 1e3
        asked: dict[bytes, ChunkQuery] = {}
        for query in wanted:
            asked.setdefault(query.key, query)
        queries = list(asked.values())
        found = self._resident(queries)
        missing = [query for query in queries if query.key not in found]
        manifests = zip(missing, self._remote.lookup(missing) if missing else [], strict=True)
        stored = [(query, manifest) for query, manifest in manifests if manifest is not None]
        reserved: list[tuple[Promotion, FetchRequest]] = []
        elsewhere: list[ChunkQuery] = []
        for query, manifest in stored:
            reservation = self._reserve(query, manifest)
            if reservation is None:
                elsewhere.append(query)
                continue
            promotion = Promotion(self._host, reservation=reservation)
            request = FetchRequest(location=reservation.location, encoding=manifest.shape.encoding)
            reserved.append((promotion, request))
            found[query.key] = promotion
        if reserved:
            self._fetch(reserved, layers, deadline_ms)
        found |= self._wait_for(elsewhere, end_s)
        return [
            found.get(query.key) if _same_tokens(query, asked[query.key]) else None
            for query in wanted
        ]

    def _fetch(
        self,
        reserved: list[tuple[Promotion, FetchRequest]],
        layers: Sequence[int],
        deadline_ms: float,
    ) -> None:
        by_key = {promotion.location.key: promotion for promotion, _ in reserved}
        try:
            fetch = self._remote.fetch(
                [request for _, request in reserved],
                layers,
                deadline_ms=deadline_ms,
                on_quiet=lambda chunk: by_key[chunk.location.key].became_quiet(chunk),
            )
        except Exception:
            for promotion, _ in reserved:
                promotion.give_up()
            raise
        for (promotion, _), chunk in zip(reserved, fetch.chunks, strict=True):
            promotion.fetch = chunk

    def _resident(self, queries: Sequence[ChunkQuery]) -> dict[bytes, Promotion]:
        leases = zip(queries, self._host.lookup(queries), strict=True)
        return {
            query.key: Promotion(self._host, lease=lease)
            for query, lease in leases
            if lease is not None
        }

    def _reserve(self, query: ChunkQuery, manifest: Manifest) -> Reservation | None:
        return self._host.reserve(
            query.key,
            query.token_ids,
            recompute_ms=manifest.recompute_ms,
            content_id=manifest.content_id,
        )

    def _wait_for(self, queries: list[ChunkQuery], end_s: float) -> dict[bytes, Promotion]:
        """Those that become resident in time. Looks without counting a miss each time."""
        found: dict[bytes, Promotion] = {}
        waiting = list(queries)
        while waiting:
            is_there = self._host.contains([query.key for query in waiting])
            there = [query for query, yes in zip(waiting, is_there, strict=True) if yes]
            if there:
                found |= self._resident(there)
                waiting = [query for query in waiting if query.key not in found]
            if time.monotonic() + _POLL_S >= end_s:
                break
            time.sleep(_POLL_S)
        return found


def _same_tokens(a: ChunkQuery, b: ChunkQuery) -> bool:
    return a is b or token_bytes(a.token_ids) == token_bytes(b.token_ids)
