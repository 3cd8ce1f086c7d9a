"""Chunks with known contents, and small arenas to keep them in."""

from pathlib import Path

import torch
from torch import Tensor

from kv_tier import (
    ArenaView,
    ChunkLocation,
    ChunkQuery,
    HostTier,
    HostTierConfig,
    KvLayout,
    Lease,
    Reservation,
)
from kv_tier.extents import GRANULE_BYTES

# 512 bytes a token and 256 of header and table, so that 7 tokens take one granule, 15 take two.
LAYOUT = KvLayout(num_layers=2, num_kv_heads=4, head_dim=8, dtype="float32")
TOKENS_PER_GRANULE = 8


def num_tokens_in(num_granules: int) -> int:
    """Tokens of a chunk that fills so many granules."""
    return num_granules * TOKENS_PER_GRANULE - 1


def open_tier(
    directory: Path,
    *,
    num_granules: int = 8,
    layout: KvLayout = LAYOUT,
    eviction: str = "cost",
    high_watermark: float = 1.0,
    low_watermark: float = 1.0,
) -> HostTier:
    """Without room made ahead, unless asked for: what goes is what a reservation needs."""
    return HostTier(
        HostTierConfig(
            directory=directory,
            capacity_bytes=num_granules * GRANULE_BYTES,
            layout=layout,
            eviction=eviction,  # type: ignore[arg-type]
            high_watermark=high_watermark,
            low_watermark=low_watermark,
        )
    )


def key_of(chunk: int) -> bytes:
    return chunk.to_bytes(32, "little")


def tokens_of(chunk: int, num_granules: int = 1) -> list[int]:
    return [chunk * 1000 + i for i in range(num_tokens_in(num_granules))]


def kv_of(chunk: int, layer: int, num_tokens: int, layout: KvLayout = LAYOUT) -> Tensor:
    """[2, num_kv_heads, num_tokens, head_dim], other numbers for every chunk and layer"""
    shape = (2, layout.num_kv_heads, num_tokens, layout.head_dim)
    generator = torch.Generator().manual_seed(chunk * 100 + layer)
    return torch.randn(shape, generator=generator).to(getattr(torch, layout.dtype))


def query(chunk: int, num_granules: int = 1) -> ChunkQuery:
    return ChunkQuery(key=key_of(chunk), token_ids=tokens_of(chunk, num_granules))


def reserve(
    tier: HostTier, chunk: int, num_granules: int = 1, *, recompute_ms: float = 0.0
) -> Reservation | None:
    return tier.reserve(
        key_of(chunk),
        tokens_of(chunk, num_granules),
        recompute_ms=recompute_ms,
        content_id=f"chunk-{chunk}",
    )


def store(
    tier: HostTier, chunk: int, num_granules: int = 1, *, recompute_ms: float = 0.0
) -> ChunkLocation:
    """Reserve and commit without writing the bytes."""
    reservation = reserve(tier, chunk, num_granules, recompute_ms=recompute_ms)
    assert reservation is not None
    assert tier.commit(reservation)
    return reservation.location


def lease(tier: HostTier, chunk: int, num_granules: int = 1) -> Lease | None:
    (found,) = tier.lookup([query(chunk, num_granules)])
    return found


def resident(tier: HostTier, chunks: range) -> set[int]:
    found = tier.contains([key_of(chunk) for chunk in chunks])
    return {chunk for chunk, is_there in zip(chunks, found, strict=True) if is_there}


def write_heads(
    view: ArenaView, location: ChunkLocation, chunk: int, head_start: int, num_heads: int
) -> None:
    """What one tensor-parallel rank does with the heads that it holds."""
    heads = slice(head_start, head_start + num_heads)
    for layer in range(view.layout.num_layers):
        k, v = kv_of(chunk, layer, location.num_tokens, view.layout)[:, heads]
        view.write_layer(location, layer, head_start, k, v)
    view.write_header(location)


def holds(
    view: ArenaView, location: ChunkLocation, chunk: int, head_start: int, num_heads: int
) -> bool:
    """Whether these heads verify in every layer, and are the chunk's own numbers."""
    heads = slice(head_start, head_start + num_heads)
    for layer in range(view.layout.num_layers):
        if not view.verify_layer(location, layer, head_start, num_heads):
            return False
        found = torch.stack(view.read_layer(location, layer, head_start, num_heads))
        wanted = kv_of(chunk, layer, location.num_tokens, view.layout)[:, heads]
        if not torch.equal(found.view(torch.uint8), wanted.contiguous().view(torch.uint8)):
            return False
    return view.verify_header(location)
