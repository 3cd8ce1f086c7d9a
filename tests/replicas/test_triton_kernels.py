"""The Triton kernels against their plain references, on random ragged inputs.

Without a GPU they run in Triton's interpreter. That is chosen when triton is first imported, so the
interpreter has a process of its own; there, and on a GPU, the same checks run.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context

import pytest
import torch

from replicas.attention import selected_attention_ref

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

FLOAT32 = {"atol": 1e-5, "rtol": 1e-5}  # sums in another order
# bf16 has 8 bits of mantissa: 2^-8 relative, once on the weights and once on the result, whose
# magnitude is up to 4
BFLOAT16 = {"atol": 3e-2, "rtol": 2e-2}
TOLERANCES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


@pytest.fixture(scope="module")
def interpreter():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(torch.set_num_threads, 1).result()  # starts the process
        yield pool


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request):
    """Calls a check, with the device first."""
    if request.param == "cpu":
        pool = request.getfixturevalue("interpreter")
        return lambda check, *args, **kwargs: pool.submit(check, "cpu", *args, **kwargs).result()
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return lambda check, *args, **kwargs: check("cuda", *args, **kwargs)


# ---- attention ----


class Ragged:
    """Five requests: sparse, dense from the first token on, all, none, and a single key."""

    def __init__(self, device, seed, heads, head_dim, dtype=torch.float32, most_keys=60):
        self.gen = torch.Generator().manual_seed(seed)
        self.device, self.dtype, self.head_dim = device, dtype, head_dim
        num_heads, num_kv_heads = heads
        self.q_offsets, self.k_offsets, positions = [0], [0], []
        for i in range(5):
            num_keys = int(torch.randint(1, most_keys, (), generator=self.gen)) if i < 4 else 1
            keep = torch.rand(num_keys, generator=self.gen) < (0.3, 0.2, 1.0, 0.0, 1.0)[i]
            if i == 1:
                keep[: num_keys // 2] = True
            chosen = keep.nonzero()[:, 0]
            positions.append(chosen)
            self.q_offsets.append(self.q_offsets[-1] + len(chosen))
            self.k_offsets.append(self.k_offsets[-1] + num_keys)
        self.positions = torch.cat(positions).to(device)
        self.scale = head_dim**-0.5
        self.q = self.rand(self.q_offsets[-1], num_heads)
        self.k = self.rand(self.k_offsets[-1], num_kv_heads)
        self.v = self.rand(self.k_offsets[-1], num_kv_heads)

    def rand(self, *shape):
        values = torch.randn(*shape, self.head_dim, generator=self.gen)
        return values.to(self.device, self.dtype)

    def plan(self, **kwargs):
        from replicas.triton_attention import TritonSelectedAttention

        return TritonSelectedAttention(self.positions, self.q_offsets, self.k_offsets, **kwargs)

    def expected(self):
        return selected_attention_ref(
            self.q.float(),
            self.k.float(),
            self.v.float(),
            self.positions,
            self.q_offsets,
            self.k_offsets,
            self.scale,
        )

    def check(self, out):
        assert out.dtype == self.dtype
        torch.testing.assert_close(out.float(), self.expected(), **TOLERANCES[self.dtype])


def check_wrapper(device, seed, heads, head_dim, dtype):
    from replicas.triton_attention import triton_selected_attention

    case = Ragged(device, seed, heads, head_dim, dtype)
    args = (case.positions, case.q_offsets, case.k_offsets, case.scale)
    case.check(triton_selected_attention(case.q, case.k, case.v, *args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 112, 128, 256])
def test_every_head_dim(run, head_dim, dtype):
    run(check_wrapper, 0, (4, 2), head_dim, dtype)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (9, 3), (5, 1), (16, 2)])
def test_every_grouping_of_heads(run, heads, seed):
    run(check_wrapper, seed, heads, 16, torch.float32)


def check_cut_tiles(device, seed, num_processors):
    """Small tiles: several blocks a request, of which some see all of a step's keys."""
    from replicas.triton_attention import TileShape

    small = TileShape(rows=16, keys=16, num_warps=4, num_stages=1)
    case = Ragged(device, seed, (3, 1), 16, most_keys=120)
    plan = case.plan(shape=small, num_processors=num_processors)
    for _ in range(2):  # as in two layers; the work list is kept
        case.check(plan(case.q, case.k, case.v, case.scale))
    work = plan._work_for(1, 3, small)
    assert (len(work.merges) > 0) == (num_processors > 1)  # else the test shows nothing


@pytest.mark.parametrize("num_processors", [1, 30, 1000])
@pytest.mark.parametrize("seed", range(2))
def test_tiles_cut_along_the_keys_are_merged(run, seed, num_processors):
    run(check_cut_tiles, seed, num_processors)


def check_paged(device, seed, block_size, dtype, layout):
    """vLLM's caches: K and V are halves of one tensor, before or behind the pages."""
    case = Ragged(device, seed, (6, 2), 32, dtype)
    lengths = [end - start for start, end in zip(case.k_offsets, case.k_offsets[1:], strict=False)]
    pages = [-(-n // block_size) for n in lengths]
    order = torch.randperm(sum(pages) + 3, generator=case.gen).to(device)
    if layout == "halves":
        cache = case.rand(2, len(order), block_size, 2)
        k, v = cache[0], cache[1]
    else:
        cache = case.rand(len(order), 2, block_size, 2)
        k, v = cache[:, 0], cache[:, 1]
    table = torch.full((len(lengths), max(pages)), -1, dtype=torch.int32, device=device)
    used = 0
    for i, length in enumerate(lengths):
        mine = order[used : used + pages[i]]
        used += pages[i]
        table[i, : pages[i]] = mine.to(torch.int32)
        at = torch.arange(length, device=device)
        rows = slice(case.k_offsets[i], case.k_offsets[i + 1])
        k[mine[at // block_size], at % block_size] = case.k[rows]
        v[mine[at // block_size], at % block_size] = case.v[rows]
    out = case.plan(num_processors=64)(case.q, k, v, case.scale, block_table=table)
    case.check(out)


@pytest.mark.parametrize("layout", ["halves", "pairs"])
@pytest.mark.parametrize(
    ("seed", "block_size", "dtype"), [(0, 16, torch.float32), (1, 12, torch.bfloat16)]
)
def test_keys_in_pages(run, seed, block_size, dtype, layout):
    run(check_paged, seed, block_size, dtype, layout)


def check_strided(device, seed):
    case = Ragged(device, seed, (4, 2), 32)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (case.q, case.k, case.v)]
    case.check(case.plan()(*heads_first, case.scale))
    qkv = torch.cat((case.k, case.rand(len(case.k), 1), case.v), dim=1)  # slices of one projection
    case.check(case.plan()(case.q, qkv[:, :2], qkv[:, 3:], case.scale))


@pytest.mark.parametrize("seed", range(2))
def test_any_strides(run, seed):
    run(check_strided, seed)


def check_hidden_keys(device, seed):
    case = Ragged(device, seed, (4, 2), 16)
    before = case.plan()(case.q, case.k, case.v, case.scale)
    row = (case.q_offsets[1] + case.q_offsets[2]) // 2  # in the middle of the second request
    behind = slice(case.k_offsets[1] + int(case.positions[row]) + 1, case.k_offsets[2])
    case.v[behind] = 1e3
    after = case.plan()(case.q, case.k, case.v, case.scale)
    torch.testing.assert_close(after[: row + 1], before[: row + 1])
    assert not torch.equal(after[row + 1], before[row + 1])  # else the test shows nothing


def test_a_query_never_sees_later_keys(run):
    run(check_hidden_keys, 3)


def check_nothing_to_do(device):
    from replicas.triton_attention import triton_selected_attention

    q = torch.empty(0, 4, 32, device=device)
    k = torch.randn(7, 2, 32, device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert triton_selected_attention(q, k, k, none, [0, 0], [0, 7], 1.0).shape == (0, 4, 32)


def test_no_queries_at_all(run):
    run(check_nothing_to_do)


def check_refused(device):
    """What would read another request's memory, or give a wrong answer quietly."""
    from replicas.triton_attention import TritonSelectedAttention

    def refused(match, positions, q_offsets, k_offsets):
        with pytest.raises(ValueError, match=match):
            TritonSelectedAttention(torch.tensor(positions, device=device), q_offsets, k_offsets)

    refused("no key", [0, 5], [0, 2], [0, 5])
    refused("sorted", [3, 1], [0, 2], [0, 5])
    refused("offsets say", [1, 3], [0, 1], [0, 5])
    case = Ragged(device, 0, (4, 2), 32)
    for match, args in {
        "queries": (case.q[1:], case.k, case.v),
        "dtypes": (case.q, case.k.double(), case.v),
        "contiguous": (case.q, case.k, case.v.transpose(1, 2).contiguous().transpose(1, 2)),
        "evenly": (case.q[:, :3], case.k, case.v),
        "head dims": (case.q[..., :8], case.k[..., :8], case.v[..., :8]),
    }.items():
        with pytest.raises(ValueError, match=match):
            case.plan()(*args, case.scale)


def test_impossible_inputs_are_refused(run):
    run(check_refused)


# ---- stitch ----


def check_stitch(device, seed, heads, head_dim, dtype, layout):
    from replicas.triton_stitch import stitch_rotated, stitch_rotated_ref

    gen = torch.Generator().manual_seed(seed)
    num_tokens, num_rows = int(torch.randint(1, 70, (), generator=gen)), 96

    def rand(*shape):
        return torch.randn(*shape, generator=gen).to(device, dtype)

    stored = rand(2, heads, num_tokens + 5, head_dim)[:, :, 2 : num_tokens + 2]  # inside a chunk
    angle = torch.rand(num_tokens, head_dim // 2, generator=gen).to(device) * 100
    rows = torch.randperm(num_rows, generator=gen)[:num_tokens].to(device)
    rows[num_tokens // 2] = -1  # a token that goes nowhere
    cache = {
        "rows": lambda: rand(2, num_rows, heads, head_dim),
        "wide rows": lambda: rand(2, num_rows, heads + 3, head_dim)[:, :, 1 : heads + 1],
        "halves": lambda: rand(2, 6, 16, heads, head_dim),
        "pairs": lambda: rand(6, 2, 16, heads, head_dim).transpose(0, 1),
    }[layout]()
    expected = cache.clone()
    stitch_rotated_ref(*stored, angle.cos(), angle.sin(), *expected, rows)
    stitch_rotated(*stored, angle.cos(), angle.sin(), *cache, rows)
    assert not torch.equal(cache[0], cache[1])
    torch.testing.assert_close(cache[0], expected[0], **TOLERANCES[dtype])
    assert torch.equal(cache[1], expected[1])  # values are copied, the other rows left alone


@pytest.mark.parametrize("layout", ["rows", "wide rows", "halves", "pairs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("seed", "heads", "head_dim"), [(0, 2, 32), (1, 1, 80), (2, 3, 128)])
def test_stitch(run, seed, heads, head_dim, dtype, layout):
    run(check_stitch, seed, heads, head_dim, dtype, layout)


def test_the_stitch_reference_rotates_by_the_angle():
    """At head_dim 2, RoPE turns a point of the plane."""
    from replicas.triton_stitch import stitch_rotated_ref

    point = torch.tensor([[[3.0, 4.0]]])
    angle = torch.tensor([[torch.pi / 2]])
    out_k, out_v = torch.zeros(2, 1, 2), torch.zeros(2, 1, 2)
    stitch_rotated_ref(
        point, point, angle.cos(), angle.sin(), out_k, out_v, torch.tensor([1], dtype=torch.int64)
    )
    torch.testing.assert_close(out_k, torch.tensor([[[0.0, 0.0]], [[-4.0, 3.0]]]))
    assert torch.equal(out_v, torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]]]))


# ---- the work list ----


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_programs", [1, 7, 1000])
def test_tiles_cover_each_visible_key_once(seed, num_programs):
    from replicas.triton_attention import plan_tiles

    case = Ragged("cpu", seed, (1, 1), 16, most_keys=300)
    positions = case.positions.numpy()
    q_offsets, k_offsets = map(torch.tensor, (case.q_offsets, case.k_offsets))
    tiles, merges = plan_tiles(
        positions,
        q_offsets.numpy(),
        k_offsets.numpy(),
        rows=8,
        keys=16,
        num_programs=num_programs,
    )
    seen = torch.zeros(len(positions), 300, dtype=torch.int64)
    for row, row_end, key, open_end, key_end, base, request, _ in tiles.tolist():
        assert case.q_offsets[request] <= row < row_end <= case.q_offsets[request + 1]
        assert base == case.k_offsets[request]
        assert key % 16 == open_end % 16 == 0 and key <= open_end <= key_end
        # without a mask, the first row sees them all
        assert open_end == key or open_end <= positions[row] + 1
        seen[row:row_end, key:key_end] += 1
    for row, position in enumerate(positions.tolist()):
        assert (seen[row, : position + 1] == 1).all()
    assert (seen <= 1).all()
    lengths = [tile[4] - tile[2] for tile in tiles.tolist()]
    assert lengths == sorted(lengths, reverse=True)
    parts = sorted(tile[7] for tile in tiles.tolist() if tile[7] >= 0)
    assert parts == list(range(int(merges[:, 3].sum())))


# ---- compilation ----


def _signature(kernel, pointers, constants, number="i32"):
    """Types of a kernel's arguments, all pointers and strides aligned as real ones are."""
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = pointers.get(name, "fp32" if name == "scale" else number)
        if name not in ("scale", "num_kv_heads", "num_tokens", "table_row"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    return signature, aligned


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "page"),
    [
        (torch.bfloat16, 128, 4, 0),
        (torch.bfloat16, 128, 8, 16),
        (torch.bfloat16, 64, 3, 0),
        (torch.float32, 128, 4, 0),
    ],
)
def test_attention_compiles_for_hopper(dtype, head_dim, group, page, tmp_path, monkeypatch):
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from replicas import triton_attention

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = triton_attention._attend
    shape = triton_attention.tile_shape(head_dim, dtype, rows=10_000, group=group)
    is_exact = dtype == torch.float32
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "WIDTH": head_dim,
        "ROWS": shape.rows,
        "KEYS": shape.keys,
        "PAGE": page,
        "FACTOR": tl.float32 if is_exact else tl.bfloat16,
    }
    data = dict.fromkeys(("q", "k", "v", "out"), "*fp32" if is_exact else "*bf16")
    scratch = dict.fromkeys(("partial", "stats"), "*fp32")
    tables = dict.fromkeys(("tiles", "positions", "block_table"), "*i32")
    signature, aligned = _signature(kernel, data | scratch | tables, constants)
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": shape.num_warps, "num_stages": shape.num_stages},
    )
    assert compiled.metadata.shared <= 227 * 1024  # what a program may have on Hopper
    if not is_exact:  # Hopper's own matrix instruction, the copies of a step under another's
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert "cp.async" in compiled.asm["ptx"]
    else:
        assert "tf32" not in compiled.asm["ptx"]


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)
@pytest.mark.parametrize("name", ["_merge", "_stitch"])
def test_the_other_kernels_compile_for_hopper(name, tmp_path, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from replicas import triton_attention, triton_stitch

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if name == "_merge":
        kernel = triton_attention._merge
        constants = {"GROUP": 4, "HEAD_DIM": 128, "WIDTH": 128, "ROWS": 128, "MERGE_ROWS": 16}
        pointers = {"out": "*bf16", "partial": "*fp32", "stats": "*fp32", "merges": "*i32"}
    else:
        kernel = triton_stitch._stitch
        constants = {"HALF": 64, "WIDTH": 64, "PAGE": 16, "BLOCK_TOKENS": 16}
        pointers = dict.fromkeys(("stored_k", "stored_v", "out_k", "out_v"), "*bf16")
        pointers |= {"cos": "*fp32", "sin": "*fp32", "rows": "*i64"}
    signature, aligned = _signature(kernel, pointers, constants)
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned), target=GPUTarget("cuda", 90, 32)
    )
    assert "ld.global.v4" in compiled.asm["ptx"]  # 16 bytes a thread
