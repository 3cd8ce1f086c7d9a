"""What a run is judged by, and what it prints."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from deploy.testbed.accounting import by_second, tally
from deploy.testbed.fault_plan import FaultKind
from deploy.testbed.recovery import FaultResult
from deploy.testbed.report import RunResult, tables
from tests.testbed.cases import REFERENCES, answer

ANSWERS = [answer(index=i, started_s=i / 20) for i in range(200)]


def result(answers=ANSWERS, **fields: Any) -> RunResult:
    values: dict[str, Any] = {
        "commit": "c0ffee",
        "engine": "emulated",
        "num_hosts": 3,
        "rate": 20.0,
        "seconds": 10.0,
        "tally": tally(answers, REFERENCES),
        "served": len(answers),
        "faults": (
            FaultResult(
                kind=FaultKind.KILL_RANK,
                host="h3",
                at_s=5.0,
                detected_s=0.4,
                recovered_s=None,
                num_requests=100,
                num_errors=2,
                worst_ttft_ms=812.3,
            ),
        ),
        "is_whole": True,
        "left_processes": {},
        "steps_s": {"ray up": 41.2},
        "by_second": tuple(by_second(answers)),
    }
    return RunResult(**{**values, **fields})


def with_broken(number: int, **fields: Any):
    return [*ANSWERS[number:], *(answer(**fields) for _ in range(number))]


def test_a_good_run_has_no_failures():
    assert result().failures == []
    assert result(with_broken(2, error="stream replica_lost")).failures == []  # 1%


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({"text": "x"}, "1 requests wrong"),
        ({"is_closed": False}, "1 requests lost"),
        ({"num_ends": 2}, "1 requests doubled"),
    ],
)
def test_one_bad_answer_fails_the_run(broken, told: str):
    assert result(with_broken(1, **broken)).failures == [told]


def test_more_than_a_hundredth_of_errors_fails_the_run():
    failures = result(with_broken(3, error="http 500 internal_error")).failures
    assert failures == ["3 errors, more than 1% of 200"]


def test_what_is_left_or_not_mended_fails_the_run():
    failures = result(is_whole=False, left_processes={"h2": ("raylet",)}, served=201).failures
    assert failures == [
        "201 requests served, 200 sent",
        "the cluster did not recover",
        "left on h2: raylet",
    ]


def test_the_tables_have_every_fault_and_number():
    text = tables(result(with_broken(3, error="http 500 internal_error")))
    rows = [line.split() for line in text.splitlines()]
    assert ["kill_rank", "h3", "5.0", "0.4", "–", "100", "2", "812"] in rows
    assert ["answered", "197"] in rows
    assert ["http", "500", "internal_error", "3"] in rows
    assert "FAILED: 3 errors" in text


def test_a_file_of_another_version_is_refused():
    kept = json.loads(result().model_dump_json())
    assert RunResult.model_validate(kept) == result()
    with pytest.raises(ValidationError, match="version"):
        RunResult.model_validate({**kept, "version": 2})
