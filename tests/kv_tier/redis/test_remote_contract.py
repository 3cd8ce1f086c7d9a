"""What every second level promises: one suite, run on Redis and on the one in memory."""

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kv_tier import ChunkQuery
from kv_tier.arrival import Arrival, arrival_of
from kv_tier.layout import HEADER_BYTES
from kv_tier.redis import ChunkFetch, ChunkWrite, Count, Miss, RemoteTier
from tests.fakes.memory_remote_tier import MemoryRemoteTier
from tests.kv_tier.redis.cases import (
    LAYERS,
    LAYOUT,
    LONG_MS,
    NUM_TOKENS,
    WRITE_ID,
    Arena,
    counted,
    fetch,
    lookup,
    misses,
    offer,
    open_tier,
    query,
    request,
    write,
)


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
def remote(request: pytest.FixtureRequest, arena: Arena) -> Iterator[RemoteTier]:
    if request.param == "memory":
        yield MemoryRemoteTier(LAYOUT, arena.memory, new_write_id=lambda: WRITE_ID)
        return
    server = request.getfixturevalue("server")
    with open_tier(server.url, arena) as tier:
        yield tier


def test_a_written_chunk_is_found_with_all_that_was_said_of_it(
    remote: RemoteTier, arena: Arena
) -> None:
    write(remote, arena, 1, 2)
    found = lookup(remote, 2, 3, 1, 2)
    assert [None if one is None else one.content_id for one in found] == [
        "chunk-2",
        None,
        "chunk-1",
        "chunk-2",
    ]
    first = found[2]
    assert first is not None
    assert first.key == query(1).key
    assert first.recompute_ms == 1.5
    assert (first.shape.num_tokens, first.shape.layout) == (NUM_TOKENS, LAYOUT)
    assert misses(remote) == {Miss.ABSENT: 1}
    assert counted(remote, Count.LOOKUP_HITS) == 3
    assert remote.lookup([]) == []


def test_other_tokens_of_the_same_key_are_a_miss(remote: RemoteTier, arena: Arena) -> None:
    write(remote, arena, 1)
    other = ChunkQuery(key=query(1).key, token_ids=query(2).token_ids)
    assert remote.lookup([other, query(1)])[0] is None
    assert misses(remote) == {Miss.COLLISION: 1}
    assert lookup(remote, 1) != [None]  # it stays for whom it belongs to


def test_a_fetched_entry_is_the_written_one(remote: RemoteTier, arena: Arena) -> None:
    source = arena.fill(1)
    assert offer(remote, source, 1)
    assert remote.flush(LONG_MS)
    place = arena.place(1)
    fetched = fetch(remote, [place])
    assert fetched.chunks[0].is_complete and fetched.chunks[0].miss is None
    assert arena.bytes_of(place) == arena.bytes_of(source)
    assert counted(remote, Count.CHUNKS_READ) == 1


def test_each_layer_is_announced_once_and_then_the_end(remote: RemoteTier, arena: Arena) -> None:
    write(remote, arena, 1, 2)
    announced: list[tuple[bytes, int]] = []
    quiet: list[bytes] = []

    def on_layer(chunk: ChunkFetch, layer: int) -> None:
        assert chunk.is_ready(layer)
        announced.append((chunk.location.key, layer))

    places = [arena.place(1), arena.place(2)]
    fetched = remote.fetch(
        [request(place) for place in places],
        [2, 0, 1],
        deadline_ms=LONG_MS,
        on_layer=on_layer,
        on_quiet=lambda chunk: quiet.append(chunk.location.key),
    )
    assert fetched.wait_layer(2) == [True, True]
    assert fetched.wait_quiet()
    keys = {query(1).key, query(2).key}
    assert sorted(announced) == sorted((key, layer) for key in keys for layer in LAYERS)
    assert sorted(quiet) == sorted(keys)


def test_a_chunk_that_is_asked_for_twice_is_read_once(remote: RemoteTier, arena: Arena) -> None:
    write(remote, arena, 1)
    place = arena.place(1)
    fetched = fetch(remote, [place, place])
    assert fetched.chunks[0] is fetched.chunks[1]
    assert fetched.wait_layer(0) == [True, True]
    assert counted(remote, Count.LAYERS_READ) == LAYOUT.num_layers
    assert counted(remote, Count.CHUNKS_READ) == 1


def test_only_the_wanted_layers_are_read(remote: RemoteTier, arena: Arena) -> None:
    write(remote, arena, 1)
    place = arena.place(1)
    fetched = fetch(remote, [place], layers=[1])
    assert fetched.chunks[0].is_complete
    assert counted(remote, Count.LAYERS_READ) == 1
    assert not any(arena.entry(place).layer(0))
    header = arena.bytes_of(place)[:HEADER_BYTES]
    assert arrival_of(header, LAYOUT, place) is not Arrival.WHOLE


def test_an_absent_chunk_is_a_miss_of_the_fetch(remote: RemoteTier, arena: Arena) -> None:
    fetched = fetch(remote, [arena.place(1)])
    assert fetched.chunks[0].miss is Miss.MISSING
    assert not fetched.chunks[0].wait_layer(0)
    assert misses(remote) == {Miss.MISSING: 1}


def test_a_removed_chunk_is_absent(remote: RemoteTier, arena: Arena) -> None:
    write(remote, arena, 1, 2)
    remote.remove(query(1).key)
    assert remote.flush(LONG_MS)
    assert [one is None for one in lookup(remote, 1, 2)] == [True, False]


def test_a_chunk_is_written_once(remote: RemoteTier, arena: Arena) -> None:
    write(remote, arena, 1)
    write(remote, arena, 1)
    assert counted(remote, Count.CHUNKS_WRITTEN) == 1
    assert counted(remote, Count.WRITES_NOT_NEEDED) == 1


def test_every_write_gives_its_lease_back(remote: RemoteTier, arena: Arena) -> None:
    released: list[int] = []
    for chunk in (1, 2, 1):
        taken = remote.write_behind(
            ChunkWrite(
                location=arena.fill(chunk),
                token_ids=query(chunk).token_ids,
                release=lambda chunk=chunk: released.append(chunk),
            )
        )
        assert taken
    assert remote.flush(LONG_MS)
    assert released == [1, 2, 1]


def test_no_time_left_is_a_miss(remote: RemoteTier, arena: Arena) -> None:
    write(remote, arena, 1)
    fetched = fetch(remote, [arena.place(1)], deadline_ms=0.0)
    assert fetched.chunks[0].miss is Miss.DEADLINE


def test_a_closed_one_answers_with_misses(remote: RemoteTier, arena: Arena) -> None:
    write(remote, arena, 1)
    remote.close()
    assert lookup(remote, 1) == [None]
    fetched = fetch(remote, [arena.place(1)])
    assert fetched.chunks[0].miss is Miss.UNAVAILABLE
    assert misses(remote) == {Miss.UNAVAILABLE: 2}


@pytest.mark.parametrize("layers", [[], [0, 0], [3], [-1]])
def test_layers_that_can_not_be(remote: RemoteTier, arena: Arena, layers: list[int]) -> None:
    with pytest.raises(ValueError, match="layers"):
        remote.fetch([request(arena.place(1))], layers, deadline_ms=LONG_MS)


@pytest.mark.parametrize("deadline_ms", [math.inf, math.nan])
def test_a_deadline_that_can_not_be(remote: RemoteTier, arena: Arena, deadline_ms: float) -> None:
    with pytest.raises(ValueError, match="deadline_ms"):
        remote.fetch([request(arena.place(1))], LAYERS, deadline_ms=deadline_ms)


def test_a_chunk_of_another_write_is_a_miss(remote: RemoteTier, arena: Arena) -> None:
    write(remote, arena, 1)
    other = replace(request(arena.place(1)), write_id=b"another.")
    fetched = remote.fetch([other], LAYERS, deadline_ms=LONG_MS)
    assert fetched.wait_quiet()
    assert fetched.chunks[0].miss is Miss.REPLACED
    assert misses(remote) == {Miss.REPLACED: 1}
    assert remote.flush(LONG_MS)
    assert lookup(remote, 1) != [None]


def test_waiting_for_a_layer_ends_with_its_own_time(remote: RemoteTier, arena: Arena) -> None:
    fetched = fetch(remote, [arena.place(1)])
    started_s = time.monotonic()
    assert not fetched.chunks[0].wait_layer(0, timeout_ms=1.0)
    assert time.monotonic() - started_s < LONG_MS / 1e3
