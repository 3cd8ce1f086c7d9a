import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.decision_kernel import FLOOR, LATEST, SEGMENTS
from planner.decision_reference import ALWAYS, NEVER, breakpoints_ref, schedule_ref
from planner.queue_projection import QUEUE_SHARES, QueueProjection, simulate_queue

NOBODY = np.full((1, 1), -1)


def work(slack, floor, *, passes=0.5, segments=((100.0, 0.3), (200.0, 0.1))):
    """Requests that wait, in order of deadline as the projection wants them."""
    order = np.argsort(slack, kind="stable")
    slack, floor = np.array(slack, float)[order], np.array(floor, float)[order]
    return {
        "slack_ms": slack,
        "floor_ms": floor,
        "floor_passes": np.full(len(slack), passes),
        "segment_ms": np.tile([[ms] for ms, _ in segments], len(slack)),
        "segment_passes": np.tile([[gain] for _, gain in segments], len(slack)),
    }


def projection(queued, others, **shares):
    timely = np.ones(len(queued["slack_ms"]), bool)
    others_ms = np.sort(np.array([ms for ms in others if np.isfinite(ms)], np.float64))
    return QueueProjection.of(timely, **queued, others_ms=others_ms, **shares)


def schedule(queue, members, occupied_ms):
    return schedule_ref(queue.queue, queue.column_of, members, np.array(occupied_ms))


def kept(queue):
    """Slack, floor and the longest that more time is worth something, of those that run."""
    floor_ms = queue.queue[FLOOR]
    return queue.queue[LATEST] + floor_ms, floor_ms, queue.queue[SEGMENTS + 1 :: 3].sum(axis=0)


def breakpoints(queue, members):
    return breakpoints_ref(queue.queue, queue.column_of, members, queue.first_ms)


def test_a_request_alone_gets_all_its_slack():
    one = projection(work([500.0], [100.0]), [])
    assert one.passes(NOBODY, np.array([100.0])) == pytest.approx(0.9)  # 300 ms beyond the floor
    assert one.passes(NOBODY, np.array([250.0])) == pytest.approx(0.5 + 0.3 + 50 / 200 * 0.1)
    assert one.passes(NOBODY, np.array([399.0])) == pytest.approx(0.5 + 0.003, abs=1e-4)
    assert one.passes(NOBODY, np.array([401.0])) == 0.0


def test_breakpoints_are_the_longest_occupancies_that_leave_a_request_on_time():
    queued = work([500.0, 600.0, 700.0], [100.0, 100.0, 100.0])
    alone = projection(queued, [])
    assert breakpoints(alone, NOBODY)[0, :3] == pytest.approx([400.0, 400.0, 400.0], abs=1e-4)
    first_gone = breakpoints(alone, np.array([[0]]))[0, :3]
    assert first_gone == pytest.approx([NEVER, 500.0, 500.0], abs=1e-4)
    with_help = projection(queued, [0.0])
    assert (breakpoints(with_help, NOBODY)[0, :3] == ALWAYS).all()
    late_help = projection(queued, [550.0])  # too late for the first two, and for the third alone
    assert np.isfinite(breakpoints(late_help, NOBODY)[0, :2]).all()


def test_requests_that_cannot_all_be_on_time_leave_the_longest_out():
    queued = work([300.0, 310.0, 320.0], [100.0, 250.0, 100.0], segments=((0.0, 0.0),))
    assert projection(queued, []).passes(NOBODY, np.array([0.0])) == pytest.approx(1.0)


def test_an_empty_queue_and_replicas_that_never_end():
    nobody = projection(work([], []), [np.inf, np.nan, -5.0])
    assert nobody.passes(NOBODY, np.array([10.0])) == 0.0
    assert breakpoints(nobody, NOBODY).shape == (1, 0)
    stuck = projection(work([100.0], [50.0]), [np.inf])
    assert stuck.passes(NOBODY, np.array([60.0])) == 0.0


def random_queue(seed):
    """A queue, the other replicas, members of the batch and an occupancy; ties are common."""
    rng = random.Random(seed)
    size = rng.randint(1, 12)
    step = rng.choice([0.001, 10.0, 50.0])

    def ms(most):
        return step * rng.randint(0, max(1, int(most / step)))

    floors = [step + ms(100.0) for _ in range(size)]
    slacks = [floor + ms(400.0) for floor in floors]
    others = [ms(300.0) for _ in range(rng.randint(0, 4))]
    members = sorted(rng.sample(range(size), rng.randint(0, min(3, size))))
    segments = [(ms(200.0), rng.uniform(0.0, 0.3)) for _ in range(rng.randint(1, 3))]
    return work(slacks, floors, segments=segments), others, members, ms(300.0)


@given(st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_it_is_never_more_optimistic_than_running_the_queue(seed):
    """Those who are said to be on time are, floor and extra time together, event by event."""
    queued, others, members, occupied = random_queue(seed)
    candidate = np.array([[*members, *[-1] * (3 - len(members))]])
    for share in QUEUE_SHARES:
        queue = projection(queued, others, shares=[share])
        on_time, extra = schedule(queue, candidate, [occupied])
        runs = np.flatnonzero(on_time[0])
        assert not set(runs.tolist()) & set(queue.column_of[members].tolist())
        slack_ms, floor_ms, most_ms = kept(queue)
        took = floor_ms[runs] + np.minimum(extra[0, runs], most_ms[runs])
        for costs in (floor_ms[runs], took):
            assert all(
                simulate_queue(
                    slack_ms=slack_ms[runs].tolist(),
                    cost_ms=costs.tolist(),
                    free_ms=[*others, occupied],
                )
            )


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_a_breakpoint_keeps_its_request_on_time(seed):
    queued, others, members, _ = random_queue(seed)
    candidate = np.array([[*members, *[-1] * (3 - len(members))]])
    for share in QUEUE_SHARES:
        queue = projection(queued, others, shares=[share])
        points = breakpoints(queue, candidate)[0]
        for column in np.flatnonzero(np.isfinite(points)):
            on_time, _ = schedule(queue, candidate, [points[column]])
            assert on_time[0, column]


def test_how_pessimistic_it_is():
    """At the floor, of the requests that would be on time, it finds most."""
    rng = np.random.default_rng(0)
    found = real = 0
    for _ in range(200):
        size, num_others = rng.integers(1, 40), rng.integers(0, 8)
        floor = rng.uniform(20, 200, size)
        queued = work(floor + rng.exponential(800, size), floor, segments=((0.0, 0.0),))
        others, occupied = rng.uniform(0, 300, num_others), rng.uniform(0, 300)
        queue = projection(queued, others, shares=[0.0])
        on_time, _ = schedule(queue, NOBODY, [occupied])
        found += int(on_time.sum())
        slack_ms, floor_ms, _ = kept(queue)
        real += sum(
            simulate_queue(
                slack_ms=slack_ms.tolist(),
                cost_ms=floor_ms.tolist(),
                free_ms=[*others.tolist(), occupied],
            )
        )
    assert found >= 0.9 * real
