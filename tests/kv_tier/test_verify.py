"""Entries that are what was written, and entries that are not."""

from pathlib import Path

import pytest

from kv_tier import ArenaView, ChunkLocation, HostTier
from kv_tier.verify import EntryCheck, EntryDamage, check_entry
from tests.kv_tier.arena_cases import LAYOUT, key_of, open_tier, reserve, resident, write_heads


def put(tier: HostTier, view: ArenaView, chunk: int) -> ChunkLocation:
    """A whole entry."""
    reservation = reserve(tier, chunk)
    assert reservation is not None
    write_heads(view, reservation.location, chunk, 0, LAYOUT.num_kv_heads)
    assert tier.commit(reservation)
    return reservation.location


def flip(view: ArenaView, offset: int) -> None:
    view.mapping[offset] ^= 1


@pytest.mark.parametrize("layer", [None, 0, LAYOUT.num_layers - 1])
def test_damage_is_found_where_it_is_and_repaired(tmp_path: Path, layer: int | None) -> None:
    with open_tier(tmp_path) as tier:
        view = ArenaView(tmp_path, LAYOUT)
        locations = [put(tier, view, chunk) for chunk in (1, 2)]
        bad = locations[0]
        start = 0 if layer is None else LAYOUT.layer_offset(bad.num_tokens, layer) + 5
        flip(view, bad.offset + start)
        found = {entry.key: check_entry(tier, view, entry) for entry in tier.entries()}
        damaged = EntryCheck(is_there=True, damage=EntryDamage(layer=layer))
        assert found == {key_of(1): damaged, key_of(2): EntryCheck(is_there=True)}
        assert resident(tier, range(4)) == {1, 2}
        for entry in tier.entries():
            check_entry(tier, view, entry, repair=True)
        assert resident(tier, range(4)) == {2}
        assert tier.stats().num_leases == 0
        assert tier.check_integrity() == []


def test_an_entry_that_has_gone_is_not_damaged(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        view = ArenaView(tmp_path, LAYOUT)
        put(tier, view, 1)
        (entry,) = tier.entries()
        tier.discard(entry.key)
        assert check_entry(tier, view, entry, repair=True) == EntryCheck(is_there=False)
