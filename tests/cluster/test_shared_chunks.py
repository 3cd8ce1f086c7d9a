"""What the ingress asks Redis before it admits a request."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cluster.shared_chunks import SharedChunks
from planner import EngineInfo
from tests.kv_tier.redis.cases import LAYOUT, SPACE, Arena, config, open_tier, query, write
from tests.kv_tier.redis.servers import RedisServer, running_redis

INFO = EngineInfo(
    model="m",
    fingerprint=SPACE.fingerprint,
    num_layers=LAYOUT.num_layers,
    max_model_len=1000,
    kv_capacity_tokens=1000,
    max_num_seqs=4,
    tensor_parallel_size=1,
    num_kv_heads=LAYOUT.num_kv_heads,
    head_dim=LAYOUT.head_dim,
    kv_dtype=LAYOUT.dtype,
    anchor_ids=SPACE.anchor_ids,
)


def chunks(*numbers: int) -> list[tuple[int, ...]]:
    return [tuple(query(number).token_ids) for number in numbers]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as started:
        yield started


@pytest.fixture
def shared(server: RedisServer) -> Iterator[SharedChunks]:
    opened = SharedChunks(config(server.url))
    yield opened
    opened.close()


@pytest.mark.redis
async def test_only_whole_chunks_of_this_model_and_tenant_are_shared(
    shared: SharedChunks, server: RedisServer
) -> None:
    arena = Arena()
    with open_tier(server.url, arena) as tier:
        write(tier, arena, 1, 3)
    found = await shared.are_shared(chunks(1, 2, 3), cache_salt="", info=INFO)
    assert found == [True, False, True]
    assert await shared.are_shared(chunks(1), cache_salt="tenant", info=INFO) == [False]
    other = replace(INFO, fingerprint="another model")
    assert await shared.are_shared(chunks(1), cache_salt="", info=other) == [False]
    assert await shared.are_shared(chunks(1), cache_salt="", info=INFO) == [True]


async def test_nothing_is_asked_while_no_replica_says_what_it_stores() -> None:
    opened = SharedChunks(config("redis://127.0.0.1:1"))
    for info in (None, replace(INFO, num_kv_heads=0)):
        assert await opened.are_shared(chunks(1, 2), cache_salt="", info=info) == [False, False]
    opened.close()


@pytest.mark.redis
async def test_a_redis_that_hangs_costs_its_deadline(server: RedisServer) -> None:
    opened = SharedChunks(config(server.url, lookup_deadline_ms=100.0))
    server.pause()
    try:
        started_s = time.monotonic()
        assert await opened.are_shared(chunks(1), cache_salt="", info=INFO) == [False]
        assert time.monotonic() - started_s < 30.0
    finally:
        server.resume()
    opened.close()
