"""From samples of the cluster to how long a fault was not seen, and not mended."""

import pytest

from deploy.testbed.fault_plan import Fault, FaultKind
from deploy.testbed.faults import Struck
from deploy.testbed.recovery import Whole, fault_results, num_served
from tests.testbed.cases import answer, sample

WHOLE = Whole(num_nodes=2, num_replicas=2, num_ingresses=1)


def struck(kind: FaultKind, at_s: float, host: int | None = None) -> Struck:
    return Struck(fault=Fault(at_s=at_s, kind=kind, host=host), at_s=at_s, host="h2")


def only(kind: FaultKind, *samples, host: int | None = None):
    """The result of a fault at 10 s, with a good look before it."""
    hit = struck(kind, 10.0, host)
    (result,) = fault_results([hit], [sample(9.5), *samples], [], WHOLE)
    return result


def test_a_replica_is_missed_and_replaced():
    result = only(
        FaultKind.KILL_REPLICA,
        sample(10.5),
        sample(11.0, ready=frozenset({"r1"})),
        sample(15.0, replicas=frozenset({"r1", "r3"}), ready=frozenset({"r1"})),
        sample(16.0, replicas=frozenset({"r1", "r3"}), ready=frozenset({"r1", "r3"})),
    )
    assert (result.detected_s, result.recovered_s) == (1.0, 6.0)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (FaultKind.KILL_SCHEDULER, {"scheduler": ""}),
        (FaultKind.KILL_INGRESS, {"ingresses": frozenset()}),
        (FaultKind.STOP_REDIS, {"breakers_open": 1}),
        (FaultKind.RESTART_HEAD, {"nodes": None, "scheduler": None}),
    ],
)
def test_each_kind_has_its_own_sign(kind: FaultKind, loss):
    result = only(kind, sample(10.5), sample(11.0, **loss), sample(13.0))
    assert (result.detected_s, result.recovered_s) == (1.0, 3.0)


def test_another_life_of_the_scheduler_is_a_loss_that_is_mended():
    result = only(FaultKind.KILL_SCHEDULER, sample(10.5), sample(11.0, scheduler="s/2"))
    assert (result.detected_s, result.recovered_s) == (1.0, 1.0)


def test_a_loss_that_nobody_can_see_is_not_detected():
    result = only(FaultKind.STOP_REDIS, sample(10.5), sample(11.0))
    assert (result.detected_s, result.recovered_s) == (None, 0.5)


def test_who_can_not_be_asked_is_not_whole():
    result = only(FaultKind.CRASH_HOST, sample(11.0, nodes=frozenset({"n1"})), host=2)
    assert (result.detected_s, result.recovered_s) == (1.0, None)
    assert not WHOLE.is_met(sample(11.0, ready=None))
    assert not WHOLE.is_met(sample(11.0, num_waiting=300))
    assert not WHOLE.is_met(sample(11.0, scheduler=None))


def test_a_repair_is_not_detected_but_recovered():
    crash = struck(FaultKind.CRASH_HOST, 10.0, 2)
    boot = struck(FaultKind.BOOT_HOST, 20.0, 2)
    lost = {"nodes": frozenset({"n1"}), "ready": frozenset({"r1"})}
    samples = [sample(9.0), sample(11.0, **lost), sample(21.0, **lost), sample(25.0)]
    crashed, booted = fault_results([crash, boot], samples, [], WHOLE)
    assert (crashed.detected_s, crashed.recovered_s) == (1.0, 15.0)
    assert (booted.detected_s, booted.recovered_s) == (None, 5.0)


def test_requests_belong_to_the_last_fault_before_them():
    hits = [struck(FaultKind.KILL_REPLICA, 10.0), struck(FaultKind.KILL_RANK, 20.0)]
    answers = [
        answer(started_s=9.0, error="stream replica_lost"),
        answer(started_s=10.0, ttft_ms=900.0),
        answer(started_s=19.9, error="stream replica_lost", is_closed=False),
        answer(started_s=20.0),
        answer(started_s=99.0, is_closed=False, did=None),
    ]
    first, second = fault_results(hits, [sample(9.0)], answers, WHOLE)
    assert (first.num_requests, first.num_errors, first.worst_ttft_ms) == (2, 1, 900.0)
    assert (second.num_requests, second.num_errors) == (2, 1)


def test_the_outcome_counter_is_added_up_over_restarts():
    counts = [24, 30, None, 40, 3, 10]
    assert num_served([sample(float(i), num_ok=n) for i, n in enumerate(counts)]) == 16 + 3 + 7
