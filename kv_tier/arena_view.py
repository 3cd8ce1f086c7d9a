"""The arena as a worker process sees it: memory to read and write, at locations it is given.

A worker never opens the index. The scheduler-side process of its replica holds the lease or the
reservation, and sends the location.
"""

import mmap
from pathlib import Path

import torch
from torch import Tensor

from kv_tier.arena_dir import ArenaDir
from kv_tier.arrival import Arrival, arrival_of
from kv_tier.errors import ArenaUnavailableError
from kv_tier.layout import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    KvLayout,
    header_matches,
    pack_header,
    slice_checksum,
)
from kv_tier.store import ChunkLocation


class ArenaView:
    """One process's mapping of an arena.

    Ranks write disjoint heads of one reserved value, each with its checksums, and any of them
    writes the header; the process that reserved it commits when all are done. Tensors that
    `read_layer` returned keep the mapping alive, also past the view itself.
    """

    def __init__(self, directory: Path, layout: KvLayout) -> None:
        self.layout = layout
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        path = ArenaDir(directory).arena
        try:
            with path.open("r+b") as file:
                self._mmap = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as exc:  # ValueError: an empty file
            raise ArenaUnavailableError(f"can not map {path}: {exc}") from exc
        self._memory = memoryview(self._mmap)
        self._mapping = torch.frombuffer(self._mmap, dtype=torch.uint8)

    @property
    def mapping(self) -> Tensor:
        """[arena_bytes], uint8: the whole mapping, for a process that page-locks it for a GPU."""
        return self._mapping

    def read_layer(
        self, location: ChunkLocation, layer: int, head_start: int, num_heads: int
    ) -> tuple[Tensor, Tensor]:
        """Keys (without RoPE) and values of heads [head_start, head_start + num_heads).

        returns: two views of the arena, [num_heads, num_tokens, head_dim] each, contiguous; valid
        while the lease is held, and not to be written to
        """
        self._check_slice(location, layer, head_start, num_heads)
        start = location.offset + self.layout.layer_offset(location.num_tokens, layer)
        layer_bytes = self.layout.layer_bytes(location.num_tokens)
        shape = (2, self.layout.num_kv_heads, location.num_tokens, self.layout.head_dim)
        kv = self._mapping[start : start + layer_bytes].view(self._dtype).view(shape)
        kv = kv[:, head_start : head_start + num_heads]
        return kv[0], kv[1]

    def write_layer(
        self, location: ChunkLocation, layer: int, head_start: int, k: Tensor, v: Tensor
    ) -> None:
        """Write these heads' keys (without RoPE) and values, and their checksums.

        k, v: [num_heads, num_tokens, head_dim], the layout's dtype, any device, any strides; from
        token-major, pass `k.transpose(0, 1)`
        """
        num_heads = k.shape[0]
        wanted = (num_heads, location.num_tokens, self.layout.head_dim)
        for name, tensor in (("k", k), ("v", v)):
            if tuple(tensor.shape) != wanted or tensor.dtype != self._dtype:
                raise ValueError(
                    f"{name} must be {wanted} {self._dtype},"
                    f" got {tuple(tensor.shape)} {tensor.dtype}"
                )
        for kept, fresh in zip(
            self.read_layer(location, layer, head_start, num_heads), (k, v), strict=True
        ):
            kept.copy_(fresh)
        for position, checksum in self._checksums(location, layer, head_start, num_heads):
            self._memory[position : position + CHECKSUM_BYTES] = checksum

    def write_header(self, location: ChunkLocation) -> None:
        """Write what the entry is. Every rank may do it: they write the same bytes."""
        self._check_bounds(location)
        header = pack_header(self.layout, location.key, location.num_tokens)
        self._memory[location.offset : location.offset + HEADER_BYTES] = header

    def verify_header(self, location: ChunkLocation) -> bool:
        """Whether the entry there is intact in its header, and is this chunk in this layout."""
        if not self._is_inside(location):
            return False
        header = bytes(self._memory[location.offset : location.offset + HEADER_BYTES])
        return header_matches(header, self.layout, location.key, location.num_tokens)

    def arrival(self, location: ChunkLocation) -> Arrival:
        """How far an entry has come that is, or was, fetched."""
        if not self._is_inside(location):
            return Arrival.GONE
        header = bytes(self._memory[location.offset : location.offset + HEADER_BYTES])
        return arrival_of(header, self.layout, location)

    def has_arrived(
        self, location: ChunkLocation, layer: int, head_start: int, num_heads: int
    ) -> bool:
        """Whether these heads' keys and values are there, of an entry that is being fetched.

        A checksum that happens to be zero never arrives; who waits has a deadline.
        """
        self._check_slice(location, layer, head_start, num_heads)
        for kv_idx in (0, 1):
            slot = self.layout.checksum_slot(layer, kv_idx, head_start)
            start = location.offset + HEADER_BYTES + slot * CHECKSUM_BYTES
            table = self._memory[start : start + num_heads * CHECKSUM_BYTES].cast("Q")
            if 0 in table.tolist():
                return False
        return True

    def verify_layer(
        self, location: ChunkLocation, layer: int, head_start: int, num_heads: int
    ) -> bool:
        """Whether these heads' keys and values are as they were written for this chunk."""
        if not self._is_inside(location):
            return False
        self._check_slice(location, layer, head_start, num_heads)
        return all(
            self._memory[position : position + CHECKSUM_BYTES] == checksum
            for position, checksum in self._checksums(location, layer, head_start, num_heads)
        )

    def _checksums(
        self, location: ChunkLocation, layer: int, head_start: int, num_heads: int
    ) -> list[tuple[int, bytes]]:
        """(position in the arena, checksum of what is stored now) of K and V of each head."""
        layout, num_tokens = self.layout, location.num_tokens
        table_start = location.offset + HEADER_BYTES
        layer_start = location.offset + layout.layer_offset(num_tokens, layer)
        head_bytes = layout.head_bytes(num_tokens)
        found = []
        for kv_idx in (0, 1):
            for head in range(head_start, head_start + num_heads):
                start = layer_start + (kv_idx * layout.num_kv_heads + head) * head_bytes
                slot = layout.checksum_slot(layer, kv_idx, head)
                content = self._memory[start : start + head_bytes]
                checksum = slice_checksum(location.key, slot, content)
                found.append((table_start + slot * CHECKSUM_BYTES, checksum))
        return found

    def _is_inside(self, location: ChunkLocation) -> bool:
        is_whole = location.nbytes == self.layout.entry_bytes(location.num_tokens)
        return is_whole and 0 <= location.offset <= len(self._memory) - location.nbytes

    def _check_bounds(self, location: ChunkLocation) -> None:
        if not self._is_inside(location):
            raise ValueError(
                f"{location} is not an entry of {self.layout} in {len(self._memory)} bytes"
            )

    def _check_slice(
        self, location: ChunkLocation, layer: int, head_start: int, num_heads: int
    ) -> None:
        self._check_bounds(location)
        is_layer = 0 <= layer < self.layout.num_layers
        head_end = head_start + num_heads
        if (
            not is_layer
            or num_heads < 1
            or not 0 <= head_start < head_end <= self.layout.num_kv_heads
        ):
            raise ValueError(f"no layer {layer}, heads [{head_start}, {head_end}) in {self.layout}")
