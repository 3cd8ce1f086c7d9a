"""The timeline is what trace viewers read, and its spans stand where they were."""

import json

from cluster.timeline import chrome_trace
from planner.types import PhaseSpan, PrefillResult, PrefillTimings
from tests.fakes.records import prefill_result


def result(*spans: PhaseSpan) -> PrefillResult:
    timings = PrefillTimings(hold_ms=2.0, first_token_ms=50.0)
    return prefill_result(timings=timings, timeline=spans)


def test_spans_are_complete_events_in_microseconds_from_the_arrival():
    spans = [
        PhaseSpan(phase="warmup", layer=0, start_ms=3.0, duration_ms=4.0),
        PhaseSpan(phase="stall", layer=1, start_ms=7.0, duration_ms=1.5),
        PhaseSpan(phase="patch", layer=1, start_ms=8.5, duration_ms=10.0),
    ]
    trace = chrome_trace(
        result(*spans),
        queue_ms=5.0,
        ttft_ms=60.0,
        ttft_slo_ms=100.0,
        replica_id="r1",
        explanation="because",
    )
    assert json.loads(json.dumps(trace)) == trace
    assert all({"ph", "pid", "name"} <= set(event) for event in trace["traceEvents"])
    complete = {e["name"]: e for e in trace["traceEvents"] if e["ph"] == "X"}
    # the engine had the request 50 ms before its first token at 60 ms
    assert (complete["queue"]["ts"], complete["queue"]["dur"]) == (5_000, 5_000)
    assert (complete["hold"]["ts"], complete["hold"]["dur"]) == (10_000, 2_000)
    assert (complete["warmup"]["ts"], complete["warmup"]["dur"]) == (13_000, 4_000)
    assert complete["patch"]["args"] == {"layer": 1}
    assert complete["stall"]["tid"] != complete["patch"]["tid"]
    marks = {e["name"]: e["ts"] for e in trace["traceEvents"] if e["ph"] == "i"}
    assert marks == {"plan": 10_000, "first token": 60_000, "deadline": 100_000}
    assert [e["args"] for e in trace["traceEvents"] if e["name"] == "plan"] == [
        {"explanation": "because"}
    ]


def test_every_row_has_a_name():
    trace = chrome_trace(result(), queue_ms=0.0, ttft_ms=60.0, ttft_slo_ms=100.0, replica_id="r1")
    named = {e["tid"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {e["tid"] for e in trace["traceEvents"] if "tid" in e} <= named


def test_a_queue_longer_than_the_rest_does_not_start_before_the_arrival():
    trace = chrome_trace(result(), queue_ms=30.0, ttft_ms=55.0, ttft_slo_ms=9.0, replica_id="r1")
    assert min(e["ts"] for e in trace["traceEvents"] if "ts" in e) >= 0
