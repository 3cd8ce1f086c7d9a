"""Brings chunks from the second level to the node's arena, once a node whoever asks."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kv_tier.arena_view import ArenaView
from kv_tier.arrival import Arrival
from kv_tier.keys import token_bytes
from kv_tier.redis.fetch import ChunkFetch, FetchRequest, deadline_from_now_s
from kv_tier.redis.remote import RemoteTier
from kv_tier.redis.values import Manifest
from kv_tier.store import ChunkLocation, ChunkQuery, ChunkStore, Lease, Reservation

log = logging.getLogger(__name__)

_MARK_TRIES = 3  # looks at an entry that was reserved just now, until it is marked
_MARK_WAIT_S = 0.002


class ArrivingChunk:
    """A reader's hold on a chunk that is on its way into the arena. Thread-safe.

    Its bytes stay this chunk's until `release`. `ArenaView.arrival` and `has_arrived` tell any
    process that maps the arena how far it has come.
    """

    def __init__(self, promoter: "Promoter", transfer: "_Transfer") -> None:
        self.location: ChunkLocation = transfer.lease.location
        self._promoter = promoter
        self._transfer: _Transfer | None = transfer

    def release(self, *, is_wanted: bool = True) -> None:
        """The reader has read what it needs; or it has gone, and does not want the chunk.

        One that nobody wants any more is not fetched to its end. May be called twice.
        """
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            self._promoter.reader_left(transfer, is_wanted=is_wanted)


class _Transfer:
    """A chunk that arrives, and who reads it. What changes is under the promoter's lock."""

    def __init__(self, query: ChunkQuery, lease: Lease, reservation: Reservation | None) -> None:
        self.token_bytes = token_bytes(query.token_ids)
        self.lease = lease  # until it is fetched, and read
        self.reservation = reservation  # None: another process of the node fetches it
        self.chunk: ChunkFetch | None = None
        self.is_fetched = reservation is None
        self.num_readers = 0


class Promoter:
    """Looks up in the second level what the arena lacks, and fetches it there. Thread-safe.

    The arena's reservation lets one process of the node fetch a chunk; the others read along while
    it arrives. One that has come whole becomes resident. Close it after `remote`, when all fetches
    have ended, and before `host`.
    """

    def __init__(self, host: ChunkStore, remote: RemoteTier, view: ArenaView) -> None:
        """view: of the arena that `host` keeps and `remote` fills"""
        self._host = host
        self._remote = remote
        self._view = view
        self._starting = threading.Lock()  # from "nobody fetches it" to "it is being fetched"
        self._lock = threading.Lock()
        self._transfers: dict[bytes, _Transfer] = {}
        self._unended: list[Callable[[], object]] = []
        # The index may be locked for seconds, and who reads layers must not wait for it.
        self._settling = ThreadPoolExecutor(1, thread_name_prefix="promoter")

    def close(self) -> None:
        """Returns when what was fetched is kept or given up. May be called twice."""
        self._settling.shutdown()

    def promote(
        self, wanted: Sequence[ChunkQuery], layers: Sequence[int], *, deadline_ms: float
    ) -> list[ArrivingChunk | None]:
        """In the order of the queries; None for what is resident, and for what is nowhere.

        Blocks for a lookup in the second level. A chunk that is wanted twice is one hold, twice.
        Raises KvTierError if the arena's index can not be used.

        layers: all layers, in the order they are needed
        deadline_ms: of lookup and fetch together, from now
        """
        if sorted(layers) != list(range(self._view.layout.num_layers)):
            raise ValueError(f"layers must be all of the entry's, once each, got {layers}")
        deadline_s = deadline_from_now_s(deadline_ms)
        asked: dict[bytes, ChunkQuery] = {}
        for query in wanted:
            asked.setdefault(query.key, query)
        found = self._join(list(asked.values()))
        try:
            missing = self._not_resident([q for key, q in asked.items() if key not in found])
            manifests = zip(missing, self._remote.lookup(missing) if missing else [], strict=True)
            stored = [(query, manifest) for query, manifest in manifests if manifest is not None]
            if stored:
                with self._starting:
                    self._start(stored, layers, deadline_s, found)
        except Exception:
            for hold in found.values():
                hold.release(is_wanted=False)
            raise
        return [
            found.get(query.key) if _same_tokens(query, asked[query.key]) else None
            for query in wanted
        ]

    def _not_resident(self, queries: Sequence[ChunkQuery]) -> list[ChunkQuery]:
        is_resident = self._host.contains([query.key for query in queries])
        return [query for query, yes in zip(queries, is_resident, strict=True) if not yes]

    def _join(self, queries: Sequence[ChunkQuery]) -> dict[bytes, ArrivingChunk]:
        """Those that are on their way already, as far as this process knows."""
        joined: dict[bytes, ArrivingChunk] = {}
        with self._lock:
            for query in queries:
                transfer = self._transfers.get(query.key)
                if transfer is not None and self._can_join(transfer, query):
                    joined[query.key] = self._new_reader(transfer)
        return joined

    def _can_join(self, transfer: _Transfer, query: ChunkQuery) -> bool:
        if transfer.token_bytes != token_bytes(query.token_ids):
            return False
        if transfer.reservation is not None:
            return transfer.chunk is None or transfer.chunk.miss is None
        return self._view.arrival(transfer.lease.location) is not Arrival.GONE

    def _start(
        self,
        stored: Sequence[tuple[ChunkQuery, Manifest]],
        layers: Sequence[int],
        deadline_s: float,
        found: dict[bytes, ArrivingChunk],
    ) -> None:
        """Fetch what nobody fetches yet; `found` gets a hold on each chunk that will come."""
        found |= self._join([query for query, _ in stored])  # another thread was faster
        started: dict[bytes, _Transfer] = {}
        requests: list[FetchRequest] = []
        try:
            for query, manifest in stored:
                if query.key in found:
                    continue
                transfer = self._transfer(query, manifest)
                if transfer is None:
                    continue
                if transfer.reservation is not None:
                    started[query.key] = transfer
                    requests.append(
                        FetchRequest(
                            location=transfer.lease.location,
                            encoding=manifest.shape.encoding,
                            write_id=manifest.write_id,
                        )
                    )
                with self._lock:
                    self._transfers[query.key] = transfer
                    found[query.key] = self._new_reader(transfer)
            if not requests:
                return
            fetch = self._remote.fetch(
                requests,
                layers,
                deadline_ms=(deadline_s - time.monotonic()) * 1e3,
                on_quiet=lambda chunk: self._quiet(started[chunk.location.key], chunk),
            )
        except Exception:
            for transfer in started.values():
                self._settle(transfer, None)
            raise
        for chunk in fetch.chunks:
            started[chunk.location.key].chunk = chunk

    def _transfer(self, query: ChunkQuery, manifest: Manifest) -> _Transfer | None:
        """One that we reserve, or one to read along with. None if there is no room for it."""
        reservation = self._reserve(query, manifest)
        if reservation is None:
            transfer = self._transfer_of_others(query)
            # nobody has it: there is no room, perhaps for what waits to be written
            if transfer is not None or not self._remote.shed_backlog():
                return transfer
            reservation = self._reserve(query, manifest)
            if reservation is None:
                return None
        lease: Lease | None = None
        try:
            (lease,) = self._host.lease_unfinished([query])
        finally:
            if lease is None:  # discarded by somebody, or the index can not be used
                self._host.abort(reservation)
        return None if lease is None else _Transfer(query, lease, reservation)

    def _reserve(self, query: ChunkQuery, manifest: Manifest) -> Reservation | None:
        return self._host.reserve(
            query.key,
            query.token_ids,
            recompute_ms=manifest.recompute_ms,
            content_id=manifest.content_id,
        )

    def _transfer_of_others(self, query: ChunkQuery) -> _Transfer | None:
        for attempt in range(_MARK_TRIES):
            (lease,) = self._host.lease_unfinished([query])
            if lease is None:
                return None
            is_coming = False
            try:
                is_coming = self._is_coming(lease.location)
            finally:
                if not is_coming:
                    self._host.release([lease])
            if is_coming:
                return _Transfer(query, lease, None)
            if attempt < _MARK_TRIES - 1:
                time.sleep(_MARK_WAIT_S)
        return None  # it is being computed, which may take long

    def _is_coming(self, location: ChunkLocation) -> bool:
        """Whether it is being fetched, or was. One that is computed may still have the marks of an
        entry that was there before."""
        arrival = self._view.arrival(location)
        if arrival is Arrival.WHOLE:
            return self._host.contains([location.key]) == [True]
        return arrival is Arrival.ARRIVING

    def _quiet(self, transfer: _Transfer, chunk: ChunkFetch) -> None:
        """Nothing writes to its entry any more."""
        self._later(lambda: self._settle(transfer, chunk))

    def _settle(self, transfer: _Transfer, chunk: ChunkFetch | None) -> None:
        reservation = transfer.reservation
        assert reservation is not None
        if chunk is not None and chunk.is_complete:
            self._end(lambda: self._host.commit(reservation))
        else:
            self._end(lambda: self._host.abort(reservation))
        with self._lock:
            transfer.is_fetched = True
            self._forget(transfer)  # who wants it from now on finds it in the arena, or nowhere
            is_over = transfer.num_readers == 0
        if is_over:
            self._end(lambda: self._host.release([transfer.lease]))

    def _new_reader(self, transfer: _Transfer) -> ArrivingChunk:
        transfer.num_readers += 1
        return ArrivingChunk(self, transfer)

    def reader_left(self, transfer: _Transfer, *, is_wanted: bool) -> None:
        with self._lock:
            transfer.num_readers -= 1
            is_unread = transfer.num_readers == 0
            is_over = transfer.is_fetched and is_unread
            if is_over:
                self._forget(transfer)
        if is_over:  # later: who leaves may be what answers requests, and must not wait
            self._later(lambda: self._end(lambda: self._host.release([transfer.lease])))
        elif is_unread and not is_wanted and transfer.chunk is not None:
            transfer.chunk.cancel()

    def _forget(self, transfer: _Transfer) -> None:
        """The caller holds the lock."""
        key = transfer.lease.location.key
        if self._transfers.get(key) is transfer:
            del self._transfers[key]

    def _later(self, work: Callable[[], object]) -> None:
        try:
            self._settling.submit(work)
        except RuntimeError:  # closed, or no thread to be had
            work()

    def _end(self, ending: Callable[[], object]) -> None:
        """End a hold on the arena; one that can not be ended now is tried again with the next."""
        with self._lock:
            endings, self._unended = [*self._unended, ending], []
        for end in endings:
            try:
                end()
            except Exception:
                log.exception("a hold on the arena could not be ended yet")
                with self._lock:
                    self._unended.append(end)


def _same_tokens(a: ChunkQuery, b: ChunkQuery) -> bool:
    return a is b or token_bytes(a.token_ids) == token_bytes(b.token_ids)
