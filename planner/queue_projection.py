"""How many waiting requests would still pass if a replica were given away for a while.

The requests left in the queue run by themselves, one after the other, earliest deadline first, on
whichever replica is free first. Work is conserved: a request starts later than a moment t only if
no replica has idled up to t, that is, if the work before it exceeds what all replicas can do until
then. So a request of cost c surely starts in time, by L = slack − c, if

    P <= C(L)        C(t) = Σ_k max(0, t − a_k)

with P the cost of the requests before it and a_k when replica k is free; the one that is given away
is free after the occupancy u. Solved for u, each request has a breakpoint: the longest occupancy
that leaves it on time.

All run at their floor cost first. What is left over is shared: with the margin M = C(L) − P, rank
j (requests before it) and m replicas free by L, every request may take longer by the same x as
those before it as long as (j + m)·x <= M, so x_i is the least M / (j + m) of i and all behind it.

Requests that would be late anyway do not run. Which ones those are is decided once, by Moore's and
Hodgson's rule (Management Science 15, 1968): in order of deadline, and whenever one would be late,
the longest so far is left out. Two such queues are looked at, of all requests at the floor, and of
fewer that get some of the time up to their saturation; the better one counts.

The projection is never more optimistic than the same queue run event by event (`simulate_queue`):
a request counts as on time only if every replica can be busy until its turn.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NEVER = -np.inf  # the breakpoint of a request that is late however short the occupancy
ALWAYS = np.inf  # of one that is on time without the replica that is given away
SLACKENED = 0.3  # share of the way from floor to saturation, of the second queue
EPS_MS = 1e-6  # taken off every capacity: sums are rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedWork:
    """The requests that may run, in order of deadline: [num_queued].

    rows: their names to the caller; slack_ms: time left until each deadline; floor_ms and
    floor_passes: alone, at the floor; segment_ms, segment_passes: [num_queued, num_segments], what
    more time brings, the most passes per ms first.
    """

    rows: Ints
    slack_ms: Floats
    floor_ms: Floats
    floor_passes: Floats
    segment_ms: Floats
    segment_passes: Floats

    def take(self, idxs: Ints) -> "QueuedWork":
        return QueuedWork(
            rows=self.rows[idxs],
            slack_ms=self.slack_ms[idxs],
            floor_ms=self.floor_ms[idxs],
            floor_passes=self.floor_passes[idxs],
            segment_ms=self.segment_ms[idxs],
            segment_passes=self.segment_passes[idxs],
        )


class QueueProjection:
    """Of one decision for one replica.

    others_ms: when the other replicas are free, from now; 0 for those that are. One that is not
    finite is never free.
    num_rows: `work.rows` and the candidates' members are below it.
    """

    def __init__(self, work: QueuedWork, *, others_ms: Sequence[float], num_rows: int) -> None:
        others = np.maximum(np.asarray(others_ms, dtype=np.float64), 0.0)
        free = np.sort(others[np.isfinite(others)])
        kept = [_most_on_time(work, free, 0.0)]
        if work.segment_passes.any():
            slackened = _most_on_time(work, free, SLACKENED)
            if not np.array_equal(slackened, kept[0]):
                kept.append(slackened)
        self.queues = [RunQueue(work.take(idxs), free, num_rows) for idxs in kept]

    @property
    def num_columns(self) -> int:
        return sum(len(queue.work.rows) for queue in self.queues)

    def passes(self, members: Ints, occupied_ms: Floats) -> Floats:
        """Expected passes of the queue, for each candidate with its occupancy.

        members: [num_candidates, max_members], rows that leave the queue; −1 fills up.
        occupied_ms, returns: [num_candidates]
        """
        best = self.queues[0].passes(members, occupied_ms)
        for queue in self.queues[1:]:
            best = np.maximum(best, queue.passes(members, occupied_ms))
        return best

    def breakpoints(self, members: Ints) -> Floats:
        """The longest occupancies that leave each request on time: [num_candidates, num_points].

        `NEVER` for members, `ALWAYS` where the replica does not matter.
        """
        return np.concatenate([queue.breakpoints(members) for queue in self.queues], axis=1)


class RunQueue:
    """Requests that all run, in order, unless they are late after all."""

    def __init__(self, work: QueuedWork, others_ms: Floats, num_rows: int) -> None:
        self.work = work
        self._latest_ms = work.slack_ms - work.floor_ms
        self._capacity_ms, self._free_by = _capacity(self._latest_ms, others_ms)
        self._first_ms = float(others_ms[0]) if len(others_ms) else np.inf
        self._before_ms = np.cumsum(work.floor_ms) - work.floor_ms
        self._column = np.full(num_rows + 1, -1)  # the last one is for −1
        self._column[work.rows] = np.arange(len(work.rows))
        self._start_ms = np.cumsum(work.segment_ms, axis=1) - work.segment_ms
        self._slopes = work.segment_passes / np.maximum(work.segment_ms, 1e-12)
        self._steps = [k for k in range(self._slopes.shape[1]) if self._slopes[:, k].any()]

    def passes(self, members: Ints, occupied_ms: Floats) -> Floats:
        on_time, margin_ms, free_by = self._on_time(members, occupied_ms, bool(self._steps))
        passes: Floats = on_time @ self.work.floor_passes
        if self._steps:
            extra_ms = _shared(on_time, margin_ms, free_by)
            for k in self._steps:
                part = extra_ms - self._start_ms[:, k]
                np.minimum(part, self.work.segment_ms[:, k], out=part)
                np.maximum(part, 0.0, out=part)
                passes += part @ self._slopes[:, k]
        return passes

    def schedule(self, members: Ints, occupied_ms: Floats) -> tuple[Bools, Floats]:
        """Which requests run, and for how long beyond their floor: [num_candidates, num_queued]."""
        on_time, margin_ms, free_by = self._on_time(members, occupied_ms, True)
        return on_time, _shared(on_time, margin_ms, free_by)

    def _on_time(
        self, members: Ints, occupied_ms: Floats, with_margins: bool
    ) -> tuple[Bools, Floats, Ints]:
        """Which requests run, their margins, and the replicas that are free by their start."""
        floor_ms = self.work.floor_ms
        rows, columns = self._places(members)
        left_ms = self._latest_ms - occupied_ms[:, None]
        free_by = (left_ms >= 0.0) + self._free_by
        margin = np.maximum(left_ms, 0.0, out=left_ms)
        margin += self._capacity_ms
        can_run = free_by >= 1
        runs_ms = can_run * floor_ms
        runs_ms[rows, columns] = 0.0
        before = runs_ms.cumsum(axis=1)
        before -= runs_ms
        on_time: Bools = (before <= margin) & can_run
        on_time[rows, columns] = False
        if with_margins:
            np.multiply(on_time, floor_ms, out=runs_ms)  # the late ones leave
            runs_ms.cumsum(axis=1, out=before)
            before -= runs_ms
            margin -= before
        return on_time, margin, free_by

    def breakpoints(self, members: Ints) -> Floats:
        floor_ms = self.work.floor_ms
        rows, columns = self._places(members)
        gone = np.zeros((len(members), len(floor_ms)))
        gone[rows, columns] = floor_ms[columns]
        spare = self._capacity_ms - self._before_ms + (np.cumsum(gone, axis=1) - gone)
        points: Floats = self._latest_ms + np.minimum(spare, 0.0) - EPS_MS
        points[(spare >= 0.0) & (self._latest_ms >= self._first_ms)] = ALWAYS
        points[points < 0.0] = NEVER
        points[rows, columns] = NEVER
        return points

    def _places(self, members: Ints) -> tuple[Ints, Ints]:
        """Row of the candidate and column of the queue, of each member that the queue has."""
        columns = self._column[members]
        rows, places = np.nonzero(columns >= 0)
        return rows, columns[rows, places]


def _shared(on_time: Bools, margin_ms: Floats, free_by: Ints) -> Floats:
    """How much longer than its floor each request may take, if all do: see the module."""
    sharers = on_time.cumsum(axis=1, dtype=np.float64)
    sharers += free_by
    sharers -= on_time
    np.maximum(sharers, 1.0, out=sharers)
    np.divide(margin_ms, sharers, out=sharers)
    sharers[~on_time] = np.inf
    extra: Floats = np.minimum.accumulate(sharers[:, ::-1], axis=1)[:, ::-1]
    np.maximum(extra, 0.0, out=extra)
    extra[~on_time] = 0.0
    return extra


def _capacity(by_ms: Floats, free_ms: Floats) -> tuple[Floats, Ints]:
    """What replicas can do until each moment, and how many are free by then. free_ms: sorted."""
    free_by = np.searchsorted(free_ms, by_ms, side="right")
    sums = np.concatenate([[0.0], np.cumsum(free_ms)])
    return free_by * by_ms - sums[free_by] - EPS_MS, free_by


def _most_on_time(work: QueuedWork, others_ms: Floats, share: float) -> Ints:
    """Positions of the requests that can all be on time if every replica serves the queue.

    share: of the way from the floor to the saturation, that each of them takes.
    """
    cost = work.floor_ms + share * work.segment_ms.sum(axis=1)
    free_ms = np.concatenate([[0.0], others_ms])  # the chosen replica is free now
    capacity, free_by = _capacity(work.slack_ms - cost, free_ms)
    capacity = np.where(free_by >= 1, capacity + EPS_MS, -1.0)
    late = np.flatnonzero(np.cumsum(cost) - cost > capacity)
    if not len(late):
        return np.arange(len(cost))
    first = int(late[0])
    costs, capacities = cost.tolist(), capacity.tolist()
    kept = [True] * first + [False] * (len(costs) - first)
    longest = [(-ms, i) for i, ms in enumerate(costs[:first])]
    heapq.heapify(longest)
    before = sum(costs[:first])
    for i in range(first, len(costs)):
        ms = costs[i]
        if before <= capacities[i]:
            before += ms
            heapq.heappush(longest, (-ms, i))
        elif longest and -longest[0][0] > ms and before + longest[0][0] <= capacities[i]:
            less, dropped = heapq.heapreplace(longest, (-ms, i))
            kept[dropped] = False
            before += less + ms
        else:
            continue
        kept[i] = True
    return np.flatnonzero(kept)


def simulate_queue(
    *, slack_ms: Sequence[float], cost_ms: Sequence[float], free_ms: Sequence[float]
) -> list[bool]:
    """Whether each request is on time, event by event: the plain reference of the projection.

    In the order of the arguments, each on the replica that is free first. free_ms: when each
    replica is, that which was given away among them.
    """
    free = [max(0.0, ms) for ms in free_ms if np.isfinite(ms)]
    heapq.heapify(free)
    on_time = []
    for slack, cost in zip(slack_ms, cost_ms, strict=True):
        if not free:
            on_time.append(False)
            continue
        end = free[0] + cost
        heapq.heapreplace(free, end)
        on_time.append(end <= slack)
    return on_time
