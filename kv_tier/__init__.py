"""The KV tier: chunk keys, the byte layout of stored KV, and the host arena that holds it.

A scheduler-side process opens a `HostTier`, and looks up, reserves and commits. Its workers open an
`ArenaView`, and read and write at the locations that they are sent.
"""

from kv_tier.arena_choice import arena_folder
from kv_tier.arena_view import ArenaView
from kv_tier.errors import (
    ArenaInUseError,
    ArenaUnavailableError,
    CorruptChunkError,
    KvTierError,
    LayoutMismatchError,
    ModelIdentityError,
)
from kv_tier.host_tier import HostTier, HostTierConfig
from kv_tier.keys import LAYOUT_VERSION, KeySpace, content_id, model_fingerprint
from kv_tier.layout import EntryHeader, KvLayout, header_matches, pack_header, parse_header
from kv_tier.page_lock import PageLock
from kv_tier.store import (
    ChunkLocation,
    ChunkQuery,
    ChunkStore,
    EntryInfo,
    Lease,
    Reservation,
    ResidencyDelta,
    TierStats,
)

__all__ = [
    "LAYOUT_VERSION",
    "ArenaInUseError",
    "ArenaUnavailableError",
    "ArenaView",
    "ChunkLocation",
    "ChunkQuery",
    "ChunkStore",
    "CorruptChunkError",
    "EntryHeader",
    "EntryInfo",
    "HostTier",
    "HostTierConfig",
    "KeySpace",
    "KvLayout",
    "KvTierError",
    "LayoutMismatchError",
    "Lease",
    "ModelIdentityError",
    "PageLock",
    "Reservation",
    "ResidencyDelta",
    "TierStats",
    "arena_folder",
    "content_id",
    "header_matches",
    "model_fingerprint",
    "pack_header",
    "parse_header",
]
