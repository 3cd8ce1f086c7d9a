"""How fast do stored layers come from Redis into the arena's memory?

Reads the same values with the Redis tier (verified, on 1 to 3 connections), with redis-py, with a
bare socket loop, which receives into memory and does nothing else, and with the native client of
lmcache where that is installed. Starts a redis-server of its own, unless it is given a URL.
Ceiling: the same number of bytes from a process that only sends, over one loopback connection.
Client and server share the machine's cores, and so does the ceiling's sender.

    cachesmith bench redis
"""

import mmap
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
import torch

from benchmarks.redis_server import is_installed, own_redis
from benchmarks.report import argument_parser, print_json, print_table, say
from benchmarks.timing import interleaved_ms, medians, spread
from kv_tier import ChunkLocation, ChunkQuery, KvLayout
from kv_tier.keys import KeySpace
from kv_tier.redis import ChunkWrite, FetchRequest, RedisTier, RedisTierConfig, operations
from kv_tier.redis.encoding import Encoding, encoding_error
from kv_tier.redis.entry_memory import EntryMemory
from kv_tier.redis.topology import ONLY_NODE, RedisTopology
from kv_tier.redis.values import layer_name

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128  # of an 8B model with grouped queries, bf16
TOKEN_LAYER_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 2
LAYOUT = KvLayout(
    num_layers=NUM_LAYERS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype="bfloat16"
)
PREFIX = "cachesmith-bench"
DEADLINE_MS = 120_000.0
WRITE_ID = b"the same"  # of all writes, so that reading needs no lookup
SENDER = """
import socket, sys
sock = socket.create_server(("127.0.0.1", 0))
print(sock.getsockname()[1], flush=True)
block = bytes(1 << 20)
while True:
    peer, _ = sock.accept()
    for _ in range(int(sys.argv[1]) >> 20):
        peer.sendall(block)
    peer.close()
"""


class Work:
    """Chunks in Redis whose values are of one size, and memory to read them into."""

    def __init__(self, url: str, value_kib: int, total_mib: int, seed: int) -> None:
        self.url = url
        self.num_tokens = (value_kib << 10) // TOKEN_LAYER_BYTES
        entry_bytes = LAYOUT.entry_bytes(self.num_tokens)
        num_chunks = max(1, (total_mib << 20) // LAYOUT.payload_bytes(self.num_tokens))
        space = KeySpace(fingerprint="benchmark", kv_dtype="bfloat16", anchor_ids=())
        self.token_ids = [[seed, chunk, *range(self.num_tokens - 2)] for chunk in range(num_chunks)]
        self.places = [
            ChunkLocation(
                key=space.key(tokens),
                offset=chunk * entry_bytes,
                nbytes=entry_bytes,
                num_tokens=self.num_tokens,
            )
            for chunk, tokens in enumerate(self.token_ids)
        ]
        self.memory = memoryview(mmap.mmap(-1, num_chunks * entry_bytes))
        self.names = [
            layer_name(PREFIX, place.key, layer)
            for layer in range(NUM_LAYERS)
            for place in self.places
        ]
        self.targets = [
            EntryMemory(self.memory, place, LAYOUT).layer(layer)
            for layer in range(NUM_LAYERS)
            for place in self.places
        ]
        self.prefix_bytes = 128 + 2 * NUM_KV_HEADS * 8
        self.num_bytes = sum(map(len, self.targets))
        self._fill(seed)

    def tier(self, **changes: Any) -> RedisTier:
        config = RedisTierConfig(
            url=self.url,
            key_prefix=PREFIX,
            value_deadline_ms=DEADLINE_MS,
            write_deadline_ms=DEADLINE_MS,
            write_backlog_bytes=1 << 40,
            **changes,
        )
        return RedisTier(config, LAYOUT, self.memory, new_write_id=lambda: WRITE_ID)

    def store(self, encoding: Encoding) -> None:
        with self.tier(encoding=encoding) as tier:
            operations.clear(tier.client(), PREFIX)
            for place, tokens in zip(self.places, self.token_ids, strict=True):
                tier.write_behind(
                    ChunkWrite(location=place, token_ids=tokens, release=lambda: None)
                )
            if not tier.flush(DEADLINE_MS):
                raise SystemExit("Redis did not take the chunks in time")

    def _fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (2 * NUM_KV_HEADS, self.num_tokens, HEAD_DIM)
        kv = torch.randn(shape, generator=generator).bfloat16()
        content = kv.view(torch.uint8).numpy().reshape(-1).data
        for place in self.places:
            entry = EntryMemory(self.memory, place, LAYOUT)
            for layer in range(NUM_LAYERS):
                entry.layer(layer)[:] = content
                entry.put_checksums(layer, entry.found_checksums(layer))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("redis", __doc__)
    parser.add_argument("--url", help="a Redis to use, emptied of nothing but our own keys")
    parser.add_argument("--value-kib", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--total-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.url is None and not is_installed():
        print("there is no redis-server: nothing to measure")
        print_json("redis", seed=args.seed, results=[])
        return
    results: list[dict[str, Any]] = []
    with _servers(args.url) as urls:
        for value_kib in args.value_kib:
            for link, url in urls.items():
                say(f"{value_kib} KiB over {link}")
                work = Work(url, value_kib, args.total_mib, args.seed)
                results += _read(work, link, value_kib, args.rounds)
        work = Work(next(iter(urls.values())), 1024, args.total_mib, args.seed)
        results += _encoded(work, args)
        results.append(_lookups(work, args.rounds))
    columns = ["link", "value_kib", "what", "gb_per_s", "gb_per_s_min", "gb_per_s_max"]
    print_table([*columns, "note"], [[r.get(c, "") for c in [*columns, "note"]] for r in results])
    print_json("redis", seed=args.seed, results=results)


def _read(work: Work, link: str, value_kib: int, rounds: int) -> list[dict[str, Any]]:
    """Every way of reading all values, in turns."""
    work.store(Encoding.RAW)
    candidates: dict[str, Callable[[], object]] = {}
    tiers = {k: work.tier(num_connections=k) for k in (1, 2, 3)}
    for num_connections, tier in tiers.items():
        candidates[f"Redis tier, {num_connections} connections"] = lambda t=tier: _fetch(t, work)
    client = redis.Redis.from_url(work.url)
    candidates["redis-py get"] = lambda: [client.get(name) for name in work.names]
    num_at_once = max(1, (16 << 10) // value_kib)  # 16 MiB
    candidates["redis-py mget"] = lambda: [
        client.mget(work.names[i : i + num_at_once]) for i in range(0, len(work.names), num_at_once)
    ]
    topology = RedisTopology(RedisTierConfig(url=work.url))
    for k in (1, 2, 3):
        socks = [topology.open(ONLY_NODE)._sock for _ in range(k)]
        candidates[f"bare sockets, {k}"] = lambda s=socks: _bare(s, work)
    if link == "tcp" and (lmcache := _lmcache(work)) is not None:
        candidates |= lmcache
    with _sender(work.num_bytes) as port:
        candidates["ceiling: only sent"] = lambda: _receive_all(port, work)
        times = interleaved_ms(candidates, rounds=rounds)
    for tier in tiers.values():
        tier.close()
    return [
        {
            "link": link,
            "value_kib": value_kib,
            "what": what,
            **spread("gb_per_s", [work.num_bytes / ms / 1e6 for ms in values]),
        }
        for what, values in times.items()
    ]


def _lookups(work: Work, rounds: int) -> dict[str, Any]:
    """Milliseconds to learn that all chunks of the work are there, with their tokens compared."""
    queries = [
        ChunkQuery(key=place.key, token_ids=tokens)
        for place, tokens in zip(work.places, work.token_ids, strict=True)
    ]
    with work.tier() as tier:
        times = interleaved_ms({"lookup": lambda: tier.lookup(queries)}, rounds=10 * rounds)
    return {
        "link": "",
        "what": f"lookup of {len(queries)} chunks",
        **spread("ms", times["lookup"]),
        "note": f"{medians(times)['lookup']:.2f} ms",
    }


def _encoded(work: Work, args: Any) -> list[dict[str, Any]]:
    """The tier with one byte a number: arena bytes a second, and what the encoding costs."""
    results = []
    kv = torch.randn(NUM_KV_HEADS, 256, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    for encoding in (Encoding.FP8, Encoding.INT8):
        work.store(encoding)
        with work.tier() as tier:
            times = interleaved_ms(
                {"read": lambda t=tier, e=encoding: _fetch(t, work, e)}, rounds=args.rounds
            )["read"]
        error = encoding_error(kv.bfloat16(), encoding)
        results.append(
            {
                "link": "tcp" if args.url is None else "url",
                "value_kib": 1024,
                "what": f"Redis tier, {encoding}",
                **spread("gb_per_s", [work.num_bytes / ms / 1e6 for ms in times]),
                "note": f"error {error.relative_rms:.4f} of a normal distribution's RMS",
            }
        )
    return results


def _fetch(tier: RedisTier, work: Work, encoding: Encoding = Encoding.RAW) -> None:
    requests = [
        FetchRequest(location=place, encoding=encoding, write_id=WRITE_ID) for place in work.places
    ]
    fetch = tier.fetch(requests, range(NUM_LAYERS), deadline_ms=DEADLINE_MS)
    fetch.wait_quiet()
    for chunk in fetch.chunks:
        if not chunk.is_complete:
            raise SystemExit(f"a chunk missed: {chunk.miss}")


def _bare(socks: list[socket.socket], work: Work) -> None:
    """A request, its answer into memory, the next request; values are shared out evenly."""
    size = work.prefix_bytes + len(work.targets[0])
    head = len(b"$%d\r\n" % size) + work.prefix_bytes

    def run(idx: int, sock: socket.socket) -> None:
        small = memoryview(bytearray(head + 2))
        for i in range(idx, len(work.names), len(socks)):
            name = work.names[i]
            sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name))
            for target in (small[:head], work.targets[i], small[:2]):
                sock.recv_into(target, 0, socket.MSG_WAITALL)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(socks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _lmcache(work: Work) -> dict[str, Callable[[], object]] | None:
    """lmcache's native client, on 1 to 3 connections, into memory that it is given."""
    try:
        from lmcache.lmcache_redis import LMCacheRedisClient
    except ImportError:
        return None
    options = redis.Redis.from_url(work.url).connection_pool.connection_kwargs
    host, port = options.get("host", "localhost"), options.get("port", 6379)
    size = work.prefix_bytes + len(work.targets[0])
    whole = memoryview(mmap.mmap(-1, size * len(work.names)))
    views = [whole[i * size : (i + 1) * size] for i in range(len(work.names))]
    names = [name.decode() for name in work.names]

    def read(client: Any) -> None:
        client.submit_batch_get(names, views)
        select.select([client.event_fd()], [], [])
        ((_, is_good, error, _),) = client.drain_completions()
        if not is_good:
            raise SystemExit(f"lmcache: {error}")

    clients = {k: LMCacheRedisClient(host, port, k, "", "") for k in (1, 2, 3)}
    return {f"lmcache, {k} connections": lambda c=c: read(c) for k, c in clients.items()}


def _receive_all(port: int, work: Work) -> None:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        for target in work.targets:
            sock.recv_into(target, 0, socket.MSG_WAITALL)


@contextmanager
def _sender(num_bytes: int) -> Iterator[int]:
    command = [sys.executable, "-c", SENDER, str(num_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def _servers(url: str | None) -> Iterator[dict[str, str]]:
    """URLs by kind of link, of the given Redis or of one of our own."""
    if url is not None:
        yield {"url": url}
        return
    with own_redis() as urls:
        yield urls


if __name__ == "__main__":
    main()
