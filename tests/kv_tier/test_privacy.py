"""Stored KV tells what the prompts were: no other user of the machine can read or replace it."""

import os
import stat
from pathlib import Path

import pytest

from kv_tier import ArenaUnavailableError
from tests.kv_tier.arena_cases import open_tier, resident, store

STRANGER = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def modes(root: Path) -> dict[str, int]:
    return {
        str(path.relative_to(root.parent)): stat.S_IMODE(path.stat().st_mode)
        for path in [root, *root.rglob("*")]
    }


def test_everything_of_an_arena_is_closed_to_others(tmp_path: Path, open_umask) -> None:
    root = tmp_path / "tier"
    with open_tier(root) as tier:
        store(tier, 1)
        found = modes(root)
        folders = {"tier", "tier/owners"}
        assert {"tier/arena.bin", "tier/index.sqlite3", "tier/index.sqlite3-wal"} <= found.keys()
        assert {name: mode for name, mode in found.items() if name not in folders} == dict.fromkeys(
            found.keys() - folders, 0o600
        )
        assert [found[name] for name in sorted(folders)] == [0o700] * 2
    with open_tier(root) as tier:  # found again by the same user
        assert resident(tier, range(3)) == {1}


@needs_root
def test_a_folder_that_somebody_else_made_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "tier"
    root.mkdir(mode=0o777)
    os.chown(root, STRANGER, STRANGER)
    with pytest.raises(ArenaUnavailableError, match=f"belongs to user {STRANGER}"):
        open_tier(root)
    assert list(root.iterdir()) == []


@needs_root
def test_a_link_that_somebody_else_made_is_refused(tmp_path: Path) -> None:
    ours, link = tmp_path / "ours", tmp_path / "tier"
    ours.mkdir()
    link.symlink_to(ours)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(ArenaUnavailableError, match="belongs to user"):
        open_tier(link)
    assert list(ours.iterdir()) == []
    os.chown(link, os.geteuid(), -1, follow_symlinks=False)
    with open_tier(link) as tier:
        store(tier, 1)
