"""When to stop asking a Redis node that does not answer."""

import threading


class Breaker:
    """Counts failures in a row. Thread-safe; knows no time: `RedisNode` probes while it is open."""

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self._lock = threading.Lock()
        self._num_failures = 0
        self._is_open = False
        self._num_opened = 0

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def num_opened(self) -> int:
        return self._num_opened

    def failed(self) -> bool:
        """Returns whether this failure opened it."""
        with self._lock:
            self._num_failures += 1
            if self._is_open or self._num_failures < self._max_failures:
                return False
            self._is_open = True
            self._num_opened += 1
            return True

    def succeeded(self) -> None:
        """An answer to a request. It does not close an open breaker: only a probe does.

        A request that was sent before the failures may still be answered after them.
        """
        with self._lock:
            if not self._is_open:
                self._num_failures = 0

    def probed(self) -> None:
        """A probe was answered: closed again."""
        with self._lock:
            self._is_open = False
            self._num_failures = 0
