"""The HTTP API over fake ports: every error's shape and field, bodies, streams."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.api import ApiFront, create_api
from cluster.config import GatewayConfig, PromptConfig
from cluster.errors import SchedulerGoneError
from cluster.gateway import Gateway
from cluster.messages import Refusal
from cluster.prompt import PromptBuilder
from planner import Deviation, MonotonicClock, Signal
from tests.fakes.fake_engine import FakeEngine, FakeEngineConfig
from tests.fakes.fake_ports import FakeReplicas, FakeScheduler, ready_status

MODEL = "fake-model"
USER = {"role": "user", "content": "Why?"}


class CopiedTokenizer:
    """A tokenizer whose methods a test may replace."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode = tokenizer.encode
        self.render_chat = tokenizer.render_chat


class Api:
    """The application, asked without a network."""

    def __init__(self, tokenizer: Any, state_dir: Path, **options: Any) -> None:
        """options: of `create_api`"""
        self.state_dir = state_dir
        self.engine = FakeEngine(FakeEngineConfig(state_dir=str(state_dir), max_model_len=2000))
        info = asyncio.run(self.engine.start())
        self.scheduler = FakeScheduler(ready_status(info))
        self.replicas = FakeReplicas(self.engine)
        clock = MonotonicClock()
        gateway = Gateway(
            self.scheduler,
            self.replicas,
            GatewayConfig(num_layers=4, default_max_tokens=3),
            clock,
        )
        self.tokenizer = CopiedTokenizer(tokenizer)
        self.front = ApiFront(
            gateway,
            PromptBuilder(self.tokenizer, PromptConfig(intro="", untitled_template="{text}")),
            clock,
            model_name=MODEL,
            default_ttft_slo_ms=500.0,
        )
        self.app = create_api(self.front, clock, version="1.2.3", **options)

    def ask(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(go())

    def chat(self, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [USER], **fields}
        return self.ask("POST", "/v1/chat/completions", json=body, headers=headers)

    def profile(self) -> Any:
        return self.scheduler.profiles[-1]

    def request(self) -> Any:
        return self.replicas.requests[-1][1]


@pytest.fixture
def api(tokenizer, tmp_path) -> Api:
    return Api(tokenizer, tmp_path)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages.0.foo"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages.0.content.0.type",
    ),
    ({"model": 5}, "model"),
    ({"foo": 1}, "foo"),
    ({"documents": "x"}, "documents"),
    ({"documents": [5]}, "documents.0"),
    ({"documents": [{"text": 5}]}, "documents.0.text"),
    ({"documents": [{"text": "a", "url": "b"}]}, "documents.0.url"),
    ({"documents": ["a", {"data": {"body": "b"}}]}, "documents.1"),
    ({"documents": ["a", {"data": 5}]}, "documents.1"),
    ({"documents": ["\ud800"]}, "documents.0.text"),
    ({"documents": [{"id": "\ud800", "text": "a"}]}, "documents.0.id"),
    ({"cache_salt": "\ud800"}, "cache_salt"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 1.5}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop.1"),
    ({"n": 2}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"tools": []}, "tools"),
    ({"slo": {"ttft_ms": 0}}, "slo.ttft_ms"),
    ({"slo": {"ttft_ms": -5}}, "slo.ttft_ms"),
    ({"slo": {"ttft_ms": "5"}}, "slo.ttft_ms"),
    ({"slo": {}}, "slo.ttft_ms"),
    ({"slo": {"ttft_ms": 5, "tpot_ms": 1}}, "slo.tpot_ms"),
    ({"cachesmith": {"policy": "magic"}}, "cachesmith.policy"),
    ({"cachesmith": {"signal": "luck"}}, "cachesmith.signal"),
    ({"cachesmith": {"warmup_depth": -1}}, "cachesmith.warmup_depth"),
    ({"cachesmith": {"probe_len": "some"}}, "cachesmith.probe_len"),
    ({"cachesmith": {"coverage": 1.5}}, "cachesmith.coverage"),
    ({"cachesmith": {"deviation": "q"}}, "cachesmith.deviation"),
    ({"cachesmith": {"timeline": "yes"}}, "cachesmith.timeline"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=[str(f)[:60] for f, _ in BAD_FIELDS])
def test_bad_fields_are_named(api: Api, fields, param):
    body = json.dumps({"model": MODEL, "messages": [USER], **fields})
    response = api.ask("POST", "/v1/chat/completions", content=body)
    error = error_of(response, 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b'"x"', b"{'a': 1}"])
def test_malformed_json(api: Api, body):
    response = api.ask(
        "POST",
        "/v1/chat/completions",
        content=body,
        headers={"content-type": "application/json"},
    )
    assert "JSON" in error_of(response, 400)["message"]


def test_nan_is_refused(api: Api):
    body = json.dumps({"model": MODEL, "messages": [USER], "slo": {"ttft_ms": float("nan")}})
    response = api.ask("POST", "/v1/chat/completions", content=body)
    assert error_of(response, 400)["param"] == "slo.ttft_ms"


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", ""])
def test_bad_slo_headers(api: Api, value):
    response = api.chat(headers={"x-slo-ttft-ms": value})
    assert error_of(response, 400)["param"] == "x-slo-ttft-ms"


def test_the_slo_comes_from_body_then_header_then_default(api: Api):
    api.chat(headers={"x-slo-ttft-ms": "70"}, slo={"ttft_ms": 50})
    assert api.profile().ttft_slo_ms == 50
    api.chat(headers={"x-slo-ttft-ms": "70"})
    assert api.profile().ttft_slo_ms == 70
    api.chat()
    assert api.profile().ttft_slo_ms == 500


def test_unknown_model(api: Api):
    error = error_of(api.chat(model="gpt-9"), 404)
    assert error["code"] == "model_not_found" and error["param"] == "model"


def test_prompts_over_the_models_length(api: Api):
    num_tokens = api.chat(documents=["x" * 100]).json()["usage"]["prompt_tokens"] + 1900
    error = error_of(api.chat(documents=["x" * 2000]), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    assert f"{num_tokens} tokens" in error["message"] and "2000 tokens" in error["message"]
    error = error_of(api.chat(max_tokens=1990), 400)
    assert error["param"] == "max_tokens" and "2000" in error["message"]


def test_the_engines_own_refusal_is_a_400(api: Api):
    api.scheduler.status = None  # nobody has said the limit yet
    error = error_of(api.chat(documents=["x" * 3000]), 400)
    assert error["code"] == "context_length_exceeded"


def test_full_queue_and_timeouts(api: Api):
    api.scheduler.answers = [
        Refusal(status=429, message="full", code="queue_full", retry_after_s=1.0),
        Refusal(status=503, message="late", code="queue_timeout", retry_after_s=5.0),
    ]
    response = api.chat()
    assert error_of(response, 429)["code"] == "queue_full"
    assert response.headers["retry-after"] == "1"
    response = api.chat(stream=True)
    assert error_of(response, 503)["type"] == "service_unavailable"
    assert response.headers["retry-after"] == "5"


def test_unknown_routes_and_methods(api: Api):
    assert "/nowhere" in error_of(api.ask("GET", "/nowhere"), 404)["message"]
    error_of(api.ask("GET", "/v1/chat/completions"), 405)


def test_a_plain_answer(api: Api):
    body = api.chat(documents=["abc", {"text": "de"}], max_tokens=2).json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "t0 t1 "}
    assert body["choices"][0]["finish_reason"] == "length"
    info = body["cachesmith"]
    assert info["num_context_tokens"] == 5 and info["num_miss_tokens"] == 5
    assert info["replica"] == "r1" and info["queue_ms"] == 2.0 and info["slo_met"] is True
    again = api.chat(documents=[{"text": "de"}, "abc"], max_tokens=2).json()
    assert again["cachesmith"]["cached_tokens"] == {"host": 5}
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}
    assert again["usage"]["completion_tokens"] == 2
    assert again["usage"]["total_tokens"] == again["usage"]["prompt_tokens"] + 2


def test_an_answer_may_be_sent_back_as_it_came(api: Api):
    echoed = {"role": "assistant", "content": "Yes.", "refusal": None, "tool_calls": None}
    assert api.chat(messages=[USER, echoed, USER]).status_code == 200


def test_a_streamed_answer(api: Api):
    response = api.chat(stream=True, stream_options={"include_usage": True}, max_tokens=2)
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-1] == "" and blocks[-2] == "data: [DONE]"
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["delta"]["content"] for c in chunks[1:3]] == ["t0 ", "t1 "]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:3]] == [None, None, "length"]
    assert [("cachesmith" in c) for c in chunks] == [False, False, True, False]
    assert [c["usage"] for c in chunks[:3]] == [None] * 3
    assert chunks[3]["choices"] == [] and chunks[3]["usage"]["completion_tokens"] == 2
    assert len({c["id"] for c in chunks}) == 1


def test_streams_without_usage_do_not_mention_it(api: Api):
    assert "usage" not in api.chat(stream=True).text


def test_plain_completions(api: Api):
    body = {"model": MODEL, "prompt": "Why?", "documents": ["abc"], "max_tokens": 2}
    answer = api.ask("POST", "/v1/completions", json=body).json()
    assert answer["object"] == "text_completion" and answer["choices"][0]["text"] == "t0 t1 "
    assert answer["cachesmith"]["num_context_tokens"] == 3
    stream = api.ask("POST", "/v1/completions", json={**body, "stream": True}).text
    first = json.loads(stream.split("\n\n")[0].removeprefix("data: "))
    assert first["choices"][0]["text"] == "t0 "
    error = error_of(api.ask("POST", "/v1/completions", json={**body, "prompt": [1, 2]}), 400)
    assert error["param"] == "prompt"


@pytest.mark.parametrize(
    "document",
    ["abc", {"text": "abc"}, {"id": "7", "data": {"text": "abc"}}, {"data": {"snippet": "abc"}},
     {"id": 7, "data": "abc"}, {"data": {"text": "abc", "url": "http://x"}}],
)  # fmt: skip
def test_forms_of_documents(api: Api, document):
    api.chat(documents=[document])
    assert [len(chunk) for chunk in api.request().chunks] == [3]


def test_empty_and_duplicate_documents(api: Api):
    api.chat(documents=["abc", "", {"title": "only a title"}, {"data": {}}, "abc", "😀"])
    assert [len(chunk) for chunk in api.request().chunks] == [3, 3, 4]
    first, second, _ = api.profile().chunks
    assert first == second


def test_options_reach_the_engine(api: Api):
    api.chat(
        max_completion_tokens=2, temperature=0, top_k=-1, seed=7, stop="x", ignore_eos=True,
        cache_salt="me", user="u", metadata={"a": 1}, store=False, n=1, logprobs=None,
    )  # fmt: skip
    request = api.request()
    assert request.cache_salt == "me"
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (2, 0, 0)
    assert (sampling.seed, sampling.stop, sampling.ignore_eos) == (7, ("x",), True)


def test_salts_separate_chunks(api: Api):
    api.chat(documents=["abc"])
    plain = api.profile().chunks[0].chunk_id
    api.chat(documents=["abc"], cache_salt="me")
    assert api.profile().chunks[0].chunk_id != plain


@pytest.mark.parametrize(
    ("options", "policy", "expected"),
    [
        ({}, "adaptive", None),
        ({"policy": "cacheblend"}, "cacheblend", (Signal.KV_DEV, 1, 1, 0.15)),
        ({"policy": "full_prefill"}, "full_prefill", (Signal.KV_DEV, None, 0, 1.0)),
        ({"policy": "cacheblend", "coverage": 0.3}, "custom", (Signal.KV_DEV, 1, 1, 0.3)),
        (
            {"signal": "qci", "warmup_depth": 2, "probe_len": "all", "coverage": 1},
            "custom",
            (Signal.QCI, 2, None, 1.0),
        ),
    ],
)
def test_policies(api: Api, options, policy, expected):
    api.chat(cachesmith=options)
    profile = api.profile()
    config = profile.config
    point = config and (config.signal, config.warmup_depth, config.probe_len, config.coverage)
    assert (profile.policy, point) == (policy, expected)


def test_auto_and_what_kv_dev_compares(api: Api):
    api.chat(cachesmith={"signal": "auto"})
    assert api.profile().config.signal is Signal.AUTO
    api.chat(cachesmith={"policy": "cacheblend", "deviation": "v"})
    config = api.profile().config
    assert (config.signal, config.deviation) == (Signal.KV_DEV, Deviation.V)


def test_a_timeline_comes_only_to_those_who_ask(api: Api):
    asked = api.chat(documents=["abc"], cachesmith={"timeline": True}).json()["cachesmith"]
    assert asked["policy"] == "adaptive"  # it changes no plan
    assert {"queue", "first token"} <= {e["name"] for e in asked["timeline"]["traceEvents"]}
    assert "timeline" not in api.chat(documents=["abc"]).json()["cachesmith"]


def test_a_replica_lost_before_the_first_token_is_not_seen(api: Api):
    api.replicas.lose_after = [0, 0]
    assert api.chat().status_code == 200
    assert len({profile.request_id for profile in api.scheduler.profiles}) == 3
    assert api.scheduler.lost == ["r1", "r1"]
    assert api.scheduler.outcomes[-1].num_retries == 2


def test_too_many_lost_replicas(api: Api):
    api.replicas.lose_after = [0, 0, 0]
    response = api.chat()
    assert error_of(response, 503)["code"] == "replica_lost"
    assert "retry-after" in response.headers


def test_a_replica_lost_after_the_first_token_is_one_clear_error(api: Api):
    api.replicas.lose_after = [2]
    assert error_of(api.chat(), 500)["code"] == "replica_lost"
    api.replicas.lose_after = [2]
    stream = api.chat(stream=True).text
    blocks = [b for b in stream.split("\n\n") if b]
    assert json.loads(blocks[-1].removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert sum("error" in block for block in blocks) == 1 and "[DONE]" not in stream
    assert len(api.scheduler.profiles) == 2  # nothing was asked for again


def test_without_a_scheduler_the_floor_plan_runs_anywhere(api: Api):
    api.scheduler.answers = [SchedulerGoneError("gone")]
    info = api.chat(documents=["abc"]).json()["cachesmith"]
    assert info["planned_coverage"] == 0.05 and info["replica"] == "r1"
    ticket, _ = api.replicas.requests[-1]
    assert ticket.replica_id == "" and ticket.batch_size == 1


def test_unexpected_failures_keep_the_shape(api: Api):
    api.scheduler.answers = [RuntimeError("boom")]
    error = error_of(api.chat(), 500)
    assert error["code"] == "internal_error" and "boom" not in error["message"]
    assert api.scheduler.outcomes[-1].outcome == "error"


def test_chunks(api: Api):
    body = {"documents": ["abc", "", "x" * 3000, "abc"]}
    data = api.ask("POST", "/v1/chunks", json=body).json()["data"]
    assert [(d["document"], d["num_tokens"], d["status"]) for d in data] == [
        (0, 3, "stored"), (1, 0, "empty"), (2, 2048, "failed"), (2, 952, "stored"),
        (3, 3, "stored"),
    ]  # fmt: skip
    assert "too long" in data[2]["nodes"]["node-of-r1"]["error"]
    chunk_id = data[0]["id"]
    shown = api.ask("GET", f"/v1/chunks/{chunk_id}").json()
    assert shown["num_tokens"] == 3 and shown["tier"] == "host"
    assert api.chat(documents=["abc"]).json()["cachesmith"]["num_miss_tokens"] == 0
    assert api.ask("DELETE", f"/v1/chunks/{chunk_id}").json()["deleted"] is True
    for method in ("GET", "DELETE"):
        error = error_of(api.ask(method, f"/v1/chunks/{chunk_id}"), 404)
        assert error["code"] == "chunk_not_found"
    assert error_of(api.ask("POST", "/v1/chunks", json={"documents": []}), 400)["param"] == (
        "documents"
    )


def test_health_models_version_metrics(api: Api):
    assert api.ask("GET", "/health").json()["status"] == "ok"
    assert api.ask("GET", "/v1/models").json()["data"][0]["max_model_len"] == 2000
    assert api.ask("GET", "/version").json() == {"version": "1.2.3"}
    assert api.ask("GET", "/ping").text == "pong"
    assert api.ask("GET", "/metrics").text.startswith("cachesmith_")
    assert api.ask("GET", "/openapi.json").status_code == 200
    api.scheduler.status = None
    response = api.ask("GET", "/health")
    assert response.status_code == 503 and "scheduler" in response.json()["reason"]
    error_of(api.ask("GET", "/metrics"), 503)
    error_of(api.ask("POST", "/v1/chunks", json={"documents": ["a"]}), 503)


def test_outcomes_are_recorded(api: Api):
    api.chat(documents=["abc"])
    outcome = api.scheduler.outcomes[-1]
    assert (outcome.outcome, outcome.num_miss_tokens, outcome.slo_met) == ("ok", 3, True)
    api.scheduler.answers = [Refusal(status=429, message="full", code="queue_full")]
    api.chat()
    assert api.scheduler.outcomes[-1].outcome == "rejected"


def test_a_stream_whose_client_can_not_be_asked_for_is_cancelled(api: Api):
    """Serve's `receive` fails when the client's leaving has ended the call behind it."""
    (api.state_dir / "token_ms").write_text("50")
    body = json.dumps({"model": MODEL, "messages": [USER], "max_tokens": 100, "stream": True})
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }

    async def go() -> None:
        requests = [{"type": "http.request", "body": body.encode()}]
        begun = asyncio.Event()

        async def receive() -> Any:
            if requests:
                return requests.pop()
            await begun.wait()
            raise RuntimeError("cancelled")

        async def send(message: Any) -> None:
            if message.get("body"):
                begun.set()

        await asyncio.wait_for(api.app(scope, receive, send), 2.0)

    asyncio.run(go())
    assert api.scheduler.outcomes[-1].outcome == "cancelled"


def test_what_is_quick_to_tokenise_changes_no_thread(api: Api):
    """Unless the thread is at work: the tokenizer is for one at a time."""
    threads: list[str] = []
    render = api.tokenizer.render_chat

    def watch(messages: Any) -> str:
        threads.append(threading.current_thread().name)
        return render(messages)

    api.tokenizer.render_chat = watch
    here = threading.current_thread().name
    long = "word " * 300
    asked = [
        ({}, here),
        ({"documents": ["short"]}, here),
        ({"documents": [long, long + "other"]}, "tokenize_0"),
        ({"documents": [long + "other", long]}, here),  # known by now
        ({"messages": [{"role": "user", "content": long * 2}]}, "tokenize_0"),
    ]
    for fields, _ in asked:
        api.chat(**fields)
    assert threads == [thread for _, thread in asked]


async def test_a_busy_tokenising_thread_keeps_its_order(api: Api):
    busy, free = threading.Event(), threading.Event()

    def block() -> None:
        busy.set()
        assert free.wait(10.0)

    front = api.front
    blocked = asyncio.create_task(front._in_thread(block))
    await asyncio.to_thread(busy.wait, 10.0)
    queued = asyncio.create_task(front._in_thread(block))
    await asyncio.sleep(0)
    quick = asyncio.create_task(front._tokenized(1, lambda *_: threading.current_thread(), "", []))
    await asyncio.sleep(0)
    queued.cancel()  # before it has begun
    free.set()
    assert await quick is not threading.current_thread()
    await blocked
    async with asyncio.timeout(10.0):
        while front._num_in_thread:
            await asyncio.sleep(0)
    there = await front._tokenized(1, lambda *_: threading.current_thread(), "", [])
    assert there is threading.current_thread()
