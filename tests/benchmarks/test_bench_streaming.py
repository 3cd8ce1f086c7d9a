"""The comparison itself: links by ratio, and a machine that does what the timeline says."""

import json
from dataclasses import replace

import pytest

from benchmarks import bench_streaming
from benchmarks.bench_streaming import PLANS, Expected, Point, Prompt, links_of, main, row
from benchmarks.engine import Prefilled
from planner import Link, PrefillShape
from planner.types import PrefillTimings
from tests.fakes.costs import every_price
from tests.fakes.records import prefill_result

NUM_LAYERS = 12
COST = every_price(NUM_LAYERS)
PROMPT = Prompt(shape=PrefillShape(num_cached=2048, num_always=33), layer_bytes=2048 * 768.0)
NUM_BYTES = PROMPT.layer_bytes * NUM_LAYERS
LINKS = [Link(bytes_per_ms=speed, latency_ms=0.3) for speed in (3e6, 1e5, 2e4, 1e3)]


def expected(ttft_ms, *, stall_ms=0.0, cost=COST, num_filled=0):
    timings = PrefillTimings(stall_ms=stall_ms)
    result = prefill_result(timings=timings, num_filled_tokens=num_filled)
    return Expected(ran=Prefilled(ttft_ms=ttft_ms, result=result), cost=cost)


def point_of(name, link, *, speed=1.0, price=1.0):
    """A machine that keeps to the timeline, at a price of its own."""
    config, cost = PLANS[name], replace(COST, scale=price)
    made = PROMPT.predict(config, cost, link)
    point = Point(plan=name, link=link, full_ms=[900.0] * 3, loads_ms=[100.0, 300.0, 200.0])
    point.resident = [expected(PROMPT.predict(config, cost).total_ms) for _ in range(3)]
    point.waiting = [expected(speed * made.total_ms, stall_ms=made.stall_ms) for _ in range(3)]
    point.filling = [expected(700.0, num_filled=n) for n in (10, 50, 20)]
    point.seen_bytes_per_ms = [1e5] * 3
    return point


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("link", LINKS)
def test_a_machine_that_keeps_to_the_timeline_has_no_errors(name, link):
    found = row(point_of(name, link), PROMPT)
    assert found["error"] == found["resident_error"] == found["link_error"] == pytest.approx(0.0)
    assert found["stall_ms"] == pytest.approx(found["predicted_stall_ms"])
    w, _ = PLANS[name].depths(NUM_LAYERS)
    needed_ms = 0.3 + (found["load_ms"] - 0.3) * (NUM_LAYERS - w) / NUM_LAYERS
    assert found["ceiling_ms"] == pytest.approx(max(found["resident_ms"], needed_ms))
    assert found["times_ceiling"] > 0.99
    assert found["load_first_ms"] == pytest.approx(found["resident_ms"] + 200.0)
    assert found["filled_tokens"] == 20 and found["filling_ms"] == 700.0


@pytest.mark.parametrize("name", PLANS)
def test_an_error_of_the_price_is_not_the_links(name):
    slow = row(point_of(name, LINKS[2], price=1.5), PROMPT)
    assert slow["resident_error"] == pytest.approx(1 / 1.5 - 1.0)
    assert slow["error"] <= 0.0 and slow["link_error"] == pytest.approx(0.0)
    late = row(point_of(name, LINKS[2], speed=1.25), PROMPT)
    assert late["error"] == late["link_error"] == pytest.approx(-0.2)


def test_the_link_takes_what_the_layers_behind_warmup_need():
    for config in PLANS.values():
        w, _ = config.depths(NUM_LAYERS)
        made = PROMPT.predict(config, COST, LINKS[-1])
        arrived_ms = 0.3 + (NUM_LAYERS - w) * PROMPT.layer_bytes / LINKS[-1].bytes_per_ms
        assert made.total_ms > arrived_ms > 0.9 * made.total_ms


def test_scaled_links_keep_the_large_models_ratio_of_load_to_full_prefill():
    (fast, slow) = links_of([], [0.05, 3.0], num_bytes=NUM_BYTES, full_ms=2000.0, latency_ms=0.3)
    assert fast.bytes_per_ms == pytest.approx(60 * slow.bytes_per_ms)
    ratio = NUM_BYTES / fast.bytes_per_ms / 2000.0
    assert ratio == pytest.approx(262_144 / 3e6 / 0.16)  # a token's load over its compute
    plain = links_of([0.1, 1.0], [], num_bytes=NUM_BYTES, full_ms=1.0, latency_ms=0.0)
    assert plain == [Link(bytes_per_ms=1e6), Link(bytes_per_ms=1e5)]


@pytest.mark.parametrize(
    "words",
    [
        ["--rounds", "0"],
        ["--tokens", "255"],
        ["--links", "0"],
        ["--scaled", "-1"],
        ["--links", "--scaled"],
        ["--latency-ms", "-1"],
        ["--plans", "none"],
    ],
)
def test_what_can_not_be_measured_is_refused(words, capsys):
    with pytest.raises(SystemExit) as refused:
        main(words)
    assert refused.value.code == 2 and capsys.readouterr().err


def test_without_a_redis_server_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(bench_streaming, "is_installed", lambda: False)
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert "no redis-server" in lines[0]
    assert json.loads(lines[-1])["results"] == []
