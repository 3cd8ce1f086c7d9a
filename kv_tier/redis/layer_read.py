"""One layer of one chunk from Redis into its arena entry: what to ask, where the answer goes."""

import torch

from kv_tier.layout import slice_checksums
from kv_tier.redis.encoding import Encoding, decode
from kv_tier.redis.errors import ReplyError
from kv_tier.redis.fetch import ChunkFetch
from kv_tier.redis.misses import Miss
from kv_tier.redis.resp import Buffer, RespConnection, command
from kv_tier.redis.values import check_prefix, prefix_checksums

# Answers that say that another node has the key now, or that this one can not serve it.
MOVED_CODES = frozenset({"MOVED", "ASK", "CLUSTERDOWN", "MASTERDOWN", "LOADING"})


class LayerReader:
    """Small memory of one reading thread, reused from layer to layer. Not thread-safe.

    Raw blocks are received where they belong in the arena, before they are verified: nobody reads
    a layer of an entry that is being written until it is said to be ready. Encoded blocks are
    received here, verified, and decoded into the arena.
    """

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())
        self.moved = False  # the last answer was one of MOVED_CODES

    def request(self, chunk: ChunkFetch, name: bytes) -> list[Buffer]:
        """One GET for all heads; for some, the prefix and their ranges. name: the layer's key"""
        if chunk.is_whole:
            return command(b"GET", name)
        ranges = [
            (0, chunk.prefix_bytes),
            *[chunk.shape.blocks_range(*r) for r in chunk.block_runs],
        ]
        return [
            part
            for start, end in ranges
            for part in command(b"GETRANGE", name, b"%d" % start, b"%d" % (end - 1))
        ]

    def receive(
        self, connection: RespConnection, chunk: ChunkFetch, layer: int, deadline_s: float
    ) -> Miss | None:
        """Receive what `request` asked for. Reads every answer, also after a miss.

        Raises LinkError or DeadlineError, which leave the connection unusable.
        """
        if len(self._memory) < chunk.num_layer_bytes and chunk.shape.encoding is not Encoding.RAW:
            self._memory = memoryview(bytearray(chunk.num_layer_bytes))
        elif len(self._memory) < chunk.prefix_bytes:
            self._memory = memoryview(bytearray(chunk.prefix_bytes))
        prefix, targets = self._memory[: chunk.prefix_bytes], self._targets(chunk, layer)
        if chunk.is_whole:
            answers = [[prefix, *targets]]
        else:
            answers = [[prefix], *[[target] for target in targets]]
        self.moved = False
        miss: Miss | None = None
        for parts in answers:
            found = self._receive_one(connection, parts, deadline_s)
            miss = miss or found
        return miss

    def place(self, chunk: ChunkFetch, layer: int) -> Miss | None:
        """Verify what was received, decode it, and fill the entry's checksum table."""
        entry, prefix = chunk.entry, self._memory[: chunk.prefix_bytes]
        key, slot = entry.location.key, entry.layout.checksum_slot(layer, 0, 0)
        if (miss := check_prefix(prefix, key, chunk.shape, layer)) is not None:
            return miss
        received = list(zip(chunk.block_runs, self._targets(chunk, layer), strict=True))
        for (first, num_blocks), blocks in received:
            checksums = slice_checksums(key, slot + first, blocks, chunk.block_bytes)
            if prefix_checksums(prefix, first, num_blocks) != checksums:
                return Miss.CORRUPT
            if chunk.shape.encoding is Encoding.RAW:
                entry.put_checksums(layer, first, checksums)
        if chunk.shape.encoding is not Encoding.RAW:
            for (first, num_blocks), blocks in received:
                _decode(chunk, blocks, entry.blocks(layer, first, num_blocks))
                checksums = entry.found_checksums(layer, first, num_blocks)
                entry.put_checksums(layer, first, checksums)
        return None

    def _targets(self, chunk: ChunkFetch, layer: int) -> list[memoryview]:
        """Where the blocks of each run are received."""
        if chunk.shape.encoding is Encoding.RAW:
            return [chunk.entry.blocks(layer, *run) for run in chunk.block_runs]
        targets, start = [], chunk.prefix_bytes
        for _, num_blocks in chunk.block_runs:
            end = start + num_blocks * chunk.block_bytes
            targets.append(self._memory[start:end])
            start = end
        return targets

    def _receive_one(
        self, connection: RespConnection, parts: list[memoryview], deadline_s: float
    ) -> Miss | None:
        try:
            size = connection.read_value_size(deadline_s, expected_bytes=len(parts[0]))
        except ReplyError as exc:
            self.moved = exc.code in MOVED_CODES
            return Miss.SERVER
        if size is None:
            return Miss.MISSING
        is_right = size == sum(map(len, parts))
        if is_right:
            for part in parts:
                connection.read_into(part, deadline_s)
        else:
            connection.skip(size, deadline_s)
        connection.end_value(deadline_s)
        if not is_right:
            return Miss.TRUNCATED if size else Miss.MISSING  # GETRANGE of no key is empty
        return None


def _decode(chunk: ChunkFetch, blocks: memoryview, target: memoryview) -> None:
    shape = chunk.shape
    dtype = getattr(torch, shape.layout.dtype)
    out = torch.frombuffer(target, dtype=dtype).view(-1, shape.num_tokens, shape.layout.head_dim)
    encoded = torch.frombuffer(blocks, dtype=torch.uint8).view(-1, chunk.block_bytes)
    decode(encoded, shape.encoding, out)
