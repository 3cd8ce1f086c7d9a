"""One arena entry's bytes, as the Redis tier reads and fills them."""

from kv_tier.arrival import begin_arrival, fail_arrival
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

    @property
    def layer_bytes(self) -> int:
        return self.layout.layer_bytes(self.location.num_tokens)

    def layer(self, layer: int) -> memoryview:
        """K, then V, of all heads: [layer_bytes], contiguous"""
        layout, num_tokens = self.layout, self.location.num_tokens
        start = layout.layer_offset(num_tokens, layer)
        return self._entry[start : start + layout.layer_bytes(num_tokens)]

    def checksums(self, layer: int) -> bytes:
        """The table's part of this layer: [2 * num_kv_heads * CHECKSUM_BYTES]"""
        return bytes(self._table(layer))

    def put_checksums(self, layer: int, checksums: bytes) -> None:
        self._table(layer)[:] = checksums

    def found_checksums(self, layer: int) -> bytes:
        """Checksums of what the layer holds now."""
        slot = self.layout.checksum_slot(layer, 0, 0)
        head_bytes = self.layout.head_bytes(self.location.num_tokens)
        return slice_checksums(self.location.key, slot, self.layer(layer), head_bytes)

    def is_intact(self, layer: int) -> bool:
        """Whether all heads' bytes fit the entry's own table."""
        return self.found_checksums(layer) == self.checksums(layer)

    def begin_arrival(self) -> None:
        """Nothing has come yet; before anybody hears of the entry."""
        begin_arrival(self._entry, self.layout, self.location)

    def fail_arrival(self) -> None:
        fail_arrival(self._entry)

    def write_header(self) -> None:
        header = pack_header(self.layout, self.location.key, self.location.num_tokens)
        self._entry[:HEADER_BYTES] = header

    def _table(self, layer: int) -> memoryview:
        start = HEADER_BYTES + self.layout.checksum_slot(layer, 0, 0) * CHECKSUM_BYTES
        return self._entry[start : start + 2 * self.layout.num_kv_heads * CHECKSUM_BYTES]
