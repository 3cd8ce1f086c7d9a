"""How one chunk's KV lies in bytes: header, checksum table, then the layers.

    offset 0             header, 128 bytes: what this is, its own checksum last
    offset 128           uint64 xxh3_64 checksums [num_layers, 2, num_kv_heads]
    layer_offset(n, i)   layer i: [2, num_kv_heads, num_tokens, head_dim], K without RoPE, then V

Head-major, so a tensor-parallel rank's heads are one contiguous slice of K and one of V, whatever
the degree of the writer was. Every layer starts on a 64-byte boundary.
"""

import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kv_tier.errors import CorruptChunkError
from kv_tier.keys import KEY_BYTES, LAYOUT_VERSION

ALIGN_BYTES = 64
HEADER_BYTES = 128
CHECKSUM_BYTES = 8

_MAGIC = b"CSMITHKV"
_ARRIVING = b"CSARRIVE"
# magic, version, dtype code, key, layers, heads, head dim, tokens, payload bytes, padding
_FIELDS = struct.Struct(f"<8sII{KEY_BYTES}sIIIIQ48x")
_CHECKSUM = struct.Struct("<Q")
assert _FIELDS.size + _CHECKSUM.size == HEADER_BYTES

# name: (code in the header, bytes per element); names are torch's
_DTYPES = {
    "float32": (1, 4),
    "float16": (2, 2),
    "bfloat16": (3, 2),
    "float8_e4m3fn": (4, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Shape of one token's KV in all layers, for the whole model, not for one rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # a torch dtype name, one of float32, float16, bfloat16, float8_e4m3fn

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_kv_heads, self.head_dim) < 1:
            raise ValueError(f"need at least one layer, head and dim, got {self}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {sorted(_DTYPES)}, got {self.dtype!r}")

    @property
    def itemsize(self) -> int:
        return _DTYPES[self.dtype][1]

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers and heads, without header and padding."""
        return self.num_layers * self.layer_bytes(1)

    def head_bytes(self, num_tokens: int) -> int:
        """K or V of one head in one layer: [num_tokens, head_dim]."""
        return num_tokens * self.head_dim * self.itemsize

    def layer_bytes(self, num_tokens: int) -> int:
        return 2 * self.num_kv_heads * self.head_bytes(num_tokens)

    def payload_bytes(self, num_tokens: int) -> int:
        """All layers, each padded to the alignment."""
        return self.num_layers * _align(self.layer_bytes(num_tokens))

    def entry_bytes(self, num_tokens: int) -> int:
        """Header, checksum table and payload."""
        return self.layer_offset(num_tokens, 0) + self.payload_bytes(num_tokens)

    def layer_offset(self, num_tokens: int, layer: int) -> int:
        """Where the layer starts, counted from the start of the entry."""
        table_bytes = self.num_layers * 2 * self.num_kv_heads * CHECKSUM_BYTES
        start = HEADER_BYTES + _align(table_bytes)
        return start + layer * _align(self.layer_bytes(num_tokens))

    def checksum_slot(self, layer: int, kv_idx: int, head: int) -> int:
        """Position in the checksum table, in elements. kv_idx: 0 for K, 1 for V."""
        return (layer * 2 + kv_idx) * self.num_kv_heads + head


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryHeader:
    """What a stored entry says about itself."""

    key: bytes
    layout: KvLayout
    num_tokens: int


def pack_header(layout: KvLayout, key: bytes, num_tokens: int) -> bytes:
    """[HEADER_BYTES]; the same inputs give the same bytes, so that every rank may write it."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
    fields = _FIELDS.pack(
        _MAGIC,
        LAYOUT_VERSION,
        _DTYPES[layout.dtype][0],
        key,
        layout.num_layers,
        layout.num_kv_heads,
        layout.head_dim,
        num_tokens,
        layout.payload_bytes(num_tokens),
    )
    return fields + _CHECKSUM.pack(xxh3_64_intdigest(fields))


def arriving_header(layout: KvLayout, key: bytes, num_tokens: int) -> bytes:
    """[HEADER_BYTES], what stands in the place of the header while the layers are fetched."""
    return _ARRIVING + pack_header(layout, key, num_tokens)[len(_ARRIVING) :]


def parse_header(header: bytes) -> EntryHeader:
    """Read a header, or raise CorruptChunkError with what is wrong."""
    if len(header) < HEADER_BYTES:
        raise CorruptChunkError(f"header has {len(header)} bytes of {HEADER_BYTES}")
    fields = header[: _FIELDS.size]
    (checksum,) = _CHECKSUM.unpack_from(header, _FIELDS.size)
    magic, version, dtype_code, key, layers, heads, dim, num_tokens, payload_bytes = _FIELDS.unpack(
        fields
    )
    if magic != _MAGIC or version != LAYOUT_VERSION:
        raise CorruptChunkError(f"not a version {LAYOUT_VERSION} entry: {magic!r} {version}")
    if checksum != xxh3_64_intdigest(fields):
        raise CorruptChunkError("header checksum does not match")
    dtype = next((name for name, (code, _) in _DTYPES.items() if code == dtype_code), None)
    if dtype is None:
        raise CorruptChunkError(f"unknown dtype code {dtype_code}")
    if min(layers, heads, dim, num_tokens) < 1:
        raise CorruptChunkError(f"empty shape {layers}, {heads}, {num_tokens}, {dim}")
    layout = KvLayout(num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype=dtype)
    if payload_bytes != layout.payload_bytes(num_tokens):
        raise CorruptChunkError(f"payload of {payload_bytes} bytes does not fit its shape")
    return EntryHeader(key=key, layout=layout, num_tokens=num_tokens)


def header_matches(header: bytes, layout: KvLayout, key: bytes, num_tokens: int) -> bool:
    """Whether the header is intact and describes exactly this chunk in this layout."""
    try:
        found = parse_header(header)
    except CorruptChunkError:
        return False
    return found == EntryHeader(key=key, layout=layout, num_tokens=num_tokens)


def slice_checksums(key: bytes, slot: int, content: memoryview, slice_bytes: int) -> bytes:
    """Checksums of neighbouring slices, one head's K or V in one layer each, from `slot` on.

    content: [num_slices * slice_bytes], for example all heads of one layer, K then V
    returns: [num_slices * CHECKSUM_BYTES], little-endian, as they stand in the table

    Each is bound to its chunk and to its place by the seed. That makes a late write of a dead
    replica visible: its slices carry another key's seed, so they never verify as the entry that has
    since taken the same space.
    """
    seed = int.from_bytes(key[:8], "little") + slot
    digests = [
        xxh3_64_intdigest(content[start : start + slice_bytes], seed=(seed + i) % 2**64)
        for i, start in enumerate(range(0, len(content), slice_bytes))
    ]
    return struct.pack(f"<{len(digests)}Q", *digests)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
