"""One connection to Redis, as bytes: requests from memory, answers straight into memory.

redis-py sets the connection up (`topology.py`). From then on this reads RESP2 by itself, because
redis-py has no answers that are received into memory of ours, and no one deadline for a whole call,
however its bytes trickle in.
"""

import math
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from kv_tier.redis.errors import DeadlineError, LinkError, OversizeError, ReplyError

Reply = int | bytes | None
Buffer = bytes | bytearray | memoryview

_TIMEVAL = struct.Struct("ll")
_PEEK_BYTES = 1 << 14
_ENDING_BYTES = 128  # so few that no layer's payload is among them
_MAX_REPLY = 1 << 24  # bytes of an answer that goes to memory of its own
_MAX_WAIT_S = 60.0  # in one system call, which is then repeated
# EAGAIN is the kernel's own timeout on a blocking socket, TimeoutError is Python's. Which time is
# over, the deadline or the alarm, is found when the call is repeated.
_TIME_IS_OVER = (BlockingIOError, TimeoutError)


def command(*words: Buffer) -> list[Buffer]:
    """One request as parts to send. Words of 1 KiB and more are sent from where they are."""
    parts: list[Buffer] = []
    head = bytearray(b"*%d\r\n" % len(words))
    for word in words:
        head += b"$%d\r\n" % len(word)
        if len(word) < 1024:
            head += word
        else:
            parts += [bytes(head), word]
            head = bytearray()
        head += b"\r\n"
    return [*parts, bytes(head)]


class RespConnection:
    """A connected, authenticated socket. One thread at a time; any thread may `close` it.

    Deadlines are `time.monotonic()` seconds. A call that raises LinkError or DeadlineError leaves
    the connection between two answers: close it. After a ReplyError it is good.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        # A plain socket blocks in the kernel, with the kernel's own timeout: one system call
        # receives a whole value. TLS decrypts record by record.
        self._is_plain = not isinstance(sock, ssl.SSLSocket)
        if self._is_plain:
            sock.settimeout(None)
        self._recv_flags = socket.MSG_WAITALL if self._is_plain else 0
        self._peek = memoryview(bytearray(_PEEK_BYTES))
        self._start = self._end = 0  # what was received and not yet read, in _peek
        self._alarm_at_s, self._ring = math.inf, _nothing
        self.generation = 0  # of its node's connections
        self.num_received = 0  # bytes, since it is ours

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Also wakes a thread that waits in it, with LinkError. May be called twice."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def set_alarm(self, at_s: float, ring: Callable[[], None]) -> None:
        """Call `ring`, once, in the thread that waits for bytes at that time, and wait on."""
        self._alarm_at_s, self._ring = at_s, ring

    def clear_alarm(self) -> None:
        self.set_alarm(math.inf, _nothing)

    def send(self, parts: Sequence[Buffer], deadline_s: float) -> None:
        """Send requests, made by `command`. Returns when the kernel has them all."""
        for part in _joined(parts):
            left = memoryview(part)
            while left:
                try:
                    self._arm(deadline_s, socket.SO_SNDTIMEO)
                    left = left[self._sock.send(left) :]
                except _TIME_IS_OVER:
                    continue
                except OSError as exc:
                    raise LinkError(f"connection lost: {exc}") from exc

    def read_reply(self, deadline_s: float) -> Reply:
        """The next answer, of any kind but arrays and RESP3's; simple strings as bytes.

        Raises OversizeError for a value that is none of ours.
        """
        kind, text = self._read_head(deadline_s, _PEEK_BYTES)
        if kind == b"-":
            raise ReplyError(text.decode(errors="replace"))
        if kind == b"+":
            return text
        size = _number(text)
        if kind == b":":
            return size
        if size < 0:
            return None
        if size > _MAX_REPLY:
            self.skip(size, deadline_s)
            self.end_value(deadline_s)
            raise OversizeError(f"a value of {size} bytes, where a small one was due")
        content = bytearray(size)
        self.read_into(memoryview(content), deadline_s)
        self.end_value(deadline_s)
        return bytes(content)

    def read_value_size(self, deadline_s: float, *, expected_bytes: int) -> int | None:
        """Size of the next answer, a value; None if there is no such key.

        Then read all of it, with `read_into` or `skip`, and `end_value`. expected_bytes: how much
        of the value is wanted in small memory, and may be received together with its head.
        """
        kind, text = self._read_head(deadline_s, len(b"$12345678\r\n") + expected_bytes)
        if kind == b"-":
            raise ReplyError(text.decode(errors="replace"))
        if kind != b"$":
            raise LinkError(f"not a value: {kind!r}")
        size = _number(text)
        return None if size < 0 else size

    def read_into(self, target: memoryview, deadline_s: float) -> None:
        """Fill the target. What was not received yet goes straight there, without a copy."""
        num_kept = min(self._end - self._start, len(target))
        target[:num_kept] = self._peek[self._start : self._start + num_kept]
        self._start += num_kept
        filled = num_kept
        while filled < len(target):
            filled += self._recv(target[filled:], deadline_s, self._recv_flags)

    def skip(self, num_bytes: int, deadline_s: float) -> None:
        """Receive and forget."""
        while num_bytes:
            if self._start == self._end:
                self._fill(min(num_bytes, _PEEK_BYTES), deadline_s)
            taken = min(num_bytes, self._end - self._start)
            self._start += taken
            num_bytes -= taken

    def end_value(self, deadline_s: float) -> None:
        """Receive what ends a value, and what is there of the next answer's head."""
        while self._end - self._start < 2:
            self._fill(_ENDING_BYTES, deadline_s)
        ending = bytes(self._peek[self._start : self._start + 2])
        self._start += 2
        if ending != b"\r\n":
            raise LinkError(f"a value ends with {ending!r}")

    def _read_head(self, deadline_s: float, max_bytes: int) -> tuple[bytes, bytes]:
        """The next answer's kind and first line. Receives at most so many bytes at once."""
        while True:
            kept = bytes(self._peek[self._start : self._end])
            line, found, _ = kept.partition(b"\r\n")
            if found:
                self._start += len(line) + 2
                if line[:1] not in (b"+", b"-", b":", b"$"):
                    raise LinkError(f"not an answer of Redis: {line[:40]!r}")
                return line[:1], line[1:]
            if len(kept) >= _PEEK_BYTES // 2:
                raise LinkError(f"not an answer of Redis: {kept[:40]!r}")
            self._fill(max_bytes, deadline_s)

    def _fill(self, max_bytes: int, deadline_s: float) -> None:
        """Receive at least one byte behind what is kept."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == _PEEK_BYTES:
            kept = bytes(self._peek[self._start :])
            self._peek[: len(kept)] = kept
            self._start, self._end = 0, len(kept)
        target = self._peek[self._end : min(_PEEK_BYTES, self._end + max_bytes)]
        self._end += self._recv(target, deadline_s, 0)

    def _recv(self, target: memoryview, deadline_s: float, flags: int) -> int:
        while True:
            try:
                self._arm(deadline_s, socket.SO_RCVTIMEO)
                received = self._sock.recv_into(target, 0, flags)
            except _TIME_IS_OVER:
                continue
            except OSError as exc:
                raise LinkError(f"connection lost: {exc}") from exc
            if received == 0:
                raise LinkError("Redis closed the connection")
            self.num_received += received
            return received

    def _arm(self, deadline_s: float, option: int) -> None:
        """Let the next system call end at the deadline, or at the alarm before it."""
        now_s = time.monotonic()
        if now_s >= self._alarm_at_s:
            ring = self._ring
            self.clear_alarm()
            ring()
        if now_s >= deadline_s:
            raise DeadlineError("no time left")
        left_s = min(min(deadline_s, self._alarm_at_s) - now_s, _MAX_WAIT_S)
        if self._is_plain:
            timeval = _TIMEVAL.pack(*divmod(int(left_s * 1e6) + 1, 1_000_000))  # 0 is for ever
            self._sock.setsockopt(socket.SOL_SOCKET, option, timeval)
        else:
            self._sock.settimeout(left_s)


def _joined(parts: Sequence[Buffer]) -> list[Buffer]:
    """Neighbouring small parts as one, so that a pipeline of small requests is one send."""
    joined: list[Buffer] = []
    small: list[Buffer] = []
    for part in parts:
        if len(part) < 1 << 16:
            small.append(part)
            continue
        joined += [b"".join(small), part] if small else [part]
        small = []
    return [*joined, b"".join(small)] if small else joined


def _nothing() -> None:
    pass


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError as exc:
        raise LinkError(f"not a number: {text[:40]!r}") from exc
