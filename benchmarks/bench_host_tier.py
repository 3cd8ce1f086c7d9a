"""How close are a put and a leased read of the host tier to moving nothing but the bytes?

A put reserves an entry of a full arena (so it evicts one), writes every layer with its checksums,
and commits. Its ceiling is one plain copy of the same bytes, layer by layer, into a mapped file of
the same folder. `token-major` is a put of tensors as a prefill has them, `head-major` one of
tensors as the arena has them; ranks write their heads in turn. A leased read looks a chunk up,
makes views of all its layers, and releases it: it copies nothing, so it has no ceiling but zero.
Verifying is apart; its ceiling is one xxh3 over the same bytes.

Shares are medians over the rounds of each round's own ratio, because other work on the machine then
hurts both sides alike. One thread.

    cachesmith bench host-tier
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from benchmarks.report import argument_parser, print_json, print_table, say
from benchmarks.timing import interleaved_ms, spread
from kv_tier import ArenaView, ChunkLocation, ChunkQuery, HostTier, HostTierConfig, KvLayout

LAYOUTS = {
    "135M": KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16"),  # SmolLM2
    "8B": KvLayout(num_layers=36, num_kv_heads=8, head_dim=128, dtype="bfloat16"),  # Qwen3
}
SPLITS = {"135M": (1, 3), "8B": (1, 2, 8)}  # tensor parallelism of the writers
MEMCPY, VERIFY, ONE_HASH = "plain copy", "verify", "one xxh3"
CEILINGS = {VERIFY: ONE_HASH, ONE_HASH: ONE_HASH}  # of all others: MEMCPY


class Work:
    """One chunk's KV, an arena with room for two such entries, and memory to copy it to."""

    def __init__(self, directory: Path, layout: KvLayout, num_tokens: int, seed: int) -> None:
        self.layout, self.num_tokens = layout, num_tokens
        entry_bytes = layout.entry_bytes(num_tokens)
        capacity_bytes = 2 * (entry_bytes + mmap.PAGESIZE)
        config = HostTierConfig(
            directory=directory / "arena",
            capacity_bytes=capacity_bytes,
            layout=layout,
            eviction="lru",
            high_watermark=1.0,
            low_watermark=1.0,
        )
        self.tier = HostTier(config)
        self.view = ArenaView(config.directory, layout)
        generator = torch.Generator().manual_seed(seed)
        shape = (layout.num_layers, 2, layout.num_kv_heads, num_tokens, layout.head_dim)
        self.head_major = torch.randn(shape, generator=generator).bfloat16()
        self.token_major = self.head_major.transpose(2, 3).contiguous().transpose(2, 3)
        self._payload = self.head_major.view(torch.uint8).numpy().reshape(layout.num_layers, -1)
        with (directory / "plain.bin").open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, 2 * self._payload.nbytes)
            self._plain = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)
        self._plain_turns, self._put_turns = count(), count()
        self.num_bytes = self._payload.nbytes

    def copy_plainly(self) -> None:
        """Into one half of the memory and then the other, as puts take turns between extents."""
        half = self._plain.reshape(2, *self._payload.shape)[next(self._plain_turns) % 2]
        for there, layer in zip(half, self._payload, strict=True):
            np.copyto(there, layer)

    def put(self, kv: Tensor, split: int) -> ChunkLocation:
        """kv: [num_layers, 2, num_kv_heads, num_tokens, head_dim], any strides"""
        query = self._query(next(self._put_turns))
        reservation = self.tier.reserve(query.key, query.token_ids, recompute_ms=1.0)
        assert reservation is not None
        location = reservation.location
        num_heads = self.layout.num_kv_heads // split
        for head in range(0, self.layout.num_kv_heads, num_heads):
            for layer in range(self.layout.num_layers):
                k, v = kv[layer, :, head : head + num_heads]
                self.view.write_layer(location, layer, head, k, v)
            self.view.write_header(location)
        assert self.tier.commit(reservation)
        self._stored = query
        return location

    def read(self) -> list[tuple[Tensor, Tensor]]:
        """Views of all layers of the last entry that was put, under a lease that has ended."""
        (lease,) = self.tier.lookup([self._stored])
        assert lease is not None
        assert self.view.verify_header(lease.location)
        found = [
            self.view.read_layer(lease.location, layer, 0, self.layout.num_kv_heads)
            for layer in range(self.layout.num_layers)
        ]
        self.tier.release([lease])
        return found

    def verify(self) -> None:
        (lease,) = self.tier.lookup([self._stored])
        assert lease is not None
        for layer in range(self.layout.num_layers):
            assert self.view.verify_layer(lease.location, layer, 0, self.layout.num_kv_heads)
        self.tier.release([lease])

    def hash_at_once(self) -> int:
        return int(xxh3_64_intdigest(self._payload.reshape(-1).data))

    def _query(self, turn: int) -> ChunkQuery:
        key = turn.to_bytes(32, "little")
        return ChunkQuery(key=key, token_ids=[turn, *range(self.num_tokens - 1)])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("host-tier", __doc__)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--directory", default="/dev/shm", help="where the arena is made")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    try:
        for name in args.layouts:
            for num_tokens in args.tokens:
                say(f"{name}, {num_tokens} tokens")
                results += _measure(args, name, num_tokens)
    finally:
        torch.set_num_threads(num_threads)
    columns = ["layout", "tokens", "mib", "what", "ranks", "ms", "gb_per_s", "share_of_ceiling"]
    print_table(columns, [[r.get(c, "") for c in columns] for r in results])
    print_json("host-tier", seed=args.seed, results=results)


def _measure(args: Any, name: str, num_tokens: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="cs-bench-", dir=args.directory) as folder:
        work = Work(Path(folder), LAYOUTS[name], num_tokens, args.seed)
        candidates: dict[tuple[str, int], Callable[[], object]] = {(MEMCPY, 1): work.copy_plainly}
        for split in SPLITS[name]:
            for what, kv in (("token-major", work.token_major), ("head-major", work.head_major)):
                candidates[f"put, {what}", split] = lambda kv=kv, split=split: work.put(kv, split)
        candidates["leased read", 1] = work.read
        candidates[VERIFY, 1] = work.verify
        candidates[ONE_HASH, 1] = work.hash_at_once
        times = interleaved_ms(candidates, rounds=args.rounds)
        work.tier.close()
    results = []
    for (what, split), spent_ms in times.items():
        ceiling_ms = times[CEILINGS.get(what, MEMCPY), 1]
        row = {
            "layout": name,
            "tokens": num_tokens,
            "mib": work.num_bytes / 2**20,
            "what": what,
            "ranks": split,
            **spread("ms", spent_ms),
        }
        if what != "leased read":  # it moves no bytes
            shares = [best / ms for best, ms in zip(ceiling_ms, spent_ms, strict=True)]
            row["gb_per_s"] = work.num_bytes / median(spent_ms) / 1e6
            row |= spread("share_of_ceiling", shares)
        results.append(row)
    return results


if __name__ == "__main__":
    main()
