"""The running cost heeds what went as planned, and only that."""

from dataclasses import replace

import pytest

from planner.cost_model import CostModel
from planner.types import PrefillResult, PrefillTimings, Ticket
from replicas.cost_tracker import CostTracker
from tests.fakes.records import prefill_result, request_plan

COST = CostModel(
    num_layers=10, fixed_ms=1.0, row_ms=0.01, pair_ms=0.0, selected_pair_ms=0.0, reuse_ms=0.0
)


def ticket(**plan) -> Ticket:
    made = request_plan(**{"expected_ms": 30.0, "num_cached": 900, **plan})
    return Ticket(replica_id="r", batch_id=1, batch_size=1, plan=made, queue_ms=0.0)


def result(*, coverage=0.2, **fields) -> PrefillResult:
    base = {
        "num_prompt_tokens": 1000,
        "num_context_tokens": 900,
        "num_recomputed_tokens": 100 + round(coverage * 900),
        "cached_tokens": {"host": 900},
    }
    return prefill_result(**{"coverage": coverage, **base, **fields})


def scale_after(made: Ticket, outcome: PrefillResult, first_ms: float) -> float:
    tracker = CostTracker(COST)
    tracker.observe(made, outcome, first_ms)
    return tracker.cost.scale


def test_a_slower_prefill_raises_the_scale():
    assert scale_after(ticket(), result(), 60.0) == pytest.approx(1.2)
    assert scale_after(ticket(), result(), 30.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "outcome",
    [
        result(parked=True),
        result(recovered=True),
        result(num_filled_tokens=64),
        result(timings=PrefillTimings(stall_ms=5.0)),
        result(num_miss_tokens=100),
        result(batch_size=2),
    ],
    ids=["parked", "recovered", "filled", "stalled", "a miss", "another batch"],
)
def test_what_went_otherwise_says_nothing(outcome):
    assert scale_after(ticket(), outcome, 90.0) == 1.0


def test_a_coverage_that_was_solved_again_is_taken_into_account():
    made = ticket(band=(0.05, 0.5))
    # 10 layers of 1,000 rows at full coverage; comparing rows in the Probe costs nothing here
    planned_ms, solved_ms = 1 + 0.01 * (1000 + 9 * 280), 1 + 0.01 * (1000 + 9 * 550)
    as_solved = 30.0 * solved_ms / planned_ms
    assert scale_after(made, result(coverage=0.5), as_solved) == pytest.approx(1.0)
    assert scale_after(made, result(coverage=0.5), 2 * as_solved) == pytest.approx(1.2)
    # a fixed plan is what it is
    assert scale_after(ticket(), result(coverage=0.5), 60.0) == pytest.approx(1.2)


def test_behind_a_link_only_lone_prefills_are_compared_with_what_they_compute():
    """Their plan counts waits; one that did not wait is not a faster machine."""
    computes_ms = 1 + 0.01 * (1000 + 9 * 280)
    tracker = CostTracker(COST)
    waited_for = ticket(expected_ms=500.0, warmup_depth=1, probe_len=1)
    tracker.observe(waited_for, result(), computes_ms, has_link=True)
    assert tracker.cost.scale == pytest.approx(1.0, rel=0.02)
    tracker.observe(waited_for, result(), 2 * computes_ms, has_link=True)
    assert tracker.cost.scale == pytest.approx(1.2, rel=0.02)
    shared = replace(waited_for, batch_size=2)
    tracker.observe(shared, result(batch_size=2), 9 * computes_ms, has_link=True)
    assert tracker.cost.scale == pytest.approx(1.2, rel=0.02)
