"""Reads layers of one Redis node into the arena, over a few connections, in the order asked for."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

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
    turn: int  # position of the layer in its fetch
    num_tries: int = 0
    is_awaited: bool = False
    requested_at_s: float = 0.0


class NodeReader:
    """Threads that read pieces from one node: first layers first, whichever fetch they are of.

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
        self._queue: list[tuple[int, int, Piece]] = []  # a heap; by turn, then as they came
        self._numbers = count()
        self._threads: list[threading.Thread] = []
        self._num_resting = 0
        self._closed = False

    def submit(self, pieces: list[Piece]) -> None:
        """Raises nothing: what can not be read is a miss."""
        with self._changed:
            is_taken = not self._closed and self._start_threads(len(pieces))
            if is_taken:
                self._put(pieces)
        if not is_taken:
            _fail(pieces, Miss.UNAVAILABLE)

    def close(self) -> None:
        """What waits is a miss; what is in flight is read to its end, or to its deadline."""
        with self._changed:
            self._closed = True
            waiting, self._queue = [piece for _, _, piece in self._queue], []
            self._changed.notify_all()
        _fail(waiting, Miss.UNAVAILABLE)

    def join(self) -> None:
        """Wait until a closed one is quiet; not for the calling thread itself."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _put(self, pieces: list[Piece]) -> None:
        """The caller holds the lock."""
        for piece in pieces:
            heappush(self._queue, (piece.turn, next(self._numbers), piece))
        self._changed.notify(len(pieces))

    def _start_threads(self, num_pieces: int) -> bool:
        """Those that so many more pieces are worth. Returns whether there is any thread."""
        num_missing = self._num_connections - len(self._threads)
        num_useful = len(self._queue) + num_pieces - self._num_resting
        for _ in range(min(num_missing, num_useful)):
            name = f"redis-read-{self._node.name}-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:
                log.error("no thread to read from Redis with: %s", exc)
                break
            self._threads.append(thread)
        return bool(self._threads)

    def _run(self) -> None:
        reader = LayerReader()
        connection: RespConnection | None = None
        flight: deque[Piece] = deque()
        num_before = 0  # bytes that had come when the last turn began
        while True:
            turn: Piece | None = None  # the piece that is being asked for, or read
            try:
                while len(flight) < self._depth and (piece := self._take()) is not None:
                    turn = piece
                    flight.append(piece)
                    if connection is None:
                        connection = self._node.acquire(self._deadline_s(piece))
                    num_before = connection.num_received
                    self._request(connection, piece)
                if connection is not None and flight:
                    turn = flight[0]
                    num_before = connection.num_received
                    self._read(reader, connection, turn)
                    flight.popleft().chunk.end()
                elif connection is not None:
                    self._node.give_back(connection)
                    connection = None
                elif not self._wait_for_pieces():
                    return
            except Exception as exc:
                num_came: int | None = None
                if connection is not None:
                    num_came = connection.num_received - num_before
                    connection.close()
                self._flight_failed(list(flight), turn, exc, num_came)
                connection = None
                flight.clear()

    def _take(self) -> Piece | None:
        """The next piece that somebody still wants; its chunk has begun."""
        while True:
            with self._changed:
                if not self._queue:
                    return None
                _, _, piece = heappop(self._queue)
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
        """When who wants this piece does not wait for a connection any more."""
        return min(time.monotonic() + self._value_deadline_s, piece.chunk.deadline_s)

    def _request(self, connection: RespConnection, piece: Piece) -> None:
        piece.requested_at_s = time.monotonic()
        piece.is_awaited = True
        self._meter.awaiting()
        connection.send(command(b"GET", piece.name), piece.requested_at_s + self._value_deadline_s)

    def _read(self, reader: LayerReader, connection: RespConnection, piece: Piece) -> None:
        """Receive the piece whose turn it is: its layer is ready, or its chunk has missed.

        One whose chunk is late is received to its end, so that the connection stays good.
        """
        chunk, deadline_s = piece.chunk, time.monotonic() + self._value_deadline_s
        connection.set_alarm(chunk.deadline_s, chunk.fail_if_late)
        miss = reader.receive(connection, chunk, piece.layer, deadline_s)
        connection.clear_alarm()
        num_bytes = chunk.layer_bytes if miss is None else 0
        if self._link is not None and num_bytes:
            self._hold_back(piece, num_bytes, deadline_s)
        self._ended(piece, num_bytes)
        self._node.succeeded()
        if reader.is_redirect:
            self._on_redirect(self._node)
        if chunk.miss is not None:
            return
        miss = miss or reader.place(chunk, piece.layer)
        if miss is not None:
            chunk.fail(miss)
            return
        self._counters.layer_read(num_bytes)
        chunk.layer_ready(piece.layer)

    def _ended(self, piece: Piece, num_bytes: int) -> None:
        """num_bytes: in Redis; what it is in the arena is what the planner reckons with"""
        if piece.is_awaited:
            piece.is_awaited = False
            self._meter.ended(piece.chunk.entry.layer_bytes if num_bytes else 0)

    def _hold_back(self, piece: Piece, num_bytes: int, deadline_s: float) -> None:
        """Wait until the value would have come over the emulated link."""
        assert self._link is not None
        arrives_at_s = self._link.arrives_at_s(piece.requested_at_s, num_bytes)
        wait_s = min(arrives_at_s, deadline_s, piece.chunk.deadline_s) - time.monotonic()
        if wait_s > 0:
            piece.chunk.stopped.wait(wait_s)
        piece.chunk.fail_if_late()
        if arrives_at_s > deadline_s and not piece.chunk.stopped.is_set():
            raise DeadlineError("late on the emulated link")

    def _flight_failed(
        self, flight: list[Piece], turn: Piece | None, exc: Exception, num_came: int | None
    ) -> None:
        """The connection is gone: ask again for what may be asked again, the rest has missed.

        num_came: bytes in this turn; None without a connection, which is not ours to report
        """
        again: list[Piece] = []
        if isinstance(exc, DeadlineError):
            # That one had its time, the others had no turn yet.
            again = [piece for piece in flight if piece is not turn]
            if num_came == 0:
                self._node.failed()
            _fail([piece for piece in flight if piece is turn], Miss.DEADLINE)
        elif isinstance(exc, UnavailableError):
            _fail(flight, Miss.UNAVAILABLE)
        elif isinstance(exc, LinkError):
            self._node.forget_idle()
            for piece in flight:
                piece.num_tries += 1
            again = [piece for piece in flight if piece.num_tries < _MAX_TRIES]
            lost = [piece for piece in flight if piece.num_tries >= _MAX_TRIES]
            if lost and num_came is not None:
                self._node.failed()
            _fail(lost, Miss.CONNECTION)
        else:
            log.error("reading from Redis failed", exc_info=exc)
            _fail(flight, Miss.CONNECTION)
        for piece in flight:
            self._ended(piece, 0)
            piece.chunk.end()
        with self._changed:
            is_closed = self._closed
            if not is_closed:
                self._put(again)
        if is_closed:
            _fail(again, Miss.UNAVAILABLE)


def _fail(pieces: list[Piece], miss: Miss) -> None:
    for piece in pieces:
        piece.chunk.fail(miss)
