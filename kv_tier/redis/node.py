"""One Redis node as its users see it: ready connections, and a breaker when it does not answer."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kv_tier.redis.breaker import Breaker
from kv_tier.redis.errors import DeadlineError, LinkError, RedisCallError, UnavailableError
from kv_tier.redis.resp import RespConnection, command

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_IDLE_S = 30.0  # an older connection may have been dropped by what lies between
_HANGS_AFTER = 3  # connect deadlines: an opening that takes longer is not counted on


class RedisNode:
    """Lends connections, opened in the background, so that a caller waits no longer than it wants.

    While the breaker is open nobody gets a connection; a thread asks the node now and then, and
    closes the breaker when it answers. Thread-safe.
    """

    def __init__(
        self,
        name: str,
        *,
        open_connection: Callable[[], RespConnection],
        refresh: Callable[[], None],
        max_failures: int,
        probe_interval_ms: float,
        connect_deadline_ms: float,
    ) -> None:
        """refresh: called before each probe, where who has what may have changed."""
        self.name = name
        self.breaker = Breaker(max_failures)
        self._open_connection = open_connection
        self._refresh = refresh
        self._probe_interval_s = probe_interval_ms / 1e3
        self._connect_deadline_s = connect_deadline_ms / 1e3
        self._changed = threading.Condition()
        self._idle: deque[tuple[float, RespConnection]] = deque()  # since when, and what; old first
        self._generation = 0  # of connections: those of an earlier one are not lent again
        self._num_waiting = 0
        self._opening: dict[threading.Thread, float] = {}  # since when
        self._refusal: tuple[int, RedisCallError] | None = None  # the last, and its number
        self._num_refusals = 0
        self._closed = threading.Event()

    def acquire(self, deadline_s: float) -> RespConnection:
        """A connection for one caller, to be given back. Raises LinkError or DeadlineError.

        Give it back when all its answers were read, else close it. Report how its calls end, with
        `succeeded` and `failed`; a connection that is refused is reported here. One that takes
        longer than the caller can wait is no failure, and is there for the next.
        """
        with self._changed:
            num_refusals = self._num_refusals
            self._num_waiting += 1
            try:
                while True:
                    if self._refusal is not None and self._refusal[0] > num_refusals:
                        raise type(self._refusal[1])(str(self._refusal[1]))
                    if self._closed.is_set() or self.breaker.is_open:
                        raise UnavailableError(f"{self.name} is not asked now")
                    if (connection := self._take_idle()) is not None:
                        return connection
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0:
                        break
                    if self._num_opening_since(_HANGS_AFTER) < self._num_waiting:
                        self._start_opening()
                    self._changed.wait(min(left_s, _HANGS_AFTER * self._connect_deadline_s))
                hangs = self._num_opening_since(1) < len(self._opening)
            finally:
                self._num_waiting -= 1
        if hangs:
            self.failed()  # who opens reports a refusal, but nobody a name server that is silent
        raise DeadlineError(f"no connection to {self.name} in time")

    def give_back(self, connection: RespConnection) -> None:
        """A connection whose answers were all read."""
        with self._changed:
            is_good = connection.generation == self._generation
            if is_good and not self._closed.is_set() and not self.breaker.is_open:
                self._close_old()
                self._idle.append((time.monotonic(), connection))
                self._changed.notify()
                return
        connection.close()

    def call(self, run: Callable[[RespConnection], T], deadline_s: float) -> T:
        """What `run` returns of a connection. Raises LinkError or DeadlineError, also its own.

        A connection that turns out lost, as all idle ones are after a restart of Redis, is replaced
        once: `run` must be harmless to repeat.
        """
        if time.monotonic() >= deadline_s:
            raise DeadlineError("no time left")  # not this node's failure
        for is_last in (False, True):
            connection = self.acquire(deadline_s)
            num_before = connection.num_received
            try:
                found = run(connection)
            except LinkError:
                connection.close()
                self.forget_idle()
                if is_last:
                    self.failed()
                    raise
            except DeadlineError:
                connection.close()
                if connection.num_received == num_before:  # else it answers: there is much to say
                    self.failed()
                raise
            except BaseException:
                connection.close()  # it may stand between two answers
                raise
            else:
                self.give_back(connection)
                self.succeeded()
                return found
        raise AssertionError("unreachable")

    def succeeded(self) -> None:
        self.breaker.succeeded()

    def failed(self) -> None:
        """A call had no answer in time, or lost its connection."""
        if not self.breaker.failed():
            return
        self.forget_idle()
        with self._changed:
            self._changed.notify_all()
            if self._closed.is_set():
                return
            try:
                self._start(self._probe_until_it_answers, "probe")
            except LinkError as exc:
                log.error("nobody can probe Redis, so it is asked on: %s", exc)
                self.breaker.probed()

    def forget_idle(self) -> None:
        """Close what is not lent, and what is lent when it comes back: it may be another Redis."""
        with self._changed:
            self._generation += 1
            idle, self._idle = self._idle, deque()
        for _, connection in idle:
            connection.close()

    def close(self) -> None:
        """Close idle connections, refuse new ones, end the probe."""
        self._closed.set()
        self.forget_idle()
        with self._changed:
            self._changed.notify_all()

    def _take_idle(self) -> RespConnection | None:
        self._close_old()
        return self._idle.pop()[1] if self._idle else None

    def _close_old(self) -> None:
        while self._idle and time.monotonic() - self._idle[0][0] >= _MAX_IDLE_S:
            self._idle.popleft()[1].close()

    def _num_opening_since(self, num_deadlines: int) -> int:
        """Openings that are not older than so many connect deadlines."""
        since_s = time.monotonic() - num_deadlines * self._connect_deadline_s
        return sum(started_s >= since_s for started_s in self._opening.values())

    def _start_opening(self) -> None:
        """The caller holds the lock, which the new thread needs to end."""
        self._opening[self._start(self._open_one, "open")] = time.monotonic()

    def _start(self, run: Callable[[], None], purpose: str) -> threading.Thread:
        thread = threading.Thread(target=run, name=f"redis-{purpose}-{self.name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:
            raise LinkError(f"no thread for {self.name}: {exc}") from exc
        return thread

    def _open(self) -> RespConnection:
        generation = self._generation
        connection = self._open_connection()
        connection.generation = generation
        return connection

    def _open_one(self) -> None:
        connection: RespConnection | None = None
        refusal: RedisCallError | None = None
        try:
            connection = self._open()
        except RedisCallError as exc:
            refusal = exc
        except Exception as exc:  # a waiting caller must hear of it, whatever it is
            refusal = LinkError(f"can not connect to {self.name}: {exc!r}")
            log.error("%s", refusal)  # no traceback: it may show the password
        with self._changed:
            del self._opening[threading.current_thread()]
            if connection is not None:
                self.give_back(connection)
            elif refusal is not None:
                self._num_refusals += 1
                self._refusal = (self._num_refusals, refusal)
                self.failed()
            self._changed.notify_all()

    def _probe_until_it_answers(self) -> None:
        while not self._closed.wait(self._probe_interval_s):
            try:
                self._refresh()
                connection = self._open()
            except RedisCallError:
                continue
            except Exception as exc:
                log.error("probing Redis failed: %r", exc)
                continue
            try:
                deadline_s = time.monotonic() + self._connect_deadline_s
                connection.send(command(b"PING"), deadline_s)
                connection.read_reply(deadline_s)
            except RedisCallError:
                connection.close()
                continue
            self.breaker.probed()
            self.give_back(connection)
            return
