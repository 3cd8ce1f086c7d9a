"""Copies arena entries to Redis when there is time; nobody ever waits for it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch

from kv_tier.keys import token_bytes
from kv_tier.layout import KvLayout, slice_checksums
from kv_tier.redis.config import RedisTierConfig
from kv_tier.redis.counters import Count, Counters
from kv_tier.redis.directory import NodeDirectory
from kv_tier.redis.encoding import Encoding, encode
from kv_tier.redis.entry_memory import EntryMemory
from kv_tier.redis.errors import RedisCallError, ReplyError, UnavailableError
from kv_tier.redis.layer_read import MOVED_CODES
from kv_tier.redis.remote import ChunkWrite
from kv_tier.redis.resp import Buffer, Reply, RespConnection, command
from kv_tier.redis.values import (
    Manifest,
    StoredShape,
    chunk_names,
    layer_name,
    manifest_name,
    pack_manifest,
    pack_prefix,
)

log = logging.getLogger(__name__)

_YIELD_S = 0.05  # a value waits so long at most for reads to end
_MAX_REMOVALS = 4096


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
    ) -> None:
        self._config = config
        self._layout = layout
        self._arena = arena
        self._directory = directory
        self._counters = counters
        self._reads_are_under_way = reads_are_under_way
        self._changed = threading.Condition()
        self._writes: deque[ChunkWrite] = deque()
        self._removals: deque[bytes] = deque(maxlen=_MAX_REMOVALS)
        self._backlog_bytes = 0  # also of the chunk that is being written
        self._writing: ChunkWrite | None = None
        self._at_work: bytes | None = None  # the chunk that is being written or removed
        self._is_working = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def backlog_bytes(self) -> int:
        return self._backlog_bytes

    @property
    def num_backlog(self) -> int:
        return len(self._writes)

    def offer(self, write: ChunkWrite) -> bool:
        nbytes = write.location.nbytes
        dropped: list[ChunkWrite] = []
        with self._changed:
            limit_bytes = self._config.write_backlog_bytes
            is_taken = not self._closed.is_set() and nbytes <= limit_bytes
            while is_taken and self._writes and self._backlog_bytes + nbytes > limit_bytes:
                dropped.append(self._pop_write())
            is_taken = is_taken and self._backlog_bytes + nbytes <= limit_bytes
            if is_taken:
                self._writes.append(write)
                self._backlog_bytes += nbytes
                self._wake()
        self._drop(dropped if is_taken else [*dropped, write])
        return is_taken

    def remove(self, key: bytes) -> None:
        with self._changed:
            if not self._closed.is_set() and key not in self._removals:
                self._removals.append(key)
                self._wake()

    def shed(self) -> int:
        with self._changed:
            dropped = [self._pop_write() for _ in range(len(self._writes))]
        self._drop(dropped)
        return len(dropped)

    def cancel(self, content_id: str) -> int:
        with self._changed:
            dropped = [write for write in self._writes if write.content_id == content_id]
            self._writes = deque(w for w in self._writes if w.content_id != content_id)
            self._backlog_bytes -= sum(write.location.nbytes for write in dropped)
            writing = self._writing
        self._drop(dropped)
        if writing is None or writing.content_id != content_id:
            return len(dropped)
        key = writing.location.key
        self.remove(key)  # comes next, when it has been written
        with self._changed:
            self._changed.wait_for(
                lambda: key not in self._removals and self._at_work != key,
                self._config.write_deadline_ms / 1e3,
            )
        return len(dropped) + 1

    def flush(self, timeout_ms: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._writes and not self._removals and not self._is_working,
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
        if thread is not None:
            thread.join()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="redis-write", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _pop_write(self) -> ChunkWrite:
        """The oldest one; the caller holds the lock."""
        write = self._writes.popleft()
        self._backlog_bytes -= write.location.nbytes
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
                self._is_working = True
                removed = self._removals.popleft() if self._removals else None
                write = self._writing = self._writes.popleft() if removed is None else None
                self._at_work = removed if write is None else write.location.key
            try:
                if removed is not None:
                    self._remove(removed)
                elif write is not None:
                    self._write(write)
            except Exception:
                log.exception("write-behind failed")
            finally:
                with self._changed:
                    if write is not None:
                        self._backlog_bytes -= write.location.nbytes
                    self._writing = self._at_work = None
                    self._is_working = False
                    self._changed.notify_all()

    def _write(self, write: ChunkWrite) -> None:
        try:
            self._counters.add(self._write_chunk(write))
        except UnavailableError:
            self._counters.add(Count.WRITES_DROPPED)
            self.shed()  # what waits would only wait for the same node
        except RedisCallError as exc:
            log.warning("a chunk was not written to Redis: %s", exc)
            self._counters.add(Count.WRITES_FAILED)
        finally:
            _release(write)

    def _write_chunk(self, write: ChunkWrite) -> Count:
        """Returns how it ended. Raises RedisCallError when Redis can not be asked."""
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
            token_bytes=token_bytes(write.token_ids),
            recompute_ms=write.recompute_ms,
            content_id=write.content_id,
        )
        num_bytes = 0
        try:
            # Who reads meanwhile must not take old layers and new ones for one chunk.
            self._ask(key, b"UNLINK", names[0])
            for layer in range(self._layout.num_layers):
                self._let_reads_pass()
                if self._closed.is_set() or not entry.is_intact(layer):
                    self._ask(key, b"UNLINK", *names)
                    is_closed = self._closed.is_set()
                    return Count.WRITES_DROPPED if is_closed else Count.WRITES_DAMAGED
                prefix, payload = _layer_value(entry, shape, layer)
                self._set(key, layer_name(config.key_prefix, key, layer), prefix, payload)
                num_bytes += shape.value_bytes
            self._set(key, names[0], pack_manifest(manifest), b"")
        except ReplyError as exc:
            log.warning("Redis refused a chunk: %s", exc)
            self._undo(key, names)
            return Count.WRITES_REFUSED
        self._counters.add(Count.BYTES_WRITTEN, num_bytes)
        return Count.CHUNKS_WRITTEN

    def _undo(self, key: bytes, names: list[bytes]) -> None:
        with suppress(RedisCallError):  # without a manifest nobody reads them; they age out
            self._ask(key, b"UNLINK", *names)

    def _remove(self, key: bytes) -> None:
        names = chunk_names(self._config.key_prefix, key, self._layout.num_layers)
        try:
            self._ask(key, b"UNLINK", *names)
            self._counters.add(Count.CHUNKS_REMOVED)
        except RedisCallError as exc:
            log.warning("a damaged chunk was not removed: %s", exc)

    def _let_reads_pass(self) -> None:
        end_s = time.monotonic() + _YIELD_S
        while self._reads_are_under_way() and time.monotonic() < end_s:
            if self._closed.wait(0.002):
                return

    def _set(self, key: bytes, name: bytes, prefix: bytes, payload: Buffer) -> None:
        """SET a value that lies in two parts, without joining them."""
        ttl_s = self._config.ttl_s
        options = [] if ttl_s is None else [b"PX", b"%d" % max(1, round(ttl_s * 1e3))]
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
            if reply.code in MOVED_CODES or reply.code == "READONLY":
                self._directory.redirected(node)
            raise reply
        return reply


def _layer_value(entry: EntryMemory, shape: StoredShape, layer: int) -> tuple[bytes, Buffer]:
    """Prefix and blocks; raw blocks are views of the arena."""
    layout, key = shape.layout, entry.location.key
    stored = entry.layer(layer)
    if shape.encoding is Encoding.RAW:
        return pack_prefix(key, shape, layer, entry.checksums(layer)), stored
    dtype = getattr(torch, layout.dtype)
    kv = torch.frombuffer(stored, dtype=dtype).view(-1, shape.num_tokens, layout.head_dim)
    blocks = encode(kv, shape.encoding)
    payload: memoryview = blocks.numpy().reshape(-1).data
    slot = layout.checksum_slot(layer, 0, 0)
    checksums = slice_checksums(key, slot, payload, shape.block_bytes)
    return pack_prefix(key, shape, layer, checksums), payload


def _release(write: ChunkWrite) -> None:
    try:
        write.release()
    except Exception:
        log.exception("a written entry could not be released")
