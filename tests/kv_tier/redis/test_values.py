"""Names and bytes of what is stored: every value says what it is, and is checked."""

import math
from dataclasses import replace

import pytest

from kv_tier import ChunkLocation, KvLayout
from kv_tier.keys import token_bytes
from kv_tier.layout import slice_checksums
from kv_tier.redis import ChunkWrite, Encoding, Manifest, Miss, StoredShape
from kv_tier.redis.values import (
    check_prefix,
    chunk_names,
    is_our_name,
    layer_name,
    manifest_name,
    pack_manifest,
    pack_prefix,
    parse_manifest,
    parse_name,
)
from tests.kv_tier.redis.cases import LAYOUT, NUM_TOKENS, WRITE_ID, query

KEY = query(1).key
SHAPE = StoredShape(layout=LAYOUT, num_tokens=NUM_TOKENS, encoding=Encoding.RAW)
TABLE = bytes(range(2 * LAYOUT.num_kv_heads * 8))


def test_a_chunk_has_one_hash_tag_and_names_that_are_told_apart() -> None:
    names = chunk_names("a:b", KEY, 3)
    tag = b"a:b:v1:{" + KEY.hex().encode() + b"}:"
    assert names == [tag + end for end in (b"chunk", b"0", b"1", b"2")]
    assert parse_name("a:b", manifest_name("a:b", KEY)) == (KEY, None)
    assert parse_name("a:b", layer_name("a:b", KEY, 17)) == (KEY, 17)


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"a:b:v1",
        b"a:b:v2:{" + KEY.hex().encode() + b"}:0",
        b"a:b:v1:{" + KEY.hex().encode()[:-2] + b"}:0",
        b"a:b:v1:{" + b"zz" * 32 + b"}:0",
        b"a:b:v1:{" + KEY.hex().encode() + b"}:x",
        b"xa:b:v1:{" + KEY.hex().encode() + b"}:0",
        b"a:c:v1:{" + KEY.hex().encode() + b"}:0",
        b"\xff\xfe",
    ],
)
def test_names_of_others_are_not_ours(name: bytes) -> None:
    assert parse_name("a:b", name) is None


def test_no_bit_of_a_prefix_can_change_unseen() -> None:
    prefix = pack_prefix(KEY, SHAPE, WRITE_ID, 1, TABLE)
    assert len(prefix) == SHAPE.prefix_bytes
    assert check_prefix(memoryview(prefix), KEY, SHAPE, WRITE_ID, 1) is None
    for bit in range(8 * len(prefix)):
        changed = bytearray(prefix)
        changed[bit // 8] ^= 1 << bit % 8
        assert check_prefix(memoryview(changed), KEY, SHAPE, WRITE_ID, 1) is Miss.CORRUPT


def test_a_prefix_of_any_other_place_does_not_pass() -> None:
    prefix = memoryview(pack_prefix(KEY, SHAPE, WRITE_ID, 1, TABLE))
    layout = replace(LAYOUT, dtype="float16")
    for key, shape, layer in [
        (query(2).key, SHAPE, 1),
        (KEY, SHAPE, 2),
        (KEY, replace(SHAPE, num_tokens=NUM_TOKENS + 1), 1),
        (KEY, replace(SHAPE, encoding=Encoding.INT8), 1),
        (KEY, replace(SHAPE, layout=layout), 1),
        (KEY, replace(SHAPE, layout=replace(LAYOUT, num_layers=4)), 1),
    ]:
        assert check_prefix(prefix, key, shape, WRITE_ID, layer) is Miss.CORRUPT
    assert check_prefix(prefix[:-1], KEY, SHAPE, WRITE_ID, 1) is Miss.TRUNCATED
    assert check_prefix(prefix[:0], KEY, SHAPE, WRITE_ID, 1) is Miss.TRUNCATED


def test_a_layer_of_another_write_is_told_from_damage() -> None:
    prefix = bytearray(pack_prefix(KEY, SHAPE, b"another.", 1, TABLE))
    assert check_prefix(memoryview(prefix), KEY, SHAPE, WRITE_ID, 1) is Miss.REPLACED
    as_int8 = replace(SHAPE, encoding=Encoding.INT8)
    assert check_prefix(memoryview(prefix), KEY, as_int8, WRITE_ID, 1) is Miss.REPLACED
    prefix[-1] ^= 1
    assert check_prefix(memoryview(prefix), KEY, SHAPE, WRITE_ID, 1) is Miss.CORRUPT


def manifest() -> Manifest:
    return Manifest(
        key=KEY,
        shape=SHAPE,
        write_id=WRITE_ID,
        token_bytes=token_bytes(query(1).token_ids),
        recompute_ms=12.5,
        content_id="a passage",
    )


def test_a_manifest_comes_back() -> None:
    assert parse_manifest(pack_manifest(manifest())) == manifest()
    bare = replace(manifest(), content_id="", recompute_ms=0.0)
    assert parse_manifest(pack_manifest(bare)) == bare


@pytest.mark.parametrize("recompute_ms", [math.nan, math.inf, -1.0])
def test_a_recompute_time_that_can_not_be_is_foreign(recompute_ms: float) -> None:
    value = pack_manifest(replace(manifest(), recompute_ms=recompute_ms))
    assert parse_manifest(value) is Miss.FOREIGN
    with pytest.raises(ValueError, match="recompute_ms"):
        ChunkWrite(
            location=ChunkLocation(key=KEY, offset=0, nbytes=1, num_tokens=1),
            token_ids=[1],
            recompute_ms=recompute_ms,
            release=lambda: None,
        )


@pytest.mark.parametrize("name", [manifest_name("a:b", KEY), layer_name("a:b", KEY, 17)])
def test_names_of_other_versions_are_ours_too(name: bytes) -> None:
    assert is_our_name("a:b", name)
    assert is_our_name("a:b", name.replace(b":v1:", b":v12:"))
    for other in (b"x" + name, name + b"x", name.replace(b":v1:", b":vx:")):
        assert not is_our_name("a:b", other)
    assert not is_our_name("a", name)


def test_no_bit_of_a_manifest_can_change_unseen() -> None:
    value = pack_manifest(manifest())
    for bit in range(8 * len(value)):
        changed = bytearray(value)
        changed[bit // 8] ^= 1 << bit % 8
        assert isinstance(parse_manifest(bytes(changed)), Miss)
    for length in range(len(value)):
        assert isinstance(parse_manifest(value[:length]), Miss)


def test_raw_values_are_what_the_arena_holds() -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    shape = StoredShape(layout=layout, num_tokens=256, encoding=Encoding.RAW)
    assert shape.payload_bytes == layout.layer_bytes(256) == 1 << 20
    assert shape.prefix_bytes == 256
    small = replace(shape, encoding=Encoding.INT8)
    assert small.payload_bytes == (1 << 19) * 132 // 128


def test_checksums_of_neighbours_are_those_of_each() -> None:
    content = memoryview(bytes(range(240)))
    for key, slot in ((KEY, 5), (b"\xff" * 32, 1)):  # the second seed runs over
        each = [
            slice_checksums(key, slot + i, content[i * 60 : (i + 1) * 60], 60) for i in range(4)
        ]
        assert slice_checksums(key, slot, content, 60) == b"".join(each)
