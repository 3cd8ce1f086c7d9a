"""Two engines of two nodes over one real Redis: shared chunks, and every way Redis can fail."""

import asyncio
import os
import random
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import redis

from kv_tier.arena_view import ArenaView
from kv_tier.host_tier import HostTier
from kv_tier.redis import (
    ChunkWrite,
    Count,
    Encoding,
    LinkLimit,
    Miss,
    RedisTier,
    RedisTierConfig,
)
from kv_tier.redis.values import chunk_names, layer_name, manifest_name
from planner.types import Signal
from tests.kv_tier.redis.servers import RedisServer
from tests.replicas.vllm_harness import (
    NUM_LAYERS,
    ask,
    ask_batch,
    assert_idle,
    assert_same,
    make_request,
    make_ticket,
    running_engine,
    store,
    until,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.redis,
    pytest.mark.asyncio(loop_scope="module"),
]

PREFIX = "cachesmith"
FAST = LinkLimit()
SLOW = LinkLimit(bytes_per_ms=2_000.0, latency_ms=1.0)  # a layer of a chunk takes tens of ms
DEADLINE_MS = 400.0
EXACT = {"coverage": 1.0}
SPARSE = {"coverage": 0.3}


class Nodes:
    """Two engines that share nothing but Redis, at tensor parallelism 1 and 2."""

    def __init__(self, server, first, second):
        self.server, self.first, self.second = server, first, second
        self.redis = server.client()

    @property
    def engines(self):
        return self.first, self.second

    def pace(self, limit=FAST):
        """How fast both nodes' links are from now on."""
        for engine in self.engines:
            engine.emulate_link(limit)

    async def forget(self):
        """Nothing is stored anywhere, and every connection is good."""
        self.pace()
        for engine in self.engines:
            await flushed(engine)
        if not self.server.is_running:
            self.server.start()
        self.redis.flushall()
        await self.forget_host()
        for engine in self.engines:
            await until(lambda engine=engine: not engine._remote.tier.stats().nodes_unavailable)

    async def forget_host(self):
        for engine in self.engines:
            await settled(engine)
            engine._tier.clear()
            await until(lambda engine=engine: engine._tier.stats().used_bytes == 0)

    async def share(self, request, *, by=None):
        """Store the request's chunks in Redis, and in no host tier."""
        engine = by or self.first
        await store(engine, request)
        await flushed(engine)
        await self.forget_host()

    def key(self, request, chunk=0):
        return self.first._keys.key(request.chunks[chunk], cache_salt=request.cache_salt)


async def settled(engine):
    """What was missing has been computed, and nothing is on its way."""

    def is_settled():
        stats = engine._tier.stats()
        load = engine.load()
        return not (stats.num_reservations or load.num_ingest_backlog or load.num_waiting)

    await until(is_settled, 30.0)


async def flushed(engine):
    await settled(engine)
    assert await asyncio.to_thread(engine._remote.tier.flush, 30_000)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def nodes(tmp_path_factory):
    """Redis is absent while the engines start, and for their first request."""
    folder = tmp_path_factory.mktemp("m")
    with tempfile.TemporaryDirectory(prefix="cs-redis-") as name:
        server = RedisServer(Path(name))
        config = RedisTierConfig(
            url=server.url,
            lookup_deadline_ms=DEADLINE_MS,
            value_deadline_ms=DEADLINE_MS,
            connect_deadline_ms=DEADLINE_MS,
            probe_interval_ms=50.0,
            limit=FAST,
        )
        async with (
            running_engine(folder, redis=config, inspected=True) as first,
            running_engine(folder, redis=config, tensor_parallel_size=2) as second,
        ):
            request = request_of(0, [40, 50])
            plain = await ask(first, request)
            await store(first, request)
            assert_same(await ask(first, request, make_ticket(**EXACT)), plain)
            first._tier.clear()
            assert_same(await ask(first, request, make_ticket(**EXACT)), plain)
            assert misses(first)[Miss.CONNECTION] > 0
            with server:
                yield Nodes(server, first, second)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_stored(nodes):
    await nodes.forget()
    yield
    await assert_idle(nodes.first)
    for engine in nodes.engines:
        await until(lambda engine=engine: engine._tier.stats().num_leases == 0)
        await settled(engine)


def request_of(seed, lengths, **options):
    """Without a prefix: the engines store those too, when they are idle."""
    return make_request(random.Random(seed), lengths, prefix=1, **options)


def misses(engine):
    return dict(engine._remote.tier.stats().misses)


def counted(engine, what):
    return engine._remote.tier.stats().counts[what]


def from_redis(answer):
    return answer.result.cached_tokens.get("redis", 0)


# ---- what is shared ----


@pytest.mark.parametrize("writer", [0, 1], ids=["tp1-writes", "tp2-writes"])
async def test_chunks_of_any_degree_serve_the_other(nodes, writer):
    request = request_of(1, [60, 70, 50])
    write, read = nodes.engines[writer], nodes.engines[1 - writer]
    plain = await ask(read, request)
    await nodes.share(request, by=write)
    for plan, signal in ((EXACT, Signal.KV_DEV), (SPARSE, Signal.QCI), (SPARSE, Signal.KV_DEV)):
        await nodes.forget_host()
        fetched = await ask(read, request, make_ticket(**plan, signal=signal))
        assert from_redis(fetched) == 180
        assert fetched.result.num_miss_tokens == 0
        assert not fetched.result.recovered
        await until(lambda: read._tier.stats().num_entries == 3)
        resident = await ask(read, request, make_ticket(**plan, signal=signal))
        assert from_redis(resident) == 0 and resident.result.cached_tokens["host"] == 180
        if plan is EXACT:
            assert_same(fetched, plain)
        elif fetched.result.num_filled_tokens == 0:
            assert_same(fetched, resident)


async def test_a_batch_fetches_what_its_requests_share_once(nodes):
    request = request_of(2, [60, 70])
    other = replace(request_of(20, [30]), chunks=(request.chunks[1], request.chunks[0]))
    await nodes.share(request)
    plain = [await ask(nodes.second, r) for r in (request, other)]
    before = counted(nodes.second, Count.CHUNKS_READ)
    answers = await ask_batch(nodes.second, [request, other], 1, [EXACT] * 2)
    for answer, exact in zip(answers, plain, strict=True):
        assert_same(answer, exact)
        assert from_redis(answer) + answer.result.cached_tokens["host"] == 130
    await until(lambda: nodes.second._tier.stats().num_entries == 2)
    assert counted(nodes.second, Count.CHUNKS_READ) == before + 2


async def test_the_link_is_measured_and_told(nodes):
    request = request_of(3, [200, 200])
    await nodes.share(request)
    nodes.pace(SLOW)
    for _ in range(16):
        await nodes.forget_host()
        await ask(nodes.first, request, make_ticket(**SPARSE))
    assert nodes.first.link.bytes_per_ms == pytest.approx(SLOW.bytes_per_ms, rel=0.5)
    assert nodes.first.load().loaded_share > 0.5


async def test_an_ingest_takes_from_redis_what_is_there(nodes):
    request = request_of(4, [50])
    await nodes.share(request)
    read = counted(nodes.second, Count.CHUNKS_READ)
    await store(nodes.second, request)
    assert counted(nodes.second, Count.CHUNKS_READ) == read + 1
    assert nodes.second._tier.contains([nodes.key(request)]) == [True]


async def test_a_deleted_chunk_does_not_come_back(nodes):
    request = request_of(5, [50])
    stored = await nodes.first.ingest(request.chunks[0])
    await flushed(nodes.first)
    assert nodes.first.delete_chunk(stored.chunk_id)
    await flushed(nodes.first)
    assert nodes.redis.keys() == []
    answer = await ask(nodes.first, request, make_ticket(**EXACT))
    assert answer.result.num_miss_tokens == 50


async def test_a_client_that_leaves_ends_the_fetch(nodes):
    request = request_of(6, [400, 400])
    await nodes.share(request)
    nodes.pace(SLOW)
    asking = asyncio.create_task(ask(nodes.first, request, make_ticket(**SPARSE)))
    await until(lambda: nodes.first._tier.stats().num_reservations == 2)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: nodes.first._tier.stats().used_bytes == 0)
    assert misses(nodes.first)[Miss.CANCELLED] >= 1


# ---- what fails ----


async def check_survived(nodes, request, plain, *, within_ms=20 * DEADLINE_MS, **plan):
    """Right tokens from both engines, in bounded time, and a counter that moved."""
    answers = []
    for engine in nodes.engines:
        before = sum(misses(engine).values())
        started_s = time.monotonic()
        answer = await ask(engine, request, make_ticket(**{**EXACT, **plan}))
        assert (time.monotonic() - started_s) * 1e3 < within_ms
        assert_same(answer, plain)
        assert sum(misses(engine).values()) > before
        answers.append(answer)
    return answers


def flip_a_bit(value):
    changed = bytearray(value)
    changed[len(changed) // 2] ^= 4
    return bytes(changed)


def of_another_version(value):
    return value[:8] + (99).to_bytes(4, "little") + value[12:]


def of_another_dtype(value):
    return value.replace(b"float32", b"float16")


DAMAGE = {
    "truncated": lambda value: value[:-100],
    "empty": lambda value: b"",
    "bit flipped": flip_a_bit,
    "other version": of_another_version,
    "other dtype": of_another_dtype,
    "other people's": lambda value: b"hello",
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("layer", [None, 0, NUM_LAYERS - 1], ids=["manifest", "first", "last"])
async def test_a_damaged_value_costs_recomputation(nodes, name, layer):
    request = request_of(7, [60, 40])
    plain = await ask(nodes.first, request)
    await nodes.share(request)
    key = nodes.key(request)
    redis_key = manifest_name(PREFIX, key) if layer is None else layer_name(PREFIX, key, layer)
    for engine in nodes.engines:
        before = sum(misses(engine).values())
        nodes.redis.set(redis_key, DAMAGE[name](nodes.redis.get(redis_key)))
        answer = await ask(engine, request, make_ticket(**EXACT))
        assert_same(answer, plain)
        assert sum(misses(engine).values()) > before
        await nodes.forget()
        await nodes.share(request)


async def test_a_layer_that_is_deleted_is_a_miss_and_is_stored_again(nodes):
    request = request_of(8, [60, 40])
    plain = await ask(nodes.first, request)
    await nodes.share(request)
    nodes.redis.delete(layer_name(PREFIX, nodes.key(request), 1))
    answer = await ask(nodes.second, request, make_ticket(**EXACT))
    assert_same(answer, plain)
    assert answer.result.num_miss_tokens == 60 and from_redis(answer) == 40
    names = chunk_names(PREFIX, nodes.key(request), NUM_LAYERS)
    await until(lambda: nodes.redis.exists(*names) == len(names))  # computed when idle


async def test_a_layer_evicted_between_lookup_and_read_is_a_miss_on_every_rank(nodes, monkeypatch):
    request = request_of(9, [60, 40])
    plain = await ask(nodes.first, request)
    for engine in nodes.engines:
        await nodes.forget()
        await nodes.share(request)
        fetch = engine._remote.tier.fetch

        def evict_first(*args, fetch=fetch, **kwargs):
            nodes.redis.delete(layer_name(PREFIX, nodes.key(request), NUM_LAYERS - 1))
            return fetch(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(engine._remote.tier, "fetch", evict_first)
            before = misses(engine)[Miss.MISSING]
            answer = await ask(engine, request, make_ticket(**EXACT))
        assert_same(answer, plain)
        assert misses(engine)[Miss.MISSING] == before + 1
        assert answer.result.num_miss_tokens == 60 and not answer.result.recovered


async def test_redis_killed_in_mid_read(nodes):
    request = request_of(10, [300, 300])
    plain = await ask(nodes.first, request)
    for engine in nodes.engines:
        await nodes.forget()
        await nodes.share(request)
        before = sum(misses(engine).values())
        nodes.pace(SLOW)
        asking = asyncio.create_task(ask(engine, request, make_ticket(**EXACT)))
        await until(lambda engine=engine: engine._tier.stats().num_reservations == 2)
        nodes.server.kill()
        assert_same(await asking, plain)
        await until(lambda engine=engine, before=before: sum(misses(engine).values()) > before)


async def test_redis_paused(nodes):
    """Every call has a deadline; then the breaker opens, and closes when Redis is back."""
    request = request_of(11, [60, 40])
    plain = await ask(nodes.first, request)
    await nodes.share(request)
    nodes.server.pause()
    try:
        for _ in range(3):
            await check_survived(nodes, request, plain)
            await nodes.forget_host()
        await until(lambda: bool(nodes.first._remote.tier.stats().nodes_unavailable))
        before = misses(nodes.first)[Miss.UNAVAILABLE]
        started_s = time.monotonic()
        assert_same(await ask(nodes.first, request, make_ticket(**EXACT)), plain)
        assert misses(nodes.first)[Miss.UNAVAILABLE] > before
        assert time.monotonic() - started_s < 60.0
    finally:
        nodes.server.resume()
    await nodes.forget()
    await nodes.share(request)
    answer = await ask(nodes.second, request, make_ticket(**EXACT))
    assert from_redis(answer) == 100
    assert_same(answer, plain)


async def test_redis_paused_in_mid_read(nodes):
    request = request_of(12, [300, 300])
    plain = await ask(nodes.first, request)
    for engine in nodes.engines:
        await nodes.forget()
        await nodes.share(request)
        nodes.pace(SLOW)
        asking = asyncio.create_task(ask(engine, request, make_ticket(**EXACT)))
        await until(lambda engine=engine: engine._tier.stats().num_reservations == 2)
        nodes.server.pause()
        try:
            assert_same(await asking, plain)
        finally:
            nodes.server.resume()


@pytest.mark.parametrize("how", ["read-only", "out of memory"])
async def test_a_redis_that_takes_no_writes_still_serves(nodes, how):
    request, other = request_of(13, [60]), request_of(130, [50])
    plain, other_plain = [await ask(nodes.first, r) for r in (request, other)]
    await nodes.share(request)
    refused = counted(nodes.first, Count.WRITES_REFUSED)
    if how == "read-only":
        nodes.redis.config_set("replica-serve-stale-data", "yes")
        nodes.redis.replicaof("127.0.0.1", "1")
    else:
        nodes.redis.config_set("maxmemory", "1mb")
    try:
        await store(nodes.first, other)
        await flushed(nodes.first)
        for seed in range(131, 161):  # on a busy machine a write may be late instead
            if counted(nodes.first, Count.WRITES_REFUSED) > refused:
                break
            await store(nodes.first, request_of(seed, [50]))
            await flushed(nodes.first)
        assert counted(nodes.first, Count.WRITES_REFUSED) == refused + 1
        answer = await ask(nodes.second, request, make_ticket(**EXACT))
        assert from_redis(answer) == 60
        assert_same(answer, plain)
        assert_same(await ask(nodes.second, other, make_ticket(**EXACT)), other_plain)
    finally:
        nodes.redis.replicaof("NO", "ONE")
        nodes.redis.config_set("maxmemory", "0")


async def test_ten_thousand_keys_of_others_do_not_matter(nodes):
    with nodes.redis.pipeline(transaction=False) as pipeline:
        for i in range(10_000):
            pipeline.set(f"{PREFIX}-of-others:{i}", b"x" * 100)
        pipeline.execute()
    request = request_of(14, [60])
    plain = await ask(nodes.first, request)
    await nodes.share(request)
    answer = await ask(nodes.second, request, make_ticket(**EXACT))
    assert from_redis(answer) == 60
    assert_same(answer, plain)
    assert nodes.redis.dbsize() == 10_000 + 1 + NUM_LAYERS


async def test_a_full_arena_costs_recomputation(nodes):
    request = request_of(15, [60, 40])
    plain = await ask(nodes.first, request)
    await nodes.share(request)
    tier = nodes.second._tier
    with HostTier(tier.config) as other:
        held, size = [], 20_000
        while size > 0:
            key = random.Random(len(held)).randbytes(32)
            reservation = other.reserve(key, range(size))
            held += [reservation] if reservation is not None else []
            size = size if reservation is not None else size // 2
        answer = await ask(nodes.second, request, make_ticket(**EXACT))
        assert_same(answer, plain)
        assert answer.result.num_miss_tokens == 100
    assert tier.stats().num_reservations == 0


@pytest.mark.parametrize("encoding", [Encoding.FP8, Encoding.INT8])
async def test_values_of_one_byte_a_number_serve_engines_that_write_raw(nodes, encoding):
    request = request_of(16, [60, 40])
    plain = await ask(nodes.first, request)
    await store(nodes.first, request)
    await flushed(nodes.first)
    nodes.redis.flushall()
    host = nodes.first._tier
    arena = ArenaView(host.config.directory, host.config.layout)
    config = replace(nodes.first._config.redis, encoding=encoding)
    with RedisTier(config, host.config.layout, memoryview(arena.mapping.numpy())) as writer:
        for chunk in request.chunks:
            lease = host.hold(nodes.first._keys.key(chunk))
            write = ChunkWrite(
                location=lease.location,
                token_ids=chunk,
                release=lambda lease=lease: host.release([lease]),
            )
            assert writer.write_behind(write)
        assert writer.flush(30_000)
    await nodes.forget_host()
    size = nodes.redis.strlen(layer_name(PREFIX, nodes.key(request), 0))
    assert size < 0.4 * host.config.layout.layer_bytes(60)
    answer = await ask(nodes.second, request, make_ticket(**EXACT))
    assert from_redis(answer) == 100
    assert_same(answer, plain)


# ---- everything at once ----

SOAK_S = 8.0


async def harm(nodes, rng, until_s):
    """One fault after another, each soon mended."""
    while time.monotonic() < until_s:
        fault = rng.choice(["kill", "pause", "delete", "flip", "forget", "forget", "slow"])
        if fault == "kill":
            nodes.server.kill()
            await asyncio.sleep(rng.random() * 0.2)
            nodes.server.start()
        elif fault == "pause":
            nodes.server.pause()
            await asyncio.sleep(rng.random() * DEADLINE_MS / 500)
            nodes.server.resume()
        elif fault in ("delete", "flip"):
            names = nodes.redis.keys(f"{PREFIX}:*")
            for name in rng.sample(names, min(3, len(names))):
                value = nodes.redis.get(name)
                if fault == "flip" and value:
                    nodes.redis.set(name, flip_a_bit(value))
                else:
                    nodes.redis.delete(name)
        elif fault == "forget":
            for engine in nodes.engines:
                engine._tier.clear()
        else:
            nodes.pace(rng.choice([FAST, SLOW]))
        await asyncio.sleep(rng.random() * 0.4)


async def test_whatever_happens_answers_stay_right_and_nothing_is_left(nodes):
    rng = random.Random(os.environ.get("CACHESMITH_TEST_SEED", "17"))
    first = request_of(170, [rng.randint(5, 120) for _ in range(8)])
    requests = [
        replace(request_of(171 + i, [1]), chunks=tuple(rng.sample(first.chunks, 1 + i % 4)))
        for i in range(8)
    ]
    plain = [await ask(nodes.first, request) for request in requests]
    await nodes.share(first)
    stored = {name: nodes.redis.get(name) for name in nodes.redis.keys(f"{PREFIX}:*")}
    end_s = time.monotonic() + SOAK_S

    async def keep_asking(engine, rng):
        while time.monotonic() < end_s:
            idx, depth = rng.randrange(len(requests)), rng.choice([0, 1, 2])
            plan = {
                **EXACT,
                "warmup_depth": depth,
                "signal": rng.choice([Signal.KV_DEV, Signal.QCI]),
            }
            asking = asyncio.create_task(
                ask(engine, requests[idx], make_ticket(rng.randrange(1 << 30), **plan))
            )
            if rng.random() < 0.1:
                await asyncio.sleep(rng.random() * 0.05)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            else:
                assert_same(await asking, plain[idx])

    client = nodes.server.client(socket_timeout=0.5, retry=None)

    def put_back():
        with suppress(redis.RedisError):  # it may be stopped just now
            for name, value in stored.items():
                client.set(name, value)

    async def keep_storing():
        """What faults have removed, so that there is always something to read."""
        while time.monotonic() < end_s:
            await asyncio.sleep(1.0)
            await asyncio.to_thread(put_back)

    asking = [keep_asking(engine, random.Random(rng.random())) for engine in nodes.engines * 2]
    before = [counted(engine, Count.CHUNKS_READ) for engine in nodes.engines]
    await asyncio.gather(harm(nodes, rng, end_s), keep_storing(), *asking)
    assert any(
        counted(engine, Count.CHUNKS_READ) > number
        for engine, number in zip(nodes.engines, before, strict=True)
    )
    for engine in nodes.engines:
        await settled(engine)
        await until(lambda engine=engine: engine._tier.stats().num_leases == 0, 30.0)
        assert engine._tier.check_integrity() == []
