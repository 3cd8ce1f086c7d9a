"""A Redis Cluster of three masters."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kv_tier import ChunkLocation
from kv_tier.redis import Count, Miss, RedisTier, operations
from tests.kv_tier.redis.cases import (
    LAYOUT,
    LONG_MS,
    Arena,
    counted,
    fetch,
    lookup,
    misses,
    offer,
    open_tier,
    query,
    write,
)
from tests.kv_tier.redis.servers import RedisServer, eventually, free_port

pytestmark = pytest.mark.redis

CHUNKS = range(1, 13)
KEYS_A_CHUNK = 1 + LAYOUT.num_layers


@pytest.fixture
def cluster(folder: Path) -> Iterator[list[RedisServer]]:
    with ExitStack() as stack:
        servers = []
        for idx in range(3):
            options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"]
            options += ["--cluster-require-full-coverage", "no"]
            options += [
                "--cluster-allow-replica-migration",
                "no",
            ]  # a master without slots stays one
            # The cluster's own port is 10000 above.
            server = RedisServer(folder / str(idx), *options, port=free_port(below=55_000))
            servers.append(stack.enter_context(server))
        starts = [0, 5461, 10923, 16384]
        for server, start, end in zip(servers, starts, starts[1:], strict=False):
            server.client().execute_command("CLUSTER", "ADDSLOTSRANGE", start, end - 1)
        for server in servers[1:]:
            servers[0].client().execute_command("CLUSTER", "MEET", "127.0.0.1", server.port)
        for server in servers:
            eventually(lambda s=server: _knows_all(s))
        yield servers


def _knows_all(server: RedisServer) -> bool:
    found = server.client().execute_command("CLUSTER", "INFO")
    return b"cluster_state:ok" in found and b"cluster_known_nodes:3" in found


def test_chunks_spread_over_the_nodes(cluster: list[RedisServer], arena: Arena) -> None:
    with open_tier(cluster[1].url, arena, mode="cluster") as tier:
        write(tier, arena, *CHUNKS)
        sizes = [server.client().dbsize() for server in cluster]
        assert sum(sizes) == len(CHUNKS) * KEYS_A_CHUNK
        assert all(size % KEYS_A_CHUNK == 0 for size in sizes)  # no chunk on two nodes
        assert sum(size > 0 for size in sizes) > 1
        assert None not in lookup(tier, *CHUNKS)
        fetched = fetch(tier, [arena.place(chunk) for chunk in CHUNKS])
        assert all(chunk.is_complete for chunk in fetched.chunks)
        assert misses(tier) == {}
    # A process that only fetches finds the nodes by itself.
    with open_tier(cluster[0].url, arena, mode="cluster") as tier:
        assert fetch(tier, [arena.place(1)]).chunks[0].is_complete


def test_a_lost_node_costs_its_own_chunks(cluster: list[RedisServer], arena: Arena) -> None:
    with open_tier(cluster[0].url, arena, mode="cluster") as tier:
        write(tier, arena, *CHUNKS)
        lost = max(cluster[1:], key=lambda server: server.client().dbsize())
        num_lost = lost.client().dbsize() // KEYS_A_CHUNK
        lost.kill()
        for _ in range(4):
            found = lookup(tier, *CHUNKS)
            assert sum(one is None for one in found) == num_lost
        assert tier.stats().nodes_unavailable == (lost.address,)
        there = [chunk for chunk, one in zip(CHUNKS, found, strict=True) if one is not None]
        fetched = fetch(tier, [arena.place(chunk) for chunk in there])
        assert all(chunk.is_complete for chunk in fetched.chunks)
        lost.start()
        eventually(lambda: not tier.stats().nodes_unavailable)


def test_a_paused_node_costs_its_own_chunks(cluster: list[RedisServer], arena: Arena) -> None:
    with open_tier(
        cluster[0].url, arena, mode="cluster", lookup_deadline_ms=1000.0, connect_deadline_ms=1000.0
    ) as tier:
        write(tier, arena, *CHUNKS)
        paused = max(cluster[1:], key=lambda server: server.client().dbsize())
        num_lost = paused.client().dbsize() // KEYS_A_CHUNK
        paused.pause()
        try:
            while not tier.stats().nodes_unavailable:
                found = lookup(tier, *CHUNKS)
                assert sum(one is None for one in found) == num_lost
            assert tier.stats().nodes_unavailable == (paused.address,)
        finally:
            paused.resume()


def test_slots_that_moved_are_found_again(cluster: list[RedisServer], arena: Arena) -> None:
    with open_tier(cluster[0].url, arena, mode="cluster") as tier:
        write(tier, arena, *CHUNKS)
        assert None not in lookup(tier, *CHUNKS)
        # All slots of the first node go to the second, their keys are lost.
        target = cluster[1].client().execute_command("CLUSTER", "MYID")
        cluster[0].client().flushall()
        with cluster[1].client() as second, cluster[0].client() as first:
            # else the first node's next message could claim them back
            second.execute_command("CLUSTER", "BUMPEPOCH")
            for client in (second, first):
                pipeline = client.pipeline(transaction=False)
                for slot in range(5461):
                    pipeline.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target)
                pipeline.execute()
            second.execute_command("CLUSTER", "BUMPEPOCH")
        for server in cluster:
            eventually(lambda s=server: _owner_of_slot_0(s) == target)
        moved = [chunk for chunk in CHUNKS if lookup(tier, chunk) == [None]]
        assert moved
        sources = {chunk: arena.fill(chunk) for chunk in moved}
        eventually(lambda: _rewritten(tier, sources))
        assert None not in lookup(tier, *CHUNKS)
        assert Miss.SERVER in misses(tier)
        assert counted(tier, Count.CHUNKS_WRITTEN) >= len(CHUNKS) + len(moved)


def _owner_of_slot_0(server: RedisServer) -> bytes:
    slots = server.client().execute_command("CLUSTER", "SLOTS")
    (owner,) = [holder[2] for start, end, holder, *_ in slots if start <= 0 <= end]
    return owner


def _rewritten(tier: RedisTier, sources: dict[int, ChunkLocation]) -> bool:
    lacking = [chunk for chunk in sources if lookup(tier, chunk) == [None]]
    for chunk in lacking:
        assert offer(tier, sources[chunk], chunk)
    assert tier.flush(LONG_MS)
    return not lacking


def test_no_node_of_the_cluster_at_start(folder: Path, arena: Arena) -> None:
    with open_tier(f"redis://127.0.0.1:{free_port()}", arena, mode="cluster") as tier:
        for _ in range(6):
            assert lookup(tier, 1) == [None]
        assert misses(tier) == {Miss.CONNECTION: 6}
        assert fetch(tier, [arena.place(1)]).chunks[0].miss is Miss.CONNECTION


def test_operations_see_all_nodes(cluster: list[RedisServer], arena: Arena) -> None:
    with open_tier(cluster[0].url, arena, mode="cluster") as tier:
        write(tier, arena, *CHUNKS)
        client = tier.client()
        for i in range(300):
            client.set(f"other:{i}", "x")
        assert operations.stats(client, "cachesmith").num_chunks == len(CHUNKS)
        assert operations.verify(client, "cachesmith") == []
        assert operations.rm(client, "cachesmith", content_id="chunk-1") == 1
        assert operations.remove_chunk(client, "cachesmith", query(2).key) == KEYS_A_CHUNK
        left = len(CHUNKS) - 2
        assert operations.clear(client, "cachesmith") == left * KEYS_A_CHUNK
        assert sum(server.client().dbsize() for server in cluster) == 300
