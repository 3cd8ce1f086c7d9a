"""The synthetic model over HTTP, as text: the server answers as the instrument says it does."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.quality.curves import FULL_PREFILL, FULL_REUSE, bounds, kv_dev
from benchmarks.quality.suites import SYNTHETIC, SYNTHETIC_MODEL
from benchmarks.quality.types import Question
from benchmarks.quality.walked_answers import walked_answers
from deploy.server import running_server
from deploy.settings import load_settings
from tests.cluster.harness import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow]

POINT = kv_dev(4, coverages=(0.3,))
REQUESTS = {
    FULL_PREFILL: {"policy": "full_prefill"},
    FULL_REUSE: {"policy": "full_reuse"},
    POINT.name: {"signal": "kv_dev", "warmup_depth": 4, "probe_len": 1, "coverage": 0.3},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="cachesmith-test-") as folder:
        settings = load_settings(
            config_file=SYNTHETIC_MODEL / "serve.yaml",
            overrides={
                "model": {"name_or_dir": str(SYNTHETIC_MODEL)},
                "engine": {"kv_cache_memory_bytes": "128MiB"},
                "kv_tier": {
                    "host": {"directory": str(Path(folder) / "tier"), "capacity_bytes": "128MiB"}
                },
                "http": {"port": free_port()},
            },
        )
        with running_server(settings) as running:
            yield running.url


def store(url: str, question: Question) -> None:
    for document in question.documents:
        stored = httpx.post(f"{url}/v1/chunks", json={"documents": [{"text": document.text}]})
        assert stored.status_code == 200, stored.text


def ask(url: str, question: Question, options: dict, **fields) -> tuple[str, dict]:
    documents = [{"text": document.text} for document in question.documents]
    body = {
        "model": SYNTHETIC_MODEL.name,
        "prompt": question.question,
        "documents": documents,
        "max_tokens": question.max_new_tokens,
        "temperature": 0,
        "cachesmith": options,
        **fields,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    content = answer.json()
    return content["choices"][0]["text"].strip(), content["cachesmith"]


def test_the_server_answers_as_the_instrument(url):
    questions = [
        question for task in ("vt", "pr") for question in SYNTHETIC.questions(task, 8, 21, 4)
    ]
    curves = [*bounds(), POINT]
    with walked_answers(SYNTHETIC_MODEL, SYNTHETIC.form, dtype="float32") as answers:
        expected = {
            (question.question_id, outcome.curve): outcome
            for question in questions
            for outcome in answers.outcomes(question, curves)
        }
    right = dict.fromkeys(REQUESTS, 0.0)
    for question in questions:
        store(url, question)
        for name, options in REQUESTS.items():
            text, info = ask(url, question, options)
            wanted = expected[question.question_id, name]
            assert text == wanted.text, (question.question_id, name)
            # vLLM's own prefill looks nothing up
            missed = info["num_context_tokens"] if name == FULL_PREFILL else 0
            assert info["num_miss_tokens"] == missed
            right[name] += wanted.gold
    assert right[FULL_PREFILL] >= 7
    assert right[POINT.name] > right[FULL_REUSE]


def test_plans_follow_the_time_that_is_left(url):
    """With the profile in the model's folder: what is promised is what it has measured."""
    (question,) = SYNTHETIC.questions("vt", 16, 5, 1)
    store(url, question)
    plans = {}
    for slo_ms in (1, 60_000):
        _, info = ask(url, question, {"timeline": True}, slo={"ttft_ms": slo_ms})
        assert info["num_miss_tokens"] == 0 and info["policy"] == "adaptive"
        (chosen,) = (line for line in info["explanation"].splitlines() if line.startswith("*"))
        names = [info["signal"], str(info["warmup_depth"]), str(info["probe_len"])]
        assert chosen.split()[1:4] == names
        plans[slo_ms] = info
    tight, loose = plans.values()
    assert not tight["slo_met"] and loose["slo_met"]
    assert tight["planned_coverage"] == 0.05 and loose["planned_coverage"] > 0.05
    assert loose["pass_probability"] > tight["pass_probability"]
    (replica,) = httpx.get(f"{url}/health").json()["replicas"]
    assert replica["cost_drift"] > 0
