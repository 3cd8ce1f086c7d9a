"""Attention of packed, sorted, selected queries over their request's whole context.

Queries are sparse, so a lower-triangular mask is wrong: a query sees the keys at positions up to
its own. `selected_attention_ref` is the plain statement of that, `selected_attention` the fast
path on fused kernels; both have the same signature.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Backend = Literal["auto", "torch", "triton"]

# What a kernel call and the merge of its result cost, in pairs of a query and a key: a split of the
# queries must save so many, and a mask-free part of the keys have so many.
SAVED_PAIRS = 1 << 16
SHARED_PAIRS = 1 << 17
# Key ranges in multiples of this: matrix units take up to twice as long for a ragged end.
KEY_TILE = 32
# Masks are the same in every layer and kept between them, up to this many elements.
MAX_KEPT_MASK = 1 << 26

# The kernel behind scaled_dot_product_attention on the CPU. It also returns the logarithm of each
# query's sum of exponentials, by which two results over different keys merge into one.
_cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def selected_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    q_offsets: Sequence[int],
    k_offsets: Sequence[int],
    scale: float,
) -> Tensor:
    """Softmax attention per request, computed in float32.

    q: [num_queries, num_heads, head_dim], the requests one after another
    k, v: [num_keys, num_kv_heads, head_dim]; key j of a request stands at position j
    q_positions: [num_queries], int64, position of each query within its request
    q_offsets, k_offsets: half-open ranges of each request, [num_requests + 1]
    returns: [num_queries, num_heads, head_dim], q's dtype
    """
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for i in range(len(q_offsets) - 1):
        rows = slice(q_offsets[i], q_offsets[i + 1])
        keys = slice(k_offsets[i], k_offsets[i + 1])
        qi = q[rows].float()
        ki = k[keys].float().repeat_interleave(group, dim=1)
        vi = v[keys].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", qi, ki) * scale
        hidden = torch.arange(ki.shape[0], device=q.device) > q_positions[rows, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, vi).to(q.dtype)
    return out


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    q_offsets: Sequence[int],
    k_offsets: Sequence[int],
    scale: float,
) -> Tensor:
    """As `selected_attention_ref`, on fused kernels; `q_positions` ascend in a request."""
    return SelectedAttention(q_positions, q_offsets, k_offsets, q.dtype)(q, k, v, scale)


class SelectedAttention:
    """The plan of `selected_attention` for one set of queries, made once and run in every layer.

    Queries that are all of the keys from the first on take the causal kernel. Those behind them go
    in blocks, each with a mask over the keys that only some of its queries see. The keys before
    those are shared: halves of the queries, halves of halves and so on see them without a mask, in
    calls as large as can be, and the results are merged.

    backend: "auto" is Triton on CUDA where it can be imported, otherwise torch; also torch where
        all queries are the first keys, for its causal kernel
    """

    def __init__(
        self,
        q_positions: Tensor,
        q_offsets: Sequence[int],
        k_offsets: Sequence[int],
        dtype: torch.dtype,
        backend: Backend = "auto",
    ) -> None:
        self._q_positions = q_positions
        self._dtype = dtype
        self._requests: list[_Request] = []
        positions = q_positions.tolist()
        for i in range(len(q_offsets) - 1):
            mine = positions[q_offsets[i] : q_offsets[i + 1]]
            num_keys = k_offsets[i + 1] - k_offsets[i]
            request = _Request(q_offsets[i], k_offsets[i], num_keys, mine, _leading_run(mine))
            self._requests.append(request)
        self._runs: dict[int, list[_Run]] = {}  # by the heads of a group
        self._triton: Callable[..., Tensor] | None = None
        has_gaps = any(r.leading < len(r.positions) for r in self._requests)
        if backend == "triton" or (backend == "auto" and has_gaps):
            triton_plan = _triton_plan(backend, q_positions.device)
            if triton_plan is not None:
                self._triton = triton_plan(q_positions, q_offsets, k_offsets)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q: [num_queries, num_heads, head_dim]; k, v: [num_keys, num_kv_heads, head_dim]."""
        if self._triton is not None:
            return self._triton(q, k, v, scale)
        group = q.shape[1] // k.shape[1]
        if group not in self._runs:
            self._runs[group] = self._plan(group)
        # the CPU kernel takes it for granted that a head's numbers lie side by side
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out = torch.empty_like(q)
        heads_k, heads_v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        for run in self._runs[group]:
            start, end = run.start, run.end
            run_k = heads_k.narrow(2, run.first_key, run.num_keys)
            run_v = heads_v.narrow(2, run.first_key, run.num_keys)
            if run.blocks:
                _attend_run(run, q[start:end], run_k, run_v, scale, out[start:end])
                continue
            attended = F.scaled_dot_product_attention(
                q[start:end].transpose(0, 1)[None],
                run_k,
                run_v,
                is_causal=True,
                scale=scale,
                enable_gqa=group > 1,
            )
            out[start:end] = attended[0].transpose(0, 1)
        return out

    def _plan(self, group: int) -> list["_Run"]:
        """The kernel calls, where `group` query heads share a KV head."""
        runs: list[_Run] = []
        kept = 0
        shared_pairs = SHARED_PAIRS if _merges(self._q_positions.device) else None
        for request in self._requests:
            positions, start = request.positions, request.start
            end = start + len(positions)
            leading = request.leading
            is_worth_a_call = leading * leading * group >= 2 * SAVED_PAIRS
            if leading and (leading == len(positions) or is_worth_a_call):
                runs.append(_Run(start, start + leading, request.first_key, leading, [], []))
                start += leading
            if start == end:
                continue
            blocks: list[_Part] = []
            shared: list[_Part] = []
            sparse = torch.tensor(positions[start - request.start :])
            for piece in _pieces(sparse, 0, len(sparse), 0, request.num_keys, group, shared_pairs):
                mask: Callable[[], Tensor] | None = None
                if piece.seen is not None:
                    rows = self._q_positions[start + piece.start : start + piece.end]
                    keys = range(piece.first_key, piece.last_key)
                    mask = partial(_mask, rows, keys, piece.seen, group, self._dtype)
                    kept += len(rows) * group * len(keys)
                    if kept <= MAX_KEPT_MASK:
                        mask = partial(_kept, mask())
                part = _Part(
                    piece.start * group,
                    (piece.end - piece.start) * group,
                    piece.first_key,
                    piece.last_key - piece.first_key,
                    mask,
                )
                (shared if mask is None else blocks).append(part)
            runs.append(_Run(start, end, request.first_key, request.num_keys, blocks, shared))
        return runs


@dataclass(frozen=True, slots=True)
class _Request:
    """One request's queries, from row `start` of the batch on, and its keys."""

    start: int
    first_key: int
    num_keys: int
    positions: list[int]  # of its queries
    leading: int  # how many of them are its keys 0, 1, 2 and so on


@dataclass(frozen=True, slots=True)
class _Run:
    """Queries [start, end) of the batch against `num_keys` keys from `first_key` on.

    Without blocks the queries are the keys. The blocks are all of the queries, in their order.
    """

    start: int
    end: int
    first_key: int
    num_keys: int
    blocks: list["_Part"]
    shared: list["_Part"]


@dataclass(frozen=True, slots=True)
class _Part:
    """One kernel call: folded queries and keys of a run, each from its first on."""

    first_query: int
    num_queries: int
    first_key: int
    num_keys: int
    mask: Callable[[], Tensor] | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries [start, end) against keys [first_key, last_key) of a request."""

    start: int
    end: int
    first_key: int
    last_key: int
    seen: int | None  # keys that other pieces cover; None: each query sees each key


def _pieces(
    positions: Tensor,
    start: int,
    end: int,
    seen: int,
    num_keys: int,
    group: int,
    shared_pairs: int | None,
) -> Iterator[_Piece]:
    """Covers what queries [start, end) see of the keys from `seen` on, each pair once."""
    # its own position is left to the mask: where a query sees none of a call's keys, the kernel
    # returns no usable sum
    common = int(positions[start]) // KEY_TILE * KEY_TILE
    if shared_pairs is not None and (common - seen) * (end - start) * group >= shared_pairs:
        yield _Piece(start, end, seen, common, None)
        seen = common
    if end - start > 1:
        # of all places to split at: the queries before it would not reach for the last one's keys
        rows = torch.arange(1, end - start)
        saved = rows * (positions[end - 1] - positions[start : end - 1]) * group
        best = int(saved.argmax())
        if saved[best] >= SAVED_PAIRS:
            half = start + 1 + best
            for lo, hi in ((start, half), (half, end)):
                yield from _pieces(positions, lo, hi, seen, num_keys, group, shared_pairs)
            return
    last = min(_round_up(int(positions[end - 1]) + 1), num_keys)
    # at the end of the request there is no more to fill the tile: back into what is seen already
    yield _Piece(start, end, max(0, last - _round_up(last - seen)), last, seen)


def _attend_run(run: _Run, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor) -> None:
    """Writes a run's attention to `out`.

    q, out: [num_rows, num_heads, head_dim]; k, v: [1, num_kv_heads, num_keys, head_dim]
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    # a group's heads are more queries of their KV head: its keys are packed once, for larger tiles
    by_head = q.unflatten(1, (num_kv_heads, group)).transpose(0, 1)
    folded = by_head.reshape(1, num_kv_heads, num_rows * group, head_dim)

    def attend(part: _Part) -> tuple[Tensor, Tensor]:
        """Attention, [1, num_kv_heads, num_queries, head_dim], and its sums' logarithms."""
        part_q = folded.narrow(2, part.first_query, part.num_queries)
        part_k = k.narrow(2, part.first_key, part.num_keys)
        part_v = v.narrow(2, part.first_key, part.num_keys)
        mask = None if part.mask is None else part.mask()
        if _merges(q.device):
            attended, log_sums = _cpu_flash(part_q, part_k, part_v, attn_mask=mask, scale=scale)
            return attended, log_sums
        attended = F.scaled_dot_product_attention(
            part_q, part_k, part_v, attn_mask=mask, scale=scale
        )
        return attended, attended[..., 0]  # nothing is merged

    results = [attend(block) for block in run.blocks]
    attended, log_sums = results[0]
    if len(results) > 1:
        attended = torch.cat([a for a, _ in results], dim=2)
        log_sums = torch.cat([s for _, s in results], dim=2)
    for part in run.shared:
        more, more_sums = attend(part)
        mine = attended.narrow(2, part.first_query, part.num_queries)
        my_sums = log_sums.narrow(2, part.first_query, part.num_queries)
        share = torch.sigmoid(more_sums - my_sums)
        mine.lerp_(more, share.to(more.dtype).unsqueeze(-1))
        torch.logaddexp(my_sums, more_sums, out=my_sums)
    unfolded = attended[0].unflatten(1, (num_rows, group)).transpose(0, 1)
    out.unflatten(1, (num_kv_heads, group)).copy_(unfolded)


def _merges(device: torch.device) -> bool:
    """Whether the device's kernel returns the sums by which results are merged."""
    return device.type == "cpu"


def _triton_plan(backend: Backend, device: torch.device) -> Callable[..., Any] | None:
    """The Triton kernel's class if it is asked for, or the device has a use for it."""
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return None
    try:
        from replicas.triton_attention import TritonSelectedAttention
    except ImportError:
        if backend == "triton":
            raise
        return None
    return TritonSelectedAttention


def _leading_run(positions: Sequence[int]) -> int:
    """How many of the ascending positions are 0, 1, 2 and so on."""
    run = 0
    for position in positions:
        if position != run:
            break
        run += 1
    return run


def _round_up(num_keys: int) -> int:
    return -(-num_keys // KEY_TILE) * KEY_TILE


def _mask(positions: Tensor, keys: range, seen: int, group: int, dtype: torch.dtype) -> Tensor:
    """0 where a query may look, -inf behind its own position and before `seen`.

    returns: [num_queries * group, len(keys)]
    """
    at = torch.arange(keys.start, keys.stop, device=positions.device)
    hidden = (at > positions[:, None]) | (at < seen)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, float("-inf")).repeat_interleave(group, dim=0)


def _kept(mask: Tensor) -> Tensor:
    return mask
