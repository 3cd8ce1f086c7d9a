"""Paths: in which order the requests of a batch get coverage, at a given (S, w, p).

A path leads from all requests at the floor to as much as is worth anything: it takes the segments
of the requests' concave envelopes, the largest gain per millisecond first. Coverage stops somewhere
on it; `planner/leftover.py` spends what is left there.
"""

from dataclasses import dataclass

import numpy as np

from planner.batch_times import BatchTimes, Ends, Floats, Ints
from planner.plan_candidates import PlanCandidates


@dataclass(frozen=True, slots=True)
class Paths:
    """The path of each of some splits; a stop is the place between two segments.

    Arrays are [num_paths, num_stops] and sums over the requests, unless said otherwise.
    """

    chosen: Ints  # [num_paths], indices of splits
    ends: Ends  # [num_paths]
    patch_ms: Floats  # c
    filter_ms: Floats  # v
    projected_ms: Floats  # u, 0 without a link
    total_ms: Floats
    passes: Floats
    buckets: Ints  # [batch]
    order: Ints  # [num_paths, num_stops - 1]: request · segments of a request + segment
    num_within: Ints  # [num_paths]: stops within the target, the first ones
    bounds: Floats  # [num_paths]: what no plan within the target exceeds; -inf: none is within it


def make_paths(
    candidates: PlanCandidates,
    batch: BatchTimes,
    chosen: Ints,
    buckets: Ints,
    *,
    ends: Ends,
    floor_ms: Floats,
    target_ms: float,
) -> Paths:
    """Paths of the chosen splits, [num_paths].

    buckets: [batch]; ends: [num_splits]; floor_ms: the time of the first stop, [num_splits]
    """
    from planner.path_kernel import walk_paths

    own = ends.take(chosen)
    lowest = np.zeros((7, len(chosen)))
    lowest[:4] = own.layers, own.start, own.probed, own.loaded
    lowest[4] = batch.patch_ms(candidates.coverages[0])
    lowest[5] = batch.filter_ms * candidates.filtered[chosen, 0]
    requests = np.zeros((4, len(buckets)))
    requests[:3] = batch.reuses, batch.slopes, batch.filter_slopes
    if batch.loads:
        lowest[6] = batch.projected_ms * candidates.projected[chosen, 0]
        requests[3] = batch.projected_slopes
    order, stops, num_within, bounds = walk_paths(
        chosen,
        candidates.group_of[chosen],
        buckets,
        candidates.gains,
        candidates.widths,
        candidates.filtered_steps,
        candidates.projected_steps,
        candidates.chances,
        requests,
        lowest,
        floor_ms,
        batch.fixed_ms,
        target_ms,
    )
    patch_ms, filter_ms, projected_ms, total_ms, passes = stops
    return Paths(
        chosen=chosen,
        ends=own,
        patch_ms=patch_ms,
        filter_ms=filter_ms,
        projected_ms=projected_ms,
        total_ms=total_ms,
        passes=passes,
        buckets=buckets,
        order=order,
        num_within=num_within,
        bounds=bounds,
    )


def make_paths_ref(
    candidates: PlanCandidates,
    batch: BatchTimes,
    chosen: Ints,
    buckets: Ints,
    *,
    ends: Ends,
    floor_ms: Floats,
    target_ms: float,
) -> Paths:
    """As `make_paths`, in array expressions."""
    groups = candidates.group_of[chosen, None]
    ends = ends.take(chosen)
    gains = candidates.gains[groups, buckets] * batch.reuses[:, None]
    patch = candidates.widths[groups, buckets] * batch.slopes[:, None]
    filters = candidates.filtered_steps[chosen[:, None], buckets] * batch.filter_slopes[:, None]
    price = ends.layers[:, None, None] * patch + filters
    worth = gains / np.maximum(price, 1e-300)
    # a request's segments stay in order, though filtering gives rebate for quantity
    worth = np.minimum.accumulate(worth, axis=2).reshape(len(chosen), -1)
    order = np.argsort(-worth, axis=1, kind="stable")
    lowest = candidates.chances[groups, buckets, 0]
    patch_ms = _sums(batch.patch_ms(candidates.coverages[0]), patch, order)
    filter_ms = _sums(batch.filter_ms * candidates.filtered[chosen, 0], filters, order)
    projected_ms = np.zeros_like(patch_ms)
    if batch.loads:
        projected = candidates.projected_steps[chosen[:, None], buckets]
        projected = projected * batch.projected_slopes[:, None]
        first = batch.projected_ms * candidates.projected[chosen, 0]
        projected_ms = _sums(first, projected, order)
    passes = _sums(np.where(batch.reuses, lowest, 1.0).sum(axis=1), gains, order)
    terms = ends.terms_ms(patch_ms.T, filter_ms.T, projected_ms.T).swapaxes(1, 2) + batch.fixed_ms
    total_ms = terms.max(axis=0)
    total_ms[:, 0] = floor_ms[chosen]
    num_within = (total_ms <= target_ms).sum(axis=1)
    return Paths(
        chosen=chosen,
        ends=ends,
        patch_ms=patch_ms,
        filter_ms=filter_ms,
        projected_ms=projected_ms,
        total_ms=total_ms,
        passes=passes,
        buckets=buckets,
        order=order,
        num_within=num_within,
        bounds=_bounds(terms, passes, num_within, target_ms),
    )


def _sums(first: Floats | float, segments: Floats, order: Ints) -> Floats:
    """Running sums along the paths, [num_paths, num_stops].

    first: at the first stop, [num_paths]; segments: [num_paths, batch, segments of a request]
    """
    num_paths, num_segments = order.shape
    steps = segments.reshape(num_paths, num_segments)[np.arange(num_paths)[:, None], order]
    sums = np.empty((num_paths, num_segments + 1))
    sums[:, 0] = first
    sums[:, 1:] = steps
    return np.cumsum(sums, axis=1, out=sums)


def _bounds(terms: Floats, passes: Floats, num_within: Ints, target_ms: float) -> Floats:
    """Envelopes at the first place of each path where a term may exceed the target.

    A term is concave along a segment, so it lies above the line between its two stops.
    terms: [3, num_paths, num_stops]
    """
    rows = np.arange(len(passes))
    here = np.maximum(num_within - 1, 0)
    there = np.minimum(num_within, passes.shape[1] - 1)
    left, right = terms[:, rows, here], terms[:, rows, there]
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(right > left, (target_ms - left) / (right - left), np.inf)
    share = np.minimum(np.maximum(shares.min(axis=0), 0.0), 1.0)
    bounds = passes[rows, here] + share * (passes[rows, there] - passes[rows, here])
    within: Floats = np.where(num_within > 0, bounds, -np.inf)
    return within
