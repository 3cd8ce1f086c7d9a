"""Whether entries of the arena still are what was written: header, and every checksum.

Whoever verifies beside serving checks one entry after another, and lets others run between two.
"""

from dataclasses import dataclass

from kv_tier.arena_view import ArenaView
from kv_tier.host_tier import HostTier
from kv_tier.store import ChunkLocation, EntryInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryDamage:
    """Where an entry is not what was written. Whoever reads that gets a miss."""

    layer: int | None  # None: the header


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryCheck:
    """What became of one entry that was listed."""

    is_there: bool  # False: it had gone before it was checked
    damage: EntryDamage | None = None


def find_damage(view: ArenaView, location: ChunkLocation) -> EntryDamage | None:
    """The first damage, all heads checked. The caller holds a lease of the entry."""
    if not view.verify_header(location):
        return EntryDamage(layer=None)
    for layer in range(view.layout.num_layers):
        if not view.verify_layer(location, layer, 0, view.layout.num_kv_heads):
            return EntryDamage(layer=layer)
    return None


def check_entry(
    tier: HostTier, view: ArenaView, entry: EntryInfo, *, repair: bool = False
) -> EntryCheck:
    """Check a resident entry, under a lease. With repair, discard it where it is damaged."""
    lease = tier.hold(entry.key)
    if lease is None:
        return EntryCheck(is_there=False)
    try:
        damage = find_damage(view, lease.location)
        if damage is not None and repair:
            tier.discard(entry.key)
    finally:
        tier.release([lease])
    return EntryCheck(is_there=True, damage=damage)
