"""Reads layers of one Redis node into the arena, over a few connections, in the order asked for."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kv_tier.redis.counters import Counters
from kv_tier.redis.errors import DeadlineError, LinkError, UnavailableError
from kv_tier.redis.fetch import ChunkFetch
from kv_tier.redis.layer_read import LayerReader
from kv_tier.redis.link import EmulatedLink, LinkMeter
from kv_tier.redis.misses import Miss
from kv_tier.redis.node import RedisNode
from kv_tier.redis.resp import RespConnection, command

log = logging.getLogger(__name__)

_MAX_TRIES = 3  # the others after lost connections


@dataclass(slots=True)
class Piece:
    """One layer of one chunk to read."""

    chunk: ChunkFetch
    layer: int
    name: bytes  # in Redis
    num_tries: int = 0
    requested_at_s: float = 0.0  # 0 while nothing is awaited


class NodeReader:
    """Threads that read pieces from one node, first come, first served.

    Each thread has one connection and a few requests in flight on it, so that the node never waits
    for us. A lost connection's pieces are asked for again, on a new one. Thread-safe.
    """

    def __init__(
        self,
        node: RedisNode,
        *,
        num_connections: int,
        depth: int,
        value_deadline_ms: float,
        meter: LinkMeter,
        link: EmulatedLink | None,
        counters: Counters,
        on_redirect: Callable[[RedisNode], None],
    ) -> None:
        self._node = node
        self._num_connections = num_connections
        self._depth = depth
        self._value_deadline_s = value_deadline_ms / 1e3
        self._meter = meter
        self._link = link
        self._counters = counters
        self._on_redirect = on_redirect
        self._changed = threading.Condition()
        self._queue: deque[Piece] = deque()
        self._threads: list[threading.Thread] = []
        self._num_resting = 0
        self._closed = False

    def submit(self, pieces: list[Piece]) -> None:
        with self._changed:
            is_closed = self._closed
            if not is_closed:
                self._queue.extend(pieces)
                num_missing = self._num_connections - len(self._threads)
                for _ in range(min(num_missing, len(self._queue) - self._num_resting)):
                    self._start_thread()
                self._changed.notify(len(pieces))
        if is_closed:
            _fail(pieces, Miss.UNAVAILABLE)

    def close(self) -> None:
        """What waits is a miss; what is in flight is read to its end, or to its deadline."""
        with self._changed:
            self._closed = True
            waiting, self._queue = list(self._queue), deque()
            threads = list(self._threads)
            self._changed.notify_all()
        _fail(waiting, Miss.UNAVAILABLE)
        for thread in threads:
            thread.join()

    def _start_thread(self) -> None:
        name = f"redis-read-{self._node.name}-{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        reader = LayerReader()
        connection: RespConnection | None = None
        flight: deque[Piece] = deque()
        while True:
            try:
                while len(flight) < self._depth and (piece := self._take()) is not None:
                    flight.append(piece)
                    if connection is None:
                        connection = self._node.acquire(self._deadline_s(piece))
                    self._request(connection, piece)
                if connection is not None and flight:
                    self._read(reader, connection, flight[0])
                    flight.popleft().chunk.end()
                elif connection is not None:
                    self._node.give_back(connection)
                    connection = None
                elif not self._wait_for_pieces():
                    return
            except Exception as exc:
                if connection is not None:
                    connection.close()
                self._flight_failed(list(flight), exc, was_connected=connection is not None)
                connection = None
                flight.clear()

    def _take(self) -> Piece | None:
        """The next piece that somebody still wants; its chunk has begun."""
        while True:
            with self._changed:
                if not self._queue:
                    return None
                piece = self._queue.popleft()
            if self._node.breaker.is_open:
                piece.chunk.fail(Miss.UNAVAILABLE)
            elif piece.chunk.begin():
                return piece

    def _wait_for_pieces(self) -> bool:
        """Returns whether there may be some; False when there will be none."""
        with self._changed:
            self._num_resting += 1
            self._changed.wait_for(lambda: self._queue or self._closed)
            self._num_resting -= 1
            return bool(self._queue)

    def _deadline_s(self, piece: Piece) -> float:
        """When a piece whose turn it is must be there."""
        return min(time.monotonic() + self._value_deadline_s, piece.chunk.deadline_s)

    def _request(self, connection: RespConnection, piece: Piece) -> None:
        piece.requested_at_s = time.monotonic()
        self._meter.awaiting()
        connection.send(command(b"GET", piece.name), self._deadline_s(piece))

    def _read(self, reader: LayerReader, connection: RespConnection, piece: Piece) -> None:
        """Receive the piece whose turn it is: its layer is ready, or its chunk has missed."""
        chunk, deadline_s = piece.chunk, self._deadline_s(piece)
        miss = reader.receive(connection, chunk, piece.layer, deadline_s)
        num_bytes = chunk.layer_bytes if miss is None else 0
        if self._link is not None and num_bytes:
            self._hold_back(piece, num_bytes, deadline_s)
        self._meter.ended(num_bytes)
        piece.requested_at_s = 0.0
        self._node.succeeded()
        if reader.moved:
            self._on_redirect(self._node)
        miss = miss or reader.place(chunk, piece.layer)
        if miss is not None:
            chunk.fail(miss)
            return
        self._counters.layer_read(num_bytes)
        chunk.layer_ready(piece.layer)

    def _hold_back(self, piece: Piece, num_bytes: int, deadline_s: float) -> None:
        """Wait until the value would have come over the emulated link."""
        assert self._link is not None
        arrives_at_s = self._link.arrives_at_s(piece.requested_at_s, num_bytes)
        wait_s = min(arrives_at_s, deadline_s) - time.monotonic()
        if wait_s > 0:
            piece.chunk.stopped.wait(wait_s)
        if arrives_at_s > deadline_s and not piece.chunk.stopped.is_set():
            raise DeadlineError("late on the emulated link")

    def _flight_failed(self, flight: list[Piece], exc: Exception, *, was_connected: bool) -> None:
        """The connection is gone: ask again for what may be asked again, the rest has missed."""
        again: list[Piece] = []
        if isinstance(exc, DeadlineError):
            # The first one had its time, the others had no turn yet.
            late, again = flight[0], flight[1:]
            if was_connected and time.monotonic() < late.chunk.deadline_s:
                self._node.failed()
            late.chunk.fail(Miss.DEADLINE)
        elif isinstance(exc, UnavailableError):
            _fail(flight, Miss.UNAVAILABLE)
        elif isinstance(exc, LinkError):
            self._node.forget_idle()
            for piece in flight:
                piece.num_tries += 1
            again = [piece for piece in flight if piece.num_tries < _MAX_TRIES]
            lost = [piece for piece in flight if piece.num_tries >= _MAX_TRIES]
            if lost and was_connected:  # who refuses a connection is counted by `acquire`
                self._node.failed()
            _fail(lost, Miss.CONNECTION)
        else:
            log.error("reading from Redis failed", exc_info=exc)
            _fail(flight, Miss.CONNECTION)
        for piece in flight:
            if piece.requested_at_s > 0:
                self._meter.ended(0)
                piece.requested_at_s = 0.0
            piece.chunk.end()
        with self._changed:
            is_closed = self._closed
            if not is_closed:
                self._queue.extendleft(reversed(again))
                self._changed.notify(len(again))
        if is_closed:
            _fail(again, Miss.UNAVAILABLE)


def _fail(pieces: list[Piece], miss: Miss) -> None:
    for piece in pieces:
        piece.chunk.fail(miss)
