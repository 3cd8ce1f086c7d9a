"""Stored chunk KV to its place in the engine's cache: K rotated, V copied, in one pass.

Ceiling: the device's memory bandwidth; every byte of K and V is read once and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_TOKENS = 16


def stitch_rotated_ref(
    stored_k: Tensor,
    stored_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    out_k: Tensor,
    out_v: Tensor,
    rows: Tensor,
) -> None:
    """Write stored KV into its rows, K with RoPE (of the neox kind), computed in float32.

    stored_k, stored_v: [num_kv_heads, num_tokens, head_dim], as the store holds them
    cos, sin: [num_tokens, head_dim // 2], float32, of each token's final position
    out_k, out_v: [num_rows, num_kv_heads, head_dim], or pages,
        [num_blocks, block_size, num_kv_heads, head_dim], whose slots are the rows; written to
    rows: [num_tokens], int64, all different; a token with a negative one goes nowhere
    """
    kept = rows >= 0
    at: tuple[Tensor, ...] = (rows[kept],)
    if out_k.dim() == 4:
        at = (rows[kept] // out_k.shape[1], rows[kept] % out_k.shape[1])
    first, second = stored_k[:, kept].transpose(0, 1).float().chunk(2, dim=-1)
    cos, sin = cos[kept, None], sin[kept, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    out_k[at] = rotated.to(out_k.dtype)
    out_v[at] = stored_v[:, kept].transpose(0, 1).to(out_v.dtype)


def stitch_rotated(
    stored_k: Tensor,
    stored_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    out_k: Tensor,
    out_v: Tensor,
    rows: Tensor,
) -> None:
    """As `stitch_rotated_ref`; any strides but the last dimension's."""
    num_kv_heads, num_tokens, head_dim = stored_k.shape
    _check(stored_k, stored_v, cos, sin, out_k, out_v, rows)
    if num_tokens == 0:
        return
    is_paged = out_k.dim() == 4
    half = head_dim // 2
    _stitch[(num_kv_heads, triton.cdiv(num_tokens, BLOCK_TOKENS))](
        stored_k,
        stored_v,
        cos,
        sin,
        out_k,
        out_v,
        rows,
        num_tokens,
        stored_k.stride(0),
        stored_k.stride(1),
        stored_v.stride(0),
        stored_v.stride(1),
        out_k.stride(0),
        out_k.stride(1) if is_paged else 0,
        out_k.stride(-2),
        out_v.stride(0),
        out_v.stride(1) if is_paged else 0,
        out_v.stride(-2),
        HALF=half,
        WIDTH=triton.next_power_of_2(half),
        PAGE=out_k.shape[1] if is_paged else 1,
        BLOCK_TOKENS=BLOCK_TOKENS,
        num_warps=4,
    )


def _check(
    stored_k: Tensor,
    stored_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    out_k: Tensor,
    out_v: Tensor,
    rows: Tensor,
) -> None:
    num_kv_heads, num_tokens, head_dim = stored_k.shape
    if stored_v.shape != stored_k.shape or head_dim % 2:
        raise ValueError(f"stored shapes {tuple(stored_k.shape)} and {tuple(stored_v.shape)}")
    if out_k.shape != out_v.shape or out_k.shape[-2:] != (num_kv_heads, head_dim):
        raise ValueError(f"cannot write {num_kv_heads} heads into {tuple(out_k.shape)}")
    if out_k.dim() not in (3, 4):
        raise ValueError(f"out_k has {out_k.dim()} dimensions, need rows or pages")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (num_tokens, head_dim // 2) or table.dtype != torch.float32:
            raise ValueError(f"{name} has shape {tuple(table.shape)} and type {table.dtype}")
        if not table.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    if rows.shape != (num_tokens,) or rows.dtype != torch.int64 or not rows.is_contiguous():
        raise ValueError("rows must be [num_tokens], int64, contiguous")
    if not all(x.stride(-1) == 1 for x in (stored_k, stored_v, out_k, out_v)):
        raise ValueError("the last dimension of K and V must be contiguous")


@triton.jit
def _stitch(
    stored_k,
    stored_v,
    cos,
    sin,
    out_k,
    out_v,
    rows,
    num_tokens,
    k_head,
    k_token,
    v_head,
    v_token,
    out_k_row,  # of a page, where PAGE > 1
    out_k_slot,
    out_k_head,
    out_v_row,
    out_v_slot,
    out_v_head,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Some tokens of one head. The heads of the same tokens run side by side, so that they find
    the cosines in the second-level cache."""
    head = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    dim = tl.arange(0, WIDTH)
    row = tl.load(rows + token, mask=token < num_tokens, other=-1)
    is_kept = (row >= 0)[:, None] & (dim < HALF)[None, :]

    angle = token[:, None] * HALF + dim[None, :]
    cosine = tl.load(cos + angle, mask=is_kept, other=0.0)
    sine = tl.load(sin + angle, mask=is_kept, other=0.0)
    token = token.to(tl.int64)
    k_at = stored_k + head * k_head + token[:, None] * k_token + dim[None, :]
    v_at = stored_v + head * v_head + token[:, None] * v_token + dim[None, :]
    first = tl.load(k_at, mask=is_kept, other=0.0).to(tl.float32)
    second = tl.load(k_at + HALF, mask=is_kept, other=0.0).to(tl.float32)
    first_v = tl.load(v_at, mask=is_kept, other=0.0)
    second_v = tl.load(v_at + HALF, mask=is_kept, other=0.0)

    page = row // PAGE
    slot = row % PAGE
    out_k_at = out_k + (page * out_k_row + slot * out_k_slot + head * out_k_head)[:, None]
    out_v_at = out_v + (page * out_v_row + slot * out_v_slot + head * out_v_head)[:, None]
    out_k_at += dim[None, :]
    out_v_at += dim[None, :]
    kind = out_k.dtype.element_ty
    tl.store(out_k_at, (first * cosine - second * sine).to(kind), mask=is_kept)
    tl.store(out_k_at + HALF, (second * cosine + first * sine).to(kind), mask=is_kept)
    tl.store(out_v_at, first_v.to(out_v.dtype.element_ty), mask=is_kept)
    tl.store(out_v_at + HALF, second_v.to(out_v.dtype.element_ty), mask=is_kept)
