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
fewer that get some of the time up to their saturation; for each candidate the better one counts.

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

QUEUE_SHARES = (0.0, 0.3)  # of the way from floor to saturation, in the two queues


@dataclass(frozen=True, slots=True)
class QueueProjection:
    """Of one decision for one replica: requests that all run, in order, unless late after all.

    The loops are those of `decision_kernel`; `decision_reference` has them as array expressions.

    queue: a column for each request, [SEGMENTS + 3 · num_segments, num_columns], as the kernel
    reads it; column_of: of each place, [num_queued + 1], the last one for −1; −1 for none.
    other, other_column_of: of the second queue, without a column if it is the same.
    first_ms: when the first of the other replicas is free.
    """

    queue: Floats
    column_of: Ints
    other: Floats
    other_column_of: Ints
    first_ms: float

    @classmethod
    def of(
        cls,
        timely: Bools,
        *,
        slack_ms: Floats,
        floor_ms: Floats,
        floor_passes: Floats,
        segment_ms: Floats,
        segment_passes: Floats,
        others_ms: Floats,
        shares: Sequence[float] = QUEUE_SHARES,
    ) -> "QueueProjection":
        """Of the requests that leave each other enough time.

        timely: those that may run, [num_queued]; slack_ms, floor_ms, floor_passes: time left until
        each deadline, and a request's curve, in order of deadline, [num_queued]
        segment_ms, segment_passes: [num_segments, num_queued], what more time brings, the most
        passes per ms first
        others_ms: when the other replicas are free, from now, in order, 0 for those that are
        """
        from planner.decision_kernel import project

        given = (timely, slack_ms, floor_ms, floor_passes, segment_ms, segment_passes)
        queues = [project(*given, others_ms, share) for share in shares]
        (queue, column_of), (other, other_column_of) = queues[0], queues[-1]
        if other.shape == queue.shape and np.array_equal(column_of, other_column_of):
            other, other_column_of = np.empty((len(queue), 0)), np.full_like(column_of, -1)
        first_ms = float(others_ms[0]) if len(others_ms) else np.inf
        return cls(queue, column_of, other, other_column_of, first_ms)

    @property
    def num_columns(self) -> int:
        return int(self.queue.shape[1] + self.other.shape[1])

    def passes(self, members: Ints, occupied_ms: Floats) -> Floats:
        """Expected passes of the queue, for each candidate with its occupancy.

        members: [num_candidates, max_members], places that leave the queue; −1 fills up.
        occupied_ms, returns: [num_candidates]
        """
        from planner.decision_kernel import queue_passes

        return np.maximum(
            queue_passes(self.queue, self.column_of, members, occupied_ms),
            queue_passes(self.other, self.other_column_of, members, occupied_ms),
        )


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
