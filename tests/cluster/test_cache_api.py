"""The administrators' routes over fake replicas on two nodes, and over real stores with Redis."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.access import Access
from cluster.api import ApiFront, create_api
from cluster.config import GatewayConfig, IngressConfig, PromptConfig
from cluster.gateway import Gateway
from cluster.prompt import PromptBuilder
from planner import MonotonicClock
from replicas.cache_types import CacheOperations, CacheUnavailableError
from replicas.interface import StoredChunk
from tests.fakes.fake_cache import FakeCache
from tests.fakes.fake_engine import FakeEngine, FakeEngineConfig
from tests.fakes.fake_ports import FakeReplicas, FakeScheduler, ready_status
from tests.kv_tier.redis.servers import RedisServer
from tests.replicas.cache_cases import NodeStore, chunk_id

TOKEN = "let-me-in"
NODES = ("node-of-r1", "node-of-r2")


class Cluster:
    """Two replicas on two nodes behind the API, asked without a network."""

    def __init__(
        self,
        tokenizer: Any,
        state_dir: Path,
        *,
        caches: Sequence[CacheOperations],
        admin_token: str | None = None,
    ) -> None:
        names = [f"r{i}" for i in range(1, len(caches) + 1)]
        config = FakeEngineConfig(state_dir=str(state_dir))
        self.replicas = FakeReplicas(FakeEngine(config))
        self.replicas.engines = {
            name: FakeEngine(config, operations=cache)
            for name, cache in zip(names, caches, strict=True)
        }
        info = asyncio.run(self.replicas.engine.start())
        self.scheduler = FakeScheduler(ready_status(info, replica_ids=names))
        clock = MonotonicClock()
        gateway = Gateway(self.scheduler, self.replicas, GatewayConfig(num_layers=4), clock)
        prompts = PromptBuilder(tokenizer, PromptConfig())
        front = ApiFront(
            gateway,
            prompts,
            clock,
            model_name="m",
            default_ttft_slo_ms=500.0,
        )
        access = Access(admin_token=admin_token)
        self.app = create_api(front, clock, version="1.2.3", access=access)

    def ask(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(go())

    def verify(self, **body: Any) -> httpx.Response:
        return self.ask("POST", "/v1/cache/verify", json=body)


def fake_nodes(*, has_redis: bool = True) -> tuple[FakeCache, FakeCache]:
    """Each node has a chunk of its own, and one that both have; Redis has that, and another."""

    def chunks(*names: str) -> dict[str, StoredChunk]:
        return {
            name: StoredChunk(chunk_id=name, num_tokens=5, nbytes=320, tier="") for name in names
        }

    redis = chunks("both", "far") if has_redis else None
    nodes = FakeCache(redis), FakeCache(redis)
    for number, node in enumerate(nodes):
        node.host.update(chunks("both", f"own-{number}"))
    return nodes


@pytest.fixture
def nodes() -> tuple[FakeCache, FakeCache]:
    return fake_nodes()


@pytest.fixture
def cluster(tokenizer, tmp_path: Path, nodes: tuple[FakeCache, FakeCache]) -> Cluster:
    return Cluster(tokenizer, tmp_path, caches=nodes)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_stats_by_node_and_by_replica(cluster: Cluster):
    body = cluster.ask("GET", "/v1/cache").json()
    assert set(body["nodes"]) == set(NODES)
    assert body["nodes"][NODES[0]]["host"]["num_entries"] == 2
    assert set(body["redis"]["replicas"]) == {"r1", "r2"}
    assert body["redis"]["replicas"]["r1"]["counts"] == {"lookup_hits": 3}
    assert body["redis"]["keys"] is None
    keys = cluster.ask("GET", "/v1/cache", params={"redis_keys": True}).json()["redis"]["keys"]
    assert keys["num_chunks"] == 2


def test_a_list_of_each_nodes_entries(cluster: Cluster):
    body = cluster.ask("GET", "/v1/cache/chunks", params={"limit": 1}).json()
    assert [entry["node"] for entry in body["data"]] == list(NODES)
    assert [entry["id"] for entry in body["data"]] == ["own-0", "own-1"]
    assert body["has_more"] is True and body["tier"] == "host"
    assert cluster.ask("GET", "/v1/cache/chunks").json()["has_more"] is False
    redis = cluster.ask("GET", "/v1/cache/chunks", params={"tier": "redis"}).json()
    assert [(entry["node"], entry["ttl_s"]) for entry in redis["data"]] == [(None, 60.0)] * 2


def test_a_removed_chunk_is_gone_from_every_node_and_from_redis(
    cluster: Cluster, nodes: tuple[FakeCache, FakeCache]
):
    assert cluster.ask("DELETE", "/v1/chunks/both").json()["deleted"] is True
    assert all("both" not in node.host for node in nodes)
    assert nodes[0].redis is not None and "both" not in nodes[0].redis
    assert error_of(cluster.ask("DELETE", "/v1/chunks/both"), 404)["code"] == "chunk_not_found"
    assert cluster.ask("DELETE", "/v1/chunks/far").status_code == 200  # in Redis alone


class Fetching(FakeCache):
    """Has just fetched the chunk when it is removed from Redis."""

    async def remove_from_redis(self, chunk_id: str) -> bool:
        assert self.redis is not None
        self.host[chunk_id] = self.redis[chunk_id]
        return await super().remove_from_redis(chunk_id)


def test_a_chunk_fetched_while_it_is_removed_does_not_stay(tokenizer, tmp_path: Path):
    other, _ = fake_nodes()
    fetching = Fetching(other.redis)
    cluster = Cluster(tokenizer, tmp_path, caches=[fetching, other])
    assert cluster.ask("DELETE", "/v1/chunks/far").status_code == 200
    assert "far" not in fetching.host and other.redis is not None and "far" not in other.redis


@pytest.mark.parametrize(
    ("tier", "num_left"), [("host", (0, 0, 2)), ("redis", (2, 2, 0)), ("all", (0, 0, 0))]
)
def test_clearing(
    cluster: Cluster, nodes: tuple[FakeCache, FakeCache], tier: str, num_left: tuple[int, ...]
):
    body = cluster.ask("DELETE", "/v1/cache", params={"tier": tier}).json()
    assert body["deleted"] is True
    assert body["nodes"] == (None if tier == "redis" else dict.fromkeys(NODES, 2))
    assert body["redis"] == (None if tier == "host" else {"num_keys": 2})
    assert nodes[0].redis is not None
    assert (len(nodes[0].host), len(nodes[1].host), len(nodes[0].redis)) == num_left


def test_verifying_and_repairing(cluster: Cluster, nodes: tuple[FakeCache, FakeCache]):
    assert cluster.verify(tier="all").json()["status"] == "sound"
    nodes[1].damaged.add("both")
    body = cluster.verify(tier="host").json()
    assert (body["status"], body["redis"]) == ("damaged", None)
    assert body["nodes"][NODES[0]]["damaged"] == []
    (damaged,) = body["nodes"][NODES[1]]["damaged"]
    assert (damaged["id"], damaged["reason"], damaged["layer"]) == ("both", "corrupt", 0)
    assert cluster.verify(tier="host", repair=True).json()["status"] == "repaired"
    assert "both" not in nodes[1].host and "both" in nodes[0].host
    assert cluster.verify(tier="redis").json()["nodes"] is None


@pytest.mark.parametrize(
    ("method", "path", "options", "param"),
    [
        ("GET", "/v1/cache/chunks", {"params": {"tier": "disk"}}, "tier"),
        ("GET", "/v1/cache/chunks", {"params": {"limit": 0}}, "limit"),
        ("GET", "/v1/cache/chunks", {"params": {"limit": 10_001}}, "limit"),
        ("GET", "/v1/cache", {"params": {"redis_keys": "perhaps"}}, "redis_keys"),
        ("DELETE", "/v1/cache", {}, "tier"),
        ("POST", "/v1/cache/verify", {"json": {}}, "tier"),
        ("POST", "/v1/cache/verify", {"json": {"tier": "host", "fix": True}}, "fix"),
        ("POST", "/v1/cache/verify", {"json": {"tier": "host", "repair": "yes"}}, "repair"),
    ],
)
def test_wrong_fields_are_named(cluster: Cluster, method: str, path: str, options: Any, param: str):
    assert error_of(cluster.ask(method, path, **options), 400)["param"] == param


def test_without_a_redis_tier(tokenizer, tmp_path: Path):
    cluster = Cluster(tokenizer, tmp_path, caches=fake_nodes(has_redis=False))
    assert cluster.ask("GET", "/v1/cache").json()["redis"] is None
    for response in (
        cluster.ask("GET", "/v1/cache/chunks", params={"tier": "redis"}),
        cluster.ask("GET", "/v1/cache", params={"redis_keys": True}),
        cluster.ask("DELETE", "/v1/cache", params={"tier": "redis"}),
        cluster.verify(tier="redis"),
    ):
        assert error_of(response, 400)["code"] == "no_redis_tier"
    assert cluster.verify(tier="all").json()["redis"] is None
    cleared = cluster.ask("DELETE", "/v1/cache", params={"tier": "all"}).json()
    assert cleared["redis"] is None and cleared["nodes"] == dict.fromkeys(NODES, 2)
    assert cluster.ask("DELETE", "/v1/chunks/both").status_code == 404


def test_redis_that_can_not_be_asked_is_a_503_that_says_so(
    cluster: Cluster, nodes: tuple[FakeCache, FakeCache]
):
    nodes[0].fail_with = CacheUnavailableError("Redis can not be asked: it is away")
    error = error_of(cluster.ask("DELETE", "/v1/chunks/both"), 503)
    assert error["code"] == "cache_unavailable" and "away" in error["message"]
    assert "both" not in nodes[1].host  # the other node's is gone all the same


def test_a_lost_replica_is_told_where_something_was_to_change(
    cluster: Cluster, nodes: tuple[FakeCache, FakeCache]
):
    cluster.replicas.gone = {"r1"}
    assert set(cluster.ask("GET", "/v1/cache").json()["nodes"]) == {NODES[1]}
    for response in (
        cluster.ask("DELETE", "/v1/chunks/both"),
        cluster.ask("DELETE", "/v1/cache", params={"tier": "all"}),
        cluster.verify(tier="host"),
    ):
        error = error_of(response, 503)
        assert error["code"] == "replica_lost" and "r1" in error["message"]
    assert nodes[1].host == {} and nodes[1].redis == {}  # the rest is done, Redis by the other
    cluster.replicas.gone = {"r1", "r2"}
    assert error_of(cluster.ask("DELETE", "/v1/chunks/both"), 503)["code"] == "replica_lost"
    cluster.scheduler.status = None
    assert error_of(cluster.ask("GET", "/v1/cache"), 503)["code"] == "no_replica_ready"


ADMIN_CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/v1/cache", {}),
    ("GET", "/v1/cache/chunks", {}),
    ("DELETE", "/v1/cache", {"params": {"tier": "host"}}),
    ("POST", "/v1/cache/verify", {"json": {"tier": "host"}}),
    ("DELETE", "/v1/chunks/both", {}),
]


@pytest.mark.parametrize(("method", "path", "options"), ADMIN_CALLS)
def test_with_a_token_only_who_has_it_passes(
    tokenizer, tmp_path: Path, caplog, method: str, path: str, options: dict[str, Any]
):
    nodes = fake_nodes()
    cluster = Cluster(tokenizer, tmp_path, caches=nodes, admin_token=TOKEN)

    def ask(value: str | None) -> httpx.Response:
        headers = {} if value is None else {"Authorization": value}
        return cluster.ask(method, path, headers=headers, **options)

    caplog.set_level(logging.DEBUG)
    missing = ask(None)
    error = error_of(missing, 401)
    assert error["code"] == "missing_admin_token" and "http.admin_token" in error["message"]
    assert missing.headers["www-authenticate"] == "Bearer"
    assert error_of(ask(f"Basic {TOKEN}"), 401)["code"] == "missing_admin_token"
    for wrong in (f"Bearer {TOKEN}x", "Bearer x", "Bearer ß"):
        response = ask(wrong.encode("latin-1"))  # type: ignore[arg-type]
        assert error_of(response, 401)["code"] == "wrong_admin_token"
        assert TOKEN not in response.text
    assert all("both" in node.host for node in nodes)
    assert ask(f"Bearer {TOKEN}").status_code == 200
    assert TOKEN not in caplog.text


def test_the_token_guards_nothing_else_and_is_shown_nowhere(tokenizer, tmp_path: Path):
    cluster = Cluster(tokenizer, tmp_path, caches=fake_nodes(), admin_token=TOKEN)
    body = {"model": "m", "messages": [{"role": "user", "content": "Why?"}]}
    assert cluster.ask("POST", "/v1/chat/completions", json=body).status_code == 200
    assert cluster.ask("POST", "/v1/chunks", json={"documents": ["a"]}).status_code == 200
    for path in ("/health", "/metrics", "/v1/models", "/openapi.json", "/docs"):
        response = cluster.ask("GET", path)
        assert response.status_code == 200 and TOKEN not in response.text
    assert TOKEN not in repr(IngressConfig(model="m", model_name="m", admin_token=TOKEN))


@pytest.mark.redis
def test_a_chunk_on_two_nodes_and_in_redis_is_gone_everywhere(tokenizer, tmp_path: Path):
    with RedisServer(tmp_path / "redis") as server:
        stores = [NodeStore(tmp_path / name, server.url) for name in ("a", "b")]
        cluster = Cluster(tokenizer, tmp_path, caches=[store.cache for store in stores])
        for store in stores:
            store.put(1, 2)
        stores[0].put_in_redis(1, 2)
        body = cluster.ask("GET", "/v1/cache", params={"redis_keys": True}).json()
        assert body["redis"]["keys"]["num_chunks"] == 2
        listed = cluster.ask("GET", "/v1/cache/chunks", params={"tier": "redis"}).json()["data"]
        assert {entry["id"] for entry in listed} == {chunk_id(1), chunk_id(2)}
        stores[1].write_behind(1)
        assert cluster.ask("DELETE", f"/v1/chunks/{chunk_id(1)}").status_code == 200
        for store in stores:
            assert (store.in_host([1, 2]), store.in_redis([1, 2])) == ({2}, {2})
        assert cluster.ask("DELETE", f"/v1/chunks/{chunk_id(1)}").status_code == 404
        stores[1].damage(2)
        stores[1].damage_in_redis(2)
        verified = cluster.verify(tier="all", repair=True).json()
        assert verified["status"] == "repaired"
        assert [len(verified["nodes"][node]["damaged"]) for node in NODES] == [0, 1]
        assert verified["redis"]["damaged"][0]["reason"] == "corrupt"
        assert cluster.ask("DELETE", "/v1/cache", params={"tier": "all"}).status_code == 200
        assert [store.in_host([1, 2]) for store in stores] == [set(), set()]
        for store in stores:
            store.close()
