"""How many replicas are wanted, on signals that the tests make up and a clock that they move."""

import math
import random
from dataclasses import replace

import pytest

from planner import Arrivals, Autoscaler, LoadSignal, ScalingConfig, ScalingDecision
from planner.arrival_forecast import ArrivalForecast, MeanRequest
from planner.autoscaling import LeadTime, Need, need_of, replicas_for_deadlines

CONFIG = ScalingConfig(max_replicas=8, down_after_s=10.0)
FLOOR_MS, SATURATION_MS, OBJECTIVE_MS = 100.0, 300.0, 1_000.0


class Known:
    """A forecast of a steady rate."""

    def __init__(self, per_s: float, *, floor_ms: float = FLOOR_MS) -> None:
        self._rate = per_s / 1e3
        self.mean = MeanRequest(
            floor_ms=floor_ms, saturation_ms=3.0 * floor_ms, objective_ms=OBJECTIVE_MS
        )

    def rate(self, ahead_ms: float = 0.0) -> float:
        return self._rate

    def count(self, ahead_ms: float) -> float:
        return self._rate * ahead_ms


def arrivals(so_far: float) -> Arrivals:
    """Whole requests."""
    count = int(so_far)
    return Arrivals(
        count=count,
        num_sized=count,
        floor_ms=count * FLOOR_MS,
        saturation_ms=count * SATURATION_MS,
        objective_ms=count * OBJECTIVE_MS,
    )


def signal(**changes: object) -> LoadSignal:
    values: dict[str, object] = {"epoch": "e", "at_ms": 0.0, "num_ready": 1, "load_ms": 0.0}
    return LoadSignal(**{**values, **changes})


def waiting(rng: random.Random, count: int) -> list[tuple[float, float]]:
    return [(rng.uniform(-500.0, 5_000.0), rng.uniform(0.0, 600.0)) for _ in range(count)]


class World:
    """Requests at a rate, replicas that are there as soon as they are asked for, and a clock."""

    def __init__(self, config: ScalingConfig, *, num_target: int = 1, load_ms: float = 0.0) -> None:
        self.scaler = Autoscaler(config)
        self.num_target = num_target
        self.now_s = 100.0
        self.count = 0.0
        self.load_ms = load_ms
        self.decided: list[int] = []

    def run(self, seconds: float, *, per_s: float, step_s: float = 0.5, **changes: object) -> None:
        for _ in range(round(seconds / step_s)):
            self.now_s += step_s
            self.count += per_s * step_s
            self.step(**changes)

    def step(self, **changes: object) -> ScalingDecision:
        values: dict[str, object] = {"num_ready": self.num_target, "load_ms": self.load_ms}
        seen = signal(at_ms=self.now_s * 1e3, arrived=arrivals(self.count), **{**values, **changes})
        decision = self.scaler.decide(seen, num_target=self.num_target, now_s=self.now_s)
        self.num_target = decision.wanted
        self.decided.append(decision.wanted)
        return decision


# --- what is needed ------------------------------------------------------------------------------


def test_deadlines_ask_for_the_processor_demand():
    assert replicas_for_deadlines([], num_ready=0) == 0.0
    late = (30.0, 31.0)
    assert replicas_for_deadlines([(100.0, 50.0), (100.0, 100.0), late], num_ready=0) == 1.5
    assert replicas_for_deadlines([(1_000.0, 10.0), (20.0, 20.0)], num_ready=1) == 1.0


def test_new_replicas_count_from_their_load_on():
    # 1,000 ms of work due in 500 ms: with one ready, 500 ms are left for 300 ms of a new one's time
    work = [(500.0, 250.0)] * 4
    assert replicas_for_deadlines(work, num_ready=1, lead_ms=200.0) == pytest.approx(
        1.0 + 500.0 / 300.0
    )
    # one that would be there too late is not asked for
    assert replicas_for_deadlines(work, num_ready=1, lead_ms=300.0) == 1.0


def test_offered_load_is_in_erlangs_over_the_target_utilisation():
    need = need_of(signal(), Known(10.0), CONFIG, lead_ms=0.0)
    assert need.offered_load == pytest.approx(10.0 * 0.2 / 0.7)
    floor = replace(CONFIG, coverage_share=0.0, target_utilisation=1.0)
    assert need_of(signal(), Known(10.0), floor, lead_ms=0.0).offered_load == pytest.approx(1.0)


def test_what_comes_during_the_load_is_counted_before_it_waits():
    """30 requests a second of 100 ms at the floor are three replicas' work; one is ready."""
    quick = need_of(signal(), Known(30.0), CONFIG, lead_ms=0.0)
    assert quick.backlog == pytest.approx(3.0)
    # 6 s of work come in 2 s, 2 s are done, and what is not late yet is the last objective's: 3 s
    slow = need_of(signal(), Known(30.0), CONFIG, lead_ms=2_000.0)
    assert slow.backlog == pytest.approx(3.0 + 3.0)


def test_work_that_is_late_in_any_case_asks_for_nothing():
    hopeless = signal(waiting=((50.0, 100.0),) * 50)
    assert need_of(hopeless, Known(1.0), CONFIG, lead_ms=5_000.0).replicas == 1


@pytest.mark.parametrize("seed", range(40))
def test_more_work_never_asks_for_fewer(seed):
    rng = random.Random(seed)
    base = waiting(rng, rng.randint(0, 12))
    seen = signal(
        waiting=tuple(base),
        num_ready=rng.randint(0, 4),
        prefill_ms=rng.uniform(0.0, 800.0),
    )
    rate, lead_ms = rng.uniform(0.0, 30.0), rng.choice([0.0, 300.0, 4_000.0])
    more = replace(
        seen,
        waiting=(*seen.waiting, *waiting(rng, rng.randint(0, 6))),
        prefill_ms=seen.prefill_ms + rng.uniform(0.0, 500.0),
    )

    def need(seen: LoadSignal, forecast: Known) -> Need:
        return need_of(seen, forecast, CONFIG, lead_ms=lead_ms)

    less, greater = need(seen, Known(rate)), need(more, Known(rate))
    for rule in ("offered_load", "backlog", "deadlines"):
        assert getattr(greater, rule) >= getattr(less, rule) - 1e-9, rule
    faster, dearer = Known(rate + 3.0), Known(rate, floor_ms=2.0 * FLOOR_MS)
    assert need(seen, faster).replicas >= less.replicas
    assert need(seen, dearer).replicas >= less.replicas


def test_a_need_is_rounded_up_but_not_for_a_rounding_error():
    assert Need(offered_load=2.0 + 1e-12).replicas == 2
    assert Need(backlog=2.1).replicas == 3


# --- the forecast --------------------------------------------------------------------------------


def follow(forecast: ArrivalForecast, per_s: list[float], *, step_s: float = 0.5) -> None:
    """A second of each rate."""
    count, at_ms = 0.0, 0.0
    for rate in per_s:
        for _ in range(round(1.0 / step_s)):
            count, at_ms = count + rate * step_s, at_ms + step_s * 1e3
            forecast.observe(arrivals(count), epoch="e", at_ms=at_ms)


def forecast() -> ArrivalForecast:
    return ArrivalForecast(level_s=5.0, trend_s=10.0, mean_s=60.0)


def test_a_steady_rate_is_found_whatever_the_time_between_looks():
    for step_s in (0.1, 0.5):
        found = forecast()
        follow(found, [20.0] * 90, step_s=step_s)
        assert found.rate() * 1e3 == pytest.approx(20.0, rel=0.05)
        assert found.rate(10_000.0) * 1e3 == pytest.approx(20.0, rel=0.1)
        assert found.mean.floor_ms == pytest.approx(FLOOR_MS)
        assert found.mean.service_ms(0.5) == pytest.approx(200.0)


def test_a_rising_rate_is_carried_on_and_a_falling_one_is_not():
    rising, falling = forecast(), forecast()
    follow(rising, [float(i) for i in range(60)])
    follow(falling, [float(60 - i) for i in range(60)])
    assert rising.rate(5_000.0) > 1.05 * rising.rate()
    assert rising.count(5_000.0) > 5_000.0 * rising.rate()
    assert falling.rate(5_000.0) == falling.rate()
    # the trend fades: an hour ahead is not 60 times a minute ahead
    assert rising.rate(3.6e6) - rising.rate() < 60 * (rising.rate(6e4) - rising.rate())


def test_another_life_of_the_scheduler_starts_from_nothing_but_the_rate_stays():
    found = forecast()
    follow(found, [20.0] * 30)
    before = found.rate()
    found.observe(arrivals(0), epoch="another", at_ms=5.0)
    assert found.rate() == before
    found.observe(arrivals(10), epoch="another", at_ms=505.0)
    assert found.rate() * 1e3 == pytest.approx(20.0, rel=0.1)


def test_the_same_look_twice_changes_nothing():
    found = forecast()
    follow(found, [20.0] * 5)
    before = found.rate()
    found.observe(arrivals(100), epoch="e", at_ms=5_000.0)
    assert found.rate() == before and math.isfinite(before)


# --- the lead time -------------------------------------------------------------------------------


def test_the_lead_time_is_what_orders_took():
    lead = LeadTime()
    lead.observe(num_target=1, num_ready=0, now_s=0.0)  # ordered before anybody looked
    lead.observe(num_target=1, num_ready=1, now_s=9.0)
    assert lead.ms == 0.0
    lead.observe(num_target=2, num_ready=1, now_s=10.0)
    lead.observe(num_target=4, num_ready=1, now_s=12.0)
    lead.observe(num_target=4, num_ready=2, now_s=14.0)
    assert lead.ms == 4_000.0
    lead.observe(num_target=4, num_ready=4, now_s=20.0)
    assert lead.ms == 6_000.0
    lead.observe(num_target=4, num_ready=4, now_s=99.0)
    assert lead.ms == 6_000.0


def test_an_order_that_was_taken_back_says_nothing():
    lead = LeadTime()
    for at_s, num_target, num_ready in ((0.0, 1, 1), (1.0, 3, 1), (2.0, 1, 1), (50.0, 3, 1)):
        lead.observe(num_target=num_target, num_ready=num_ready, now_s=at_s)
    lead.observe(num_target=3, num_ready=3, now_s=55.0)
    assert lead.ms == 5_000.0


# --- decisions over time -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_bounds_hold_whatever_comes(seed):
    rng = random.Random(seed)
    config = ScalingConfig(
        min_replicas=rng.randint(1, 3), max_replicas=rng.randint(3, 6), down_after_s=2.0
    )
    world = World(config, load_ms=rng.choice([0.0, 3_000.0]))
    for _ in range(60):
        world.run(
            rng.uniform(0.5, 3.0),
            per_s=rng.choice([0.0, 1.0, 50.0, 1e4]),
            waiting=tuple(waiting(rng, rng.randint(0, 30))),
            prefill_ms=rng.uniform(0.0, 1e4),
        )
    assert min(world.decided) >= config.min_replicas
    assert max(world.decided) <= config.max_replicas


def test_a_burst_is_answered_at_once_and_forgotten_after_the_window():
    world = World(CONFIG)
    world.run(30.0, per_s=1.0)
    assert world.num_target == 1
    assert world.step(waiting=((800.0, 100.0),) * 40).wanted == 5
    world.run(9.0, per_s=1.0)
    assert world.num_target == 5
    world.run(3.0, per_s=1.0)
    assert world.num_target == 1


@pytest.mark.parametrize("load_ms", [0.0, 4_000.0, 60_000.0])
@pytest.mark.parametrize("per_s", [0.0, 2.9, 3.5, 7.0, 100.0])
def test_a_constant_load_does_not_flap(per_s, load_ms):
    world = World(CONFIG, load_ms=load_ms)
    world.run(120.0, per_s=per_s)
    settled = len(world.decided)
    world.run(300.0, per_s=per_s)
    assert len(set(world.decided[settled:])) == 1
    changes = [a for a, b in zip(world.decided, world.decided[1:], strict=False) if a != b]
    assert len(changes) <= 8  # up step by step, at most once down


@pytest.mark.parametrize("seed", range(5))
def test_a_random_load_scales_down_once_a_window_at_most(seed):
    rng = random.Random(seed)
    world = World(CONFIG)
    for _ in range(600):
        world.run(0.5, per_s=rng.gammavariate(1 / 9, 9 * 6.0))
    falls = [i for i in range(1, len(world.decided)) if world.decided[i] < world.decided[i - 1]]
    rises = [i for i in range(1, len(world.decided)) if world.decided[i] > world.decided[i - 1]]
    # no rise is taken back within the window of 10 s, 20 looks
    assert all(not any(r < f <= r + 19 for f in falls) for r in rises)


def test_more_are_ordered_before_anything_is_late():
    """The rate doubles over 20 s; a load takes 5 s. Nothing ever waits in the queue."""
    eager, blind = World(CONFIG, load_ms=5_000.0), World(CONFIG, load_ms=0.0)
    for second in range(20):
        for world in (eager, blind):
            world.run(1.0, per_s=5.0 + second / 4.0)
    crossed = [next(i for i, n in enumerate(w.decided) if n >= 3) for w in (eager, blind)]
    assert crossed[0] < crossed[1]


def test_a_new_autoscaler_keeps_what_it_finds_until_it_knows_better():
    world = World(CONFIG, num_target=6)
    world.run(9.0, per_s=1.0)
    assert world.num_target == 6
    world.run(3.0, per_s=1.0)
    assert world.num_target == 1


def test_scaling_to_zero_waits_for_idleness_and_wakes_at_once():
    world = World(replace(CONFIG, scale_to_zero_after_s=5.0, down_after_s=1.0), num_target=2)
    world.run(20.0, per_s=0.0, num_active=1)  # an answer is still being written
    assert world.num_target == 1
    world.run(4.0, per_s=0.0)
    assert world.num_target == 1
    world.run(2.0, per_s=0.0)
    assert world.num_target == 0
    world.run(100.0, per_s=0.0)
    assert set(world.decided[-100:]) == {0}
    world.count += 1
    assert world.step(waiting=((1_000.0, 0.0),)).wanted == 1  # nobody has said what it costs
    assert world.step().wanted == 1


def test_a_replica_that_is_still_loading_is_not_idle():
    world = World(replace(CONFIG, scale_to_zero_after_s=5.0))
    world.run(60.0, per_s=0.0, num_ready=0)
    assert world.num_target == 1
    world.run(6.0, per_s=0.0, num_ready=1)
    assert world.num_target == 0


def test_a_new_autoscaler_lets_a_sleeping_application_sleep():
    world = World(replace(CONFIG, scale_to_zero_after_s=5.0), num_target=0)
    world.count = 50.0  # that came before
    world.run(3.0, per_s=0.0)
    assert set(world.decided) == {0}


def test_without_the_setting_the_last_one_stays():
    world = World(CONFIG)
    world.run(1_000.0, per_s=0.0, step_s=5.0)
    assert set(world.decided) == {1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_replicas": 0},
        {"min_replicas": 9},
        {"target_utilisation": 0.0},
        {"target_utilisation": 1.5},
        {"down_after_s": -1.0},
        {"scale_to_zero_after_s": math.inf},
        {"coverage_share": 2.0},
    ],
)
def test_impossible_configurations_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(CONFIG, **wrong)
