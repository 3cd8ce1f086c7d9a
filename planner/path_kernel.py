"""The loops of `coverage_shift.make_paths`, compiled; `make_paths_ref` is the plain reference.

Importing this module compiles it (a second), or loads what was compiled before; `BudgetPlanner`
does when it is made.
"""

import numpy as np

from planner.batch_times import Floats, Ints
from planner.compiled import compiled


@compiled("(f8[:,::1], i8[::1], i8)")
def _order(worth: Floats, order: Ints, num_segments: int) -> None:
    """The largest first, of equals the first request; a request's segments stay in order.

    worth: [batch, num_segments]; order: [batch · num_segments], written
    """
    taken = np.zeros(len(worth), np.int64)
    for step in range(len(order)):
        best = -1
        for request in range(len(worth)):
            if taken[request] < num_segments and (
                best < 0 or worth[request, taken[request]] > worth[best, taken[best]]
            ):
                best = request
        order[step] = best * num_segments + taken[best]
        taken[best] += 1


@compiled(
    "(i8[::1], i8[::1], i8[::1], f8[:,:,::1], f8[:,:,::1], f8[:,:,::1], f8[:,:,::1],"
    " f8[:,:,::1], f8[:,::1], f8[:,::1], f8[::1], f8, f8)"
)
def walk_paths(
    chosen: Ints,
    groups: Ints,
    buckets: Ints,
    gains: Floats,
    widths: Floats,
    filtered_steps: Floats,
    projected_steps: Floats,
    chances: Floats,
    requests: Floats,
    ends: Floats,
    floor_ms: Floats,
    fixed_ms: float,
    target_ms: float,
) -> tuple[Ints, Floats, Ints, Floats]:
    """chosen, groups: [num_paths], of splits; buckets: [batch]; the next five: of the candidates

    requests: [4, batch]: what reuses something (1 or 0), and the slopes of c, v and u
    ends: [7, num_paths]: n, start, probed, loaded; and c, v and u with all at the lowest coverage
    floor_ms: [num_splits]; returns: order; c, v, u, total_ms and passes, [5, num_paths, num_stops];
    num_within; bounds
    """
    num_paths, batch, num_segments = len(chosen), len(buckets), gains.shape[2]
    num_stops = batch * num_segments + 1
    order = np.empty((num_paths, num_stops - 1), np.int64)
    stops = np.empty((5, num_paths, num_stops))
    num_within = np.zeros(num_paths, np.int64)
    bounds = np.full(num_paths, -np.inf)
    worth = np.empty((batch, num_segments))
    for path in range(num_paths):
        split, group = chosen[path], groups[path]
        layers, start, probed, loaded = ends[0, path], ends[1, path], ends[2, path], ends[3, path]
        patch_ms, filter_ms, projected_ms = ends[4, path], ends[5, path], ends[6, path]
        passes = 0.0
        for i in range(batch):
            bucket = buckets[i]
            passes += chances[group, bucket, 0] if requests[0, i] else 1.0
            least = np.inf
            for k in range(num_segments):
                price = layers * (widths[group, bucket, k] * requests[1, i])
                price += filtered_steps[split, bucket, k] * requests[2, i]
                # a request's segments stay in order, though filtering gives rebate for quantity
                gain = gains[group, bucket, k] * requests[0, i]
                least = min(least, gain / max(price, 1e-300))
                worth[i, k] = least
        _order(worth, order[path], num_segments)
        count = 0
        for stop in range(num_stops):
            if stop:
                i, k = order[path, stop - 1] // num_segments, order[path, stop - 1] % num_segments
                bucket = buckets[i]
                patch_ms += widths[group, bucket, k] * requests[1, i]
                filter_ms += filtered_steps[split, bucket, k] * requests[2, i]
                projected_ms += projected_steps[split, bucket, k] * requests[3, i]
                passes += gains[group, bucket, k] * requests[0, i]
            behind = layers * patch_ms
            total_ms = max(start + filter_ms + behind, probed + projected_ms + behind)
            total_ms = fixed_ms + max(total_ms, loaded + patch_ms)
            if not stop:
                total_ms = floor_ms[split]
            stops[0, path, stop], stops[1, path, stop] = patch_ms, filter_ms
            stops[2, path, stop], stops[3, path, stop] = projected_ms, total_ms
            stops[4, path, stop] = passes
            count += total_ms <= target_ms
        num_within[path] = count
        if not count:
            continue
        # the envelope at the first place where a term may exceed the target: a term is concave
        # along a segment, so it lies above the line between its two stops
        here, there = count - 1, min(count, num_stops - 1)
        share = 1.0
        for term in range(3):
            if term == 2:
                left, right = loaded + stops[0, path, here], loaded + stops[0, path, there]
            else:
                fixed = start if term == 0 else probed
                left = fixed + stops[1 + term, path, here] + layers * stops[0, path, here]
                right = fixed + stops[1 + term, path, there] + layers * stops[0, path, there]
            left, right = left + fixed_ms, right + fixed_ms
            if right > left:
                share = min(share, max((target_ms - left) / (right - left), 0.0))
        first, second = stops[4, path, here], stops[4, path, there]
        bounds[path] = first + share * (second - first)
    return order, stops, num_within, bounds
