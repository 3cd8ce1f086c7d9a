"""Spans of a trace to the phases of the planner's timeline."""

import pytest

from planner.types import PhaseSpan, PrefillTimings
from replicas.phase_times import phase_times
from tests.fakes.records import prefill_result


def result_of(*spans, compute_ms=1000.0):
    """Spans as (phase, layer, start, end)."""
    return prefill_result(
        timings=PrefillTimings(compute_ms=compute_ms),
        timeline=tuple(
            PhaseSpan(phase=phase, layer=layer, start_ms=start, duration_ms=end - start)
            for phase, layer, start, end in spans
        ),
    )


def test_loading_and_writing_belong_to_the_layer_that_does_them():
    times = phase_times(
        result_of(
            ("warmup", 0, 10, 20),
            ("write", 0, 20, 21),
            ("warmup", 0, 21, 30),
            ("load", 1, 32, 35),  # a gap of 2 before it
            ("probe", 1, 35, 40),
            ("load", 1, 40, 43),
            ("patch", 1, 43, 50),
            ("write", 1, 50, 52),
            ("patch", 1, 52, 60),
        )
    )
    assert (times.warmup_ms, times.probe_ms, times.patch_ms) == (20, 10, 20)
    assert (times.load_ms, times.num_loads, times.stall_ms) == (6, 2, 0)
    assert times.total_ms == 50


def test_waits_are_apart_whether_used_or_not():
    times = phase_times(
        result_of(
            ("fill", 0, 0, 5),
            ("stall", 0, 6, 8),
            ("load", 0, 8, 9),
            ("probe", 0, 9, 11),
            ("stall", 0, 11, 12),
            ("load", 0, 12, 13),
            ("patch", 0, 13, 20),
        )
    )
    assert (times.warmup_ms, times.probe_ms, times.patch_ms, times.stall_ms) == (0, 3, 8, 9)


def test_the_order_of_the_spans_does_not_matter():
    spans = [("load", 0, 0, 1), ("patch", 0, 1, 2), ("write", 0, 2, 3), ("patch", 0, 3, 4)]
    assert phase_times(result_of(*spans)) == phase_times(result_of(*reversed(spans)))


def test_without_a_timeline_there_is_nothing_to_tell():
    with pytest.raises(ValueError, match="timeline"):
        phase_times(result_of())
