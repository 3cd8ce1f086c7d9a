"""The fast attention against its plain reference, on random ragged inputs."""

import sys
from itertools import accumulate
from types import ModuleType

import pytest
import torch

from replicas import attention
from replicas.attention import (
    SelectedAttention,
    selected_attention,
    selected_attention_ref,
)

SMALL = {"SAVED_PAIRS": 40, "SHARED_PAIRS": 1, "KEY_TILE": 4}

# Each part of a query's result is rounded to bf16's 8 bits, and so is what merges them: a few times
# 2^-9 relative, on outputs of magnitude 1 to 3.
BF16 = {"atol": 3e-2, "rtol": 3e-2}
FLOAT32 = {"atol": 1e-5, "rtol": 1e-5}


def ragged(seed, *, num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, share=0.3):
    gen = torch.Generator().manual_seed(seed)
    q_offsets, k_offsets, positions = [0], [0], []
    for i in range(5):
        num_keys = int(torch.randint(1, 90, (), generator=gen))
        keep = torch.rand(num_keys, generator=gen) < (1.0 if i == 2 else 0.0 if i == 3 else share)
        keep[: num_keys // 2] |= i == 1  # a dense beginning, such as a prefix and missed chunks
        chosen = keep.nonzero()[:, 0]
        positions.append(chosen)
        q_offsets.append(q_offsets[-1] + len(chosen))
        k_offsets.append(k_offsets[-1] + num_keys)
    return inputs(gen, positions, q_offsets, k_offsets, num_heads, num_kv_heads, head_dim, dtype)


def of_requests(seed, requests, *, num_heads=6, num_kv_heads=2, head_dim=16, dtype=torch.float32):
    """Requests as (positions of the queries, number of keys)."""
    gen = torch.Generator().manual_seed(seed)
    positions = [torch.tensor(list(rows), dtype=torch.int64) for rows, _ in requests]
    q_offsets = [0, *accumulate(len(rows) for rows in positions)]
    k_offsets = [0, *accumulate(num_keys for _, num_keys in requests)]
    return inputs(gen, positions, q_offsets, k_offsets, num_heads, num_kv_heads, head_dim, dtype)


def inputs(gen, positions, q_offsets, k_offsets, num_heads, num_kv_heads, head_dim, dtype):
    def rand(rows, heads):
        return torch.randn(rows, heads, head_dim, generator=gen).to(dtype)

    return (
        rand(q_offsets[-1], num_heads),
        rand(k_offsets[-1], num_kv_heads),
        rand(k_offsets[-1], num_kv_heads),
        torch.cat(positions),
        q_offsets,
        k_offsets,
        head_dim**-0.5,
    )


def shrink(monkeypatch):
    """Several blocks and shared parts at test sizes."""
    for name, value in SMALL.items():
        monkeypatch.setattr(attention, name, value)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 2), (3, 1)])
def test_fast_equals_reference(seed, num_heads, num_kv_heads, monkeypatch):
    shrink(monkeypatch)
    monkeypatch.setattr(attention, "MAX_KEPT_MASK", 200)  # some masks kept, some not
    args = ragged(seed, num_heads=num_heads, num_kv_heads=num_kv_heads)
    torch.testing.assert_close(selected_attention(*args), selected_attention_ref(*args), **FLOAT32)


SHAPES = {
    "dense prefix, then few": [([*range(40), 47, 61, 62, 89], 90)],
    "short dense prefix": [([0, 1, 9, 30, 31, 32, 33, 34, 77], 90)],
    "dense run in the middle": [([5, *range(30, 70), 88], 90)],
    "one row": [([43], 90)],
    "the first row": [([0], 90)],
    "the last row": [([89], 90)],
    "last rows": [(range(78, 90), 90)],
    "last rows, then keys behind them": [(range(60, 72), 90)],
    "all rows": [(range(90), 90)],
    "one key": [([0], 1)],
    "no queries": [([], 90)],
    "no queries beside some": [([], 13), ([3, 11, 12], 14), ([], 1), (range(8), 8), ([], 5)],
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("blocks", ["small", "real"])
@pytest.mark.parametrize("requests", SHAPES.values(), ids=SHAPES.keys())
def test_shapes_equal_reference(seed, blocks, requests, monkeypatch):
    if blocks == "small":
        shrink(monkeypatch)
    args = of_requests(seed, requests)
    torch.testing.assert_close(selected_attention(*args), selected_attention_ref(*args), **FLOAT32)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, FLOAT32), (torch.bfloat16, BF16)], ids=str
)
def test_real_block_sizes_with_shared_keys(seed, dtype, tolerance):
    """A size at which blocks, shared keys and an end that fills no tile all occur unshrunk."""
    rows = torch.rand(1490, generator=torch.Generator().manual_seed(seed)) < 0.3
    args = of_requests(seed, [(rows.nonzero()[:, 0], 1490), (range(80, 90), 90)], dtype=dtype)
    wide = [a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    torch.testing.assert_close(
        selected_attention(*args).float(), selected_attention_ref(*wide), **tolerance
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("group", [1, 3])
def test_pieces_cover_what_is_seen_once(seed, group, monkeypatch):
    shrink(monkeypatch)
    num_keys = 117
    gen = torch.Generator().manual_seed(seed)
    positions = (torch.rand(num_keys, generator=gen) < 0.4).nonzero()[:, 0]
    covered = torch.zeros(len(positions), num_keys, dtype=torch.int64)
    pieces = list(attention._pieces(positions, 0, len(positions), 0, num_keys, group, 1))
    for piece in pieces:
        keys = torch.arange(piece.first_key, piece.last_key)
        visible = torch.ones(piece.end - piece.start, len(keys), dtype=torch.bool)
        if piece.seen is not None:
            visible = (keys <= positions[piece.start : piece.end, None]) & (keys >= piece.seen)
        assert visible.any(dim=1).all()  # the kernel's sum of no keys cannot be merged
        covered[piece.start : piece.end, piece.first_key : piece.last_key] += visible
    expected = torch.arange(num_keys) <= positions[:, None]
    assert torch.equal(covered, expected.long())
    assert any(piece.seen is None for piece in pieces)
    assert len(pieces) > 4


@pytest.mark.parametrize("seed", range(2))
def test_a_plan_runs_in_models_of_any_group(seed, monkeypatch):
    shrink(monkeypatch)
    _, _, _, positions, q_offsets, k_offsets, _ = ragged(seed)
    plan = SelectedAttention(positions, q_offsets, k_offsets, torch.float32)
    for num_heads, num_kv_heads in [(4, 2), (6, 2), (4, 2)]:
        q, k, v, *rest = ragged(seed, num_heads=num_heads, num_kv_heads=num_kv_heads)
        expected = selected_attention_ref(q, k, v, *rest)
        torch.testing.assert_close(plan(q, k, v, rest[-1]), expected, **FLOAT32)


@pytest.mark.parametrize("seed", range(2))
def test_keys_and_values_may_be_views(seed, monkeypatch):
    shrink(monkeypatch)
    q, k, v, *rest = ragged(seed)
    packed = torch.cat([q.flatten(1)[:1].expand(len(k), -1), k.flatten(1), v.flatten(1)], dim=1)
    _, k_view, v_view = packed.split([q[0].numel(), k[0].numel(), v[0].numel()], dim=1)
    viewed = selected_attention(q, k_view.view(k.shape), v_view.view(v.shape), *rest)
    torch.testing.assert_close(viewed, selected_attention_ref(q, k, v, *rest), **FLOAT32)
    spread = [x.repeat_interleave(2, dim=-1)[..., ::2] for x in (q, k, v)]
    spaced = selected_attention(*spread, *rest)
    torch.testing.assert_close(spaced, selected_attention_ref(q, k, v, *rest), **FLOAT32)


@pytest.mark.parametrize("seed", range(2))
def test_bfloat16_is_close_to_the_float32_reference(seed, monkeypatch):
    shrink(monkeypatch)
    args = ragged(seed, dtype=torch.bfloat16)
    wide = [a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    torch.testing.assert_close(
        selected_attention(*args).float(), selected_attention_ref(*wide), **BF16
    )


@pytest.mark.parametrize("blocks", ["small", "real"])
@pytest.mark.parametrize("row", range(7))
def test_a_query_never_sees_later_keys(row, blocks, monkeypatch):
    if blocks == "small":
        shrink(monkeypatch)
    q, k, v, positions, *rest = of_requests(3, [([3, 9, 20, 21, 22, 40, 71], 90)])
    before = selected_attention(q, k, v, positions, *rest)
    later = slice(int(positions[row]) + 1, 90)
    k[later], v[later] = 1e3, 1e3
    after = selected_attention(q, k, v, positions, *rest)
    torch.testing.assert_close(before[: row + 1], after[: row + 1])
    assert not torch.allclose(before[row + 1 :], after[row + 1 :]) or row == 6


class FakeTriton(ModuleType):
    """The kernel's module, whose plans answer with the reference."""

    def __init__(self):
        super().__init__("replicas.triton_attention")
        self.calls = 0

    def TritonSelectedAttention(self, q_positions, q_offsets, k_offsets):
        def plan(q, k, v, scale):
            self.calls += 1
            return selected_attention_ref(q, k, v, q_positions, q_offsets, k_offsets, scale)

        return plan


@pytest.fixture
def triton(monkeypatch):
    fake = FakeTriton()
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    return fake


@pytest.mark.parametrize(("backend", "calls"), [("triton", 2), ("torch", 0), ("auto", 0)])
def test_the_backend_is_the_one_that_was_asked_for(backend, calls, triton):
    q, k, v, positions, q_offsets, k_offsets, scale = ragged(1)
    plan = SelectedAttention(positions, q_offsets, k_offsets, q.dtype, backend=backend)
    expected = selected_attention_ref(q, k, v, positions, q_offsets, k_offsets, scale)
    for _ in range(2):
        torch.testing.assert_close(plan(q, k, v, scale), expected, **FLOAT32)
    assert triton.calls == calls


def test_auto_is_triton_on_cuda_where_it_can_be_imported(triton, monkeypatch):
    cuda = torch.device("cuda")
    assert attention._triton_plan("auto", cuda) == triton.TritonSelectedAttention
    assert attention._triton_plan("torch", cuda) is None
    monkeypatch.setitem(sys.modules, triton.__name__, None)  # as if it could not be imported
    assert attention._triton_plan("auto", cuda) is None
    with pytest.raises(ImportError):
        attention._triton_plan("triton", cuda)


@pytest.mark.parametrize(
    ("requests", "calls"), [([(range(5), 5), (range(3), 9)], 0), ([(range(5), 5), ([1], 9)], 1)]
)
def test_auto_leaves_causal_attention_to_torch(requests, calls, triton, monkeypatch):
    choose = attention._triton_plan
    monkeypatch.setattr(attention, "_triton_plan", lambda b, _: choose(b, torch.device("cuda")))
    args = of_requests(0, requests)
    torch.testing.assert_close(selected_attention(*args), selected_attention_ref(*args), **FLOAT32)
    assert triton.calls == calls


@pytest.mark.parametrize("seed", range(2))
def test_other_devices_than_the_cpu_need_no_merge(seed, monkeypatch):
    """Kernels that return no sums of exponentials get every key of a query in one call."""
    shrink(monkeypatch)
    monkeypatch.setattr(attention, "_merges", lambda device: False)
    monkeypatch.delattr(attention, "_cpu_flash")
    args = ragged(seed)
    torch.testing.assert_close(selected_attention(*args), selected_attention_ref(*args), **FLOAT32)
