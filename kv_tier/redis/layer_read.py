"""One layer of one chunk from Redis into its arena entry: where the answer goes."""

import torch

from kv_tier.layout import HEADER_BYTES, slice_checksums
from kv_tier.redis.encoding import Encoding, decode
from kv_tier.redis.errors import ReplyError
from kv_tier.redis.fetch import ChunkFetch
from kv_tier.redis.misses import Miss
from kv_tier.redis.resp import RespConnection
from kv_tier.redis.values import check_prefix

# Answers that say that another node has the key now, or that this one can not serve it.
MOVED_CODES = frozenset({"MOVED", "ASK", "CLUSTERDOWN", "MASTERDOWN", "LOADING"})


class LayerReader:
    """Small memory of one reading thread, reused from layer to layer. Not thread-safe.

    Raw blocks are received where they belong in the arena, before they are verified: nobody reads
    a layer of an entry that is arriving until its checksums are there. Encoded blocks are received
    here, verified, and decoded into the arena.
    """

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())
        self.moved = False  # the last answer was one of MOVED_CODES

    def receive(
        self, connection: RespConnection, chunk: ChunkFetch, layer: int, deadline_s: float
    ) -> Miss | None:
        """Receive the answer to the layer's GET, to its end also when it is a miss.

        Raises LinkError or DeadlineError, which leave the connection unusable.
        """
        num_bytes, prefix_bytes = chunk.layer_bytes, chunk.shape.prefix_bytes
        needed = prefix_bytes if chunk.shape.encoding is Encoding.RAW else num_bytes
        if len(self._memory) < needed:
            self._memory = memoryview(bytearray(needed))
        self.moved = False
        try:
            size = connection.read_value_size(deadline_s, expected_bytes=prefix_bytes)
        except ReplyError as exc:
            self.moved = exc.code in MOVED_CODES
            return Miss.SERVER
        if size is None:
            return Miss.MISSING
        if size == num_bytes:
            connection.read_into(self._memory[:prefix_bytes], deadline_s)
            connection.read_into(self._blocks(chunk, layer), deadline_s)
        else:
            connection.skip(size, deadline_s)
        connection.end_value(deadline_s)
        return None if size == num_bytes else Miss.TRUNCATED

    def place(self, chunk: ChunkFetch, layer: int) -> Miss | None:
        """Verify what was received, decode it, and fill the entry's checksum table."""
        entry, prefix = chunk.entry, self._memory[: chunk.shape.prefix_bytes]
        key, slot = entry.location.key, entry.layout.checksum_slot(layer, 0, 0)
        if (miss := check_prefix(prefix, key, chunk.shape, layer)) is not None:
            return miss
        blocks = self._blocks(chunk, layer)
        checksums = slice_checksums(key, slot, blocks, chunk.shape.block_bytes)
        if prefix[HEADER_BYTES:] != checksums:
            return Miss.CORRUPT
        if chunk.shape.encoding is not Encoding.RAW:
            _decode(chunk, blocks, entry.layer(layer))
            checksums = entry.found_checksums(layer)
        entry.put_checksums(layer, checksums)
        return None

    def _blocks(self, chunk: ChunkFetch, layer: int) -> memoryview:
        """Where the layer's blocks are received."""
        if chunk.shape.encoding is Encoding.RAW:
            return chunk.entry.layer(layer)
        return self._memory[chunk.shape.prefix_bytes : chunk.layer_bytes]


def _decode(chunk: ChunkFetch, blocks: memoryview, target: memoryview) -> None:
    shape = chunk.shape
    dtype = getattr(torch, shape.layout.dtype)
    out = torch.frombuffer(target, dtype=dtype).view(-1, shape.num_tokens, shape.layout.head_dim)
    encoded = torch.frombuffer(blocks, dtype=torch.uint8).view(-1, shape.block_bytes)
    decode(encoded, shape.encoding, out)
