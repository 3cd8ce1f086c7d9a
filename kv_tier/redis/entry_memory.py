"""One arena entry's bytes, as the Redis tier reads and fills them."""

from kv_tier.layout import CHECKSUM_BYTES, HEADER_BYTES, KvLayout, pack_header, slice_checksums
from kv_tier.store import ChunkLocation


class EntryMemory:
    """Views of an entry. Whoever writes holds its reservation, whoever reads a lease.

    arena: [arena_bytes], the whole mapping, writable to be filled: `memoryview` of
    `ArenaView.mapping.numpy()`.
    """

    def __init__(self, arena: memoryview, location: ChunkLocation, layout: KvLayout) -> None:
        is_whole = location.nbytes == layout.entry_bytes(location.num_tokens)
        if not is_whole or not 0 <= location.offset <= len(arena) - location.nbytes:
            raise ValueError(f"{location} is not an entry of {layout} in {len(arena)} bytes")
        self.location = location
        self.layout = layout
        self._entry = arena[location.offset : location.offset + location.nbytes]

    def blocks(self, layer: int, first: int, num_blocks: int) -> memoryview:
        """K or V of neighbouring heads: [num_blocks * head_bytes], contiguous

        A layer's blocks are the heads' K, then the heads' V: [0, 2 * num_kv_heads).
        """
        layout, num_tokens = self.layout, self.location.num_tokens
        head_bytes = layout.head_bytes(num_tokens)
        start = layout.layer_offset(num_tokens, layer) + first * head_bytes
        return self._entry[start : start + num_blocks * head_bytes]

    def layer(self, layer: int) -> memoryview:
        """K and V of all heads: [layer_bytes], contiguous"""
        return self.blocks(layer, 0, 2 * self.layout.num_kv_heads)

    def checksums(self, layer: int) -> bytes:
        """The table's part of this layer: [2 * num_kv_heads * CHECKSUM_BYTES]"""
        start = self._table_offset(layer, 0)
        return bytes(self._entry[start : start + 2 * self.layout.num_kv_heads * CHECKSUM_BYTES])

    def put_checksums(self, layer: int, first: int, checksums: bytes) -> None:
        """Of the blocks from `first` on."""
        start = self._table_offset(layer, first)
        self._entry[start : start + len(checksums)] = checksums

    def found_checksums(self, layer: int, first: int, num_blocks: int) -> bytes:
        """Checksums of what the blocks hold now."""
        return slice_checksums(
            self.location.key,
            self.layout.checksum_slot(layer, 0, 0) + first,
            self.blocks(layer, first, num_blocks),
            self.layout.head_bytes(self.location.num_tokens),
        )

    def is_intact(self, layer: int) -> bool:
        """Whether all heads' bytes fit the entry's own table."""
        return self.found_checksums(layer, 0, 2 * self.layout.num_kv_heads) == self.checksums(layer)

    def write_header(self) -> None:
        """The same bytes from every rank."""
        header = pack_header(self.layout, self.location.key, self.location.num_tokens)
        self._entry[:HEADER_BYTES] = header

    def _table_offset(self, layer: int, first: int) -> int:
        slot = self.layout.checksum_slot(layer, 0, 0) + first
        return HEADER_BYTES + slot * CHECKSUM_BYTES
