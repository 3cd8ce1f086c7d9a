"""Chunks in an arena of their own memory, and a Redis tier over them."""

import mmap
import struct
from collections.abc import Sequence

import torch
from xxhash import xxh3_64_intdigest

from kv_tier import ChunkLocation, ChunkQuery, KvLayout
from kv_tier.keys import KeySpace
from kv_tier.redis import (
    ChunkWrite,
    Count,
    Encoding,
    Fetch,
    FetchRequest,
    Manifest,
    Miss,
    RedisTier,
    RedisTierConfig,
    RemoteTier,
)
from kv_tier.redis.entry_memory import EntryMemory
from tests.kv_tier.arena_cases import kv_of

LAYOUT = KvLayout(num_layers=3, num_kv_heads=4, head_dim=8, dtype="float32")
LAYERS = range(LAYOUT.num_layers)
NUM_TOKENS = 20
ARENA_BYTES = 1 << 22
LONG_MS = 20_000.0
WRITE_ID = b"the same"  # of all writes of `open_tier`, so that tests can fetch without a lookup

SPACE = KeySpace(fingerprint="a model", kv_dtype="float32", anchor_ids=(1,))


class Arena:
    """Memory that entries are put into one after another, and never removed from."""

    def __init__(self, layout: KvLayout = LAYOUT, num_bytes: int = ARENA_BYTES) -> None:
        self.layout = layout
        self.memory = memoryview(mmap.mmap(-1, num_bytes))
        self._used_bytes = 0

    def place(self, chunk: int, num_tokens: int = NUM_TOKENS) -> ChunkLocation:
        """Space for the chunk, as a reservation gives it."""
        nbytes = self.layout.entry_bytes(num_tokens)
        offset = self._used_bytes
        self._used_bytes += -(-nbytes // 4096) * 4096
        assert self._used_bytes <= len(self.memory)
        return ChunkLocation(
            key=query(chunk, num_tokens).key, offset=offset, nbytes=nbytes, num_tokens=num_tokens
        )

    def fill(self, chunk: int, num_tokens: int = NUM_TOKENS) -> ChunkLocation:
        """An entry with the chunk's numbers and their checksums."""
        location = self.place(chunk, num_tokens)
        entry = self.entry(location)
        for layer in range(self.layout.num_layers):
            kv = kv_of(chunk, layer, num_tokens, self.layout).contiguous()
            entry.layer(layer)[:] = kv.view(torch.uint8).numpy().reshape(-1).data
            entry.put_checksums(layer, entry.found_checksums(layer))
        entry.write_header()
        return location

    def entry(self, location: ChunkLocation) -> EntryMemory:
        return EntryMemory(self.memory, location, self.layout)

    def bytes_of(self, location: ChunkLocation) -> bytes:
        return bytes(self.memory[location.offset : location.offset + location.nbytes])


def query(chunk: int, num_tokens: int = NUM_TOKENS) -> ChunkQuery:
    token_ids = [chunk * 1000 + i for i in range(num_tokens)]
    return ChunkQuery(key=SPACE.key(token_ids), token_ids=token_ids)


def config(url: str, **changes: object) -> RedisTierConfig:
    """Deadlines so long that a busy machine does not matter, unless a test is about them."""
    values: dict[str, object] = {
        "url": url,
        "lookup_deadline_ms": LONG_MS,
        "value_deadline_ms": LONG_MS,
        "write_deadline_ms": LONG_MS,
        "connect_deadline_ms": LONG_MS,
        "probe_interval_ms": 20.0,
        **changes,
    }
    return RedisTierConfig(**values)  # type: ignore[arg-type]


def open_tier(url: str, arena: Arena, **changes: object) -> RedisTier:
    settings = config(url, **changes)
    return RedisTier(settings, arena.layout, arena.memory, new_write_id=lambda: WRITE_ID)


def write(tier: RemoteTier, arena: Arena, *chunks: int, num_tokens: int = NUM_TOKENS) -> None:
    """Put chunks into the second level, and wait until they are there."""
    for chunk in chunks:
        assert offer(tier, arena.fill(chunk, num_tokens), chunk)
    assert tier.flush(LONG_MS)


def offer(tier: RemoteTier, location: ChunkLocation, chunk: int) -> bool:
    return tier.write_behind(
        ChunkWrite(
            location=location,
            token_ids=query(chunk, location.num_tokens).token_ids,
            recompute_ms=chunk + 0.5,
            content_id=f"chunk-{chunk}",
            release=lambda: None,
        )
    )


def lookup(tier: RemoteTier, *chunks: int) -> list[Manifest | None]:
    return tier.lookup([query(chunk) for chunk in chunks])


def request(location: ChunkLocation, encoding: Encoding = Encoding.RAW) -> FetchRequest:
    return FetchRequest(location=location, encoding=encoding, write_id=WRITE_ID)


def fetch(
    tier: RemoteTier,
    locations: Sequence[ChunkLocation],
    *,
    layers: Sequence[int] = LAYERS,
    deadline_ms: float = LONG_MS,
) -> Fetch:
    """Fetch whole chunks, and wait until that has ended."""
    found = tier.fetch([request(place) for place in locations], layers, deadline_ms=deadline_ms)
    assert found.wait_quiet()
    return found


def as_of_another_kind(manifest: bytes) -> bytes:
    """The manifest, intact, as a later program may write it: with an encoding that we lack."""
    fields = manifest[:120].replace(b"raw\0\0\0\0\0", b"fp4\0\0\0\0\0")
    digest = xxh3_64_intdigest(fields + manifest[128:])
    return fields + struct.pack("<Q", digest) + manifest[128:]


def misses(tier: RemoteTier) -> dict[Miss, int]:
    """Reasons that there were, with how often."""
    return {reason: number for reason, number in tier.stats().misses.items() if number}


def counted(tier: RemoteTier, what: Count) -> int:
    return tier.stats().counts[what]
