"""One layer of one chunk from Redis into its arena entry: where the answer goes."""

import torch

from kv_tier.layout import HEADER_BYTES
from kv_tier.redis.encoding import Encoding, decode
from kv_tier.redis.errors import ReplyError
from kv_tier.redis.fetch import ChunkFetch
from kv_tier.redis.misses import Miss
from kv_tier.redis.resp import RespConnection
from kv_tier.redis.values import check_prefix, check_value


class LayerReader:
    """Small memory of one reading thread, reused from layer to layer. Not thread-safe.

    Raw blocks are received where they belong in the arena, before they are verified: nobody reads
    a layer of an entry that is arriving until its checksums are there. Encoded blocks are received
    here, verified, and decoded into the arena.
    """

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())
        self.is_redirect = False  # the last answer was one

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
        self.is_redirect = False
        try:
            size = connection.read_value_size(deadline_s, expected_bytes=prefix_bytes)
        except ReplyError as exc:
            self.is_redirect = exc.is_redirect
            return Miss.SERVER
        if size is None:
            return Miss.MISSING
        prefix = self._memory[: min(size, prefix_bytes)]
        connection.read_into(prefix, deadline_s)
        if size == num_bytes:
            connection.read_into(self._blocks(chunk, layer), deadline_s)
            connection.end_value(deadline_s)
            return None
        connection.skip(size - len(prefix), deadline_s)
        connection.end_value(deadline_s)
        # Another write's encoding may have made it longer or shorter.
        miss = check_prefix(prefix, chunk.location.key, chunk.shape, chunk.write_id, layer)
        return Miss.REPLACED if miss is Miss.REPLACED else Miss.TRUNCATED

    def place(self, chunk: ChunkFetch, layer: int) -> Miss | None:
        """Verify what was received, decode it, and fill the entry's checksum table."""
        entry, shape, prefix = chunk.entry, chunk.shape, self._memory[: chunk.shape.prefix_bytes]
        blocks = self._blocks(chunk, layer)
        miss = check_value(prefix, blocks, chunk.location.key, shape, chunk.write_id, layer)
        if miss is not None:
            return miss
        checksums = bytes(prefix[HEADER_BYTES:])
        if shape.encoding is not Encoding.RAW:
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
