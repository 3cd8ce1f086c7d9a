"""Reading, writing and checking the bytes of one entry."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kv_tier import ArenaUnavailableError, ArenaView, ChunkLocation, KvLayout
from kv_tier.arena_dir import ArenaDir
from tests.kv_tier.arena_cases import (
    LAYOUT,
    holds,
    kv_of,
    num_tokens_in,
    open_tier,
    store,
    write_heads,
)


@pytest.fixture
def entry(tmp_path: Path) -> tuple[ArenaView, ChunkLocation]:
    """Chunk 1, written whole, after another entry."""
    with open_tier(tmp_path) as tier:
        store(tier, 0)
        location = store(tier, 1, 2)
    view = ArenaView(tmp_path, LAYOUT)
    write_heads(view, location, 1, 0, 4)
    return view, location


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("num_writers", "num_readers"), [(1, 2), (2, 1), (4, 2), (1, 4)])
def test_any_split_of_heads_reads_what_any_other_wrote(
    tmp_path: Path, dtype: str, num_writers: int, num_readers: int
) -> None:
    layout = KvLayout(num_layers=3, num_kv_heads=4, head_dim=5, dtype=dtype)
    with open_tier(tmp_path, layout=layout) as tier:
        location = store(tier, 1)
    for rank in range(num_writers):
        num_heads = 4 // num_writers
        write_heads(ArenaView(tmp_path, layout), location, 1, rank * num_heads, num_heads)
    for rank in range(num_readers):
        num_heads = 4 // num_readers
        assert holds(ArenaView(tmp_path, layout), location, 1, rank * num_heads, num_heads)


def test_token_major_tensors_are_written_through_a_transposed_view(
    entry: tuple[ArenaView, ChunkLocation],
) -> None:
    view, location = entry
    k, v = (kv.transpose(0, 1).contiguous() for kv in kv_of(7, 0, location.num_tokens))
    assert k.shape == (location.num_tokens, 4, 8)
    view.write_layer(location, 0, 0, k.transpose(0, 1), v.transpose(0, 1))
    found_k, found_v = view.read_layer(location, 0, 0, 4)
    assert torch.equal(found_k, k.transpose(0, 1))
    assert torch.equal(found_v, v.transpose(0, 1))


def test_reads_are_views_and_outlive_the_view_object(
    entry: tuple[ArenaView, ChunkLocation],
) -> None:
    view, location = entry
    k, v = view.read_layer(location, 1, 1, 2)
    assert k.shape == v.shape == (2, num_tokens_in(2), 8)
    assert k.is_contiguous() and v.is_contiguous()
    first, last = view.mapping.data_ptr(), view.mapping.data_ptr() + len(view.mapping)
    assert first <= k.data_ptr() < v.data_ptr() < last
    wanted_k, wanted_v = kv_of(1, 1, location.num_tokens)[:, 1:3]
    del view, entry
    assert torch.equal(k, wanted_k) and torch.equal(v, wanted_v)


def test_a_flipped_bit_fails_its_head_and_no_other(entry: tuple[ArenaView, ChunkLocation]) -> None:
    view, location = entry
    for kv_idx in (0, 1):
        at = location.offset + LAYOUT.layer_offset(location.num_tokens, 1)
        at += (kv_idx * 4 + 2) * LAYOUT.head_bytes(location.num_tokens) + 17
        view.mapping[at] ^= 4
        assert not view.verify_layer(location, 1, 2, 1)
        assert not view.verify_layer(location, 1, 0, 4)
        assert view.verify_layer(location, 1, 0, 2)
        assert view.verify_layer(location, 1, 3, 1)
        assert view.verify_layer(location, 0, 0, 4)
        view.mapping[at] ^= 4
        assert view.verify_layer(location, 1, 0, 4)


def test_layers_of_another_chunk_do_not_verify(entry: tuple[ArenaView, ChunkLocation]) -> None:
    view, location = entry
    late = replace(location, key=bytes(32))  # a writer whose space was given to this entry
    k, v = kv_of(9, 0, location.num_tokens)
    view.write_layer(late, 0, 0, k, v)
    assert not view.verify_layer(location, 0, 0, 4)


def test_headers_tell_chunk_and_shape(entry: tuple[ArenaView, ChunkLocation]) -> None:
    view, location = entry
    assert view.verify_header(location)
    view.write_header(location)
    assert view.verify_header(location)
    for other in (
        replace(location, key=bytes(32)),
        replace(location, num_tokens=location.num_tokens - 1),
        replace(location, offset=0),
        replace(location, offset=len(view.mapping)),
        replace(location, offset=-4096),
    ):
        assert not view.verify_header(other)
    view.mapping[location.offset + 50] ^= 1
    assert not view.verify_header(location)


def test_a_reused_extent_without_its_header_does_not_verify(tmp_path: Path) -> None:
    with open_tier(tmp_path, num_granules=1) as tier:
        location = store(tier, 1)
        view = ArenaView(tmp_path, LAYOUT)
        write_heads(view, location, 1, 0, 4)
        reused = store(tier, 2)
    assert reused.offset == location.offset
    assert not view.verify_header(reused)
    assert not view.verify_layer(reused, 0, 0, 4)


def test_wrong_slices_and_tensors_are_refused(entry: tuple[ArenaView, ChunkLocation]) -> None:
    view, location = entry
    k, v = kv_of(1, 0, location.num_tokens)
    for layer, head_start, num_heads in ((2, 0, 1), (-1, 0, 1), (0, 3, 2), (0, -1, 1), (0, 0, 0)):
        with pytest.raises(ValueError, match="no layer"):
            view.read_layer(location, layer, head_start, num_heads)
    with pytest.raises(ValueError, match="not an entry"):
        view.read_layer(replace(location, offset=1 << 40), 0, 0, 1)
    with pytest.raises(ValueError, match="k must be"):
        view.write_layer(location, 0, 0, k[:, 1:], v[:, 1:])
    with pytest.raises(ValueError, match="v must be"):
        view.write_layer(location, 0, 0, k, v.half())


def test_an_arena_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArenaUnavailableError, match=str(tmp_path)):
        ArenaView(tmp_path, LAYOUT)
    ArenaDir(tmp_path).arena.touch()
    with pytest.raises(ArenaUnavailableError, match=str(tmp_path)):
        ArenaView(tmp_path, LAYOUT)
