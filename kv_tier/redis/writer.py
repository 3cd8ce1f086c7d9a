"""Copies arena entries to Redis when there is time; nobody ever waits for it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kv_tier.keys import token_bytes
from kv_tier.layout import KvLayout, slice_checksums
from kv_tier.redis.config import RedisTierConfig
from kv_tier.redis.counters import Count, Counters
from kv_tier.redis.directory import NodeDirectory
from kv_tier.redis.encoding import Encoding, encode
from kv_tier.redis.entry_memory import EntryMemory
from kv_tier.redis.errors import OversizeError, RedisCallError, ReplyError, UnavailableError
from kv_tier.redis.remote import ChunkWrite
from kv_tier.redis.resp import Buffer, Reply, RespConnection, command
from kv_tier.redis.values import (
    Manifest,
    StoredShape,
    chunk_names,
    manifest_name,
    pack_manifest,
    pack_prefix,
    write_id_in,
)

log = logging.getLogger(__name__)

_YIELD_S = 0.05  # a value waits so long at most for reads to end
_MAX_REMOVALS = 4096


@dataclass(frozen=True, slots=True)
class _Removal:
    """Remove a chunk, but not what somebody has written there since."""

    key: bytes
    write_id: bytes | None  # in the manifest; None: whatever is there
    is_unfinished: bool = False  # our own write: its layers may be there without a manifest


class WriteBehind:
    """A backlog of chunks, bounded in bytes, and one thread that writes it. Thread-safe.

    The layers go first, the manifest last: a chunk is not seen before it is whole. Reads go before
    writes: between values the thread waits a little while reads are under way.
    """

    def __init__(
        self,
        config: RedisTierConfig,
        layout: KvLayout,
        arena: memoryview,
        directory: NodeDirectory,
        counters: Counters,
        *,
        reads_are_under_way: Callable[[], bool],
        new_write_id: Callable[[], bytes],
    ) -> None:
        self._config = config
        self._layout = layout
        self._arena = arena
        self._directory = directory
        self._counters = counters
        self._reads_are_under_way = reads_are_under_way
        self._new_write_id = new_write_id
        self._changed = threading.Condition()
        self._writes: deque[ChunkWrite] = deque()
        self._removals: dict[_Removal, None] = {}  # a set, in order
        self._waiting_bytes = 0
        self._writing: ChunkWrite | None = None
        self._removing: _Removal | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def backlog_bytes(self) -> int:
        return self._waiting_bytes + self._writing_bytes

    @property
    def _writing_bytes(self) -> int:
        return 0 if self._writing is None else self._writing.location.nbytes

    @property
    def num_backlog(self) -> int:
        return len(self._writes)

    def offer(self, write: ChunkWrite) -> bool:
        nbytes = write.location.nbytes
        dropped: list[ChunkWrite] = []
        with self._changed:
            # What is being written can not be dropped for it.
            left_bytes = self._config.write_backlog_bytes - self._writing_bytes - nbytes
            is_taken = left_bytes >= 0 and self._wake()
            while is_taken and self._waiting_bytes > left_bytes:
                dropped.append(self._pop_write())
            if is_taken:
                self._writes.append(write)
                self._waiting_bytes += nbytes
        self._drop(dropped if is_taken else [write])
        return is_taken

    def remove(self, key: bytes) -> None:
        self._queue_removal(_Removal(key, None))

    def remove_damaged(self, key: bytes, write_id: bytes) -> None:
        """write_id: as its manifest has it"""
        self._queue_removal(_Removal(key, write_id))

    def _queue_removal(self, removal: _Removal) -> None:
        with self._changed:
            if len(self._removals) < _MAX_REMOVALS and self._wake():
                self._removals[removal] = None

    def shed(self) -> int:
        with self._changed:
            dropped = [self._pop_write() for _ in range(len(self._writes))]
        self._drop(dropped)
        return len(dropped)

    def cancel(self, content_id: str) -> int:
        with self._changed:
            dropped = [write for write in self._writes if write.content_id == content_id]
            self._writes = deque(w for w in self._writes if w.content_id != content_id)
            self._waiting_bytes -= sum(write.location.nbytes for write in dropped)
            writing = self._writing
        self._drop(dropped)
        if writing is None or writing.content_id != content_id:
            return len(dropped)
        removal = _Removal(writing.location.key, None)
        self._queue_removal(removal)  # comes next, when it has been written
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._writing is not writing
                    and removal not in self._removals
                    and self._removing != removal
                ),
                self._config.write_deadline_ms / 1e3,
            )
        return len(dropped) + 1

    def flush(self, timeout_ms: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._writes or self._removals or self._writing or self._removing),
                timeout_ms / 1e3,
            )

    def close(self) -> None:
        """Drop the backlog; returns when the value that is being written has ended."""
        self._closed.set()
        self.shed()
        with self._changed:
            self._removals.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _wake(self) -> bool:
        """Returns whether there is a thread to work. The caller holds the lock, until it has."""
        if self._closed.is_set():
            return False
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="redis-write", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:
                log.error("no thread to write to Redis with: %s", exc)
                return False
            self._thread = thread
        self._changed.notify_all()
        return True

    def _pop_write(self) -> ChunkWrite:
        """The oldest one; the caller holds the lock."""
        write = self._writes.popleft()
        self._waiting_bytes -= write.location.nbytes
        return write

    def _drop(self, dropped: list[ChunkWrite]) -> None:
        for write in dropped:
            self._counters.add(Count.WRITES_DROPPED)
            _release(write)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._writes or self._removals or self._closed.is_set()
                )
                if self._closed.is_set():
                    return
                removal = self._removing = next(iter(self._removals), None)
                write = self._writing = self._pop_write() if removal is None else None
                if removal is not None:
                    del self._removals[removal]
            if removal is not None:
                self._remove(removal)
            if write is not None:
                self._counters.add(self._write(write))
                _release(write)
            with self._changed:
                self._writing = self._removing = None
                self._changed.notify_all()

    def _write(self, write: ChunkWrite) -> Count:
        """Returns how it ended. Raises nothing."""
        try:
            return self._write_chunk(write)
        except UnavailableError:
            return Count.WRITES_DROPPED
        except ReplyError as exc:
            log.warning("Redis refused a chunk: %s", exc)
            return Count.WRITES_REFUSED
        except RedisCallError as exc:
            log.warning("a chunk was not written to Redis: %s", exc)
        except Exception:
            log.exception("a chunk was not written to Redis")
        return Count.WRITES_FAILED

    def _write_chunk(self, write: ChunkWrite) -> Count:
        """Raises what went wrong."""
        key, config = write.location.key, self._config
        entry = EntryMemory(self._arena, write.location, self._layout)
        shape = StoredShape(
            layout=self._layout, num_tokens=write.location.num_tokens, encoding=config.encoding
        )
        names = chunk_names(config.key_prefix, key, self._layout.num_layers)
        if self._ask(key, b"EXISTS", *names) == len(names):
            return Count.WRITES_NOT_NEEDED
        manifest = Manifest(
            key=key,
            shape=shape,
            write_id=self._new_write_id(),
            token_bytes=token_bytes(write.token_ids),
            recompute_ms=write.recompute_ms,
            content_id=write.content_id,
        )
        manifest_value = pack_manifest(manifest)
        unfinished = _Removal(key, manifest.write_id, is_unfinished=True)
        # The same for all: with layers that expire first, a manifest would be a lie.
        expires_at_s = None if config.ttl_s is None else time.monotonic() + config.ttl_s
        num_bytes = 0
        try:
            # Without a manifest nobody reads what is half old and half new.
            self._ask(key, b"UNLINK", names[0])
            for layer, name in enumerate(names[1:]):
                self._let_reads_pass()
                value = _layer_value(entry, manifest, layer)
                if self._closed.is_set() or value is None:
                    self._remove(unfinished)
                    return Count.WRITES_DAMAGED if value is None else Count.WRITES_DROPPED
                self._set(key, name, *value, expires_at_s)
                num_bytes += shape.value_bytes
            self._set(key, names[0], manifest_value, b"", expires_at_s)
        except Exception:
            self._queue_removal(unfinished)
            raise
        self._counters.add(Count.BYTES_WRITTEN, num_bytes)
        return Count.CHUNKS_WRITTEN

    def _remove(self, removal: _Removal) -> None:
        """Between the look and the removal another node may write, whose chunk is then a miss."""
        key, write_id = removal.key, removal.write_id
        names = chunk_names(self._config.key_prefix, key, self._layout.num_layers)
        try:
            if write_id is not None:
                value = self._ask(key, b"GET", names[0])
                if not isinstance(value, bytes):
                    is_there = removal.is_unfinished
                else:
                    is_there = write_id_in(value) == write_id
                if not is_there:
                    return
            self._ask(key, b"UNLINK", *names)
            if not removal.is_unfinished:
                self._counters.add(Count.CHUNKS_REMOVED)
        except OversizeError:
            return  # a value of others
        except Exception as exc:
            log.warning("a damaged chunk was not removed: %r", exc)

    def _let_reads_pass(self) -> None:
        end_s = time.monotonic() + _YIELD_S
        while self._reads_are_under_way() and time.monotonic() < end_s:
            if self._closed.wait(0.002):
                return

    def _set(
        self, key: bytes, name: bytes, prefix: bytes, payload: Buffer, expires_at_s: float | None
    ) -> None:
        """SET a value that lies in two parts, without joining them."""
        options: list[bytes] = []
        if expires_at_s is not None:
            left_ms = max(1, round((expires_at_s - time.monotonic()) * 1e3))
            options = [b"PX", b"%d" % left_ms]
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (
            3 + len(options),
            len(name),
            name,
            len(prefix) + len(payload),
        )
        tail = b"\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in options)
        self._send(key, [head + prefix, payload, tail])

    def _ask(self, key: bytes, *words: bytes) -> Reply:
        return self._send(key, command(*words))

    def _send(self, key: bytes, parts: list[Buffer]) -> Reply:
        deadline_s = time.monotonic() + self._config.write_deadline_ms / 1e3
        node = self._directory.node_for(manifest_name(self._config.key_prefix, key), deadline_s)

        def run(connection: RespConnection) -> Reply | ReplyError:
            connection.send(parts, deadline_s)
            try:
                return connection.read_reply(deadline_s)
            except ReplyError as exc:
                return exc

        reply = node.call(run, deadline_s)
        if isinstance(reply, ReplyError):
            if reply.is_redirect:
                self._directory.redirected(node)
            raise reply
        return reply


def _layer_value(entry: EntryMemory, manifest: Manifest, layer: int) -> tuple[bytes, Buffer] | None:
    """Prefix and blocks; raw blocks are views of the arena. None if the arena's are damaged."""
    key, shape, write_id = manifest.key, manifest.shape, manifest.write_id
    layout, num_tokens = shape.layout, shape.num_tokens
    content = entry.layer(layer)
    if shape.encoding is not Encoding.RAW:
        content = memoryview(bytearray(content))  # what is verified is what is encoded
    checksums = entry.checksums(layer)
    slot = layout.checksum_slot(layer, 0, 0)
    if slice_checksums(key, slot, content, layout.head_bytes(num_tokens)) != checksums:
        return None
    if shape.encoding is Encoding.RAW:
        return pack_prefix(key, shape, write_id, layer, checksums), content
    dtype = getattr(torch, layout.dtype)
    kv = torch.frombuffer(content, dtype=dtype).view(-1, num_tokens, layout.head_dim)
    blocks = encode(kv, shape.encoding)
    payload: memoryview = blocks.numpy().reshape(-1).data
    checksums = slice_checksums(key, slot, payload, shape.block_bytes)
    return pack_prefix(key, shape, write_id, layer, checksums), payload


def _release(write: ChunkWrite) -> None:
    try:
        write.release()
    except Exception:
        log.exception("a written entry could not be released")
