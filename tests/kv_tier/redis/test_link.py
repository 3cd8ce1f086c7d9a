"""The breaker, the meter and the emulated link, with a clock of the test's own."""

import math
import traceback

import pytest

from kv_tier.redis import LinkLimit, RedisTierConfig
from kv_tier.redis.breaker import Breaker
from kv_tier.redis.link import EmulatedLink, LinkMeter


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_breaker_opens_after_failures_in_a_row_and_a_probe_closes_it() -> None:
    breaker = Breaker(3)
    assert [breaker.failed(), breaker.failed()] == [False, False]
    breaker.succeeded()
    assert [breaker.failed(), breaker.failed(), breaker.failed()] == [False, False, True]
    assert breaker.is_open
    breaker.succeeded()  # the late answer to an early request
    assert breaker.is_open and not breaker.failed()
    breaker.probed()
    assert not breaker.is_open and not breaker.failed()
    assert breaker.num_opened == 1


def test_bandwidth_is_bytes_over_busy_time() -> None:
    clock = Clock()
    meter = LinkMeter(monotonic_s=clock)
    assert meter.speed().bytes_per_ms == 0.0
    for _ in range(5):
        meter.awaiting()
        meter.awaiting()  # two at once share the time
        clock.now_s += 0.010
        meter.ended(1000)
        clock.now_s += 0.010
        meter.ended(3000)
        assert not meter.is_busy
        clock.now_s += 5.0  # nothing is awaited: it does not count
    assert math.isclose(meter.speed().bytes_per_ms, 200.0, rel_tol=0.06)


def test_bandwidth_follows_the_link() -> None:
    clock = Clock()
    meter = LinkMeter(monotonic_s=clock)
    for rate, num_values in ((1000, 100), (100, 200)):
        for _ in range(num_values):
            meter.awaiting()
            clock.now_s += 0.01
            meter.ended(10 * rate)
    assert math.isclose(meter.speed().bytes_per_ms, 100.0, rel_tol=0.01)


def test_what_does_not_come_lowers_the_bandwidth() -> None:
    clock = Clock()
    meter = LinkMeter(monotonic_s=clock)
    for num_bytes in (1000, 0):
        meter.awaiting()
        clock.now_s += 0.01
        meter.ended(num_bytes)
    assert meter.speed().bytes_per_ms < 60.0


def test_latency_is_smoothed() -> None:
    meter = LinkMeter()
    for latency_ms in (2.0, *[10.0] * 50):
        meter.round_trip(latency_ms)
    assert 9.0 < meter.speed().latency_ms <= 10.0


def test_the_emulated_link_is_shared_and_its_latency_overlaps() -> None:
    link = EmulatedLink(LinkLimit(bytes_per_ms=100.0, latency_ms=5.0))
    assert math.isclose(link.arrives_at_s(10.0, 1000), 10.015)
    assert math.isclose(link.arrives_at_s(10.0, 1000), 10.025)  # behind the first
    assert math.isclose(link.arrives_at_s(11.0, 1000), 11.015)


def test_an_emulated_link_is_replaced_by_an_empty_one() -> None:
    link = EmulatedLink(LinkLimit(bytes_per_ms=1.0))
    assert math.isclose(link.arrives_at_s(10.0, 5000), 15.0)
    link.replace(LinkLimit(bytes_per_ms=100.0, latency_ms=5.0))
    assert math.isclose(link.arrives_at_s(11.0, 1000), 11.015)
    link.replace(None)
    assert link.arrives_at_s(11.0, 1000) == 11.0
    assert EmulatedLink().arrives_at_s(7.0, 1000) == 7.0


@pytest.mark.parametrize(
    "change",
    [
        {"url": "http://x"},
        {"mode": "ring"},
        {"mode": "sentinel"},
        {"mode": "cluster", "url": "unix:///x"},
        {"mode": "cluster", "nodes": ("host",)},
        {"key_prefix": ""},
        {"key_prefix": "a b"},
        {"key_prefix": "a{b}"},
        {"key_prefix": "a*"},
        {"num_connections": 0},
        {"depth": 0},
        {"breaker_failures": 0},
        {"lookup_deadline_ms": 0.0},
        {"value_deadline_ms": float("nan")},
        {"write_backlog_bytes": -1},
        {"ttl_s": 0.0},
        {"ttl_s": math.inf},
        {"lookup_deadline_ms": math.inf},
        {"connect_deadline_ms": 1e300},
        {"url": "redis://:se/cret@host"},
        {"url": "redis://host?socket_timeout=soon"},
    ],
)
def test_settings_that_can_not_be(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        RedisTierConfig(**{"url": "redis://host", **change})  # type: ignore[arg-type]


def test_a_limit_that_can_not_be() -> None:
    for change in ({"bytes_per_ms": 0.0}, {"latency_ms": -1.0}, {"latency_ms": math.inf}):
        with pytest.raises(ValueError, match="bytes_per_ms"):
            LinkLimit(**change)


def test_a_password_is_not_shown() -> None:
    config = RedisTierConfig(url="redis://:secret@host", sentinel_password="hidden")
    assert "secret" not in repr(config) and "hidden" not in repr(config)
    with pytest.raises(ValueError, match="url") as caught:
        RedisTierConfig(url="redis://:sec/ret@host")
    shown = "".join(traceback.format_exception(caught.value))
    assert "ValueError: Port could not" not in shown and "'sec'" not in shown
