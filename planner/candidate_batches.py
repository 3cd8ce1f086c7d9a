"""Which batches are worth judging: earliest-deadline prefixes of length buckets and neighbours."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, combinations, pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Batch = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """What one batch may hold on one replica.

    max_tokens: of the configuration; a single longer request may still go alone.
    room_tokens: of the replica.
    """

    max_requests: int
    max_tokens: int
    room_tokens: int


def candidate_batches(
    order: Ints,
    *,
    tokens: Ints,
    buckets: Ints,
    at_home: NDArray[np.bool_] | None,
    limits: BatchLimits,
    forced: int | None = None,
    max_exhaustive: int = 0,
    most: int = 1_000,
) -> list[Batch]:
    """Batches of requests that share their phases; rows in order of deadline, none twice.

    order: rows of the requests that fit the replica alone, earliest deadline first.
    tokens, buckets, at_home: by row. `at_home` marks the requests whose chunks are
    hot on the replica's node, or nowhere; they form a family of their own. None: all are.
    forced: a row that must be in every batch; it is not in `order`.
    max_exhaustive: up to so many requests, every subset is a candidate.
    most: candidates, about; the families of the earliest deadlines come first.
    """
    seed: Batch = () if forced is None else (forced,)
    used_tokens = 0 if forced is None else int(tokens[forced])
    seats = limits.max_requests - len(seed)
    max_tokens = min(limits.max_tokens, limits.room_tokens) - used_tokens
    found: dict[Batch, None] = {seed: None} if seed else {}
    if seats < 1:
        return list(found)
    if len(order) <= max_exhaustive:
        rows = order.tolist()
        lengths = dict(zip(rows, tokens[order].tolist(), strict=True))
        sizes = range(1, min(seats, len(rows)) + 1)
        for subset in chain.from_iterable(combinations(rows, size) for size in sizes):
            is_alone = len(subset) == 1 and not seed
            if is_alone or sum(lengths[row] for row in subset) <= max_tokens:
                found[seed + subset] = None
        return list(found)
    for family in _families(order, buckets, at_home, seats):
        rows = family.tolist()
        fitting = bisect_right(list(accumulate(tokens[family].tolist())), max_tokens)
        if fitting == 0 and not seed and rows:
            fitting = 1  # it fits the replica, though not the limit of a batch
        for size in _sizes(fitting):
            found[(*seed, *rows[:size])] = None
        if len(found) >= most:
            break
    return list(found)


def _families(
    order: Ints, buckets: Ints, at_home: NDArray[np.bool_] | None, seats: int
) -> Iterator[Ints]:
    """The first of all, of those at home here, of each bucket, of each pair of neighbours."""
    yield order[:seats]
    if at_home is not None:
        yield order[at_home[order]][:seats]
    of_order = buckets.take(order)
    found = list(dict.fromkeys(of_order.tolist()))  # the earliest deadlines first
    if len(found) > 1:
        for bucket in found:
            yield order[of_order == bucket][:seats]
    if len(found) > 2:
        for low, high in pairwise(sorted(found)):
            yield order[(of_order == low) | (of_order == high)][:seats]


@cache
def _sizes(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16 and so on, and the largest; from that on down."""
    steps = {size for power in range(most.bit_length()) for size in (1 << power, 3 << power >> 1)}
    return tuple(sorted({size for size in steps if size <= most} | ({most} if most else set())))[
        ::-1
    ]
