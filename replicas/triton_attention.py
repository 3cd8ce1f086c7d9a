"""`selected_attention` in Triton, for GPUs: each tile of keys is read once for many queries.

A tile of the kernel holds some sorted query rows times the group of heads that share a KV head, so
a selection of 15% still fills the tensor cores. Its keys end at its last row's position; only those
behind its first row's position need the mask. Keys may lie packed or in an engine's pages.

The plain statement of what is computed is `replicas.attention.selected_attention_ref`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST_HEAD_DIM, MOST_HEAD_DIM = 16, 256  # others than powers of two are padded in registers
MERGE_ROWS = 16  # tile rows that a program of the merging kernel takes


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """How one program of the kernel cuts its work."""

    rows: int  # query rows times heads of a group, a power of two
    keys: int  # of one step, a power of two
    num_warps: int
    num_stages: int


def tile_shape(head_dim: int, dtype: torch.dtype, *, rows: int, group: int) -> TileShape:
    """What suits a Hopper GPU: two warp groups on 128 rows, two steps of K and V in flight.

    rows: the most rows times heads that a request has; less than a full tile takes a smaller one.
    group: heads that share a KV head, all of them in one tile
    """
    if dtype == torch.float32:  # without tensor cores, so that it is exact; few registers' worth
        most, keys, num_stages = (32, 32, 2) if head_dim <= 64 else (16, 16, 2)
    elif head_dim <= 64:
        most, keys, num_stages = 128, 128, 3
    elif head_dim <= 128:
        most, keys, num_stages = 128, 128, 2
    else:
        most, keys, num_stages = 64, 64, 2
    most = max(most, triton.next_power_of_2(group))
    fitting = min(most, max(16, triton.next_power_of_2(rows)))
    num_warps = 8 if fitting >= 128 else 4
    return TileShape(rows=fitting, keys=keys, num_warps=num_warps, num_stages=num_stages)


def triton_selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    q_offsets: Sequence[int],
    k_offsets: Sequence[int],
    scale: float,
    *,
    block_table: Tensor | None = None,
    block_size: int | None = None,
) -> Tensor:
    """As `selected_attention_ref`; `q_positions` ascend in a request.

    block_table, block_size: the pages of each request, see `TritonSelectedAttention`
    """
    if block_size is not None and k.shape[1] != block_size:
        raise ValueError(f"pages of {k.shape[1]} keys, but block_size is {block_size}")
    plan = TritonSelectedAttention(q_positions, q_offsets, k_offsets)
    return plan(q, k, v, scale, block_table=block_table)


class TritonSelectedAttention:
    """The plan of `triton_selected_attention` for one set of rows, made once, run in every layer.

    The work list has one entry a request and tile of rows, the longest first, so that nothing is
    padded and no processor is left with a long tile at the end. Where there are fewer tiles than
    processors, as with a suffix alone, tiles are cut along the keys and merged afterwards.
    """

    def __init__(
        self,
        q_positions: Tensor,
        q_offsets: Sequence[int],
        k_offsets: Sequence[int],
        *,
        num_processors: int | None = None,
        shape: TileShape | None = None,
    ) -> None:
        """num_processors, shape: of the GPU, and of a tile, where they are not to be looked up."""
        device = q_positions.device
        if num_processors is None:
            num_processors = 1
            if device.type == "cuda":
                num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._num_processors = num_processors
        self._shape = shape
        self._q_offsets = np.asarray(q_offsets, dtype=np.int64)
        self._k_offsets = np.asarray(k_offsets, dtype=np.int64)
        self._device_positions = q_positions.to(torch.int32)
        self._positions = self._device_positions.cpu().numpy().astype(np.int64)
        self._check()
        self._work: dict[tuple[int, TileShape], _Work] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        *,
        block_table: Tensor | None = None,
    ) -> Tensor:
        """q: [num_queries, num_heads, head_dim]

        k, v: [num_keys, num_kv_heads, head_dim], or, with a block table, an engine's pages,
            [num_blocks, block_size, num_kv_heads, head_dim]; any strides but the last
        block_table: [num_requests, max_blocks], int32, the pages of each request in order
        returns: [num_queries, num_heads, head_dim], q's dtype
        """
        _check_tensors(q, k, v, block_table, num_queries=len(self._positions))
        longest = int(np.diff(self._k_offsets).max(initial=0))
        if block_table is None and longest * max(k.stride(0), v.stride(0)) >= 1 << 31:
            raise ValueError(f"{longest} keys of a request lie too far apart for 32-bit offsets")
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if len(q) == 0:
            return out
        num_heads, head_dim = q.shape[1:]
        num_kv_heads = k.shape[-2]
        group = num_heads // num_kv_heads
        longest = int(np.diff(self._q_offsets).max())
        shape = self._shape or tile_shape(head_dim, q.dtype, rows=longest * group, group=group)
        if group > shape.rows:
            raise ValueError(f"{group} heads share a KV head, a tile has {shape.rows} rows")
        work = self._work_for(num_kv_heads, group, shape)
        width = triton.next_power_of_2(head_dim)
        partial = torch.empty(
            (work.num_parts, num_kv_heads, shape.rows, width), dtype=torch.float32, device=q.device
        )
        stats = torch.empty(
            (work.num_parts, num_kv_heads, 2, shape.rows), dtype=torch.float32, device=q.device
        )
        is_paged = block_table is not None
        table = block_table if block_table is not None else work.tiles
        _attend[(len(work.tiles) * num_kv_heads,)](
            q,
            k,
            v,
            out,
            partial,
            stats,
            work.tiles,
            self._device_positions,
            table,
            scale * math.log2(math.e),
            num_kv_heads,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1) if is_paged else 0,
            k.stride(-2),
            v.stride(0),
            v.stride(1) if is_paged else 0,
            v.stride(-2),
            table.stride(0),
            GROUP=group,
            HEAD_DIM=head_dim,
            WIDTH=width,
            ROWS=shape.rows,
            KEYS=shape.keys,
            PAGE=k.shape[1] if is_paged else 0,
            FACTOR=_factor_type(q),
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
        if work.num_parts:
            _merge[(len(work.merges) * num_kv_heads, shape.rows // MERGE_ROWS)](
                out,
                partial,
                stats,
                work.merges,
                num_kv_heads,
                GROUP=group,
                HEAD_DIM=head_dim,
                WIDTH=width,
                ROWS=shape.rows,
                MERGE_ROWS=MERGE_ROWS,
            )
        return out

    def _work_for(self, num_kv_heads: int, group: int, shape: TileShape) -> "_Work":
        """Made at the first layer; the others have the same heads."""
        key = (num_kv_heads, shape)
        if key not in self._work:
            tiles, merges = plan_tiles(
                self._positions,
                self._q_offsets,
                self._k_offsets,
                rows=shape.rows // group,
                keys=shape.keys,
                num_programs=max(1, self._num_processors // num_kv_heads),
            )
            device = self._device_positions.device
            self._work[key] = _Work(
                tiles=torch.from_numpy(tiles).to(device),
                merges=torch.from_numpy(merges).to(device),
                num_parts=int(merges[:, 3].sum()),
            )
        return self._work[key]

    def _check(self) -> None:
        """A position without a key would be read from somebody else's memory."""
        if len(self._q_offsets) != len(self._k_offsets):
            raise ValueError(
                f"{len(self._q_offsets)} query offsets, but {len(self._k_offsets)} key offsets"
            )
        num_keys = np.diff(self._k_offsets)
        request = np.repeat(np.arange(len(num_keys)), np.diff(self._q_offsets))
        if len(request) != len(self._positions):
            raise ValueError(f"{len(self._positions)} positions, offsets say {len(request)}")
        if ((self._positions < 0) | (self._positions >= num_keys[request])).any():
            raise ValueError("a query stands where its request has no key")
        descends = np.diff(self._positions) < 0
        if (descends & (np.diff(request) == 0)).any():
            raise ValueError("the queries of a request must be sorted by position")


@dataclass(frozen=True, slots=True)
class _Work:
    """tiles: [num_tiles, 8], merges: [num_merges, 4], both int32, see `plan_tiles`."""

    tiles: Tensor
    merges: Tensor
    num_parts: int


def plan_tiles(
    positions: np.ndarray,
    q_offsets: np.ndarray,
    k_offsets: np.ndarray,
    *,
    rows: int,
    keys: int,
    num_programs: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Cut the queries into tiles of `rows` rows, longest first; steps of `keys` keys.

    num_programs: tiles that run at once. No tile is to take longer than all of them would take
        if they shared the work evenly; a longer one is cut along the keys.
    returns:
        tiles, int32, [num_tiles, 8]: query rows [0, 1) over keys [2, 4) of their request, of which
        all of the rows see those before 3; where packed K and V of the request begin; the request;
        which part the result is, -1 where no other tile has the same rows
        merges, int32, [num_merges, 4]: rows [0, 1) that are cut along the keys, their first part,
        and how many parts there are
    """
    starts, ends, request = [], [], []
    for i in range(len(q_offsets) - 1):
        start = np.arange(q_offsets[i], q_offsets[i + 1], rows)
        starts.append(start)
        ends.append(np.minimum(start + rows, q_offsets[i + 1]))
        request.append(np.full(len(start), i))
    start, end, owner = map(np.concatenate, (starts, ends, request))
    key_end = positions[end - 1] + 1
    open_end = (positions[start] + 1) // keys * keys
    num_steps = -(-key_end // keys)
    most_steps = max(1, -(-int(num_steps.sum()) // num_programs))
    num_parts = -(-num_steps // most_steps)

    # of part j of n: steps [s·j/n, s·(j+1)/n)
    tile = np.repeat(np.arange(len(start)), num_parts)
    first_part = np.cumsum(num_parts) - num_parts
    part = np.arange(len(tile)) - first_part[tile]
    low = num_steps[tile] * part // num_parts[tile] * keys
    high = np.minimum(num_steps[tile] * (part + 1) // num_parts[tile] * keys, key_end[tile])

    is_cut = num_parts > 1
    slots = np.cumsum(np.where(is_cut, num_parts, 0)) - np.where(is_cut, num_parts, 0)
    columns = (
        start[tile],
        end[tile],
        low,
        np.clip(open_end[tile], low, high // keys * keys),
        high,
        k_offsets[owner[tile]],
        owner[tile],
        np.where(is_cut[tile], slots[tile] + part, -1),
    )
    table = np.stack(columns, axis=1).astype(np.int32)
    merges = np.stack((start, end, slots, num_parts), axis=1)[is_cut].astype(np.int32)
    return table[np.argsort(low - high, kind="stable")], merges


def _check_tensors(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None, *, num_queries: int
) -> None:
    if q.dim() != 3 or q.shape[0] != num_queries:
        raise ValueError(f"q has shape {tuple(q.shape)}, the plan has {num_queries} queries")
    if k.shape != v.shape or k.dim() != (3 if block_table is None else 4):
        raise ValueError(f"k and v have shapes {tuple(k.shape)} and {tuple(v.shape)}")
    head_dim = q.shape[2]
    if k.shape[-1] != head_dim or not LEAST_HEAD_DIM <= head_dim <= MOST_HEAD_DIM:
        raise ValueError(f"head dims {head_dim} and {k.shape[-1]}, not one within 16 to 256")
    if q.shape[1] % k.shape[-2]:
        raise ValueError(f"{q.shape[1]} heads cannot share {k.shape[-2]} KV heads evenly")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"dtypes differ: {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        raise ValueError("the last dimension of q, k and v must be contiguous")
    if block_table is not None and (block_table.dtype != torch.int32 or block_table.dim() != 2):
        raise ValueError("block_table must be [num_requests, max_blocks], int32")


def _factor_type(q: Tensor) -> tl.dtype:
    """What products are taken of: the tensors' own type, but Triton's interpreter, which is what
    runs on a CPU, multiplies bf16 wrongly."""
    if q.device.type == "cpu":
        return tl.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[
        q.dtype
    ]


@triton.jit
def _attend(
    q,
    k,
    v,
    out,
    partial,
    stats,
    tiles,
    positions,
    block_table,
    scale,  # of the scores, times log2(e): the kernel works with powers of two; positive
    num_kv_heads,
    q_row,
    q_head,
    k_row,  # of a page, where PAGE > 0
    k_slot,
    k_head,
    v_row,
    v_slot,
    v_head,
    table_row,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """One tile of rows and one KV head: online softmax over its keys."""
    program = tl.program_id(0)
    head = program % num_kv_heads  # neighbours share the tile's rows, not its keys
    tile = tiles + (program // num_kv_heads) * 8
    first_row = tl.load(tile)
    row_end = tl.load(tile + 1)
    key_start = tl.load(tile + 2)
    open_end = tl.load(tile + 3)
    key_end = tl.load(tile + 4)
    base = tl.load(tile + 5).to(tl.int64)
    request = tl.load(tile + 6)
    part = tl.load(tile + 7)

    lane = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    rows = first_row + lane // GROUP
    is_row = (rows < row_end) & (lane < ROWS // GROUP * GROUP)
    rows = tl.minimum(rows, row_end - 1)  # lanes without a row repeat the last one
    heads = head * GROUP + lane % GROUP
    row_positions = tl.load(positions + rows)
    q_at = q + rows[:, None].to(tl.int64) * q_row + heads[:, None] * q_head + dim[None, :]
    if WIDTH == HEAD_DIM:
        queries = tl.load(q_at)
    else:
        queries = tl.load(q_at, mask=dim[None, :] < HEAD_DIM, other=0.0)
    queries = queries.to(FACTOR)

    k += head * k_head
    v += head * v_head
    if PAGE == 0:
        k += base * k_row
        v += base * v_row
    table = block_table + request.to(tl.int64) * table_row

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(key_start, open_end, KEYS):
        acc, top, total = _step(
            acc, top, total, queries, k, v, table, start, key_end, row_positions, scale,
            k_row, k_slot, v_row, v_slot, HEAD_DIM, WIDTH, KEYS, PAGE, FACTOR, False,
        )  # fmt: skip
    for start in range(open_end, key_end, KEYS):
        acc, top, total = _step(
            acc, top, total, queries, k, v, table, start, key_end, row_positions, scale,
            k_row, k_slot, v_row, v_slot, HEAD_DIM, WIDTH, KEYS, PAGE, FACTOR, True,
        )  # fmt: skip

    if part < 0:
        num_heads = num_kv_heads * GROUP
        at = (rows[:, None].to(tl.int64) * num_heads + heads[:, None]) * HEAD_DIM + dim[None, :]
        result = acc / total[:, None]
        tl.store(
            out + at,
            result.to(out.dtype.element_ty),
            mask=is_row[:, None] & (dim[None, :] < HEAD_DIM),
        )
    else:
        slot = (part * num_kv_heads + head).to(tl.int64)
        tl.store(partial + (slot * ROWS + lane[:, None]) * WIDTH + dim[None, :], acc)
        tl.store(stats + slot * 2 * ROWS + lane, top)
        tl.store(stats + slot * 2 * ROWS + ROWS + lane, total)


@triton.jit
def _step(
    acc,
    top,
    total,
    queries,
    k,
    v,
    table,
    start,
    key_end,
    row_positions,
    scale,
    k_row,
    k_slot,
    v_row,
    v_slot,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    FACTOR: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The next KEYS keys into the running softmax."""
    keys = start + tl.arange(0, KEYS)
    dim = tl.arange(0, WIDTH)
    at = keys
    if MASKED:  # what is read behind the end is hidden below
        at = tl.minimum(keys, key_end - 1)
    if PAGE == 0:
        k_at = at * k_row
        v_at = at * v_row
    else:
        page = tl.load(table + at // PAGE).to(tl.int64)
        k_at = page * k_row + (at % PAGE) * k_slot
        v_at = page * v_row + (at % PAGE) * v_slot
    if WIDTH == HEAD_DIM:
        keys_tile = tl.load(k + k_at[:, None] + dim[None, :])
        values = tl.load(v + v_at[:, None] + dim[None, :])
    else:
        is_dim = dim[None, :] < HEAD_DIM
        keys_tile = tl.load(k + k_at[:, None] + dim[None, :], mask=is_dim, other=0.0)
        values = tl.load(v + v_at[:, None] + dim[None, :], mask=is_dim, other=0.0)

    scores = tl.dot(queries, tl.trans(keys_tile.to(FACTOR)), input_precision="ieee")
    if MASKED:
        scores = tl.where(keys[None, :] <= row_positions[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    origin = new_top
    if MASKED:  # a tile cut along its keys may hide all of them from a row
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * scale - origin[:, None])  # one multiply-add each
    decay = tl.exp2(top - origin)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    weights = weights.to(values.dtype).to(FACTOR)
    acc = tl.dot(weights, values.to(FACTOR), acc, input_precision="ieee")
    return acc, new_top, total


@triton.jit
def _merge(
    out,
    partial,
    stats,
    merges,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
):
    """The parts of a tile that was cut along its keys become one result."""
    program = tl.program_id(0)
    head = program % num_kv_heads
    merge = merges + (program // num_kv_heads) * 4
    first_row = tl.load(merge)
    row_end = tl.load(merge + 1)
    first_part = tl.load(merge + 2)
    num_parts = tl.load(merge + 3)

    lane = tl.program_id(1) * MERGE_ROWS + tl.arange(0, MERGE_ROWS)
    dim = tl.arange(0, WIDTH)
    top = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([MERGE_ROWS], tl.float32)
    acc = tl.zeros([MERGE_ROWS, WIDTH], tl.float32)
    for part in range(first_part, first_part + num_parts):
        slot = (part * num_kv_heads + head).to(tl.int64)
        part_top = tl.load(stats + slot * 2 * ROWS + lane)
        part_total = tl.load(stats + slot * 2 * ROWS + ROWS + lane)
        part_acc = tl.load(partial + (slot * ROWS + lane[:, None]) * WIDTH + dim[None, :])
        new_top = tl.maximum(top, part_top)  # finite: every row sees the first part's first key
        decay = tl.exp2(top - new_top)
        gain = tl.exp2(part_top - new_top)
        total = total * decay + part_total * gain
        acc = acc * decay[:, None] + part_acc * gain[:, None]
        top = new_top

    rows = first_row + lane // GROUP
    is_row = (rows < row_end) & (lane < ROWS // GROUP * GROUP)
    heads = head * GROUP + lane % GROUP
    num_heads = num_kv_heads * GROUP
    at = (rows[:, None].to(tl.int64) * num_heads + heads[:, None]) * HEAD_DIM + dim[None, :]
    result = acc / total[:, None]
    tl.store(
        out + at,
        result.to(out.dtype.element_ty),
        mask=is_row[:, None] & (dim[None, :] < HEAD_DIM),
    )
