"""The byte layout: slices do not overlap, layers are aligned, headers tell the truth."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_tier import CorruptChunkError, EntryHeader, KvLayout, header_matches, pack_header
from kv_tier.layout import (
    ALIGN_BYTES,
    CHECKSUM_BYTES,
    HEADER_BYTES,
    parse_header,
    slice_checksums,
)

KEY = bytes(range(32))
LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16")

layouts = st.builds(
    KvLayout,
    num_layers=st.integers(1, 5),
    num_kv_heads=st.integers(1, 5),
    head_dim=st.sampled_from([1, 3, 64, 80]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16", "float8_e4m3fn"]),
)


@given(layouts, st.integers(1, 70))
def test_header_table_and_layers_are_disjoint_and_aligned(layout: KvLayout, n: int) -> None:
    last_slot = layout.checksum_slot(layout.num_layers - 1, 1, layout.num_kv_heads - 1)
    ends = HEADER_BYTES + (last_slot + 1) * CHECKSUM_BYTES
    for layer in range(layout.num_layers):
        start = layout.layer_offset(n, layer)
        assert start % ALIGN_BYTES == 0
        assert 0 <= start - ends < ALIGN_BYTES
        ends = start + layout.layer_bytes(n)
    assert 0 <= layout.entry_bytes(n) - ends < ALIGN_BYTES
    assert layout.layer_bytes(n) == 2 * layout.num_kv_heads * layout.head_bytes(n)
    assert layout.bytes_per_token * n == layout.num_layers * layout.layer_bytes(n)


@given(layouts)
def test_every_slice_has_a_checksum_slot_of_its_own(layout: KvLayout) -> None:
    slots = [
        layout.checksum_slot(layer, kv_idx, head)
        for layer in range(layout.num_layers)
        for kv_idx in (0, 1)
        for head in range(layout.num_kv_heads)
    ]
    assert slots == list(range(len(slots)))


@given(layouts, st.integers(1, 70))
def test_header_round_trip(layout: KvLayout, n: int) -> None:
    header = pack_header(layout, KEY, n)
    assert len(header) == HEADER_BYTES
    assert parse_header(header) == EntryHeader(key=KEY, layout=layout, num_tokens=n)
    assert header_matches(header, layout, KEY, n)


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_is_found(bit: int) -> None:
    header = bytearray(pack_header(LAYOUT, KEY, 9))
    header[bit // 8] ^= 1 << bit % 8
    assert not header_matches(bytes(header), LAYOUT, KEY, 9)


def test_a_header_of_another_chunk_or_shape_does_not_match() -> None:
    header = pack_header(LAYOUT, KEY, 9)
    assert not header_matches(header, LAYOUT, bytes(32), 9)
    assert not header_matches(header, LAYOUT, KEY, 8)
    assert not header_matches(header, replace(LAYOUT, num_layers=2), KEY, 9)
    assert not header_matches(header, replace(LAYOUT, num_kv_heads=4), KEY, 9)
    assert not header_matches(header, replace(LAYOUT, head_dim=16), KEY, 9)
    assert not header_matches(header, replace(LAYOUT, dtype="float16"), KEY, 9)


@pytest.mark.parametrize("header", [b"", bytes(HEADER_BYTES), pack_header(LAYOUT, KEY, 9)[:-1]])
def test_what_is_no_header_is_refused(header: bytes) -> None:
    with pytest.raises(CorruptChunkError):
        parse_header(header)


def test_a_checksum_is_bound_to_its_chunk_and_its_place() -> None:
    content = memoryview(b"the same bytes")
    size = len(content)
    checksums = {
        slice_checksums(key, slot, content, size) for key in (KEY, bytes(32)) for slot in (0, 1)
    }
    assert len(checksums) == 4


@pytest.mark.parametrize("change", [{"num_layers": 0}, {"head_dim": -1}, {"dtype": "int8"}])
def test_impossible_layouts_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="got"):
        replace(LAYOUT, **change)
