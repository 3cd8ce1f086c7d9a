"""vLLM and transformers walk the same phases: request by request the same answers in float32."""

import random
from dataclasses import replace

import pytest

from benchmarks.quality.curves import baselines, kv_dev, qci
from benchmarks.quality.suites import SYNTHETIC, SYNTHETIC_MODEL
from benchmarks.quality.vllm_answers import VllmAnswers, vllm_answers
from benchmarks.quality.walked_answers import walked_answers
from replicas import vllm_engine
from tests.replicas.vllm_harness import no_measurement

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

COVERAGES = (0.1, 0.3)
CURVES = [
    *(
        replace(curve, coverages=curve.coverages and COVERAGES, chunk_starts=curve.chunk_starts[:2])
        for curve in baselines()
        if not curve.is_random
    ),
    kv_dev(4, coverages=COVERAGES),
    kv_dev(3, 2, coverages=COVERAGES),
    qci(5, 1, coverages=COVERAGES),
    qci(2, 4, coverages=COVERAGES),
]


@pytest.fixture(scope="module")
def engine():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "measure_cost", no_measurement)
        with vllm_answers(SYNTHETIC_MODEL, SYNTHETIC.form, dtype="float32") as answers:
            yield answers


def test_both_engines_answer_every_request_alike(engine: VllmAnswers):
    questions = [
        question
        for task, size, count in (("vt", 8, 3), ("pr", 8, 3), ("vt", 16, 2))
        for question in SYNTHETIC.questions(task, size, 11, count)
    ]
    random.Random(0).shuffle(questions)
    with walked_answers(SYNTHETIC_MODEL, SYNTHETIC.form, dtype="float32") as walked:
        different = []
        num_compared = 0
        for question in questions:
            plain = {o.key: o for o in walked.outcomes(question, CURVES)}
            for served in engine.outcomes(question, CURVES):
                twin = plain[served.key]
                num_compared += 1
                assert served.coverage == twin.coverage
                assert served.share == twin.share
                if served.text != twin.text:
                    different.append((served.key, served.text, twin.text))
    assert num_compared == sum(len(list(c.points())) for c in CURVES) * len(questions)
    assert different == []


def test_a_curve_that_is_not_served_is_refused(engine: VllmAnswers):
    question = next(SYNTHETIC.questions("vt", 4, 0, 1))
    with pytest.raises(ValueError, match="is not served"):
        next(engine.outcomes(question, [kv_dev(1, keeps_fresh=False)]))
