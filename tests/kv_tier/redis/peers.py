"""The other end of a connection, in this process: what it answers, and when, is the test's."""

import socket
import threading
from collections.abc import Callable

from kv_tier.redis import Encoding, StoredShape
from kv_tier.redis.node import RedisNode
from kv_tier.redis.resp import RespConnection
from kv_tier.redis.values import layer_name, pack_prefix
from tests.kv_tier.redis.cases import LAYOUT, LONG_MS, NUM_TOKENS, WRITE_ID, Arena, query

SHAPE = StoredShape(layout=LAYOUT, num_tokens=NUM_TOKENS, encoding=Encoding.RAW)


class Peer:
    """Answers every request for a key, on each connection by a thread of its own."""

    def __init__(self, answer: Callable[[socket.socket, bytes], None]) -> None:
        self._answer = answer
        self.num_opened = 0
        self.asked: list[bytes] = []

    def open(self) -> RespConnection:
        self.num_opened += 1
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._serve, args=(theirs,), daemon=True).start()
        return RespConnection(ours)

    def _serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as requests:
            while requests.readline():
                for _ in range(3):  # length, GET, length
                    requests.readline()
                name = requests.readline().strip()
                self.asked.append(name)
                try:
                    self._answer(sock, name)
                except OSError:
                    return


def make_node(open_connection: Callable[[], RespConnection], **changes: object) -> RedisNode:
    options: dict[str, object] = {
        "refresh": lambda: None,
        "max_failures": 3,
        "probe_interval_ms": 5.0,
        "connect_deadline_ms": LONG_MS,
        **changes,
    }
    return RedisNode("peer", open_connection=open_connection, **options)  # type: ignore[arg-type]


def stored_layers(arena: Arena, *chunks: int) -> dict[bytes, bytes]:
    """Answers with the raw layers of these chunks, by their names."""
    values: dict[bytes, bytes] = {}
    for chunk in chunks:
        entry, key = arena.entry(arena.fill(chunk)), query(chunk).key
        for layer in range(LAYOUT.num_layers):
            prefix = pack_prefix(key, SHAPE, WRITE_ID, layer, entry.checksums(layer))
            value = prefix + bytes(entry.layer(layer))
            values[name_of(chunk, layer)] = b"$%d\r\n%s\r\n" % (len(value), value)
    return values


def name_of(chunk: int, layer: int) -> bytes:
    return layer_name("cachesmith", query(chunk).key, layer)
