"""Over HTTP, with nothing faked: Ray, Serve, and two vLLM engines that share a node's chunk store.

The model is tiny and random, in float32, so that greedy answers are equal where the arithmetic is.
"""

import json
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from deploy.server import running_server
from deploy.settings import load_settings
from deploy.tiny_models import TRAINING_TEXT, make_tiny_qwen3
from kv_tier import HostTier, HostTierConfig, KvLayout
from tests.cluster.harness import free_port, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MAX_MODEL_LEN = 4096
MAX_CHUNK_TOKENS = 512
MIB = 1 << 20
KV_CACHE_BYTES = 32 * MIB  # of each replica
HOST_TIER_BYTES = 64 * MIB
LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=32, dtype="float32")
KV_CACHE_TOKENS = KV_CACHE_BYTES // LAYOUT.bytes_per_token

REPLICA_PROCESS = "ray::ServeReplica:cachesmith:Replica"
ENGINE_PROCESS = "VLLM::EngineCore"
FULL_PREFILL = {"policy": "full_prefill"}
EXACT = {"coverage": 1.0}
WORDS = TRAINING_TEXT.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One finished answer, plain or streamed."""

    text: str
    finish_reason: str
    usage: dict[str, Any]
    info: dict[str, Any]  # the response's `cachesmith` field

    @property
    def replica(self) -> str:
        return self.info["replica"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RealServer:
    url: str
    model: str
    tier: HostTier  # the replicas' arena, opened here as well

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60.0)

    def body(self, documents: Sequence[Any], **fields: Any) -> dict[str, Any]:
        """A greedy chat request of 16 tokens; `question` and `system` go to its messages."""
        system, question = fields.pop("system", None), fields.pop("question", "Who built it?")
        messages = [{"role": "system", "content": system}] if system else []
        return {
            "model": self.model,
            "messages": [*messages, {"role": "user", "content": question}],
            "documents": list(documents),
            "max_tokens": 16,
            "temperature": 0.0,
            "ignore_eos": True,
            **fields,
        }

    def post(self, documents: Sequence[Any], **fields: Any) -> httpx.Response:
        url = f"{self.url}/v1/chat/completions"
        return httpx.post(url, json=self.body(documents, **fields), timeout=60.0)

    def ask(self, documents: Sequence[Any], **fields: Any) -> Answer:
        response = self.post(documents, **fields)
        assert response.status_code == 200, response.text
        return answer_of(response.json())

    def events(self, documents: Sequence[Any], **fields: Any) -> Iterator[dict[str, Any] | str]:
        """The payloads of one stream as they come, [DONE] as it is."""
        body = self.body(documents, stream=True, **fields)
        url = f"{self.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=120.0) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: "):
                    payload = line.removeprefix("data: ")
                    yield payload if payload == "[DONE]" else json.loads(payload)

    def store(self, documents: Sequence[Any], **fields: Any) -> list[dict[str, Any]]:
        """Ingest, and check that all of it is stored on the one node that there is."""
        body = {"documents": list(documents), **fields}
        response = httpx.post(f"{self.url}/v1/chunks", json=body, timeout=60.0)
        assert response.status_code == 200, response.text
        data = response.json()["data"]
        for chunk in data:
            if chunk["status"] != "empty":
                assert chunk["status"] == "stored" and len(chunk["nodes"]) == 1, chunk
        return data

    def ask_both(self, documents: Sequence[Any]) -> list[dict[str, Any]]:
        """Several answers' `cachesmith` fields, from both replicas."""
        # a running stream makes its replica the busier one: what comes beside it goes to the other
        stream = self.events(documents, max_tokens=150)
        wait_for_text(stream)
        beside = [self.ask(documents, question=f"Number {i}?") for i in range(3)]
        *_, last, done = stream
        assert done == "[DONE]"
        infos = [last["cachesmith"], *(answer.info for answer in beside)]
        assert {info["replica"] for info in infos} == self.ready()
        return infos

    def health(self) -> httpx.Response:
        return httpx.get(f"{self.url}/health", timeout=10.0)

    def ready(self) -> set[str]:
        response = self.health()
        replicas = response.json()["replicas"] if response.status_code == 200 else []
        return {replica["replica"] for replica in replicas}

    def is_at_rest(self) -> bool:
        """Two replicas, nothing running, waiting or left to ingest."""
        response = self.health()
        if response.status_code != 200:
            return False
        health = response.json()
        loads = [(r["num_running"], r["num_ingest_backlog"]) for r in health["replicas"]]
        return health["num_waiting"] == 0 and loads == [(0, 0)] * 2

    def holds_nothing(self) -> bool:
        """No lease, reservation or discarded entry is left in the arena."""
        stats = self.tier.stats()
        return stats.num_leases == stats.num_reservations == stats.num_retired == 0

    def metrics(self) -> dict[str, float]:
        """Sample line without its value → value."""
        text = httpx.get(f"{self.url}/metrics", timeout=10.0).text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    def num_requests(self, outcome: str) -> float:
        """Finished requests of any policy so far."""
        start = f'cachesmith_requests_total{{outcome="{outcome}"'
        return sum(value for name, value in self.metrics().items() if name.startswith(start))


def wait_for_text(stream: Iterator[Any]) -> None:
    """Read a stream's events up to its first text."""
    next(event for event in stream if event["choices"][0]["delta"].get("content"))


def answer_of(body: dict[str, Any]) -> Answer:
    (choice,) = body["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Answer(
        text=text,
        finish_reason=choice["finish_reason"],
        usage=body["usage"],
        info=body["cachesmith"],
    )


def passage(name: str, num_words: int = 100) -> str:
    """A text of its own for each name, the same in every run."""
    rng = random.Random(name)
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def passages(name: str, count: int = 3, num_words: int = 100) -> list[str]:
    return [passage(f"{name} {i}", num_words) for i in range(count)]


def num_tokens(chunks: Sequence[dict[str, Any]]) -> int:
    return sum(chunk["num_tokens"] for chunk in chunks)


def processes(name: str) -> list[psutil.Process]:
    """Of this test's own Ray: descendants with that name, the oldest first."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and name in " ".join(process.cmdline()):
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def whole_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    model_dir = make_tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny-qwen3")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="cachesmith-test-") as folder:
        directory = Path(folder) / "tier"
        settings = load_settings(
            overrides={
                "model": {
                    "name_or_dir": str(model_dir),
                    "dtype": "float32",
                    "max_model_len": MAX_MODEL_LEN,
                },
                "engine": {"cpu_threads": 1, "kv_cache_memory_bytes": KV_CACHE_BYTES},
                "replicas": {"num": 2},
                # with the untitled template as it is by default no document has one token
                "prompt": {"max_chunk_tokens": MAX_CHUNK_TOKENS, "untitled_template": "{text}"},
                "kv_tier": {
                    "host": {"directory": str(directory), "capacity_bytes": HOST_TIER_BYTES}
                },
                "http": {"port": free_port()},
            }
        )
        with running_server(settings) as running:
            tier = HostTierConfig(
                directory=directory, capacity_bytes=HOST_TIER_BYTES, layout=LAYOUT
            )
            with HostTier(tier) as store:
                yield RealServer(url=running.url, model=running.model_name, tier=store)
        assert not directory.exists()


@pytest.fixture
def server(whole_server: RealServer) -> RealServer:
    wait_until(whole_server.is_at_rest, timeout_s=60, what="two replicas at rest")
    return whole_server


# ---- answers ----


def check_accounts(answer: Answer, server: RealServer) -> None:
    """What a response says about itself fits together."""
    usage, info = answer.usage, answer.info
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == sum(info["cached_tokens"].values())
    assert 0 <= info["num_miss_tokens"] <= info["num_context_tokens"] < usage["prompt_tokens"]
    assert info["num_miss_tokens"] <= info["num_recomputed_tokens"] <= usage["prompt_tokens"]
    assert info["ttft_ms"] > 0 and info["slo_met"] == (info["ttft_ms"] <= info["slo_ttft_ms"])
    assert info["replica"] in server.ready()
    assert not info["recovered"]


@pytest.mark.parametrize(
    "options", [FULL_PREFILL, EXACT, {"policy": "cacheblend"}], ids=lambda o: str(*o.values())
)
def test_streamed_and_plain_answers_agree(server: RealServer, options: dict[str, Any]):
    documents = passages("streamed")
    stored = server.store(documents)
    extra = {"documents": documents, "ignore_eos": True, "cachesmith": options}
    extra["slo"] = {"ttft_ms": 60_000}
    asked: dict[str, Any] = {
        "model": server.model,
        "messages": [{"role": "user", "content": "Why 🌉?"}],
        "max_tokens": 24,
        "temperature": 0.0,
        "extra_body": extra,
    }
    plain = answer_of(server.client.chat.completions.create(**asked).model_dump())
    chunks = list(
        server.client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    )
    *pieces, last = chunks
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == plain.text != ""
    assert [p.choices[0].finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert last.choices == [] and last.usage
    assert ["cachesmith" in (c.model_extra or {}) for c in chunks].count(True) == 1
    streamed = Answer(
        text=plain.text,
        finish_reason="length",
        usage=last.usage.model_dump(),
        info=pieces[-1].model_extra["cachesmith"],
    )
    for answer in (plain, streamed):
        check_accounts(answer, server)
        assert answer.finish_reason == "length"
        assert answer.usage["completion_tokens"] == 24
        assert answer.info["num_context_tokens"] == num_tokens(stored)
        assert answer.info["slo_ttft_ms"] == 60_000 and answer.info["slo_met"]
        assert answer.info["policy"] == options.get("policy", "custom")
        is_full = options is FULL_PREFILL
        assert answer.info["full_prefill"] == is_full
        assert answer.info["num_miss_tokens"] == (num_tokens(stored) if is_full else 0)
    for key in ("coverage", "warmup_depth", "probe_len", "num_context_tokens"):
        assert plain.info[key] == streamed.info[key], key
    assert plain.usage["prompt_tokens"] == streamed.usage["prompt_tokens"]


def test_streamed_and_plain_completions_agree(server: RealServer):
    documents = passages("completion")
    server.store(documents)
    asked: dict[str, Any] = {
        "model": server.model,
        "prompt": "In the year",
        "max_tokens": 12,
        "temperature": 0.0,
        "extra_body": {"documents": documents, "ignore_eos": True, "cachesmith": EXACT},
    }
    plain = answer_of(server.client.completions.create(**asked).model_dump())
    streamed = server.client.completions.create(**asked, stream=True)
    assert "".join(piece.choices[0].text for piece in streamed) == plain.text != ""
    check_accounts(plain, server)
    assert plain.info["num_miss_tokens"] == 0


@pytest.mark.parametrize("signal_name", ["kv_dev", "qci"])
def test_cold_and_warm_answers_agree_at_coverage_1(server: RealServer, signal_name: str):
    reused = 0
    for case in range(3):
        documents = passages(f"warm {case}", count=2 + case)
        cold = server.ask(documents, cachesmith=FULL_PREFILL)
        server.store(documents)
        for depths in ({}, {"warmup_depth": 0, "probe_len": "all"}):
            options = {"coverage": 1.0, "signal": signal_name, **depths}
            warm = server.ask(documents, cachesmith=options)
            assert warm.text == cold.text
            assert warm.info["num_miss_tokens"] == 0 and warm.info["coverage"] == 1.0
            assert warm.info["signal"] == signal_name
        reuse = server.ask(documents, cachesmith={"policy": "full_reuse"})
        assert reuse.info["coverage"] == 0.0
        reused += reuse.text != cold.text
    assert reused > 0  # else equal answers would say nothing


def test_a_batch_answers_as_each_request_alone(server: RealServer):
    """Ragged, half of it stored, over both replicas and beside each other's decodes."""
    prompts = [passages(f"batch {i}", count=1 + i % 4, num_words=150) for i in range(8)]
    alone = [server.ask(documents, cachesmith=FULL_PREFILL).text for documents in prompts]
    assert len(set(alone)) == len(alone)
    for documents in prompts[::2]:
        server.store(documents)
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(server.ask, d, cachesmith=EXACT) for d in prompts]
        answers = [future.result() for future in asked]
    assert [answer.text for answer in answers] == alone
    assert [answer.info["num_miss_tokens"] > 0 for answer in answers] == [False, True] * 4
    assert max(answer.info["batch_size"] for answer in answers) > 1


HARD_DOCUMENTS: dict[str, list[Any]] = {
    "repeated": [passage("repeated")] * 3 + [passage("between"), passage("repeated")],
    "one token": ["x", "y", "x", {"title": "t", "text": "z"}],
    "emoji": ["👩🏽‍🚀🏳️‍🌈", "naïve 東京 \u202eabc\u202c", passage("with emoji") + " 🌉"],
    "beside empty ones": ["", passage("full"), "  \n", {"title": "only a title", "text": ""}],
    "of several chunks": [passage("very long", 1200)],
    "like the template": ["{question}", "<|im_end|>\n<|im_start|>system", passage("template")],
}


@pytest.mark.parametrize("kind", HARD_DOCUMENTS)
def test_hard_documents_answer_as_a_full_prefill(server: RealServer, kind: str):
    documents = HARD_DOCUMENTS[kind]
    full = server.ask(documents, cachesmith=FULL_PREFILL)
    chunks = server.store(documents)
    assert full.info["num_context_tokens"] == num_tokens(chunks)
    for options in (EXACT, {"coverage": 1.0, "signal": "qci", "warmup_depth": 0}):
        warm = server.ask(documents, cachesmith=options)
        assert warm.text == full.text
        assert warm.info["num_miss_tokens"] == 0
        assert warm.info["cached_tokens"]["host"] >= num_tokens(chunks)
    sizes = [chunk["num_tokens"] for chunk in chunks]
    if kind == "one token":
        assert sizes.count(1) == 3
    if kind == "of several chunks":
        assert len(sizes) > 3 and set(sizes[:-1]) == {MAX_CHUNK_TOKENS}


def test_empty_documents_are_none(server: RealServer):
    documents = ["", " \n\t"]
    assert [chunk["status"] for chunk in server.store(documents)] == ["empty"] * 2
    answer = server.ask(documents)
    assert answer.info["num_context_tokens"] == 0
    assert answer.text == server.ask([]).text


# ---- hits and misses ----


def test_stored_documents_hit_on_both_replicas(server: RealServer):
    documents = passages("both replicas", count=4)
    server.store(documents)
    infos = server.ask_both(documents)
    assert [info["num_miss_tokens"] for info in infos] == [0] * 4


def test_a_timeline_shows_the_phases_of_a_real_prefill(server: RealServer):
    documents = passages("timeline", count=2)
    server.store(documents)
    info = server.ask(documents, cachesmith={"coverage": 0.3, "timeline": True}).info
    spans = [e for e in info["timeline"]["traceEvents"] if e["ph"] == "X"]
    by_name = {name: [s for s in spans if s["name"] == name] for name in ("warmup", "patch")}
    assert {s["args"]["layer"] for s in by_name["warmup"]} == {0}
    assert {s["args"]["layer"] for s in by_name["patch"]} == {1, 2, 3}
    assert all(0 <= s["ts"] <= info["ttft_ms"] * 1e3 for s in spans)
    patch_ms = sum(s["dur"] for s in by_name["patch"]) / 1e3
    assert patch_ms == pytest.approx(info["patch_ms"], abs=0.1)


def test_another_order_and_another_system_prompt_hit(server: RealServer):
    documents = passages("moved", count=4)
    server.store(documents)
    moved = {
        "order": {"documents": documents[::-1]},
        "system": {"documents": documents, "system": "Answer in one word. " * 5},
        "both": {"documents": documents[2:] + documents[:1], "system": "Be brief."},
    }
    for name, fields in moved.items():
        answer = server.ask(**fields, cachesmith=EXACT)
        assert answer.info["num_miss_tokens"] == 0, name
        assert answer.text == server.ask(**fields, cachesmith=FULL_PREFILL).text, name


def test_missed_documents_are_stored_when_the_engine_is_idle(server: RealServer):
    documents = passages("never seen")
    answer = server.ask(documents)
    assert answer.info["num_miss_tokens"] == answer.info["num_context_tokens"] > 0

    def hits() -> bool:
        return server.ask(documents, max_tokens=1).info["num_miss_tokens"] == 0

    wait_until(hits, timeout_s=40, what="the missed documents are stored")
    warm = server.ask(documents, cachesmith=EXACT)
    assert warm.text == server.ask(documents, cachesmith=FULL_PREFILL).text


def test_another_cache_salt_does_not_hit(server: RealServer):
    documents = passages("salted")
    open_chunks = server.store(documents)
    salted = server.ask(documents, cache_salt="tenant b", cachesmith=EXACT)
    assert salted.info["num_miss_tokens"] == salted.info["num_context_tokens"] > 0
    own = server.ask(documents, cachesmith=EXACT)
    assert own.info["num_miss_tokens"] == 0 and own.text == salted.text
    salted_chunks = server.store(documents, cache_salt="tenant b")
    assert not {c["id"] for c in open_chunks} & {c["id"] for c in salted_chunks}
    again = server.ask(documents, cache_salt="tenant b", cachesmith=EXACT)
    assert again.info["num_miss_tokens"] == 0
    third = server.ask(documents, cache_salt="tenant c")
    assert third.info["num_miss_tokens"] == third.info["num_context_tokens"]


def test_a_deleted_chunk_is_a_miss(server: RealServer):
    documents = passages("deleted")
    chunks = server.store(documents)
    assert server.ask(documents).info["num_miss_tokens"] == 0
    url = f"{server.url}/v1/chunks/{chunks[1]['id']}"
    shown = httpx.get(url).json()
    assert shown["num_tokens"] == chunks[1]["num_tokens"] and shown["tier"] == "host"
    assert httpx.delete(url).json()["deleted"] is True
    assert httpx.get(url).status_code == httpx.delete(url).status_code == 404
    answer = server.ask(documents)
    assert answer.info["num_miss_tokens"] == chunks[1]["num_tokens"]


# ---- what the server says about itself ----


def test_health_and_models(server: RealServer):
    health = server.health().json()
    assert health["status"] == "ok" and health["model"] == server.model
    assert [r["reuse_refusal"] for r in health["replicas"]] == [None, None]
    (model,) = server.client.models.list().data
    assert model.id == server.model
    assert model.model_extra["max_model_len"] == MAX_MODEL_LEN


def test_metrics_move(server: RealServer):
    documents = passages("metrics")
    stored = num_tokens(server.store(documents[:2]))
    before = server.metrics()
    answer = server.ask(documents, cachesmith={"policy": "cacheblend"})
    moved = {
        'cachesmith_requests_total{outcome="ok",policy="cacheblend"}': 1,
        "cachesmith_prompt_tokens_total": answer.usage["prompt_tokens"],
        "cachesmith_generated_tokens_total": 16,
        "cachesmith_miss_tokens_total": answer.info["num_context_tokens"] - stored,
        'cachesmith_cached_tokens_total{tier="host"}': answer.info["cached_tokens"]["host"],
        "cachesmith_recomputed_tokens_total": answer.info["num_recomputed_tokens"],
        'cachesmith_ttft_ms_count{policy="cacheblend"}': 1,
    }

    def differences() -> dict[str, float]:
        after = server.metrics()
        return {name: after.get(name, 0.0) - before.get(name, 0.0) for name in moved}

    wait_until(lambda: differences() == moved, timeout_s=40, what="the request is counted")
    after = server.metrics()
    assert after["cachesmith_ready_replicas"] == 2
    resident = {after[f'cachesmith_resident_chunks{{replica="{r}"}}'] for r in server.ready()}
    assert len(resident) == 1 and resident.pop() > 0  # one node, one store


def test_a_prompt_longer_than_the_model_is_refused_with_both_lengths(server: RealServer):
    documents = [passage("too long", 3000)]
    length = num_tokens(server.store(documents))
    assert length > MAX_MODEL_LEN
    with pytest.raises(openai.BadRequestError) as refused:
        server.client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": "Why?"}],
            extra_body={"documents": documents},
        )
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "messages"
    named = [int(number) for number in re.findall(r"\d+", refused.value.body["message"])]
    assert named[1] == MAX_MODEL_LEN and length < named[0] < length + 100
    # the prompt alone fits, with its answer it does not
    short = server.post(passages("fits"), max_tokens=MAX_MODEL_LEN)
    assert short.status_code == 400 and short.json()["error"]["param"] == "max_tokens"
    assert str(MAX_MODEL_LEN) in short.json()["error"]["message"]


# ---- clients that go ----


def leave(server: RealServer, documents: Sequence[Any], *, after_s: float, **fields: Any) -> None:
    """Send a request and break its connection, whatever has come by then."""
    body = server.body(documents, **fields)
    deadline = time.monotonic() + after_s
    # read: a silent server, as in the queue or in prefill; the deadline: one that streams
    timeout = httpx.Timeout(30.0, read=after_s)
    with (
        suppress(httpx.ReadTimeout),
        httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=body, timeout=timeout
        ) as response,
    ):
        for _ in response.iter_lines():
            if time.monotonic() > deadline:
                return


def fill_the_caches(server: RealServer, name: str) -> None:
    """Requests that together need most blocks of both replicas, at once, within a bound."""
    prompts = [[passage(f"{name} {i}", 1800)] for i in range(8)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(server.ask, documents, max_tokens=4) for documents in prompts]
        answers = [future.result(timeout=60.0) for future in asked]
    num_used = sum(answer.usage["total_tokens"] for answer in answers)
    assert 2 * KV_CACHE_TOKENS > num_used > 1.6 * KV_CACHE_TOKENS


def test_clients_that_leave_long_answers_free_their_blocks(server: RealServer):
    documents = passages("left", count=4)
    server.store(documents)
    before = {outcome: server.num_requests(outcome) for outcome in ("cancelled", "ok")}
    streams = [server.events(documents, max_tokens=3000) for _ in range(8)]
    with ThreadPoolExecutor(len(streams)) as pool:  # one by one, the first might come to its end
        list(pool.map(wait_for_text, streams))
    for stream in streams:
        stream.close()
    wait_until(server.is_at_rest, timeout_s=40, what="nothing runs any more")

    def num_ended(outcome: str) -> float:
        return server.num_requests(outcome) - before[outcome]

    wait_until(
        lambda: num_ended("cancelled") + num_ended("ok") == len(streams),
        timeout_s=40,
        what="all of them count",
    )
    # on a busy machine one may come to its end before the last has its first text
    assert num_ended("cancelled") > len(streams) / 2
    wait_until(server.holds_nothing, timeout_s=40, what="the arena is free of leases")
    assert server.tier.check_integrity() == []


def test_clients_that_leave_during_prefill_leak_nothing(server: RealServer):
    """More tokens than both caches hold are given up in the queue, in prefill and in decode."""
    shared = passages("shared", count=6, num_words=200)
    num_tokens_each = 4 * min(chunk["num_tokens"] for chunk in server.store(shared))  # or more
    rng = random.Random(0)
    num_clients = 40
    cancelled, failed = server.num_requests("cancelled"), server.num_requests("error")
    retries = server.metrics()["cachesmith_retries_total"]
    leased: list[int] = []
    with ThreadPoolExecutor(num_clients) as pool:
        left = [
            pool.submit(
                leave,
                server,
                [*rng.sample(shared, 4), passage(f"own {i}", 400)],
                after_s=rng.uniform(0.1, 3.0),
                max_tokens=1000,
                stream=i % 3 > 0,
                cachesmith={"coverage": rng.choice([0.1, 0.5, 1.0])},
            )
            for i in range(num_clients)
        ]
        while wait(left, timeout=0.02).not_done:
            leased.append(server.tier.stats().num_leases)
        for future in left:
            future.result()
    assert max(leased) > 0  # some were in prefill over stored chunks

    def num_given_up() -> float:
        return num_tokens_each * (server.num_requests("cancelled") - cancelled)

    wait_until(lambda: num_given_up() > 2 * KV_CACHE_TOKENS, timeout_s=40, what="enough was left")
    fill_the_caches(server, "after leaving")
    wait_until(server.is_at_rest, timeout_s=60, what="nothing runs any more")
    wait_until(server.holds_nothing, timeout_s=40, what="the arena is free of leases")
    assert server.tier.check_integrity() == []
    # a client that leaves is nobody's failure, and not the replica's loss
    assert server.num_requests("error") == failed
    assert server.metrics()["cachesmith_retries_total"] == retries
    answer = server.ask(shared, cachesmith=EXACT)
    assert answer.text == server.ask(shared, cachesmith=FULL_PREFILL).text


# ---- a replica that dies ----


@dataclass
class RunningStream:
    """A stream read in a thread of its own."""

    server: RealServer
    documents: list[str]
    events: list[dict[str, Any] | str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self._begun.wait(30.0), "no first token"

    def _read(self) -> None:
        for event in self.server.events(self.documents, max_tokens=400):
            self.events.append(event)
            if len(self.events) == 3:  # role, first token, second token
                self._begun.set()

    def join(self) -> None:
        self._thread.join(90.0)
        assert not self._thread.is_alive(), "the stream did not end"

    @property
    def is_complete(self) -> bool:
        return self.events[-1] == "[DONE]"

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [e["error"] for e in self.events if isinstance(e, dict) and "error" in e]


def engine_of(replica: psutil.Process) -> psutil.Process:
    (engine,) = [
        process
        for process in replica.children(recursive=True)
        if ENGINE_PROCESS in " ".join(process.cmdline())
    ]
    return engine


def shared_memory_of(family: Sequence[psutil.Process]) -> set[Path]:
    """What vLLM's processes share among themselves, and leave behind when they are killed."""
    inodes = set()
    for process in family:
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            if " /dev/shm/" in line:  # a semaphore is mapped under a name that it has no more
                inodes.add(int(line.split()[4]))
    found = set()
    for pattern in ("psm_*", "sem.mp-*"):
        for path in Path("/dev/shm").glob(pattern):
            with suppress(FileNotFoundError):
                if path.stat().st_ino in inodes:
                    found.add(path)
    return found


@pytest.mark.parametrize("victim", ["engine", "replica"])
def test_a_killed_replica(server: RealServer, victim: str):
    """SIGKILL to the engine core, or to the Serve replica over it, while both replicas stream."""
    documents = passages("kept", count=4)
    server.store(documents)
    before = server.ready()
    streams = [RunningStream(server, documents) for _ in range(6)]  # to each replica in turn
    replica = processes(REPLICA_PROCESS)[0]
    family = [replica, *replica.children(recursive=True)]
    litter = shared_memory_of(family)
    os.kill((engine_of(replica) if victim == "engine" else replica).pid, signal.SIGKILL)

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(server.post, documents, question=f"{i}?") for i in range(4)]
        assert [future.result().status_code for future in asked] == [200] * 4
    for stream in streams:
        stream.join()
    broken = [stream for stream in streams if not stream.is_complete]
    assert 0 < len(broken) < 6
    for stream in broken:
        (error,) = stream.errors
        assert stream.events[-1]["error"] == error and error["code"] == "replica_lost"
    whole = [stream for stream in streams if stream.is_complete]
    (survivor,) = {stream.events[-2]["cachesmith"]["replica"] for stream in whole}
    assert survivor in before and not any(stream.errors for stream in whole)

    wait_until(lambda: not any(map(is_running, family)), timeout_s=40, what="nothing is left of it")
    for path in litter:
        path.unlink(missing_ok=True)
    wait_until(lambda: len(server.ready()) == 2, timeout_s=150, what="it is replaced")
    (new,) = server.ready() - before
    # the arena outlived the engine, and the new one uses it
    assert {new, survivor} == server.ready()
    assert [info["num_miss_tokens"] for info in server.ask_both(documents)] == [0] * 4
    wait_until(server.holds_nothing, timeout_s=40, what="the dead engine's leases are taken back")
    assert server.tier.check_integrity() == []
