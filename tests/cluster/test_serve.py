"""The whole path on a real Ray and Serve: HTTP, tickets, streams, and what happens at each loss."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
import ray
from ray import serve

from tests.cluster.harness import (
    APP,
    MODEL,
    Server,
    chat_body,
    fake_app,
    running_cluster,
    wait_until,
)

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), num_replicas=2) as server:
        yield server


@pytest.fixture
def server(cluster: Server) -> Server:
    """The cluster at rest: quick, healthy, nothing in flight."""
    cluster.delays()
    wait_until(lambda: cluster.num_ready() == 2, timeout_s=40, what="two ready replicas")
    wait_until(lambda: cluster.num_leases() == 0, timeout_s=40, what="nothing in flight")
    return cluster


def post(server: Server, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json=chat_body(**fields), timeout=60.0)


def stream_events(server: Server, **fields: Any) -> list[dict[str, Any] | str]:
    """The payloads of one stream, [DONE] as it is."""
    body = chat_body(stream=True, **fields)
    url = f"{server.url}/v1/chat/completions"
    events: list[dict[str, Any] | str] = []
    with httpx.stream("POST", url, json=body, timeout=60.0) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: "):
                payload = line.removeprefix("data: ")
                events.append(payload if payload == "[DONE]" else json.loads(payload))
    return events


def test_the_openai_client_plain(server: Server):
    answer = server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Why?"}],
        max_tokens=3,
        extra_body={"documents": [{"title": "T", "text": "plain one"}], "slo": {"ttft_ms": 900}},
    )
    assert answer.choices[0].message.content == "t0 t1 t2 "
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage and answer.usage.prompt_tokens_details
    info = answer.model_extra["cachesmith"]
    assert info["slo_ttft_ms"] == 900 and info["num_miss_tokens"] == info["num_context_tokens"]


def test_the_openai_client_streams_and_hits_the_cache(server: Server):
    def ask(documents: list[str]) -> tuple[str, Any, dict[str, Any]]:
        text, usage, info = "", None, {}
        for chunk in server.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Why?"}],
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"documents": documents},
        ):
            usage = chunk.usage or usage
            info = (chunk.model_extra or {}).get("cachesmith") or info
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
        return text, usage, info

    text, usage, info = ask(["stream one", "stream two"])
    assert text == "t0 t1 t2 t3 " and usage.completion_tokens == 4
    # the replica tells the scheduler what it now holds, and the next request goes there
    time.sleep(1.0)
    _, usage, again = ask(["stream two", "stream one"])
    assert again["replica"] == info["replica"]
    assert again["num_miss_tokens"] == 0
    assert usage.prompt_tokens_details.cached_tokens == again["cached_tokens"]["host"] > 0


def test_plain_completions_with_the_openai_client(server: Server):
    chunks = list(
        server.client.completions.create(model=MODEL, prompt="Why?", max_tokens=2, stream=True)
    )
    assert "".join(c.choices[0].text for c in chunks) == "t0 t1 "


def test_hard_documents(server: Server):
    documents = ["", "😀", "x", "same", "same", {"id": 1, "data": {"snippet": "s"}}]
    info = post(server, documents=documents, max_tokens=1).json()["cachesmith"]
    sizes = [len(f"{text}\n\n".encode()) for text in ("😀", "x", "same", "same", "s")]
    assert info["num_context_tokens"] == sum(sizes)


def test_a_document_of_100k_characters(server: Server):
    response = post(server, documents=["word " * 20_000])
    assert response.status_code == 400  # one token a byte here: longer than the fake model
    assert "100" in response.json()["error"]["message"]
    data = httpx.post(
        f"{server.url}/v1/chunks", json={"documents": ["word " * 20_000]}, timeout=60.0
    ).json()["data"]
    assert sum(chunk["num_tokens"] for chunk in data) == 100_002
    assert {chunk["status"] for chunk in data} == {"stored"}


def test_errors_reach_the_openai_client(server: Server):
    with pytest.raises(openai.BadRequestError) as bad:
        server.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], extra_body={"foo": 1}
        )
    assert bad.value.param == "foo"
    with pytest.raises(openai.NotFoundError) as missing:
        server.client.chat.completions.create(
            model="other", messages=[{"role": "user", "content": "x"}]
        )
    assert missing.value.code == "model_not_found"
    response = httpx.post(f"{server.url}/v1/chat/completions", content=b"{", timeout=10.0)
    assert response.status_code == 400 and "JSON" in response.json()["error"]["message"]


def test_chunks_come_and_go(server: Server):
    body = {"documents": ["chunk to keep"]}
    data = httpx.post(f"{server.url}/v1/chunks", json=body, timeout=30.0).json()["data"]
    chunk = f"{server.url}/v1/chunks/{data[0]['id']}"
    assert httpx.get(chunk).json()["num_tokens"] == data[0]["num_tokens"]
    assert httpx.delete(chunk).json()["deleted"] is True
    missing = httpx.get(chunk)
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "chunk_not_found"


def test_the_store_is_operated_over_http(server: Server):
    body = {"documents": ["a chunk to operate on"]}
    data = httpx.post(f"{server.url}/v1/chunks", json=body, timeout=30.0).json()["data"]
    stats = httpx.get(f"{server.url}/v1/cache", timeout=10.0).json()
    (node,) = stats["nodes"].values()
    assert node["host"]["num_entries"] >= 1 and stats["redis"] is None
    listed = httpx.get(f"{server.url}/v1/cache/chunks", timeout=10.0).json()["data"]
    assert data[0]["id"] in [entry["id"] for entry in listed]
    checked = {"tier": "all", "repair": True}
    found = httpx.post(f"{server.url}/v1/cache/verify", json=checked, timeout=10.0).json()
    assert found["status"] == "sound"
    refused = httpx.get(f"{server.url}/v1/cache/chunks", params={"tier": "redis"}, timeout=10.0)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "no_redis_tier"
    cleared = httpx.delete(f"{server.url}/v1/cache", params={"tier": "all"}, timeout=10.0)
    assert cleared.json()["deleted"] is True
    assert httpx.get(f"{server.url}/v1/chunks/{data[0]['id']}").status_code == 404
    wait_until(
        lambda: any(name.startswith("cachesmith_host_entries{") for name in server.metrics()),
        timeout_s=40,
        what="the tier is in the metrics",
    )


def test_simultaneous_requests_share_batches_over_both_replicas(server: Server):
    server.delays(prefill_ms=300)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: post(server, max_tokens=1).json(), range(8)))
    infos = [answer["cachesmith"] for answer in answers]
    assert max(info["batch_size"] for info in infos) >= 2
    assert len({info["replica"] for info in infos}) == 2


def test_metrics_move(server: Server):
    before = server.metrics()
    post(server, documents=["metric"], max_tokens=2, cachesmith={"policy": "cacheblend"})
    name = 'cachesmith_requests_total{outcome="ok",policy="cacheblend"}'
    wait_until(
        lambda: server.metrics().get(name, 0) == before.get(name, 0) + 1,
        timeout_s=40,
        what="the request is counted",
    )
    after = server.metrics()
    for total in ("prompt_tokens", "generated_tokens", "miss_tokens", "prefill_expected_ms"):
        key = f"cachesmith_{total}_total"
        assert after[key] > before.get(key, 0), key
    assert after["cachesmith_ready_replicas"] == 2


def test_a_full_queue_answers_429(server: Server):
    server.delays(prefill_ms=60_000)
    # two replicas with batches of up to 4, then 8 may wait
    with ThreadPoolExecutor(24) as pool:
        pending = [pool.submit(post, server, max_tokens=1) for _ in range(24)]
        wait_until(lambda: sum(p.done() for p in pending) >= 8, timeout_s=40, what="8 refused")
        server.delays()
        answers = [future.result() for future in pending]
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {200, 429} and codes.count(200) >= 8
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "queue_full"


@contextmanager
def leaving_client(server: Server, **fields: Any) -> Iterator[None]:
    """A client with a request on its way, which breaks its connection at the block's end."""
    body = json.dumps(chat_body(**fields)).encode()
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 80), timeout=30.0) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        yield


def test_a_client_that_leaves_the_queue_is_forgotten(server: Server):
    server.delays(prefill_ms=60_000)
    with leaving_client(server, max_tokens=1):
        wait_until(lambda: server.num_leases() == 1, timeout_s=40, what="one replica is busy")
        with leaving_client(server, max_tokens=1):
            wait_until(lambda: server.num_leases() == 2, timeout_s=40, what="both are busy")
            with leaving_client(server, max_tokens=1):
                wait_until(lambda: server.num_waiting() == 1, timeout_s=40, what="it waits")
            wait_until(lambda: server.num_waiting() == 0, timeout_s=40, what="it is forgotten")
            assert server.num_leases() == 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_an_answer_cancels_it(server: Server, stream: bool):
    server.delays(token_ms=1_000)
    firsts, before = server.num_events("first"), server.num_events("cancelled")
    with leaving_client(server, max_tokens=500, stream=stream):
        wait_until(lambda: server.num_events("first") > firsts, timeout_s=40, what="it decodes")
    wait_until(
        lambda: server.num_events("cancelled") == before + 1, timeout_s=40, what="it is cancelled"
    )
    wait_until(lambda: server.num_leases() == 0, timeout_s=40, what="its place is free")
    cancelled = 'cachesmith_requests_total{outcome="cancelled",policy="adaptive"}'
    assert server.metrics()[cancelled] >= 1


def test_a_killed_replica(server: Server):
    """Requests before their first token go elsewhere, streams get one error, service recovers."""
    server.delays(token_ms=100)
    streams: list[list[dict[str, Any] | str]] = []

    def run_stream() -> None:
        streams.append(stream_events(server, max_tokens=600))

    firsts = server.num_events("first")
    threads = [threading.Thread(target=run_stream) for _ in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.num_events("first") == firsts + 6, timeout_s=40, what="six decode")
    server.delays(prefill_ms=60_000, token_ms=100)
    with ThreadPoolExecutor(2) as pool:
        late = [pool.submit(post, server, max_tokens=1) for _ in range(2)]
        wait_until(server.pids_in_prefill, timeout_s=40, what="a replica is in prefill")
        victim = min(server.pids_in_prefill())
        os.kill(victim, signal.SIGKILL)
        server.delays()
        answers = [future.result() for future in late]
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    for thread in threads:
        thread.join()
    broken = [events for events in streams if events[-1] != "[DONE]"]
    assert 0 < len(broken) < 6
    for events in broken:
        errors = [event for event in events if isinstance(event, dict) and "error" in event]
        assert len(errors) == 1 and events[-1] is errors[0]
        assert errors[0]["error"]["code"] == "replica_lost"
    wait_until(lambda: server.num_ready() == 2, timeout_s=40, what="the replica is replaced")
    assert victim not in server.replica_pids()
    assert post(server, max_tokens=1).status_code == 200


def test_a_dead_engine_ends_its_replica_and_the_service_recovers(server: Server):
    before = set(server.replica_pids())
    (server.state_dir / "die").touch()
    wait_until(lambda: not before & set(server.replica_pids()), timeout_s=40, what="both ended")
    (server.state_dir / "die").unlink()
    wait_until(lambda: server.num_ready() == 2, timeout_s=40, what="both are replaced")
    assert post(server, max_tokens=1).status_code == 200


def test_a_killed_scheduler_loses_no_request(server: Server):
    server.delays(prefill_ms=100, token_ms=20)
    epoch = ray.get(server.scheduler().status.remote()).epoch
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(post, server, max_tokens=10)]
        deadline = time.monotonic() + 5.0
        killed = False
        while time.monotonic() < deadline:
            answers.append(pool.submit(post, server, max_tokens=10))
            time.sleep(0.15)
            if not killed and time.monotonic() > deadline - 4.0:
                ray.kill(server.scheduler(), no_restart=False)
                killed = True
        assert {answer.result().status_code for answer in answers} == {200}
    status = ray.get(server.scheduler().status.remote())
    assert status.epoch != epoch
    wait_until(lambda: server.num_ready() == 2, timeout_s=40, what="the replicas are known again")
    wait_until(  # no floor plan any more
        lambda: post(server, max_tokens=1).json()["cachesmith"]["budget_ms"] > 0,
        timeout_s=40,
        what="the scheduler plans again",
    )


def test_health_says_why_it_is_not_ready(server: Server):
    (server.state_dir / "die").touch()
    wait_until(lambda: server.health().status_code == 503, timeout_s=40, what="503")
    assert "no replica" in server.health().json()["reason"]
    (server.state_dir / "die").unlink()
    wait_until(lambda: server.health().status_code == 200, timeout_s=40, what="200 again")


def test_scaling_down_drains(server: Server):
    """A replica that leaves finishes its streams first. Runs last: one replica stays away."""
    server.delays(token_ms=100)
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(stream_events, server, max_tokens=25) for _ in range(4)]
        wait_until(lambda: server.num_leases() == 4, timeout_s=40, what="four streams run")
        serve.run(fake_app(server, num_replicas=1), name=APP, route_prefix="/")
        assert [future.result()[-1] for future in running] == ["[DONE]"] * 4
    wait_until(lambda: server.num_events("closed"), timeout_s=40, what="engines are closed")
