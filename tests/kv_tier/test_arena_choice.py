"""Where an arena is opened while others use the folder with another size or layout."""

from dataclasses import replace
from pathlib import Path

import pytest

from kv_tier import arena_choice, arena_folder
from kv_tier.extents import GRANULE_BYTES
from tests.kv_tier.arena_cases import LAYOUT, open_tier, resident, store

SMALL, LARGE = 8, 16


def folder(directory: Path, num_granules: int) -> Path:
    # a capacity is rounded down to whole granules
    return arena_folder(directory, LAYOUT, num_granules * GRANULE_BYTES + 1)


def test_an_arena_that_fits_or_is_free_is_taken(tmp_path: Path) -> None:
    directory = tmp_path / "arena"
    assert folder(directory, SMALL) == directory
    with open_tier(directory, num_granules=SMALL):
        assert folder(directory, SMALL) == directory
    assert folder(directory, LARGE) == directory


def test_an_upgrade_opens_another_beside_the_one_in_use(tmp_path: Path) -> None:
    directory = tmp_path / "arena"
    old = open_tier(directory, num_granules=SMALL)
    store(old, 1)
    beside = folder(directory, LARGE)
    assert beside != directory and beside.parent == tmp_path
    with open_tier(beside, num_granules=LARGE) as first:
        store(first, 2)
        assert resident(old, range(5)) == {1}
        # others of the new kind meet there, also when the old kind is gone, whose arena then goes
        assert folder(directory, LARGE) == beside and directory.exists()
        old.close()
        assert folder(directory, LARGE) == beside and not directory.exists()
        assert resident(first, range(5)) == {2}
        # the next upgrade finds the first folder free
        assert folder(directory, SMALL) == directory
        with open_tier(directory, num_granules=SMALL):
            first.close()
            assert folder(directory, SMALL) == directory and not beside.exists()


def test_kinds_of_the_same_folder_are_told_apart(tmp_path: Path) -> None:
    directory = tmp_path / "arena"
    with open_tier(directory, num_granules=SMALL):
        capacity = SMALL * GRANULE_BYTES
        wide = arena_folder(directory, replace(LAYOUT, num_kv_heads=8), capacity)
        half = arena_folder(directory, replace(LAYOUT, dtype="float16"), capacity)
    assert len({wide, half, directory}) == 3


def test_what_is_no_arena_is_left_alone(tmp_path: Path) -> None:
    directory, other = tmp_path / "arena", tmp_path / "arena.0123abcd"
    other.mkdir()
    (other / "notes.txt").write_text("not ours")
    assert folder(directory, SMALL) == directory
    assert (other / "notes.txt").exists()


def test_an_index_that_can_not_be_read_now_parts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "arena"
    with open_tier(directory, num_granules=SMALL):
        monkeypatch.setattr(arena_choice, "held_identity", lambda folder: None)
        assert folder(directory, SMALL) == directory
