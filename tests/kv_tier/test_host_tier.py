"""What one process sees of the host tier: hits, leases, room, eviction order."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kv_tier import (
    ArenaUnavailableError,
    ChunkQuery,
    ChunkStore,
    HostTier,
    HostTierConfig,
    KeySpace,
)
from kv_tier.arena_dir import ArenaDir
from kv_tier.extents import GRANULE_BYTES
from kv_tier.host_tier import RECLAIM_INTERVAL_S
from tests.kv_tier.arena_cases import (
    LAYOUT,
    key_of,
    lease,
    open_tier,
    query,
    reserve,
    resident,
    store,
    tokens_of,
)


def test_it_is_a_chunk_store(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        as_protocol: ChunkStore = tier
        assert as_protocol.stats().num_owners == 1


def test_an_entry_is_seen_after_its_commit(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        reservation = reserve(tier, 1)
        assert reservation is not None
        assert reservation.location.key == key_of(1)
        assert lease(tier, 1) is None
        assert tier.contains([key_of(1)]) == [False]
        assert reserve(tier, 1) is None  # it is being written
        assert tier.commit(reservation)
        assert not tier.commit(reservation)
        tier.abort(reservation)
        assert reserve(tier, 1) is None  # it is there
        found = lease(tier, 1)
        assert found is not None
        assert found.location == reservation.location
        stats = tier.stats()
        assert (stats.hits, stats.misses, stats.num_entries, stats.num_leases) == (1, 1, 1, 1)
        assert stats.used_bytes == GRANULE_BYTES
        assert tier.check_integrity() == []


def test_one_lookup_answers_each_query_in_its_place(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        locations = {chunk: store(tier, chunk) for chunk in (1, 2)}
        leases = tier.lookup([query(2), query(3), query(1), query(2)])
        found = [None if one is None else one.location for one in leases]
        assert found == [locations[2], None, locations[1], locations[2]]
        assert len({one.lease_id for one in leases if one is not None}) == 3
        assert tier.lookup([]) == []


def test_an_aborted_reservation_gives_its_space_back(tmp_path: Path) -> None:
    with open_tier(tmp_path, num_granules=2) as tier:
        reservation = reserve(tier, 1, 2)
        assert reservation is not None
        assert reserve(tier, 2) is None
        tier.abort(reservation)
        tier.abort(reservation)
        assert tier.stats().largest_free_bytes == 2 * GRANULE_BYTES
        assert not tier.commit(reservation)
        store(tier, 1, 2)


def test_other_tokens_under_one_key_are_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeySpace, "key", lambda *_args, **_options: key_of(1))
    space = KeySpace(fingerprint="f", kv_dtype="float32", anchor_ids=())
    with open_tier(tmp_path) as tier:
        store(tier, 1)
        for other in (tokens_of(2), tokens_of(1)[:-1], [*tokens_of(1), 0]):
            wanted = ChunkQuery(key=space.key(other), token_ids=other)
            assert tier.lookup([wanted]) == [None]
            assert tier.reserve(wanted.key, other) is None
        assert lease(tier, 1) is not None
        stats = tier.stats()
        assert (stats.collisions, stats.misses, stats.hits) == (3, 3, 1)


def test_what_can_never_fit_is_refused_and_nothing_is_evicted(tmp_path: Path) -> None:
    with open_tier(tmp_path, num_granules=3) as tier:
        store(tier, 1)
        store(tier, 2)
        assert reserve(tier, 9, 4) is None
        assert tier.reserve(key_of(9), []) is None
        assert resident(tier, range(10)) == {1, 2}


def test_leased_and_writing_entries_stay(tmp_path: Path) -> None:
    with open_tier(tmp_path, num_granules=3) as tier:
        for chunk in (1, 2):
            store(tier, chunk)
        held = lease(tier, 1)
        writing = reserve(tier, 3)
        assert held is not None and writing is not None
        assert reserve(tier, 4, 2) is None  # one would have to go that can not: nothing goes
        assert resident(tier, range(10)) == {1, 2}
        store(tier, 5)
        assert resident(tier, range(10)) == {1, 5}
        assert tier.commit(writing)
        tier.release([held])
        tier.release([held])
        assert tier.stats().num_leases == 0
        store(tier, 6, 3)
        assert resident(tier, range(10)) == {6}
        assert tier.stats().evictions == 4


def test_an_arena_full_of_what_is_held_refuses_and_counts(tmp_path: Path) -> None:
    with open_tier(tmp_path, num_granules=3) as tier:
        for chunk in (1, 2):
            store(tier, chunk)
        held, writing = [lease(tier, 1), lease(tier, 2)], reserve(tier, 3)
        assert all(held) and writing is not None
        assert reserve(tier, 4) is None
        assert reserve(tier, 5, 2) is None
        assert reserve(tier, 6, 4) is None  # it could never fit
        assert tier.stats().refused == 3
        assert reserve(tier, 1) is None and reserve(tier, 3) is None  # there, and on its way
        assert tier.reserve(key_of(9), []) is None
        assert tier.stats().refused == 3
        assert resident(tier, range(10)) == {1, 2}
        tier.release(filter(None, held[:1]))
        assert reserve(tier, 4) is not None
        assert tier.stats().refused == 3


def test_lru_evicts_what_was_used_longest_ago(tmp_path: Path) -> None:
    with open_tier(tmp_path, num_granules=3, eviction="lru") as tier:
        for chunk, recompute_ms in ((1, 900.0), (2, 1.0), (3, 1.0)):
            store(tier, chunk, recompute_ms=recompute_ms)
        tier.release(filter(None, [lease(tier, 2)]))
        for fresh in (4, 5):
            store(tier, fresh)
        assert resident(tier, range(10)) == {2, 4, 5}


def test_cost_evicts_what_saves_least_per_byte(tmp_path: Path) -> None:
    with open_tier(tmp_path, num_granules=5) as tier:
        store(tier, 1, recompute_ms=9.0)
        store(tier, 2, recompute_ms=2.0)
        store(tier, 3, 2, recompute_ms=10.0)  # 5 a granule
        store(tier, 4, recompute_ms=4.0)
        for _ in range(5):
            tier.release(filter(None, [lease(tier, 2)]))  # 6 uses: worth 12
        gone = []
        for fresh in (5, 6, 7):
            before = resident(tier, range(10))
            store(tier, fresh, recompute_ms=100.0)
            gone += sorted(before - resident(tier, range(10)))
        assert gone == [4, 3]
        store(tier, 8, recompute_ms=100.0)
        assert resident(tier, range(10)) == {2, 5, 6, 7, 8}


def test_cost_ages(tmp_path: Path) -> None:
    """An entry that once was worth much goes, when nobody asks for it again."""
    with open_tier(tmp_path, num_granules=2) as tier:
        store(tier, 0, recompute_ms=5.0)
        for chunk in range(1, 10):
            store(tier, chunk, recompute_ms=1.0)
        assert resident(tier, range(10)) == {8, 9}


def test_discard_hides_at_once_and_frees_when_the_last_lease_goes(tmp_path: Path) -> None:
    with open_tier(tmp_path, num_granules=2) as tier:
        location = store(tier, 1)
        leases = [lease(tier, 1), lease(tier, 1)]
        assert tier.discard(key_of(1))
        assert not tier.discard(key_of(1))
        assert lease(tier, 1) is None
        assert tier.find("chunk-1") == []
        fresh = store(tier, 1)  # the same key again, elsewhere
        assert fresh.offset != location.offset
        assert tier.stats().num_retired == 1
        assert tier.stats().used_bytes == 2 * GRANULE_BYTES
        for held in leases:
            assert tier.stats().num_retired == 1
            tier.release(filter(None, [held]))
            assert tier.check_integrity() == []
        assert tier.stats().num_retired == 0
        assert tier.stats().used_bytes == GRANULE_BYTES


@pytest.mark.parametrize("ends_with", ["commit", "abort"])
def test_what_is_discarded_while_it_is_written_never_shows(tmp_path: Path, ends_with: str) -> None:
    with open_tier(tmp_path) as tier:
        reservation = reserve(tier, 1)
        assert reservation is not None
        assert tier.discard(key_of(1))
        assert tier.stats().used_bytes == GRANULE_BYTES  # its writer still writes
        if ends_with == "commit":
            assert not tier.commit(reservation)
        else:
            tier.abort(reservation)
        assert tier.stats().used_bytes == 0
        assert resident(tier, range(10)) == set()
        assert tier.check_integrity() == []


def test_clear_empties_all_but_what_is_held(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        for chunk in (1, 2):
            store(tier, chunk)
        held, writing = lease(tier, 1), reserve(tier, 3)
        assert held is not None and writing is not None
        tier.clear()
        assert resident(tier, range(10)) == set()
        assert tier.stats().used_bytes == 2 * GRANULE_BYTES
        assert not tier.commit(writing)
        tier.release([held])
        assert tier.stats().used_bytes == 0
        assert tier.check_integrity() == []


def test_find_lists_every_entry_of_a_chunk(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        store(tier, 1, recompute_ms=3.0)
        other = tier.reserve(key_of(2), tokens_of(1), content_id="chunk-1")
        assert other is not None
        assert [info.key for info in tier.find("chunk-1")] == [key_of(1)]
        tier.commit(other)
        lease(tier, 1)
        infos = tier.find("chunk-1")
        assert [info.key for info in infos] == [key_of(1), key_of(2)]
        first = infos[0]
        assert (first.num_tokens, first.recompute_ms, first.num_leases) == (7, 3.0, 1)
        assert first.nbytes == LAYOUT.entry_bytes(7)
        assert tier.find("chunk-2") == []


def test_threads_share_one_tier(tmp_path: Path) -> None:
    def use(chunk: int) -> bool:
        for _ in range(10):
            reservation = reserve(tier, chunk)
            if reservation is not None:
                tier.commit(reservation)
            found = lease(tier, chunk)
            if found is not None:
                tier.release([found])
        return tier.check_integrity() == []

    with open_tier(tmp_path, num_granules=4) as tier, ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, [1, 2, 3, 4, 5, 6, 1, 2]))
        assert tier.stats().num_leases == tier.stats().num_reservations == 0


def test_dead_owners_are_looked_for_now_and_then(tmp_path: Path) -> None:
    now_s = 100.0
    config = HostTierConfig(directory=tmp_path, capacity_bytes=1 << 20, layout=LAYOUT)
    with HostTier(config, monotonic_s=lambda: now_s) as tier:
        gone = open_tier(tmp_path, num_granules=256)
        store(gone, 1)
        lease(gone, 1)
        ArenaDir(tmp_path).owners.joinpath(f"{gone._owner.owner_id}.lock").unlink()
        lease(tier, 2)
        assert tier.stats().num_leases == 1
        now_s += RECLAIM_INTERVAL_S
        lease(tier, 2)
        assert tier.stats().num_leases == 0
        gone.close()


def test_a_folder_without_space_is_an_error_with_size_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaUnavailableError, match=f"32768 bytes in {tmp_path}.*No space left"):
        open_tier(tmp_path)
    monkeypatch.undo()
    with open_tier(tmp_path) as tier:
        assert tier.check_integrity() == []


def test_the_arena_has_all_its_pages_from_the_start(tmp_path: Path) -> None:
    with open_tier(tmp_path, num_granules=64):
        status = ArenaDir(tmp_path).arena.stat()
        assert status.st_size == 64 * GRANULE_BYTES
        assert status.st_blocks * 512 >= status.st_size


def test_capacity_is_rounded_down_to_granules(tmp_path: Path) -> None:
    config = HostTierConfig(directory=tmp_path, capacity_bytes=10_000, layout=LAYOUT)
    with HostTier(config) as tier:
        assert tier.stats().capacity_bytes == 8192
        assert tier.check_integrity() == []
    with pytest.raises(ValueError, match="capacity_bytes"):
        HostTierConfig(directory=tmp_path, capacity_bytes=100, layout=LAYOUT)


def test_a_closed_tier_says_so(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.close()
    tier.close()
    with pytest.raises(ArenaUnavailableError, match="closed"):
        lease(tier, 1)


def test_a_tier_does_not_go_through_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_tier(tmp_path) as tier:
        with monkeypatch.context() as in_child:
            in_child.setattr(os, "getpid", lambda: -1)
            with pytest.raises(ArenaUnavailableError, match="fork"):
                lease(tier, 1)
        assert tier.check_integrity() == []


@pytest.mark.parametrize("recompute_ms", [-1.0, float("nan"), float("inf")])
def test_costs_that_can_not_be_compared_are_refused(tmp_path: Path, recompute_ms: float) -> None:
    with open_tier(tmp_path) as tier, pytest.raises(ValueError, match="recompute_ms"):
        reserve(tier, 1, recompute_ms=recompute_ms)


def test_entries_are_listed_with_the_last_used_first(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        for chunk in (1, 2, 3):
            store(tier, chunk, recompute_ms=chunk + 0.5)
        prefix = tier.reserve(key_of(4), tokens_of(4))
        assert prefix is not None and tier.commit(prefix)
        held = lease(tier, 1)
        assert reserve(tier, 5) is not None  # nobody sees it yet
        found = tier.entries()
        assert [entry.key for entry in found] == [key_of(i) for i in (1, 4, 3, 2)]
        assert [entry.content_id for entry in found] == ["chunk-1", "", "chunk-3", "chunk-2"]
        first = found[0]
        assert (first.recompute_ms, first.uses, first.num_leases) == (1.5, 2, 1)
        assert first.nbytes == LAYOUT.entry_bytes(first.num_tokens)
        assert tier.entries(2) == found[:2] and tier.entries(0) == []
        assert held is not None
        assert tier.find("chunk-1") == [first]


def test_a_hold_keeps_an_entry_and_counts_no_use(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        location = store(tier, 1)
        before, (entry,) = tier.stats(), tier.entries()
        assert tier.hold(key_of(2)) is None
        held = tier.hold(key_of(1))
        assert held is not None and held.location == location
        assert tier.stats().num_leases == 1
        tier.discard(key_of(1))
        assert tier.stats().num_retired == 1
        tier.release([held])
        after = tier.stats()
        assert (after.hits, after.misses) == (before.hits, before.misses)
        assert (entry.uses, after.used_bytes) == (1, 0)


def test_a_public_id_is_discarded_with_what_is_being_written(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        store(tier, 1)
        other_model = tier.reserve(key_of(11), tokens_of(1), content_id="chunk-1")
        assert other_model is not None
        store(tier, 2)
        prefix = tier.reserve(key_of(3), tokens_of(3))
        assert prefix is not None and tier.commit(prefix)
        assert tier.discard_content("chunk-1") == 2
        assert not tier.commit(other_model)
        assert tier.discard_content("chunk-1") == tier.discard_content("") == 0
        assert resident(tier, range(12)) == {2, 3}
        assert tier.check_integrity() == []
