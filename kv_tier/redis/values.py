"""What is stored in Redis: one manifest a chunk, and one value a layer. Both describe themselves.

    <prefix>:v<version>:{<chunk key, hex>}:chunk      manifest: shape, token ids; written last
    <prefix>:v<version>:{<chunk key, hex>}:<layer>    one layer

The braces are a Redis Cluster hash tag: a chunk lives on one node, so that one command tells
whether it is whole, and a lost node costs its own chunks instead of a layer of each.

    layer value:  offset 0            header, 128 bytes, its checksum over header and table last
                  offset 128          uint64 checksums [2, num_kv_heads] of the blocks that follow
                  prefix_bytes        blocks [2, num_kv_heads, block_bytes], K then V

In `raw` encoding the blocks and their checksums are, bit for bit, those of the arena's entry.

Manifest and layers carry the random id of the write that they are of. Two nodes may write one chunk
at the same time, or one anew what another is reading: layers of different writes are never taken
for one chunk.
"""

import math
import re
import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kv_tier.keys import KEY_BYTES, LAYOUT_VERSION
from kv_tier.layout import CHECKSUM_BYTES, HEADER_BYTES, KvLayout, slice_checksums
from kv_tier.redis.encoding import Encoding, block_bytes
from kv_tier.redis.misses import Miss

VALUE_VERSION = 1
WRITE_ID_BYTES = 8

_LAYER_MAGIC = b"CSMITHLV"
_MANIFEST_MAGIC = b"CSMITHMF"
# magic, value version, layout version, key, num_layers, num_kv_heads, head_dim, num_tokens,
# dtype, encoding, write id
_COMMON = f"<8sII{KEY_BYTES}sIIII16s8s{WRITE_ID_BYTES}s"
_LAYER_FIELDS = struct.Struct(_COMMON + "IQ12x")  # layer, bytes of all blocks
_MANIFEST_FIELDS = struct.Struct(_COMMON + "dI12x")  # recompute_ms, bytes of the content id
_WRITE_ID_END = struct.calcsize(_COMMON)
_CHECKSUM = struct.Struct("<Q")
_REST_OF_NAME = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})}}:(chunk|[0-9]+)")
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
    write_id: bytes  # [WRITE_ID_BYTES], random: its layers have the same
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
    found = None if head else _REST_OF_NAME.fullmatch(rest)
    if found is None:
        return None
    return bytes.fromhex(found[1]), None if found[2] == "chunk" else int(found[2])


def is_our_name(prefix: str, name: bytes) -> bool:
    """Whether it is a key of ours, of whatever value version."""
    head, _, rest = name.decode("utf-8", "replace").partition(f"{prefix}:v")
    version, _, rest = rest.partition(":{")
    return not head and version.isdecimal() and _REST_OF_NAME.fullmatch(rest) is not None


def pack_prefix(
    key: bytes, shape: StoredShape, write_id: bytes, layer: int, checksums: bytes
) -> bytes:
    """checksums: the blocks' `slice_checksums`, [2 * num_kv_heads * CHECKSUM_BYTES]"""
    common = _common(_LAYER_MAGIC, key, shape, write_id)
    fields = _LAYER_FIELDS.pack(*common, layer, shape.payload_bytes)
    return fields + _digest(fields + checksums) + checksums


def check_prefix(
    prefix: memoryview, key: bytes, shape: StoredShape, write_id: bytes, layer: int
) -> Miss | None:
    """None when the prefix is intact and of exactly this layer of this write."""
    checksums = bytes(prefix[HEADER_BYTES:])
    if prefix == pack_prefix(key, shape, write_id, layer, checksums):
        return None
    if len(prefix) != shape.prefix_bytes:
        return Miss.TRUNCATED
    fields = bytes(prefix[: _LAYER_FIELDS.size])
    is_intact = prefix[_LAYER_FIELDS.size : HEADER_BYTES] == _digest(fields + checksums)
    return Miss.REPLACED if is_intact and write_id_in(fields) != write_id else Miss.CORRUPT


def check_value(
    prefix: memoryview,
    blocks: memoryview,
    key: bytes,
    shape: StoredShape,
    write_id: bytes,
    layer: int,
) -> Miss | None:
    """None when prefix and blocks, which have their lengths, are intact and of this layer."""
    if (miss := check_prefix(prefix, key, shape, write_id, layer)) is not None:
        return miss
    slot = shape.layout.checksum_slot(layer, 0, 0)
    found = slice_checksums(key, slot, blocks, shape.block_bytes)
    return None if found == prefix[HEADER_BYTES:] else Miss.CORRUPT


def pack_manifest(manifest: Manifest) -> bytes:
    content_id = manifest.content_id.encode()
    common = _common(_MANIFEST_MAGIC, manifest.key, manifest.shape, manifest.write_id)
    fields = _MANIFEST_FIELDS.pack(*common, manifest.recompute_ms, len(content_id))
    rest = manifest.token_bytes + content_id
    return fields + _digest(fields + rest) + rest


def parse_manifest(value: bytes) -> Manifest | Miss:
    """What a manifest says of its chunk, or what is wrong with it."""
    if len(value) < HEADER_BYTES:
        return Miss.TRUNCATED
    fields, rest = value[: _MANIFEST_FIELDS.size], value[HEADER_BYTES:]
    _, _, _, key, num_layers, num_kv_heads, head_dim, num_tokens, *others = _MANIFEST_FIELDS.unpack(
        fields
    )
    dtype, encoding, write_id, recompute_ms, id_bytes = others
    is_whole = len(rest) == 4 * num_tokens + id_bytes
    is_intact = value[_MANIFEST_FIELDS.size : HEADER_BYTES] == _digest(fields + rest)
    if not is_whole or not is_intact:
        return Miss.CORRUPT if is_whole else Miss.TRUNCATED
    if fields[:16] != _MANIFEST_MAGIC + struct.pack("<II", VALUE_VERSION, LAYOUT_VERSION):
        return Miss.FOREIGN
    if not 0.0 <= recompute_ms < math.inf:
        return Miss.FOREIGN
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
        write_id=write_id,
        token_bytes=rest[: 4 * num_tokens],
        recompute_ms=recompute_ms,
        content_id=rest[4 * num_tokens :].decode(errors="replace"),
    )


def write_id_in(value: bytes) -> bytes:
    """What stands in the place of the write id, whatever the value is like otherwise."""
    return value[_WRITE_ID_END - WRITE_ID_BYTES : _WRITE_ID_END]


def _start(prefix: str) -> str:
    return f"{prefix}:v{VALUE_VERSION}:{{"


def _common(
    magic: bytes, key: bytes, shape: StoredShape, write_id: bytes
) -> tuple[bytes | int, ...]:
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
        write_id,
    )


def _digest(content: bytes) -> bytes:
    return _CHECKSUM.pack(xxh3_64_intdigest(content))
