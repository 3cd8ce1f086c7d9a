import numpy as np
import pytest

from planner.arrival_forecast import NUM_SEEN, ArrivalForecast
from planner.batch_choice import CacheSmithConfig
from planner.pass_curves import CurveBook, Pace, planned_passes
from planner.slo_scheduler import CacheSmithScheduler
from planner.waiting_table import WaitingTable
from tests.planner.scheduler_worlds import COST, ConcavePlanner, profile, replica

PLANNER = ConcavePlanner()
BOOK = CurveBook(PLANNER, planned_passes, COST, reserve=0.0)


def curve_of(*, tokens, slo):
    table = WaitingTable()
    row = table.add(profile("q", tokens=tokens, slo=slo), now_ms=0.0, key=1, bucket=0, rounds=0.0)
    curve = BOOK.curve(tokens + 50, tokens, policy="adaptive", config=None)
    table.set_curve(row, curve)
    return table.curve(row).copy(), curve


def forecast(times_ms, **request):
    made = ArrivalForecast()
    column, _ = curve_of(**{"tokens": 600, "slo": 900.0, **request})
    for at_ms in times_ms:
        made.note(column, now_ms=at_ms)
    return made


def test_the_rate_is_that_of_the_latest_arrivals():
    early = [10_000.0 * i for i in range(20)]
    late = [1e6 + 5.0 * i for i in range(NUM_SEEN)]
    made = forecast(early + late)
    assert made.interval_ms(late[-1] + 5.0) == pytest.approx(5.0)
    # in silence it falls
    assert made.interval_ms(late[-1] + 100.0 * NUM_SEEN) == pytest.approx(105.0, rel=0.01)


@pytest.mark.parametrize("times_ms", [[], [1.0] * 8, [5.0] * NUM_SEEN, [9.0] * 100])
def test_few_arrivals_and_those_of_one_instant_tell_no_rate(times_ms):
    made = forecast(times_ms)
    now_ms = times_ms[-1] if times_ms else 0.0
    assert made.interval_ms(now_ms) is None
    coming = made.coming(16, now_ms=now_ms, pace=Pace())
    assert len(coming.slack_ms) == coming.times.columns.shape[1] == 0


def test_those_who_come_are_like_those_who_came():
    made = forecast([10.0 * i for i in range(1, NUM_SEEN)])
    column, curve = curve_of(tokens=3000, slo=400.0)
    made.note(column, now_ms=10.0 * NUM_SEEN)
    coming = made.coming(3, now_ms=10.0 * (NUM_SEEN + 1), pace=Pace(speed=2.0))
    # the latest first, in steps of the interval
    assert coming.slack_ms == pytest.approx([5.0 + 400.0, 15.0 + 900.0, 25.0 + 900.0])
    assert coming.times.floor_ms[0] == pytest.approx(2.0 * curve.floor_ms)
    assert coming.times.floor_ms[1] == coming.times.floor_ms[2] < coming.times.floor_ms[0]


def test_who_is_hopeless_from_the_start_does_not_count():
    made = forecast([10.0 * i for i in range(NUM_SEEN)], tokens=3000, slo=50.0)
    coming = made.coming(16, now_ms=10.0 * NUM_SEEN, pace=Pace())
    assert coming.slack_ms[-1] > 50.0 and not coming.timely.any()


def chosen_after(interval_ms, **rules):
    """The plan of a patient request that comes after others, which came so often."""
    queue = CacheSmithScheduler(CacheSmithConfig(**rules), PLANNER)
    state = replica()
    queue.submit(profile("first"), now_ms=0.0)
    queue.next_batch([state], now_ms=0.0)
    for i in range(NUM_SEEN):
        queue.submit(profile(f"q{i}", tokens=2000, slo=600.0), now_ms=i * interval_ms)
        queue.cancel(f"q{i}")
    now_ms = NUM_SEEN * interval_ms
    queue.submit(profile("patient", tokens=3000, slo=5_000.0), now_ms=now_ms)
    decision = queue.next_batch([state], now_ms=now_ms)
    assert [p.request_id for p in decision.requests] == ["patient"]
    return decision


def test_who_is_likely_to_come_is_left_time():
    alone, often = chosen_after(1e6), chosen_after(300.0)
    assert alone.plan.expected_passes == pytest.approx(0.95)
    assert often.plan.expected_ms < 0.8 * alone.plan.expected_ms
    assert often.judged[0].waiting_passes > 1.0
    blind = chosen_after(300.0, num_coming=0)
    assert blind.plan.expected_ms == pytest.approx(alone.plan.expected_ms)
    assert blind.judged[0].waiting_passes == 0.0


def test_they_are_no_members_of_a_batch_and_hold_nobody_up():
    """One after the other, far more often than the replica can take them."""
    queue = CacheSmithScheduler(CacheSmithConfig(), PLANNER)
    rng = np.random.default_rng(0)
    now_ms, served = 0.0, 0
    for i in range(200):
        now_ms += float(rng.exponential(20.0))
        queue.submit(profile(f"q{i}", tokens=int(rng.integers(50, 4000))), now_ms=now_ms)
        decision = queue.next_batch([replica()], now_ms=now_ms)
        assert decision is not None
        served += len(decision.requests)
    assert served == 200 and queue.num_waiting == 0
