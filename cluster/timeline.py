"""A prefill's timeline in the Trace Event Format, which Perfetto and chrome://tracing open."""

from typing import Any

from planner.types import PhaseSpan, PrefillResult

# one row of the viewer for each: what the compute did, and what it waited for
_ROWS = {"phases": 1, "stored KV": 2, "request": 3}
_ROW_OF = {"load": "stored KV", "stall": "stored KV"}


def chrome_trace(
    result: PrefillResult,
    *,
    queue_ms: float,
    ttft_ms: float,
    ttft_slo_ms: float,
    replica_id: str,
    explanation: str = "",
) -> dict[str, Any]:
    """One request, from its arrival at the ingress (time 0) to its first token.

    The ingress and the engine may be on two machines: the engine's clock is placed so that both
    agree on the first token.
    """
    timings = result.timings
    engine_ms = max(0.0, ttft_ms - timings.first_token_ms)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"replica {replica_id}"}},
        *(
            {"ph": "M", "pid": 1, "tid": row, "name": "thread_name", "args": {"name": name}}
            for name, row in _ROWS.items()
        ),
        _span("queue", "request", max(0.0, engine_ms - queue_ms), min(queue_ms, engine_ms)),
        {**_instant("plan", engine_ms), "args": {"explanation": explanation}},
        _span("hold", "request", engine_ms, timings.hold_ms),
        *(_phase(span, engine_ms) for span in result.timeline),
        _instant("first token", ttft_ms),
        _instant("deadline", ttft_slo_ms),
    ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _phase(span: PhaseSpan, engine_ms: float) -> dict[str, Any]:
    event = _span(
        span.phase,
        _ROW_OF.get(span.phase, "phases"),
        engine_ms + span.start_ms,
        span.duration_ms,
    )
    return {**event, "args": {"layer": span.layer}}


def _span(name: str, row: str, start_ms: float, duration_ms: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 1,
        "tid": _ROWS[row],
        "name": name,
        "ts": round(start_ms * 1e3, 1),  # the format counts microseconds
        "dur": round(duration_ms * 1e3, 1),
    }


def _instant(name: str, at_ms: float) -> dict[str, Any]:
    return {
        "ph": "i",
        "pid": 1,
        "tid": _ROWS["request"],
        "name": name,
        "ts": round(at_ms * 1e3, 1),
        "s": "p",
    }
