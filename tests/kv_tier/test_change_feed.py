"""The feed that tells a scheduler which chunks are hot on a node."""

from pathlib import Path

import pytest

from kv_tier import change_feed
from tests.kv_tier.arena_cases import key_of, lease, open_tier, reserve, store, tokens_of


def test_a_poller_follows_what_is_resident(tmp_path: Path) -> None:
    with open_tier(tmp_path, num_granules=2) as tier:
        store(tier, 1)
        first = tier.resident_since(0)
        assert (first.is_full, first.added, first.removed) == (True, ("chunk-1",), ())
        quiet = tier.resident_since(first.cursor)
        assert (quiet.is_full, quiet.added, quiet.removed) == (False, (), ())
        assert quiet.cursor == first.cursor

        writing = reserve(tier, 2)
        assert writing is not None
        assert tier.resident_since(first.cursor).added == ()
        tier.commit(writing)
        lease(tier, 2)
        tier.discard(key_of(2))
        store(tier, 3)  # evicts 1; the place of 2 is still leased
        delta = tier.resident_since(first.cursor)
        assert (delta.is_full, delta.added) == (False, ("chunk-3",))
        assert set(delta.removed) == {"chunk-1", "chunk-2"}
        assert delta.cursor > first.cursor


def test_entries_of_one_chunk_count_as_one(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        start = tier.resident_since(0).cursor
        store(tier, 1)
        again = tier.reserve(key_of(2), tokens_of(1), content_id="chunk-1")
        hidden = tier.reserve(key_of(3), tokens_of(1))
        assert again is not None and hidden is not None
        tier.commit(again)
        tier.commit(hidden)
        both = tier.resident_since(start)
        assert both.added == ("chunk-1",)
        tier.discard(key_of(1))
        assert tier.resident_since(both.cursor).removed == ()
        tier.discard(key_of(2))
        assert tier.resident_since(both.cursor).removed == ("chunk-1",)


def test_a_cursor_that_is_too_old_or_foreign_gets_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_feed, "MAX_CHANGES", 3)
    with open_tier(tmp_path) as tier:
        old = tier.resident_since(0).cursor
        for chunk in (1, 2, 3):
            store(tier, chunk)
        assert not tier.resident_since(old).is_full
        store(tier, 4)
        everything = ("chunk-1", "chunk-2", "chunk-3", "chunk-4")
        for cursor in (old, tier.resident_since(old).cursor + 1):
            delta = tier.resident_since(cursor)
            assert (delta.is_full, delta.added) == (True, everything)
    with open_tier(tmp_path, num_granules=9) as recreated:
        delta = recreated.resident_since(delta.cursor)
        assert (delta.is_full, delta.added) == (True, ())
