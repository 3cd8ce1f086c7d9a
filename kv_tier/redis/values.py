"""What is stored in Redis: one manifest a chunk, and one value a layer. Both describe themselves.

    <prefix>:v<version>:{<chunk key, hex>}:chunk      manifest: shape, token ids; written last
    <prefix>:v<version>:{<chunk key, hex>}:<layer>    one layer

The braces are a Redis Cluster hash tag: a chunk lives on one node, so that one command tells
whether it is whole, and a lost node costs its own chunks instead of a layer of each.

    layer value:  offset 0            header, 128 bytes, its checksum over header and table last
                  offset 128          uint64 checksums [2, num_kv_heads] of the blocks that follow
                  prefix_bytes        blocks [2, num_kv_heads, block_bytes], K then V

Any range of heads is contiguous, as in the arena. In `raw` encoding the blocks and their checksums
are, bit for bit, those of the arena's entry.
"""

import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kv_tier.keys import KEY_BYTES, LAYOUT_VERSION
from kv_tier.layout import CHECKSUM_BYTES, HEADER_BYTES, KvLayout
from kv_tier.redis.encoding import Encoding, block_bytes
from kv_tier.redis.misses import Miss

VALUE_VERSION = 1
MANIFEST_PATTERN = f"v{VALUE_VERSION}:{{*}}:chunk"  # for SCAN, behind the prefix and a colon

_LAYER_MAGIC = b"CSMITHLV"
_MANIFEST_MAGIC = b"CSMITHMF"
# magic, value version, layout version, key, num_layers, num_kv_heads, head_dim, num_tokens,
# dtype, encoding
_COMMON = f"<8sII{KEY_BYTES}sIIII16s8s"
_LAYER_FIELDS = struct.Struct(_COMMON + "IQ20x")  # layer, bytes of all blocks
_MANIFEST_FIELDS = struct.Struct(_COMMON + "dI20x")  # recompute_ms, bytes of the content id
_CHECKSUM = struct.Struct("<Q")
assert _LAYER_FIELDS.size + CHECKSUM_BYTES == HEADER_BYTES == _MANIFEST_FIELDS.size + CHECKSUM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShape:
    """What decides how long a chunk's layer values are and where in them a head is."""

    layout: KvLayout
    num_tokens: int
    encoding: Encoding

    @property
    def prefix_bytes(self) -> int:
        """Header and checksum table, before the blocks."""
        return HEADER_BYTES + 2 * self.layout.num_kv_heads * CHECKSUM_BYTES

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.encoding, self.layout, self.num_tokens)

    @property
    def payload_bytes(self) -> int:
        return 2 * self.layout.num_kv_heads * self.block_bytes

    @property
    def value_bytes(self) -> int:
        return self.prefix_bytes + self.payload_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What Redis knows about one chunk."""

    key: bytes
    shape: StoredShape
    token_bytes: bytes  # from keys.token_bytes
    recompute_ms: float = 0.0
    content_id: str = ""


def manifest_name(prefix: str, key: bytes) -> bytes:
    return f"{_start(prefix)}{key.hex()}}}:chunk".encode()


def layer_name(prefix: str, key: bytes, layer: int) -> bytes:
    return f"{_start(prefix)}{key.hex()}}}:{layer}".encode()


def chunk_names(prefix: str, key: bytes, num_layers: int) -> list[bytes]:
    """The manifest's name, then the layers'."""
    layers = [layer_name(prefix, key, layer) for layer in range(num_layers)]
    return [manifest_name(prefix, key), *layers]


def parse_name(prefix: str, name: bytes) -> tuple[bytes, int | None] | None:
    """(chunk key, layer or None for the manifest) of a key of ours; None for any other."""
    head, _, rest = name.decode("utf-8", "replace").partition(_start(prefix))
    hex_key, _, field = rest.partition("}:")
    if head or len(hex_key) != 2 * KEY_BYTES or not (field == "chunk" or field.isdecimal()):
        return None
    try:
        return bytes.fromhex(hex_key), None if field == "chunk" else int(field)
    except ValueError:
        return None


def pack_prefix(key: bytes, shape: StoredShape, layer: int, checksums: bytes) -> bytes:
    """checksums: the blocks' `slice_checksums`, [2 * num_kv_heads * CHECKSUM_BYTES]"""
    fields = _LAYER_FIELDS.pack(*_common(_LAYER_MAGIC, key, shape), layer, shape.payload_bytes)
    return fields + _digest(fields + checksums) + checksums


def check_prefix(prefix: memoryview, key: bytes, shape: StoredShape, layer: int) -> Miss | None:
    """None when the prefix is intact and of exactly this layer."""
    checksums = bytes(prefix[HEADER_BYTES:])
    if prefix == pack_prefix(key, shape, layer, checksums):
        return None
    if len(prefix) != shape.prefix_bytes:
        return Miss.TRUNCATED
    fields = bytes(prefix[: _LAYER_FIELDS.size])
    if _is_foreign(fields, _LAYER_MAGIC):
        return Miss.FOREIGN
    is_intact = prefix[_LAYER_FIELDS.size : HEADER_BYTES] == _digest(fields + checksums)
    return Miss.FOREIGN if is_intact else Miss.CORRUPT


def pack_manifest(manifest: Manifest) -> bytes:
    content_id = manifest.content_id.encode()
    common = _common(_MANIFEST_MAGIC, manifest.key, manifest.shape)
    fields = _MANIFEST_FIELDS.pack(*common, manifest.recompute_ms, len(content_id))
    rest = manifest.token_bytes + content_id
    return fields + _digest(fields + rest) + rest


def parse_manifest(value: bytes) -> Manifest | Miss:
    """What a manifest says of its chunk, or what is wrong with it."""
    if len(value) < HEADER_BYTES:
        return Miss.TRUNCATED
    fields, rest = value[: _MANIFEST_FIELDS.size], value[HEADER_BYTES:]
    if _is_foreign(fields, _MANIFEST_MAGIC):
        return Miss.FOREIGN
    *_, num_tokens, dtype, encoding, recompute_ms, id_bytes = _MANIFEST_FIELDS.unpack(fields)
    if len(rest) != 4 * num_tokens + id_bytes:
        return Miss.TRUNCATED
    if value[_MANIFEST_FIELDS.size : HEADER_BYTES] != _digest(fields + rest):
        return Miss.CORRUPT
    _, _, _, key, num_layers, num_kv_heads, head_dim, *_ = _MANIFEST_FIELDS.unpack(fields)
    try:
        layout = KvLayout(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype.rstrip(b"\0").decode(),
        )
        shape = StoredShape(
            layout=layout,
            num_tokens=num_tokens,
            encoding=Encoding(encoding.rstrip(b"\0").decode()),
        )
    except ValueError:  # a dtype or an encoding that this program does not know
        return Miss.FOREIGN
    return Manifest(
        key=key,
        shape=shape,
        token_bytes=rest[: 4 * num_tokens],
        recompute_ms=recompute_ms,
        content_id=rest[4 * num_tokens :].decode(errors="replace"),
    )


def _start(prefix: str) -> str:
    return f"{prefix}:v{VALUE_VERSION}:{{"


def _common(magic: bytes, key: bytes, shape: StoredShape) -> tuple[bytes | int, ...]:
    layout = shape.layout
    return (
        magic,
        VALUE_VERSION,
        LAYOUT_VERSION,
        key,
        layout.num_layers,
        layout.num_kv_heads,
        layout.head_dim,
        shape.num_tokens,
        layout.dtype.encode(),
        shape.encoding.encode(),
    )


def _is_foreign(fields: bytes, magic: bytes) -> bool:
    return fields[:16] != magic + struct.pack("<II", VALUE_VERSION, LAYOUT_VERSION)


def _digest(content: bytes) -> bytes:
    return _CHECKSUM.pack(xxh3_64_intdigest(content))
