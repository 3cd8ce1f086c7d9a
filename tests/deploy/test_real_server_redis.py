"""Over HTTP, with nothing faked: two replicas, and Redis behind the store of their node."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from deploy.server import RunningServer, running_server
from deploy.settings import load_settings
from deploy.tiny_models import make_tiny_qwen3
from tests.cluster.harness import free_port
from tests.deploy.test_real_server import answer_of, passages
from tests.kv_tier.redis.servers import RedisServer, eventually

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.slow]

ADMIN = {"Authorization": "Bearer for-tests"}


class Served:
    def __init__(self, server: RunningServer, redis: RedisServer) -> None:
        self.url, self.model, self.redis = server.url, server.model_name, redis

    def ask(self, documents, **fields):
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": "Who built it?"}],
            "documents": documents,
            "max_tokens": 8,
            "temperature": 0.0,
            "ignore_eos": True,
            **fields,
        }
        response = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60.0)
        assert response.status_code == 200, response.text
        return answer_of(response.json())

    def store(self, documents):
        response = httpx.post(f"{self.url}/v1/chunks", json={"documents": documents}, timeout=60.0)
        assert response.status_code == 200, response.text
        return response.json()["data"]

    def forget_host(self):
        response = httpx.delete(f"{self.url}/v1/cache", params={"tier": "host"}, headers=ADMIN)
        assert response.status_code == 200, response.text

    def metric(self, name):
        text = httpx.get(f"{self.url}/metrics", timeout=10.0).text
        rows = [row.rsplit(" ", 1) for row in text.splitlines() if row.startswith(name)]
        return sum(float(value) for _, value in rows)

    def num_running(self):
        health = httpx.get(f"{self.url}/health", timeout=10.0).json()
        return sum(replica["num_running"] for replica in health["replicas"])

    def num_in_redis(self):
        return len(self.redis.client().keys("cachesmith:*:chunk"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model_dir = make_tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny-qwen3")
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="cachesmith-test-") as folder,
        RedisServer(Path(folder) / "redis") as redis,
    ):
        settings = load_settings(
            overrides={
                "model": {"name_or_dir": str(model_dir), "dtype": "float32"},
                "engine": {"cpu_threads": 1, "kv_cache_memory_bytes": 1 << 25},
                "replicas": {"num": 2},
                "kv_tier": {
                    "host": {"directory": f"{folder}/tier", "capacity_bytes": 1 << 26},
                    "redis": {"url": redis.url, "lookup_deadline_ms": 500.0},
                },
                "http": {"port": free_port(), "admin_token": "for-tests"},
            }
        )
        with running_server(settings) as server:
            yield Served(server, redis)


def test_chunks_stored_through_one_replica_are_hits_on_the_other(served: Served) -> None:
    documents = passages("shared")
    plain = served.ask(documents, cachesmith={"policy": "full_prefill"})
    chunks = served.store(documents)
    assert [chunk["status"] for chunk in chunks] == ["stored"] * len(documents)
    total = sum(chunk["num_tokens"] for chunk in chunks)
    eventually(lambda: served.num_in_redis() >= len(chunks))
    with ThreadPoolExecutor(1) as pool:
        # what comes beside a long answer goes to the other replica
        busy = pool.submit(served.ask, passages("other"), max_tokens=300)
        eventually(lambda: served.num_running() == 1)
        served.forget_host()
        beside = served.ask(documents, cachesmith={"coverage": 1.0})
        assert busy.result().replica != beside.replica
    eventually(lambda: served.num_running() == 0)
    served.forget_host()
    alone = served.ask(documents, cachesmith={"coverage": 1.0})
    assert beside.replica != alone.replica
    for answer in (beside, alone):
        assert answer.text == plain.text
        assert answer.info["cached_tokens"].get("redis", 0) >= total
    eventually(lambda: served.metric("cachesmith_redis_chunks_read_total") >= len(chunks))


def test_what_redis_holds_is_planned_with(served: Served) -> None:
    documents = passages("planned")
    served.store(documents)
    eventually(lambda: served.num_in_redis() >= len(documents))
    served.forget_host()
    answer = served.ask(documents, slo={"ttft_ms": 60_000})
    assert answer.info["cached_tokens"].get("redis", 0) > 0
    assert answer.info["num_miss_tokens"] == 0
    # a plan that took the chunks for missing would have left nothing to choose
    assert 0.0 < answer.info["coverage"] < 1.0


def test_redis_may_go_and_come_back(served: Served) -> None:
    documents = passages("gone")
    plain = served.ask(documents, cachesmith={"policy": "full_prefill"})
    served.store(documents)
    served.redis.kill()
    try:
        for _ in range(2):
            served.forget_host()
            answer = served.ask(documents, cachesmith={"coverage": 1.0})
            assert answer.text == plain.text
            assert answer.info["cached_tokens"].get("redis", 0) == 0
    finally:
        served.redis.start()
    eventually(lambda: served.metric("cachesmith_redis_breakers_open") == 0.0)
    served.store(documents)
    eventually(lambda: served.num_in_redis() >= len(documents))


def test_a_removed_chunk_does_not_come_back_from_redis(served: Served) -> None:
    documents = passages("removed")
    chunks = served.store(documents)
    eventually(lambda: served.num_in_redis() >= len(documents))
    for chunk in chunks:
        response = httpx.delete(f"{served.url}/v1/chunks/{chunk['id']}", headers=ADMIN)
        assert response.status_code == 200, response.text
    answer = served.ask(documents, cachesmith={"coverage": 1.0})
    assert answer.info["num_miss_tokens"] == sum(chunk["num_tokens"] for chunk in chunks)
