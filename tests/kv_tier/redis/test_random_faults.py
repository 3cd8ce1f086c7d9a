"""Faults at random times, while several readers and a writer work: misses or right bytes."""

import random
import threading
import time
from pathlib import Path

import pytest
import redis

from kv_tier import KvLayout
from kv_tier.redis import ChunkWrite, FetchRequest, Miss, RedisTier
from tests.kv_tier.redis.cases import Arena, config, query
from tests.kv_tier.redis.servers import RedisServer, eventually

pytestmark = [pytest.mark.redis, pytest.mark.slow]

# 64 KiB a layer
LAYOUT = KvLayout(num_layers=6, num_kv_heads=2, head_dim=64, dtype="float32")
NUM_TOKENS = 64
CHUNKS = range(1, 9)
NUM_READERS = 3
NUM_FAULTS = 40
DEADLINE_MS = 300.0
BOUND_S = 20.0


class World:
    """Chunks in an arena, copied to Redis again and again, and readers of them."""

    def __init__(self, server: RedisServer) -> None:
        self.arena = Arena(LAYOUT, 1 << 25)
        self.sources = {chunk: self.arena.fill(chunk, NUM_TOKENS) for chunk in CHUNKS}
        self.tier = RedisTier(
            config(
                server.url,
                lookup_deadline_ms=DEADLINE_MS,
                value_deadline_ms=DEADLINE_MS,
                write_deadline_ms=DEADLINE_MS,
                connect_deadline_ms=DEADLINE_MS,
            ),
            LAYOUT,
            self.arena.memory,
        )
        self.is_over = threading.Event()
        self.problems: list[str] = []
        self.num_whole = self.num_missed = 0
        self.slowest_s = 0.0

    def offer(self, chunk: int) -> None:

        self.tier.write_behind(
            ChunkWrite(
                location=self.sources[chunk],
                token_ids=query(chunk, NUM_TOKENS).token_ids,
                release=lambda: None,
            )
        )

    def write(self) -> None:
        while not self.is_over.is_set():
            for chunk in CHUNKS:
                self.offer(chunk)
            self.tier.flush(BOUND_S * 1e3)
            self.is_over.wait(0.02)

    def read(self, seed: int) -> None:
        try:
            self._read(random.Random(seed))
        except Exception as exc:
            self.problems.append(repr(exc))

    def _read(self, rng: random.Random) -> None:
        places = {chunk: self.arena.place(chunk, NUM_TOKENS) for chunk in CHUNKS}
        while not self.is_over.is_set():
            wanted = rng.sample(list(CHUNKS), 3)
            started_s = time.monotonic()
            found = self.tier.lookup([query(chunk, NUM_TOKENS) for chunk in wanted])
            there = [(c, m) for c, m in zip(wanted, found, strict=True) if m is not None]
            for chunk, _ in there:
                entry = places[chunk]
                self.arena.memory[entry.offset : entry.offset + entry.nbytes] = bytes(entry.nbytes)
            requests = [
                FetchRequest(
                    location=places[chunk],
                    encoding=manifest.shape.encoding,
                    write_id=manifest.write_id,
                )
                for chunk, manifest in there
            ]
            layers = rng.sample(range(LAYOUT.num_layers), LAYOUT.num_layers)
            fetch = self.tier.fetch(requests, layers, deadline_ms=2 * DEADLINE_MS)
            if rng.random() < 0.1:
                fetch.cancel()
            fetch.wait_quiet()
            self.slowest_s = max(self.slowest_s, time.monotonic() - started_s)
            for fetched, (chunk, _) in zip(fetch.chunks, there, strict=True):
                if not fetched.is_complete:
                    self.num_missed += 1
                    continue
                self.num_whole += 1
                if self.arena.bytes_of(places[chunk]) != self.arena.bytes_of(self.sources[chunk]):
                    self.problems.append(f"chunk {chunk} has wrong bytes")


def harm(server: RedisServer, rng: random.Random) -> None:
    """One fault, and the end of it."""
    kind = rng.choice(["pause", "restart", "drop", "delete", "flip", "cut", "full", "flush"])
    client = server.client(socket_timeout=5.0)
    if kind == "pause":
        server.pause()
        time.sleep(rng.choice([0.05, 1.5 * DEADLINE_MS / 1e3]))
        server.resume()
    elif kind == "restart":
        server.kill()
        time.sleep(rng.choice([0.0, 0.2]))
        server.start()
    elif kind == "drop":
        client.client_kill_filter(_type="normal", skipme=True)
    elif kind == "full":
        client.config_set("maxmemory", 1 << 20)
        time.sleep(0.05)
        client.config_set("maxmemory", 0)
    elif kind == "flush":
        client.flushall()
    elif name := client.randomkey():
        value = bytearray(client.get(name) or b"x")
        if kind == "delete":
            client.delete(name)
        elif kind == "cut":
            client.set(name, bytes(value[: rng.randrange(len(value))]))
        else:
            value[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
            client.set(name, bytes(value))
    client.close()


@pytest.mark.parametrize("seed", range(2))
def test_faults_at_random(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    with RedisServer(folder) as server:
        world = World(server)
        with world.tier:
            threads = [threading.Thread(target=world.write)]
            threads += [threading.Thread(target=world.read, args=(i,)) for i in range(NUM_READERS)]
            for thread in threads:
                thread.start()
            for _ in range(NUM_FAULTS):
                time.sleep(rng.choice([0.0, 0.02, 0.1]))
                try:
                    harm(server, rng)
                except redis.RedisError:
                    continue  # a fault of another kind was not over
            world.is_over.set()
            for thread in threads:
                thread.join(BOUND_S)
                assert not thread.is_alive()
            assert world.problems == []
            assert world.slowest_s < BOUND_S
            assert world.num_whole > 0 and world.num_missed > 0
            counted = {reason for reason, number in world.tier.stats().misses.items() if number}
            assert len(counted - {Miss.CANCELLED, Miss.ABSENT}) >= 2
            eventually(lambda: not world.tier.stats().nodes_unavailable)
            world.offer(1)
            assert world.tier.flush(BOUND_S * 1e3)
            eventually(lambda: world.tier.lookup([query(1, NUM_TOKENS)]) != [None])
