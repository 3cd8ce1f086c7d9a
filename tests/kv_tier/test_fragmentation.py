"""How much of the arena is lost to its own shape, on sizes as chunks have them."""

import os
import random
from collections import deque
from pathlib import Path

import pytest

from kv_tier import ChunkQuery, HostTier, HostTierConfig, KvLayout, Lease
from kv_tier.extents import GRANULE_BYTES, extent_bytes_for

MIN_TOKENS, MAX_TOKENS = 64, 2048
ARENA_CHUNKS = 64  # of the largest size
NUM_CHUNKS = 800  # about six times what fits
LAYOUTS = {
    "1 KiB a token": KvLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16"),
    "23 KiB a token": KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16"),
    "144 KiB a token": KvLayout(num_layers=36, num_kv_heads=8, head_dim=128, dtype="bfloat16"),
}


@pytest.mark.parametrize("marks", [(1.0, 1.0), None], ids=["no watermarks", "default watermarks"])
@pytest.mark.parametrize("eviction", ["cost", "lru"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_less_than_a_tenth_is_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: KvLayout,
    eviction: str,
    marks: tuple[float, float] | None,
) -> None:
    """Chunks of 64 to 2,048 tokens, all lengths alike, in an arena of 64 of the largest.

    Half of the requests are for a few popular chunks. A miss is stored, with a cost by length and
    chunk; a hit is leased until eight more came. After a third of 2,500 requests, at each
    reservation for which no free run is long enough, so that it has to evict: all bytes that are
    free at that instant, those that were evicted ahead among them, and one granule of rounding for
    each entry (it is less), over the capacity. The worst instant counts.
    """
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, _, length: os.ftruncate(fd, length))
    marked = {} if marks is None else {"high_watermark": marks[0], "low_watermark": marks[1]}
    config = HostTierConfig(
        directory=tmp_path,
        capacity_bytes=ARENA_CHUNKS * layout.entry_bytes(MAX_TOKENS),
        layout=layout,
        eviction=eviction,  # type: ignore[arg-type]
        **marked,
    )
    choose = random.Random(7)
    lengths = [choose.randint(MIN_TOKENS, MAX_TOKENS) for _ in range(NUM_CHUNKS)]
    costs = [length * choose.choice([0.05, 0.2, 1.0]) for length in lengths]
    lost: list[float] = []
    held: deque[Lease] = deque()
    with HostTier(config) as tier:
        for step in range(2_500):
            chunk = choose.randrange(NUM_CHUNKS)
            if choose.random() < 0.5:
                chunk = int(choose.paretovariate(0.5)) % NUM_CHUNKS
            key, token_ids = chunk.to_bytes(32, "little"), [chunk] * lengths[chunk]
            (found,) = tier.lookup([ChunkQuery(key=key, token_ids=token_ids)])
            if found is not None:
                held.append(found)
                if len(held) > 8:
                    tier.release([held.popleft()])
                continue
            if step > 800 and (share := lost_share(tier, lengths[chunk])) is not None:
                lost.append(share)
            reservation = tier.reserve(key, token_ids, recompute_ms=costs[chunk])
            assert reservation is not None and tier.commit(reservation)
        assert tier.stats().evictions > 300
    assert len(lost) > 30
    assert max(lost) < 0.1


def lost_share(tier: HostTier, num_tokens: int) -> float | None:
    """None if there is a free run for so many tokens."""
    stats = tier.stats()
    if stats.largest_free_bytes >= extent_bytes_for(tier.config.layout.entry_bytes(num_tokens)):
        return None
    free_bytes = stats.capacity_bytes - stats.used_bytes
    return (free_bytes + stats.num_entries * GRANULE_BYTES) / stats.capacity_bytes
