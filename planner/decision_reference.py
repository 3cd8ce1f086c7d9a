"""What `decision_kernel` computes, as plain array expressions. Only tests call these.

Q waiting requests, N columns of a projection, C candidates of up to W members, K segments of a
request's curve, S = W·K of a candidate's.
"""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.decision_kernel import (
    CAPACITY,
    EPS_MS,
    FLOOR,
    FREE_BY,
    LATEST,
    NUM_BUDGETS,
    OTHERS_CAN,
    PASSES,
    ROUNDED,
    SEGMENTS,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NEVER = -np.inf  # the breakpoint of a request that is late however short the occupancy
ALWAYS = np.inf  # of one that is on time without the replica that is given away


def loaded_times_ref(
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
    """Requests' curves on a machine with a link, as the columns of `pass_curves.Times`.

    The curves are those of `pass_curves.RequestCurve`, [Q] and [K, Q]; the machine that of `Pace`.

    A prefill ends when its work is done, or one Patch layer after the last stored KV has come,
    whichever is later. Where that is the loading, a deeper WarmUp serves: with a share x of the
    other layers in it there is x·(full prefill − floor) more to compute, and (1 − x) of the KV to
    load. The floor is where both end together, or as deep as the planner goes; what the loading
    hides even so costs nothing. From there on, time buys what it does without a link, and WarmUp
    besides that is not needed any more. Full prefill waits for nothing and passes for sure, so it
    is the floor where it takes no longer.
    """
    exact_ms, segment_ms = speed * exact_ms, speed * segment_ms
    first_ms = latency_ms * (loaded > 0.0)
    floor_ms = speed * floor_ms + first_ms + token_ms * probed
    load_ms = token_ms * loaded
    wait_ms = np.maximum(first_ms + load_ms + speed * last_ms - floor_ms, 0.0)
    deeper_ms = np.where(deepest > 0.0, exact_ms, floor_ms) - floor_ms
    gain_ms = np.maximum(load_ms + deeper_ms, 1e-12)
    share = np.minimum(wait_ms / gain_ms, deepest)
    free_ms = np.maximum(wait_ms - share * gain_ms, 0.0)
    floor_ms = floor_ms + wait_ms - share * load_ms
    free_ms, hidden_ms = (
        np.diff(np.minimum(np.cumsum(segment_ms, axis=0), ms), axis=0, prepend=0.0)
        for ms in (free_ms, wait_ms)
    )
    paid_ms = segment_ms - free_ms - (hidden_ms - free_ms) * deeper_ms / gain_ms
    free_passes = segment_passes * (free_ms / np.maximum(segment_ms, 1e-12))
    is_exact = exact_ms <= floor_ms
    return np.vstack(
        (
            np.where(is_exact, exact_ms, floor_ms),
            np.where(is_exact, 1.0, floor_passes + free_passes.sum(axis=0)),
            np.where(is_exact, 0.0, np.maximum(paid_ms, 0.0)),
            np.where(is_exact, 0.0, np.maximum(segment_passes - free_passes, 0.0)),
        )
    )


def most_on_time_ref(slack_ms: Floats, cost_ms: Floats, free_ms: Floats) -> Bools:
    """Moore's and Hodgson's choice of requests that can all be on time, [N].

    slack_ms, cost_ms: [N], in order of deadline; free_ms: when each replica is, sorted
    """
    kept = np.zeros(len(cost_ms), np.bool_)
    longest: list[tuple[float, int]] = []
    before = 0.0
    for i, cost in enumerate(cost_ms.tolist()):
        by_ms = slack_ms[i] - cost
        is_free = free_ms <= by_ms
        capacity = (by_ms - free_ms[is_free]).sum() if is_free.any() else -1.0
        if before <= capacity:
            before += cost
            heapq.heappush(longest, (-cost, i))
        elif longest and -longest[0][0] > cost and before + longest[0][0] <= capacity:
            less, dropped = heapq.heapreplace(longest, (-cost, i))
            kept[dropped] = False
            before += less + cost
        else:
            continue
        kept[i] = True
    return kept


def project_ref(
    timely: Bools,
    slack_ms: Floats,
    floor_ms: Floats,
    floor_passes: Floats,
    segment_ms: Floats,
    segment_passes: Floats,
    others_ms: Floats,
    share: float,
) -> tuple[Floats, Ints]:
    """The requests that can all be on time, as a matrix; and the column of each request.

    timely: [Q], those that may run; slack_ms, floor_ms, floor_passes: [Q], in order of deadline
    segment_ms, segment_passes: [K, Q]; others_ms: sorted; share: of the way from the floor to the
    saturation, that each of them takes
    returns: [SEGMENTS + 3 K, N]; [Q + 1], −1 for those without a column, the last one for −1
    """
    places = timely.nonzero()[0]
    slopes = segment_passes / np.maximum(segment_ms, 1e-12)
    start_ms = segment_ms.cumsum(axis=0) - segment_ms
    latest_ms = slack_ms - floor_ms
    left_ms = latest_ms - others_ms[:, None]  # what each of the others can do until then
    num_free = (left_ms >= 0.0).sum(axis=0)
    queue = np.concatenate(
        [
            [latest_ms, np.maximum(left_ms, 0.0).sum(axis=0) - EPS_MS],
            [num_free > 0, num_free + 1, floor_ms, floor_passes],
            np.stack([start_ms, segment_ms, slopes], axis=1).reshape(-1, len(timely)),
        ]
    )
    cost_ms = floor_ms[places] + share * segment_ms[:, places].sum(axis=0)
    kept = most_on_time_ref(slack_ms[places], cost_ms, np.append(0.0, others_ms))
    column_of = np.full(len(timely) + 1, -1)
    column_of[places[kept]] = np.arange(kept.sum())
    return queue[:, places[kept]], column_of


def queue_passes_ref(queue: Floats, column_of: Ints, members: Ints, occupied_ms: Floats) -> Floats:
    """Expected passes of the queue, for each candidate with its occupancy.

    queue, column_of: of `project`; members: [C, W], places of requests that leave the queue; −1
    fills up; occupied_ms, returns: [C]
    """
    on_time, extra_ms = schedule_ref(queue, column_of, members, occupied_ms)
    passes: Floats = on_time @ queue[PASSES]
    for row in range(SEGMENTS, len(queue), 3):
        start_ms, length_ms, slopes = queue[row : row + 3]
        passes += np.clip(extra_ms - start_ms, 0.0, length_ms) @ slopes
    return passes


def schedule_ref(
    queue: Floats, column_of: Ints, members: Ints, occupied_ms: Floats
) -> tuple[Bools, Floats]:
    """Which requests run, and for how long beyond their floor: [C, N]."""
    margin_ms = queue[LATEST] - occupied_ms[:, None]
    can_run = (margin_ms >= 0.0) | (queue[OTHERS_CAN] > 0.0)
    can_run &= ~_gone(queue, column_of, members)
    margin_ms = np.maximum(margin_ms, 0.0) + queue[CAPACITY]
    on_time: Bools = can_run & (_before(can_run * queue[FLOOR]) <= margin_ms)
    margin_ms -= _before(on_time * queue[FLOOR])  # the late ones leave
    # how much longer than its floor each may take, if all do: see `queue_projection`
    extra_ms = np.where(on_time, margin_ms / (_before(on_time) + queue[FREE_BY]), np.inf)
    extra_ms = np.minimum.accumulate(extra_ms[:, ::-1], axis=1)[:, ::-1]
    return on_time, np.where(on_time, extra_ms, 0.0)


def breakpoints_ref(queue: Floats, column_of: Ints, members: Ints, first_ms: float) -> Floats:
    """The longest occupancies that leave each request on time: [C, N].

    first_ms: when the first of the other replicas is free.
    `NEVER` for members, `ALWAYS` where the replica does not matter.
    """
    gone = _gone(queue, column_of, members)
    spare = queue[CAPACITY] - _before(~gone * queue[FLOOR])
    points: Floats = queue[LATEST] + np.minimum(spare, 0.0) - EPS_MS
    points[(spare >= 0.0) & (queue[LATEST] >= first_ms)] = ALWAYS
    points[gone | (points < 0.0)] = NEVER
    return points


def candidate_curves_ref(
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
    """The candidates that keep the deadlines of all members that can be kept.

    members: [C, W]; the others as in `project`, on the chosen replica; at_home: [Q], its chunks
    are hot there; away_ms: [Q], the floor's time where they are not, and all has to be computed
    shared_ms: paid once by a batch; usable: share of a budget that the planner uses
    returns: rows of `members`, [kept]; limits, [kept, 4]: the floor's time and passes, the least
    slack of those that can be on time, the longest budget that makes a difference; curves,
    [kept, 3, S]: start, length and slope of the segments beyond the floor, the steepest first
    """
    is_member = members >= 0
    is_timely = is_member & timely[members]
    own_ms = np.where(at_home[members], floor_ms[members], away_ms[members])
    least_ms = shared_ms + (np.maximum(own_ms - shared_ms, 0.0) * is_member).sum(axis=1)
    passes = (floor_passes[members] * is_timely).sum(axis=1)
    slack = np.where(is_timely, slack_ms[members], np.inf).min(axis=1)
    # more time is worth something to those at home; the others fill up with nothing
    chooses = is_timely & at_home[members]
    length_ms = (segment_ms[:, members] * chooses).swapaxes(0, 1)
    slopes = segment_passes[:, members].swapaxes(0, 1) * chooses[:, None]
    slopes = slopes / np.maximum(length_ms, 1e-12)
    shape = (len(members), -1)
    length_ms, slopes = (
        length_ms.swapaxes(1, 2).reshape(shape),
        slopes.swapaxes(1, 2).reshape(shape),
    )
    order = (-slopes).argsort(axis=1, kind="stable")
    length_ms = np.take_along_axis(length_ms, order, axis=1)
    slopes = np.take_along_axis(slopes, order, axis=1)
    start_ms = least_ms[:, None] + length_ms.cumsum(axis=1) - length_ms
    saturation_ms = least_ms + length_ms.sum(axis=1)
    most_ms = np.minimum(slack, np.maximum(least_ms, saturation_ms / usable))
    limits = np.stack([least_ms, passes, slack, np.maximum(most_ms, least_ms)], axis=1)
    rows = (least_ms <= slack + EPS_MS).nonzero()[0]
    return rows, limits[rows], np.stack([start_ms, length_ms, slopes], axis=1)[rows]


def search_ref(
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
    """The best candidates with how long they would take, and the passes of the queue meanwhile.

    Of the two queues, the one that passes more counts; breakpoints are those of the first.
    Each is tried with its shortest budget, and its longest if `try_longest`; the best few
    (`num_searched`) with more between them.
    members, parked, by_size: [C, W], [C], [C], of those in `limits` and `curves`; of equals, the
    lower `by_size` is better
    returns: rows, occupied_ms and passes, [num_offers]
    """
    queues = ((queue, column_of), (other, other_column_of))
    best: list[tuple[float, float, float]] = []  # value, ms and passes of the queue
    for c in range(len(members)):
        tries = limits[c, [0, 3]] if try_longest else limits[c, :1]
        best.append(_best_of_tries(c, tries, members, limits, curves, queues, usable))

    def by_value(c: int) -> tuple[float, bool, int, float, int]:
        value, ms, _ = best[c]
        return -value, bool(parked[c]), int(by_size[c]), -ms, c

    for c in sorted(range(len(members)), key=by_value)[:num_searched]:
        points = breakpoints_ref(queue, column_of, members[[c]], first_ms)[0]
        tries = budgets_ref(points, limits[c, 0], limits[c, 3])
        found = _best_of_tries(c, tries, members, limits, curves, queues, usable)
        if found[0] >= best[c][0]:
            best[c] = found
    offers = sorted(range(len(members)), key=by_value)[:num_offers]
    _, ms, waits = zip(*(best[c] for c in offers), strict=True)
    return np.array(offers), np.array(ms), np.array(waits)


def budgets_ref(points: Floats, least_ms: float, most_ms: float) -> Floats:
    """Budgets to try, rising: `NUM_BUDGETS` breakpoints between the two, and even steps.

    returns: [2 · NUM_BUDGETS]; short of breakpoints, the longest again
    """
    inside = np.sort(points[(points > least_ms) & (points < most_ms)])
    if len(inside) > NUM_BUDGETS:
        inside = inside[np.arange(NUM_BUDGETS) * (len(inside) - 1) // (NUM_BUDGETS - 1)]
    filling = np.full(NUM_BUDGETS - len(inside), most_ms)
    steps = np.linspace(least_ms, most_ms, NUM_BUDGETS + 1)[1:]
    return np.sort(np.concatenate([inside, filling, steps]))


def _best_of_tries(
    c: int,
    tries_ms: Floats,
    members: Ints,
    limits: Floats,
    curves: Floats,
    queues: Sequence[tuple[Floats, Ints]],
    usable: float,
) -> tuple[float, float, float]:
    """Of equals, the longest. tries_ms: rising"""
    rows = members[[c] * len(tries_ms)]
    waiting = np.max([queue_passes_ref(*queue, rows, tries_ms) for queue in queues], axis=0)
    start_ms, length_ms, slopes = curves[c]
    used_ms = np.clip(usable * tries_ms[:, None] - start_ms, 0.0, length_ms)
    value = np.rint((limits[c, 1] + used_ms @ slopes + waiting) * ROUNDED)
    at = len(value) - 1 - int(value[::-1].argmax())
    return float(value[at]), float(tries_ms[at]), float(waiting[at])


def _gone(queue: Floats, column_of: Ints, members: Ints) -> Bools:
    """The columns of each candidate's members, [C, N]."""
    gone = np.zeros((len(members), queue.shape[1]), np.bool_)
    rows, columns = (column_of[members] >= 0).nonzero()
    gone[rows, column_of[members[rows, columns]]] = True
    return gone


def _before(amounts: Floats | Bools) -> Floats:
    """Sums of those before each, [C, N]."""
    sums: Floats = amounts.cumsum(axis=1, dtype=np.float64) - amounts
    return sums
