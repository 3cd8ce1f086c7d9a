"""Several processes on one arena, and what is left when one of them dies."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kv_tier import (
    ArenaInUseError,
    ArenaUnavailableError,
    ArenaView,
    HostTier,
    LayoutMismatchError,
    arena_open,
)
from kv_tier.arena_dir import ArenaDir
from kv_tier.extents import GRANULE_BYTES
from kv_tier.index_db import SCHEMA_VERSION
from tests.kv_tier.arena_cases import (
    LAYOUT,
    holds,
    key_of,
    lease,
    open_tier,
    reserve,
    resident,
    store,
    write_heads,
)
from tests.kv_tier.worker_processes import be_a_rank, hammer, hold_and_wait, read_slowly

SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def running(target: Callable[..., None], *args: Any) -> Iterator[tuple[Any, Connection]]:
    """A process, and the pipe to it. It is killed at the end if it still runs."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()


def test_ranks_in_other_processes_read_what_any_split_wrote(tmp_path: Path) -> None:
    with (
        open_tier(tmp_path) as tier,
        running(be_a_rank, tmp_path) as (_, one),
        running(be_a_rank, tmp_path) as (_, two),
    ):
        whole, halves = reserve(tier, 1), reserve(tier, 2, 3)
        assert whole is not None and halves is not None
        one.send(("write", whole.location, 1, 0, 4))
        two.send(("write", halves.location, 2, 2, 2))
        assert one.recv() and two.recv()
        one.send(("write", halves.location, 2, 0, 2))
        assert one.recv()
        assert tier.commit(whole) and tier.commit(halves)
        found = lease(tier, 1)
        assert found is not None
        for rank, head_start in ((one, 0), (two, 2)):
            rank.send(("check", found.location, 1, head_start, 2))
        assert one.recv() and two.recv()
        two.send(("check", halves.location, 2, 0, 4))
        assert two.recv()
        two.send(("check", halves.location, 1, 0, 4))
        assert not two.recv()


def test_a_killed_process_gives_up_what_it_held(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier, running(hold_and_wait, tmp_path) as (process, pipe):
        leases, reservation = pipe.recv()
        assert reservation is not None and all(leases)
        assert reserve(tier, 3, 2) is None  # its writer lives
        assert reserve(tier, 4, 4) is None  # 2 granules free, 2 leased, 2 retired, 2 writing
        process.kill()
        process.join()
        assert tier.stats().num_leases == 2
        taken = reserve(tier, 3, 2)  # a dead writer's key can be had at once
        assert taken is not None
        stats = tier.stats()
        assert (stats.num_owners, stats.num_leases, stats.num_retired) == (1, 0, 0)
        assert tier.check_integrity() == []
        found = lease(tier, 1, 2)
        assert found is not None
        assert holds(ArenaView(tmp_path, LAYOUT), found.location, 1, 0, 4)
        assert len(list(ArenaDir(tmp_path).owners.iterdir())) == 1


def test_the_arena_is_warm_after_the_last_process_was_killed(tmp_path: Path) -> None:
    with running(hold_and_wait, tmp_path) as (process, pipe):
        pipe.recv()
        process.kill()
        process.join()
    with open_tier(tmp_path) as tier:
        assert tier.check_integrity() == []
        stats = tier.stats()
        assert (stats.num_leases, stats.num_reservations, stats.num_owners) == (0, 0, 1)
        assert stats.used_bytes == 2 * GRANULE_BYTES
        found = lease(tier, 1, 2)
        assert found is not None
        assert holds(ArenaView(tmp_path, LAYOUT), found.location, 1, 0, 4)
        assert tier.reclaim_dead_owners() == 0


def test_space_is_made_from_what_the_dead_held(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier, running(hold_and_wait, tmp_path) as (process, pipe):
        pipe.recv()
        process.kill()
        process.join()
        store(tier, 5, 8)
        assert resident(tier, range(10)) == {5}
        assert tier.check_integrity() == []


def test_processes_that_hammer_one_arena_read_only_right_values(tmp_path: Path) -> None:
    with (
        open_tier(tmp_path) as tier,
        running(hammer, tmp_path, 1) as (_, one),
        running(hammer, tmp_path, 2) as (_, two),
        running(hammer, tmp_path, 3) as (_, three),
    ):
        for pipe in (one, two, three):
            assert pipe.recv() == "on its way"
            num_read, wrong = pipe.recv()
            assert num_read > 0
            assert wrong == []
        assert tier.check_integrity() == []
        stats = tier.stats()
        assert (stats.num_leases, stats.num_reservations, stats.num_retired) == (0, 0, 0)
        assert stats.evictions > 0


def test_processes_that_are_killed_at_work_leave_no_harm(tmp_path: Path) -> None:
    with (
        open_tier(tmp_path) as tier,
        running(hammer, tmp_path, 4) as (first, one),
        running(hammer, tmp_path, 5) as (second, two),
        running(hammer, tmp_path, 6) as (_, survivor),
    ):
        for process, pipe in ((first, one), (second, two)):
            pipe.recv()
            process.kill()
            process.join()
        survivor.recv()
        _, wrong = survivor.recv()
        assert wrong == []
        tier.reclaim_dead_owners()
        assert tier.check_integrity() == []
        stats = tier.stats()
        assert (stats.num_leases, stats.num_reservations, stats.num_retired) == (0, 0, 0)


@pytest.mark.parametrize("is_discarded", [True, False])
def test_a_slow_reader_keeps_its_bytes_while_all_else_is_reused(
    tmp_path: Path, is_discarded: bool
) -> None:
    with open_tier(tmp_path) as tier:
        view = ArenaView(tmp_path, LAYOUT)
        write_heads(view, store(tier, 1, 2), 1, 0, 4)
        with running(read_slowly, tmp_path) as (_, reader):
            leased = reader.recv()
            assert reader.recv() == "it reads"
            if is_discarded:
                assert tier.discard(key_of(1))
            overwritten: set[int] = set()
            for chunk in range(2, 300):  # each has other bytes
                size = 1 + chunk % 3
                reservation = reserve(tier, chunk, size, recompute_ms=float(chunk))
                assert reservation is not None
                start = reservation.location.offset // GRANULE_BYTES
                overwritten.update(range(start, start + size))
                write_heads(view, reservation.location, chunk, 0, 4)
                assert tier.commit(reservation)
            first = leased.offset // GRANULE_BYTES
            assert overwritten == set(range(8)) - {first, first + 1}
            assert tier.stats().num_retired == int(is_discarded)
            assert holds(view, leased, 1, 0, 4)
            reader.send("stop")
            num_reads, num_wrong = reader.recv()
            assert num_reads > 10 and num_wrong == 0
        assert tier.stats().num_retired == 0
        assert tier.check_integrity() == []
        store(tier, 300, 8)  # its space too
        assert resident(tier, range(301)) == {300}


def test_another_layout_is_refused_while_the_arena_is_used(tmp_path: Path) -> None:
    other = replace(LAYOUT, head_dim=16)
    with open_tier(tmp_path) as tier:
        store(tier, 1)
        with pytest.raises(LayoutMismatchError, match=r"'head_dim': 8.*'head_dim': 16"):
            open_tier(tmp_path, layout=other)
        with pytest.raises(LayoutMismatchError, match=r"'capacity_bytes': 32768.*: 36864"):
            open_tier(tmp_path, num_granules=9)
        with open_tier(tmp_path, eviction="lru") as same:
            assert resident(same, range(10)) == {1}
    with open_tier(tmp_path, layout=other, num_granules=9) as recreated:
        assert resident(recreated, range(10)) == set()
        assert recreated.stats().capacity_bytes == 9 * GRANULE_BYTES
        assert recreated.check_integrity() == []


def test_an_index_of_another_schema_is_refused_in_use_and_made_anew_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(arena_open, "SCHEMA_VERSION", SCHEMA_VERSION - 1)
        with open_tier(tmp_path) as old:
            store(old, 1)
            before.undo()
            with pytest.raises(LayoutMismatchError, match=f"'schema_version': {SCHEMA_VERSION}"):
                open_tier(tmp_path)
    with open_tier(tmp_path) as recreated:
        assert resident(recreated, range(10)) == set()
        assert recreated.stats().refused == 0
        assert recreated.check_integrity() == []


def test_a_view_of_a_recreated_arena_finds_nothing(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        old = store(tier, 1)
        view = ArenaView(tmp_path, LAYOUT)
        write_heads(view, old, 1, 0, 4)
    with open_tier(tmp_path, num_granules=9) as recreated:
        fresh = store(recreated, 2)
        assert holds(view, old, 1, 0, 4)  # its mapping stays valid memory
        assert not view.verify_header(fresh)
        assert not ArenaView(tmp_path, LAYOUT).verify_header(old)


@pytest.mark.parametrize("damage", ["garbage", "truncated arena", "missing arena", "lost row"])
def test_a_damaged_arena_is_made_anew(tmp_path: Path, damage: str) -> None:
    folder = ArenaDir(tmp_path)
    with open_tier(tmp_path) as tier:
        store(tier, 1)
        if damage == "lost row":
            with tier._db.transaction() as tx:
                tx.execute("DELETE FROM free_extents")
    if damage == "garbage":
        folder.index.write_bytes(b"not a database" * 1000)
    elif damage == "truncated arena":
        folder.arena.write_bytes(b"short")
    elif damage == "missing arena":
        folder.arena.unlink()
    with open_tier(tmp_path) as tier:
        assert resident(tier, range(10)) == set()
        assert tier.check_integrity() == []


def test_an_index_that_was_deleted_under_a_live_process_is_refused(tmp_path: Path) -> None:
    with open_tier(tmp_path):
        ArenaDir(tmp_path).remove_index()
        with pytest.raises(ArenaUnavailableError, match="1 processes use it"):
            open_tier(tmp_path)


def test_destroy_removes_everything_that_nobody_uses(tmp_path: Path) -> None:
    directory = tmp_path / "node" / "arena"
    HostTier.destroy(directory)
    tier = open_tier(directory)
    with pytest.raises(ArenaInUseError, match=str(directory)):
        HostTier.destroy(directory)
    assert tier.check_integrity() == []
    HostTier.destroy(directory, force=True)
    assert not directory.exists()
    with open_tier(directory) as fresh:
        tier.close()
        assert fresh.check_integrity() == []
    (directory / "notes.txt").write_text("not ours")
    HostTier.destroy(directory)
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]
