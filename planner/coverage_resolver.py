"""Solve the coverages again while a batch runs: for the time that is left, with the scores known.

The plan was made from expectations. After WarmUp and after Probe the elapsed time and the transfer
state are facts, so a slow machine or link costs coverage, not the deadline.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost_model import CostModel

BISECTIONS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchDemand:
    """What Patch is asked to do for one request of a batch."""

    num_cached: int  # context tokens with stored KV, the candidates of the coverage
    num_always: int  # tokens that Patch computes at any coverage
    num_keys: int  # tokens of the prompt
    planned: float  # the coverage, if everything goes as expected
    floor: float  # what it may become; both the same: it is fixed
    saturation: float
    scores: NDArray[np.float64] | None = None  # [num_scored], of candidates; None before the Probe


def layer_budget_ms(time_left_ms: float, arrivals_ms: Sequence[float]) -> float:
    """The longest that a layer may take so that all layers end in time.

    A layer starts when the one before is done and its stored KV is there. With layers of equal
    length c the last one ends at the latest of `arrival + c · (number of layers from there on)`.

    arrivals_ms: for each layer that is left, from now; 0 for what is there
    """
    num_layers = len(arrivals_ms)
    return min(
        (time_left_ms - arrival) / (num_layers - idx) for idx, arrival in enumerate(arrivals_ms)
    )


def hidden_layer_ms(arrivals_ms: Sequence[float]) -> float:
    """The longest that a layer may take so that only the last one ends after all KV is there."""
    before = range(len(arrivals_ms) - 1)
    return min(
        ((arrivals_ms[-1] - arrivals_ms[idx]) / (len(before) - idx) for idx in before), default=0.0
    )


def resolve_coverages(
    demands: Sequence[PatchDemand],
    *,
    time_left_ms: float,
    arrivals_ms: Sequence[float],
    cost: CostModel,
) -> list[float]:
    """The coverage of each request within its band, as much as the time that is left allows.

    Less time than planned is taken from all requests, down to their floors; more of it goes to all
    of them, up to their saturations. Without scores they stand at the same place of the way. With
    scores, a token is worth its share of its request's score, and the tokens that are worth most
    for their time are taken, whosever they are. A time under the floors' runs the floors, and what
    else can be computed while stored KV is waited for.

    arrivals_ms: when the stored KV of each layer that Patch is to run is there, from now
    """
    token_ms = [
        cost.scale * (cost.row_ms + cost.selected_pair_ms * d.num_keys / 2) for d in demands
    ]
    always_ms = cost.stitched_layer_ms(len(demands)) + sum(
        token * d.num_always + cost.scale * cost.reuse_ms * d.num_cached
        for token, d in zip(token_ms, demands, strict=True)
    )

    def layer_ms(coverages: Sequence[float]) -> float:
        return always_ms + sum(
            token * r * d.num_cached
            for token, r, d in zip(token_ms, coverages, demands, strict=True)
        )

    budget_ms = layer_budget_ms(time_left_ms - cost.batch_fixed_ms(len(demands)), arrivals_ms)
    if budget_ms < layer_ms([d.floor for d in demands]):
        budget_ms = max(budget_ms, hidden_layer_ms(arrivals_ms))
    planned = [min(d.saturation, max(d.floor, d.planned)) for d in demands]
    if layer_ms(planned) <= budget_ms:
        bounds = [(r, d.saturation) for r, d in zip(planned, demands, strict=True)]
    else:
        bounds = [(d.floor, r) for r, d in zip(planned, demands, strict=True)]
    coverages = _coverages_by_generosity(demands, bounds, token_ms)
    if layer_ms(coverages(1.0)) <= budget_ms:
        return coverages(1.0)
    low, high = 0.0, 1.0  # the time grows with the generosity
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if layer_ms(coverages(middle)) <= budget_ms:
            low = middle
        else:
            high = middle
    return coverages(low)


def _coverages_by_generosity(
    demands: Sequence[PatchDemand],
    bounds: Sequence[tuple[float, float]],
    token_ms: Sequence[float],
) -> Callable[[float], list[float]]:
    """Coverages of all requests, from their lower bounds at 0 to their upper ones at 1."""
    worths, owners = [], []
    for idx, (demand, token) in enumerate(zip(demands, token_ms, strict=True)):
        if demand.scores is not None and demand.num_cached > 0:
            worths.append(_shares(demand.scores) / max(token, 1e-12))
            owners.append(np.full(len(demand.scores), idx))
    best_first: NDArray[np.int64] = np.empty(0, np.int64)
    if worths:
        order = np.argsort(-np.concatenate(worths), kind="stable")
        best_first = np.concatenate(owners)[order]

    def at(generosity: float) -> list[float]:
        taken = best_first[: round(generosity * len(best_first))]
        counts = np.bincount(taken, minlength=len(demands))
        coverages = []
        for demand, (least, most), count in zip(demands, bounds, counts, strict=True):
            if demand.scores is None or demand.num_cached == 0 or generosity == 1.0:
                wanted = least + generosity * (most - least)
            else:
                wanted = float(count) / demand.num_cached
            coverages.append(min(most, max(least, wanted)))
        return coverages

    return at


def _shares(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the request's whole score; a score that is not finite is worth as much as the highest."""
    finite = np.isfinite(scores)
    highest = float(scores[finite].max()) if finite.any() else 1.0
    safe = np.where(finite, np.maximum(scores, 0.0), highest)
    total = float(safe.sum())
    if total <= 0.0:
        return np.full(len(scores), 1.0 / max(1, len(scores)))
    return np.asarray(safe / total, dtype=np.float64)
