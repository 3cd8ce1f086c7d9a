"""What becomes of a request is counted once, and under the right name."""

import math

import pytest

from deploy.testbed.accounting import by_second, tally, way_of
from tests.testbed.cases import REFERENCES, WAY, answer, did


def counted(*answers):
    return tally(answers, REFERENCES)


def test_a_right_answer():
    t = counted(answer())
    assert (t.sent, t.accepted, t.answered) == (1, 1, 1)
    assert (t.num_errors, t.wrong, t.lost, t.doubled, t.unverified) == (0, 0, 0, 0, 0)


def test_every_request_is_answered_lost_or_an_error():
    answers = [
        answer(),
        answer(error="stream replica_lost", is_closed=False, did=None),
        answer(error="http 503 queue_timeout", status=503, is_closed=False, did=None),
        answer(is_closed=False, did=None),
        answer(status=None, is_closed=False, did=None),
    ]
    t = counted(*answers)
    assert t.sent == t.answered + t.lost + t.num_errors == 5
    assert t.accepted == 3
    assert t.errors == {"stream replica_lost": 1, "http 503 queue_timeout": 1}
    assert t.lost == 2


def test_a_stream_that_ends_before_its_report_is_lost():
    assert counted(answer(did=None)).lost == 1


def test_at_coverage_1_any_other_text_is_wrong():
    assert counted(answer(text="one three")).wrong == 1
    # also where the answer says that it went another way
    assert counted(answer(text="one six", did=did())).wrong == 1


def test_an_answer_that_is_too_short_is_wrong():
    assert counted(answer(num_tokens=1)).wrong == 1


def test_a_partial_answer_is_compared_with_the_same_way():
    assert counted(answer(is_exact=False, text="one six", did=did())).wrong == 0
    assert counted(answer(is_exact=False, text="one two", did=did())).wrong == 1


def test_a_partial_answer_that_was_computed_as_a_whole_is_compared_with_full_prefill():
    for fields in ({"full_prefill": True}, {"recovered": True}, {"coverage": 1.0}):
        assert counted(answer(is_exact=False, did=did(**fields))).wrong == 0
        assert counted(answer(is_exact=False, text="one six", did=did(**fields))).wrong == 1


@pytest.mark.parametrize("field", ["num_miss_tokens", "num_filled_tokens"])
def test_with_missed_or_filled_tokens_nobody_knows_the_text(field: str):
    t = counted(answer(is_exact=False, text="what else", did=did(**{field: 3})))
    assert (t.wrong, t.unverified) == (0, 1)


def test_a_way_that_was_not_asked_again_is_unverified():
    t = counted(answer(is_exact=False, text="what else", did=did(coverage=0.5)))
    assert (t.wrong, t.unverified) == (0, 1)


def test_tokens_or_ends_that_came_twice_are_doubled():
    assert counted(answer(num_ends=2)).doubled == 1
    assert counted(answer(num_tokens=4, text="one two one two")).doubled == 1


def test_refused_connections_are_no_errors():
    t = counted(answer(num_refused=3))
    assert (t.retried_connections, t.num_errors) == (3, 0)


def test_a_way_is_asked_for_with_a_coverage_that_chooses_as_many_tokens():
    assert way_of(answer(did=did())) == WAY
    for num_chosen in range(WAY.num_context + 1):
        way = WAY._replace(num_chosen=num_chosen)
        assert math.ceil(way.recompute["coverage"] * way.num_context) == num_chosen


def test_seconds_are_those_of_sending():
    seconds = by_second(
        [
            answer(started_s=0.2, ended_s=3.0, ttft_ms=2500.0),
            answer(started_s=0.9),
            answer(started_s=2.0, error="stream replica_lost"),
        ]
    )
    assert [(s.second, s.sent, s.answered, s.errors) for s in seconds] == [
        (0, 2, 2, 0),
        (2, 1, 0, 1),
    ]
    assert seconds[0].worst_ttft_ms == 2500.0
