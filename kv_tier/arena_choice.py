"""Which folder an arena is opened in, while replicas of an upgrade have two kinds of it.

The first replicas with another capacity or dtype start on a node while those before them have the
arena open. They take a folder beside it; what nobody has open any more is removed by who comes.
"""

from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2s
from pathlib import Path
from typing import Any

from kv_tier.arena_dir import ArenaDir, destroy_arena
from kv_tier.arena_open import arena_identity, held_identity
from kv_tier.errors import ArenaUnavailableError
from kv_tier.extents import GRANULE_BYTES
from kv_tier.layout import KvLayout
from kv_tier.owners import live_owner_ids

_DIGEST_CHARS = 8


def arena_folder(directory: Path, layout: KvLayout, capacity_bytes: int) -> Path:
    """`directory`, or the folder beside it for this layout and size where others use `directory`.

    Unused arenas of the two kinds are removed, but the one that is returned. What two processes
    choose at the same moment may differ; opening then refuses one of them.
    """
    wanted = arena_identity(layout, capacity_bytes // GRANULE_BYTES * GRANULE_BYTES)
    digest = blake2s(repr(sorted(wanted.items())).encode()).hexdigest()[:_DIGEST_CHARS]
    beside = directory.with_name(f"{directory.name}.{digest}")
    chosen = beside if _is_used(beside) or _is_another(directory, wanted) else directory
    for other in (directory, *_all_beside(directory)):
        if other != chosen and ArenaDir(other).index.exists() and not _is_used(other):
            with suppress(ArenaUnavailableError, OSError):  # another process has just come
                destroy_arena(other)
    return chosen


def _all_beside(directory: Path) -> Iterator[Path]:
    return directory.parent.glob(f"{directory.name}.{'[0-9a-f]' * _DIGEST_CHARS}")


def _is_another(directory: Path, wanted: dict[str, Any]) -> bool:
    """Whether others have an arena of another kind there. One that can not be read now is none:
    a busy index must not part replicas that share an arena."""
    held = held_identity(ArenaDir(directory)) if _is_used(directory) else None
    return held is not None and held != wanted


def _is_used(directory: Path) -> bool:
    return bool(live_owner_ids(ArenaDir(directory).owners))
