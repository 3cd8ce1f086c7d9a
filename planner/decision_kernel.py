"""The loops of a scheduling decision, compiled: candidates row by row, and for each the queue.

As array expressions they are some hundred calls that take longer than their arithmetic. Each has a
plain reference with the same signature in `decision_reference`; a test compares the two.

Importing this module compiles it (seconds), or loads what was compiled before; therefore the
scheduler's constructor does, and `import planner` does not.

Names in comments: Q waiting requests, N of them in the projection ("columns", see
`queue_projection`), C candidates of up to W members, K segments of a request's curve.
"""

import numpy as np
from numpy.typing import NDArray

from planner.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# rows of a projection's matrix; those of segment k begin at SEGMENTS + 3 k: start, length, slope
LATEST, CAPACITY, OTHERS_CAN, FREE_BY, FLOOR, PASSES, SEGMENTS = range(7)
EPS_MS = 1e-6  # taken off every capacity, and added to every deadline: sums are rounded
ROUNDED = 1e6  # passes are compared by so many parts of one
NUM_BUDGETS = 4  # evenly spaced, and as many breakpoints


# --- the requests' times on a machine ---------------------------------------------------------


@compiled(
    "(f8[::1], f8[::1], f8[:,::1], f8[:,::1], f8[::1], f8[::1], f8[::1], f8[::1], f8[::1],"
    " f8, f8, f8)"
)
def loaded_times(
    floor_ms: Floats,
    floor_passes: Floats,
    segment_ms: Floats,
    segment_passes: Floats,
    exact_ms: Floats,
    last_ms: Floats,
    probed: Floats,
    loaded: Floats,
    deepest: Floats,
    speed: float,
    token_ms: float,
    latency_ms: float,
) -> Floats:
    """As `decision_reference.loaded_times_ref`."""
    num_segments = len(segment_ms)
    times = np.empty((2 + 2 * num_segments, len(floor_ms)))
    floors, passes = times[0], times[1]
    lengths, gains = times[2 : 2 + num_segments], times[2 + num_segments :]
    for i in range(len(floor_ms)):
        exact = speed * exact_ms[i]
        first = latency_ms if loaded[i] > 0.0 else 0.0
        load = token_ms * loaded[i]
        floor = speed * floor_ms[i] + first + token_ms * probed[i]
        wait = max(first + load + speed * last_ms[i] - floor, 0.0)
        deeper = exact - floor if deepest[i] > 0.0 else 0.0
        gain = max(load + deeper, 1e-12)
        share = min(wait / gain, deepest[i])
        free = max(wait - share * gain, 0.0)
        floor += wait - share * load
        is_exact = exact <= floor
        floors[i] = exact if is_exact else floor
        passes[i] = 1.0 if is_exact else floor_passes[i]
        start = 0.0  # of the segment, in what it takes without a link
        for k in range(len(segment_ms)):
            length = speed * segment_ms[k, i]
            end = start + length
            free_part = min(end, free) - min(start, free)
            hidden_part = min(end, wait) - min(start, wait) - free_part
            won = segment_passes[k, i] * (free_part / max(length, 1e-12))
            if is_exact:
                lengths[k, i] = gains[k, i] = 0.0
            else:
                lengths[k, i] = max(length - free_part - hidden_part * deeper / gain, 0.0)
                gains[k, i] = max(segment_passes[k, i] - won, 0.0)
                passes[i] += won
            start = end
    return times


# --- the queue that is left waiting --------------------------------------------------------------


@compiled("(f8[::1], f8)")
def _num_free(free_ms: Floats, by_ms: float) -> int:
    """How many replicas are free by then; free_ms: sorted."""
    low, high = 0, len(free_ms)
    while low < high:
        middle = (low + high) // 2
        if free_ms[middle] <= by_ms:
            low = middle + 1
        else:
            high = middle
    return low


@compiled("(i8[::1], i8, i8, f8[::1])")
def _sift_down(heap: Ints, size: int, at: int, cost_ms: Floats) -> None:
    """Restore the order below a place: the longest on top, of equals the first."""
    item = heap[at]
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size:
            left, right = heap[child], heap[child + 1]
            if cost_ms[right] > cost_ms[left] or (cost_ms[right] == cost_ms[left] and right < left):
                child += 1
        other = heap[child]
        if cost_ms[item] > cost_ms[other] or (cost_ms[item] == cost_ms[other] and item < other):
            break
        heap[at] = other
        at = child
    heap[at] = item


@compiled("(f8[::1], f8[::1], f8[::1])")
def most_on_time(slack_ms: Floats, cost_ms: Floats, free_ms: Floats) -> Bools:
    """As `decision_reference.most_on_time_ref`."""
    num = len(cost_ms)
    kept = np.ones(num, np.bool_)
    free_sums = np.zeros(len(free_ms) + 1)
    for i in range(len(free_ms)):
        free_sums[i + 1] = free_sums[i] + free_ms[i]
    heap = np.empty(num, np.int64)  # of those kept, once one is late
    size = 0
    before = 0.0
    is_late = False
    for i in range(num):
        cost = cost_ms[i]
        by_ms = slack_ms[i] - cost
        free = _num_free(free_ms, by_ms)
        capacity = free * by_ms - free_sums[free] if free else -1.0
        if before <= capacity:
            before += cost
            heap[size] = i
            size += 1
            if is_late:  # sift up
                at = size - 1
                while at > 0:
                    parent = (at - 1) // 2
                    if cost_ms[heap[parent]] >= cost:
                        break
                    heap[at] = heap[parent]
                    at = parent
                heap[at] = i
            continue
        if not is_late:
            is_late = True
            for at in range(size // 2 - 1, -1, -1):
                _sift_down(heap, size, at, cost_ms)
        kept[i] = False
        if size:
            longest = heap[0]
            most = cost_ms[longest]
            if most > cost and before - most <= capacity:
                kept[i], kept[longest] = True, False
                heap[0] = i
                _sift_down(heap, size, 0, cost_ms)
                before += cost - most
    return kept


@compiled("(f8[:,::1], f8, b1[::1], f8[::1])")
def _row_passes(queue: Floats, occupied_ms: float, gone: Bools, shares_ms: Floats) -> float:
    """Of one candidate. gone: [N], its members; shares_ms: [N], for use in here."""
    num = queue.shape[1]
    before = running = sharers = 0.0  # of all that could run, and of those on time
    for i in range(num):
        shares_ms[i] = -np.inf
        if gone[i]:
            continue
        margin_ms = queue[LATEST, i] - occupied_ms
        if margin_ms < 0.0:
            if queue[OTHERS_CAN, i] == 0.0:
                continue
            margin_ms = 0.0
        margin_ms += queue[CAPACITY, i]
        floor_ms = queue[FLOOR, i]
        if before <= margin_ms:
            shares_ms[i] = (margin_ms - running) / (sharers + queue[FREE_BY, i])
            running += floor_ms
            sharers += 1.0
        before += floor_ms
    passes = 0.0
    extra_ms = np.inf
    for i in range(num - 1, -1, -1):
        if shares_ms[i] == -np.inf:
            continue
        extra_ms = min(extra_ms, shares_ms[i])
        passes += queue[PASSES, i]
        for row in range(SEGMENTS, len(queue), 3):
            part_ms = extra_ms - queue[row, i]
            if part_ms <= 0.0:
                break
            passes += min(part_ms, queue[row + 1, i]) * queue[row + 2, i]
    return passes


@compiled("(b1[::1], i8[::1], i8[::1], b1)")
def _mark(gone: Bools, column_of: Ints, members: Ints, value: bool) -> None:
    for place in members:
        column = column_of[place]
        if column >= 0:
            gone[column] = value


@compiled("(f8[:,::1], i8[::1], i8[:,::1], f8[::1])")
def queue_passes(queue: Floats, column_of: Ints, members: Ints, occupied_ms: Floats) -> Floats:
    """As `decision_reference.queue_passes_ref`."""
    num = queue.shape[1]
    gone, shares_ms = np.zeros(num, np.bool_), np.empty(num)
    passes = np.empty(len(members))
    for c in range(len(members)):
        _mark(gone, column_of, members[c], True)
        passes[c] = _row_passes(queue, occupied_ms[c], gone, shares_ms)
        _mark(gone, column_of, members[c], False)
    return passes


@compiled("(f8[:,::1], f8, b1[::1], f8, f8, f8[::1])")
def _row_breakpoints(
    queue: Floats, first_ms: float, gone: Bools, least_ms: float, most_ms: float, points: Floats
) -> int:
    """Of one candidate, those between two occupancies; returns how many. points: [N], written."""
    before = 0.0
    count = 0
    for i in range(queue.shape[1]):
        if gone[i]:
            continue
        spare_ms = queue[CAPACITY, i] - before
        before += queue[FLOOR, i]
        latest_ms = queue[LATEST, i]
        if spare_ms >= 0.0 and latest_ms >= first_ms:
            continue  # on time without the replica that is given away
        point = latest_ms + min(spare_ms, 0.0) - EPS_MS
        if least_ms < point < most_ms:
            points[count] = point
            count += 1
    return count


@compiled(
    "(f8[:,::1], i8[::1], b1[::1], b1[::1], f8[::1], f8[::1], f8[::1], f8[:,::1], f8[:,::1],"
    " f8[::1])"
)
def _fill(
    queue: Floats,
    column_of: Ints,
    timely: Bools,
    kept: Bools,
    slack_ms: Floats,
    floor_ms: Floats,
    floor_passes: Floats,
    segment_ms: Floats,
    segment_passes: Floats,
    others_ms: Floats,
) -> None:
    """Write a projection's matrix. kept: of those that are timely."""
    sums = np.zeros(len(others_ms) + 1)
    for i in range(len(others_ms)):
        sums[i + 1] = sums[i] + others_ms[i]
    at = column = 0
    for place in range(len(timely)):
        if not timely[place]:
            continue
        at += 1
        if not kept[at - 1]:
            continue
        latest_ms = slack_ms[place] - floor_ms[place]
        free = _num_free(others_ms, latest_ms)
        column_of[place] = column
        queue[LATEST, column] = latest_ms
        queue[CAPACITY, column] = free * latest_ms - sums[free] - EPS_MS
        queue[OTHERS_CAN, column] = 1.0 if free else 0.0
        queue[FREE_BY, column] = free + 1.0
        queue[FLOOR, column] = floor_ms[place]
        queue[PASSES, column] = floor_passes[place]
        start_ms = 0.0
        for k in range(len(segment_ms)):
            row, length_ms = SEGMENTS + 3 * k, segment_ms[k, place]
            queue[row, column] = start_ms
            queue[row + 1, column] = length_ms
            queue[row + 2, column] = segment_passes[k, place] / max(length_ms, 1e-12)
            start_ms += length_ms
        column += 1


@compiled("(b1[::1], f8[::1], f8[::1], f8[::1], f8[:,::1], f8[:,::1], f8[::1], f8)")
def project(
    timely: Bools,
    slack_ms: Floats,
    floor_ms: Floats,
    floor_passes: Floats,
    segment_ms: Floats,
    segment_passes: Floats,
    others_ms: Floats,
    share: float,
) -> tuple[Floats, Ints]:
    """As `decision_reference.project_ref`."""
    num = 0
    for is_timely in timely:
        num += is_timely
    free_ms = np.zeros(len(others_ms) + 1)  # the chosen replica is free now
    for i in range(len(others_ms)):
        free_ms[i + 1] = others_ms[i]
    slack, cost_ms = np.empty(num), np.empty(num)
    at = 0
    for place in range(len(timely)):
        if timely[place]:
            slack[at] = slack_ms[place]
            cost_ms[at] = floor_ms[place]
            for k in range(len(segment_ms)):
                cost_ms[at] += share * segment_ms[k, place]
            at += 1
    kept = most_on_time(slack, cost_ms, free_ms)
    count = 0
    for is_kept in kept:
        count += is_kept
    queue = np.empty((SEGMENTS + 3 * len(segment_ms), count))
    column_of = np.full(len(timely) + 1, -1)  # the last one is for −1
    _fill(
        queue,
        column_of,
        timely,
        kept,
        slack_ms,
        floor_ms,
        floor_passes,
        segment_ms,
        segment_passes,
        others_ms,
    )
    return queue, column_of


# --- the candidates ------------------------------------------------------------------------------


@compiled(
    "(i8[:,::1], b1[::1], b1[::1], f8[::1], f8[::1], f8[::1], f8[::1], f8[:,::1], f8[:,::1],"
    " f8, f8)"
)
def candidate_curves(
    members: Ints,
    timely: Bools,
    at_home: Bools,
    slack_ms: Floats,
    floor_ms: Floats,
    away_ms: Floats,
    floor_passes: Floats,
    segment_ms: Floats,
    segment_passes: Floats,
    shared_ms: float,
    usable: float,
) -> tuple[Ints, Floats, Floats]:
    """As `decision_reference.candidate_curves_ref`."""
    num_segments = len(segment_ms)
    rows = np.empty(len(members), np.int64)
    limits = np.empty((len(members), 4))
    curves = np.zeros((len(members), 3, members.shape[1] * num_segments))
    count = 0
    for c in range(len(members)):
        least_ms, passes, slack, longest_ms = shared_ms, 0.0, np.inf, 0.0
        lengths, slopes = curves[count, 1], curves[count, 2]
        size = 0
        for place in members[c]:
            if place < 0:
                continue
            own_ms = floor_ms[place] if at_home[place] else away_ms[place]
            least_ms += max(own_ms - shared_ms, 0.0)
            if not timely[place]:
                continue
            slack = min(slack, slack_ms[place])
            passes += floor_passes[place]
            if not at_home[place]:
                continue  # all has to be computed
            for k in range(num_segments):
                length_ms = segment_ms[k, place]
                slope = segment_passes[k, place] / max(length_ms, 1e-12)
                longest_ms += length_ms
                at = size  # the steepest first, of equals the earliest
                while at > 0 and slopes[at - 1] < slope:
                    lengths[at], slopes[at] = lengths[at - 1], slopes[at - 1]
                    at -= 1
                lengths[at], slopes[at] = length_ms, slope
                size += 1
        if least_ms > slack + EPS_MS:
            for k in range(size):
                lengths[k] = slopes[k] = 0.0
            continue
        start_ms = least_ms
        for k in range(curves.shape[2]):
            curves[count, 0, k] = start_ms
            start_ms += lengths[k]
        most_ms = min(slack, max(least_ms, (least_ms + longest_ms) / usable))
        rows[count] = c
        limits[count, 0], limits[count, 1] = least_ms, passes
        limits[count, 2], limits[count, 3] = slack, max(most_ms, least_ms)
        count += 1
    return rows[:count], limits[:count], curves[:count]


@compiled("(f8[:,::1], f8, f8)")
def _curve_passes(curve: Floats, floor_passes: float, ms: float) -> float:
    passes = floor_passes
    for k in range(curve.shape[1]):
        used_ms = ms - curve[0, k]
        if used_ms <= 0.0:
            break
        passes += min(used_ms, curve[1, k]) * curve[2, k]
    return passes


@compiled("(f8[::1],)")
def _sort(values: Floats) -> None:
    """Shell's sort: NumPy's takes seconds to compile."""
    gap = len(values) // 2
    while gap > 0:
        for i in range(gap, len(values)):
            value = values[i]
            at = i
            while at >= gap and values[at - gap] > value:
                values[at] = values[at - gap]
                at -= gap
            values[at] = value
        gap = 1 if gap == 2 else gap * 5 // 11


@compiled("(f8[::1], f8, f8, f8[::1])")
def _budgets(points: Floats, least_ms: float, most_ms: float, tries: Floats) -> None:
    """As `decision_reference.budgets_ref`. points: those between the two; tries: written."""
    num = len(points)
    _sort(points)
    for i in range(NUM_BUDGETS):
        tries[i] = most_ms
        if num > NUM_BUDGETS:
            tries[i] = points[i * (num - 1) // (NUM_BUDGETS - 1)]
        elif i < num:
            tries[i] = points[i]
        # the last one is the longest, exactly
        tries[NUM_BUDGETS + i] = most_ms - (most_ms - least_ms) * (1.0 - (i + 1) / NUM_BUDGETS)
    _sort(tries)


@compiled("(f8[::1], f8[::1], b1[::1], i8[::1], i8)")
def _best(value: Floats, occupied_ms: Floats, parked: Bools, by_size: Ints, most: int) -> Ints:
    """The best first. Ties: unparked; the lower `by_size`; more time; early."""
    num = len(value)
    order = np.empty(min(most, num), np.int64)
    is_taken = np.zeros(num, np.bool_)
    for at in range(len(order)):
        best = -1
        for c in range(num):
            if is_taken[c]:
                continue
            if best < 0 or value[c] > value[best]:
                best = c
            elif value[c] == value[best]:
                if parked[c] != parked[best]:
                    is_better = parked[best]
                elif by_size[c] != by_size[best]:
                    is_better = by_size[c] < by_size[best]
                else:
                    is_better = occupied_ms[c] > occupied_ms[best]
                if is_better:
                    best = c
        order[at] = best
        is_taken[best] = True
    return order


@compiled("(f8[:,::1], b1[::1], f8[:,::1], b1[::1], f8, f8[::1])")
def _better_passes(
    queue: Floats,
    gone: Bools,
    other: Floats,
    other_gone: Bools,
    occupied_ms: float,
    shares_ms: Floats,
) -> float:
    """Of one candidate, the more of two queues."""
    passes = _row_passes(queue, occupied_ms, gone, shares_ms)
    return max(passes, _row_passes(other, occupied_ms, other_gone, shares_ms))


@compiled(
    "(i8[:,::1], b1[::1], i8[::1], f8[:,::1], f8[:,:,::1], f8[:,::1], i8[::1], f8[:,::1],"
    " i8[::1], f8, f8, i8, b1, i8)"
)
def search(
    members: Ints,
    parked: Bools,
    by_size: Ints,
    limits: Floats,
    curves: Floats,
    queue: Floats,
    column_of: Ints,
    other: Floats,
    other_column_of: Ints,
    first_ms: float,
    usable: float,
    num_searched: int,
    try_longest: bool,
    num_offers: int,
) -> tuple[Ints, Floats, Floats]:
    """As `decision_reference.search_ref`."""
    num, columns, other_columns = len(members), queue.shape[1], other.shape[1]
    gone, other_gone = np.zeros(columns, np.bool_), np.zeros(other_columns, np.bool_)
    shares_ms = np.empty(max(columns, other_columns))
    value, ms, waits = np.empty(num), np.empty(num), np.empty(num)
    for c in range(num):
        _mark(gone, column_of, members[c], True)
        _mark(other_gone, other_column_of, members[c], True)
        ms[c] = limits[c, 0]
        waits[c] = _better_passes(queue, gone, other, other_gone, ms[c], shares_ms)
        value[c] = np.rint((limits[c, 1] + waits[c]) * ROUNDED)
        if try_longest:
            most_ms = limits[c, 3]
            waiting = _better_passes(queue, gone, other, other_gone, most_ms, shares_ms)
            own = _curve_passes(curves[c], limits[c, 1], usable * most_ms)
            tried = np.rint((own + waiting) * ROUNDED)
            if tried >= value[c]:
                value[c], ms[c], waits[c] = tried, most_ms, waiting
        _mark(gone, column_of, members[c], False)
        _mark(other_gone, other_column_of, members[c], False)
    tries = np.empty(2 * NUM_BUDGETS)
    for c in _best(value, ms, parked, by_size, num_searched):
        _mark(gone, column_of, members[c], True)
        _mark(other_gone, other_column_of, members[c], True)
        least_ms, most_ms = limits[c, 0], limits[c, 3]
        count = _row_breakpoints(queue, first_ms, gone, least_ms, most_ms, shares_ms)
        _budgets(shares_ms[:count], least_ms, most_ms, tries)
        for budget_ms in tries:  # rising: of equals, the longest
            waiting = _better_passes(queue, gone, other, other_gone, budget_ms, shares_ms)
            own = _curve_passes(curves[c], limits[c, 1], usable * budget_ms)
            tried = np.rint((own + waiting) * ROUNDED)
            if tried >= value[c]:
                value[c], ms[c], waits[c] = tried, budget_ms, waiting
        _mark(gone, column_of, members[c], False)
        _mark(other_gone, other_column_of, members[c], False)
    best = _best(value, ms, parked, by_size, num_offers)
    best_ms, best_waits = np.empty(len(best)), np.empty(len(best))
    for at in range(len(best)):
        best_ms[at], best_waits[at] = ms[best[at]], waits[best[at]]
    return best, best_ms, best_waits
