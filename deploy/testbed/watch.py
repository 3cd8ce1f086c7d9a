"""Looks at the cluster twice a second: who is in rotation, who is ready, what is lost."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from deploy.app import APP_NAME
from deploy.testbed.client import HTTP_PORT
from deploy.testbed.ray_cluster import RayCluster, alive_in

PERIOD_S = 0.5
_TIMEOUT_S = 5.0
_HEALTH_TIMEOUT_S = 2.0  # who takes longer is out of rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look. None: nobody could say.

    scheduler: names the actor's life while it is alive, "" while it is not
    """

    at_s: float
    proxies: tuple[str, ...]  # addresses of hosts whose Serve proxy is healthy
    nodes: frozenset[str] | None  # ids of nodes that are alive to Ray
    replicas: frozenset[str] | None  # running ones, to Serve
    ingresses: frozenset[str] | None  # running ones, to Serve
    ready: frozenset[str] | None  # replicas that `/health` lists
    num_waiting: int | None  # requests without a ticket, to `/health`
    scheduler: str | None
    breakers_open: int | None  # Redis nodes that some replica does not ask any more
    num_ok: int | None  # the outcome counter, since the scheduler started


@dataclass(slots=True)
class Watch:
    """Samples until it is cancelled. The latest says which proxies are in rotation."""

    cluster: RayCluster
    began_s: float
    samples: list[Sample] = field(default_factory=list)
    proxies: tuple[str, ...] = ()

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as http:
            while True:
                started_s = time.monotonic()
                self.samples.append(await self.look(http))
                await asyncio.sleep(max(0.05, PERIOD_S - (time.monotonic() - started_s)))

    async def look(self, http: httpx.AsyncClient) -> Sample:
        at_s = time.monotonic() - self.began_s
        dashboard, headers = self.cluster.dashboard, self.cluster.headers
        nodes, serve, actors, *_ = await asyncio.gather(
            _json(http, f"{dashboard}/nodes", headers, view="summary"),
            _json(http, f"{dashboard}/api/serve/applications/", headers),
            _json(
                http,
                f"{dashboard}/api/v0/actors",
                headers,
                filter_keys="class_name",
                filter_predicates="=",
                filter_values="SchedulerActor",
                detail="true",
            ),
            self._find_proxies(http),
        )
        health, metrics = await self._ask_application(http)
        return Sample(
            at_s=at_s,
            proxies=self.proxies,
            nodes=_nodes(nodes),
            replicas=_running(serve, "Replica"),
            ingresses=_running(serve, "Ingress"),
            ready=_ready(health),
            num_waiting=health.get("num_waiting") if isinstance(health, dict) else None,
            scheduler=_scheduler(actors),
            breakers_open=_metric(metrics, "cachesmith_redis_breakers_open"),
            num_ok=_metric(metrics, "cachesmith_requests_total", outcome="ok"),
        )

    async def _find_proxies(self, http: httpx.AsyncClient) -> None:
        """As a load balancer does it: in rotation is who answers its health check."""
        addresses = [host.address for host in self.cluster.hosts]
        found = await asyncio.gather(*(_is_healthy(http, address) for address in addresses))
        self.proxies = tuple(a for a, ok in zip(addresses, found, strict=True) if ok)

    async def _ask_application(self, http: httpx.AsyncClient) -> tuple[Any, str | None]:
        """`/health` and `/metrics` of the first proxy that answers; a 503 is an answer too."""
        for address in self.proxies:
            url = f"http://{address}:{HTTP_PORT}"
            with suppress(httpx.HTTPError, ValueError):
                health, metrics = await asyncio.gather(
                    http.get(f"{url}/health"), http.get(f"{url}/metrics")
                )
                return health.json(), metrics.text if metrics.status_code == 200 else None
        return None, None


async def _is_healthy(http: httpx.AsyncClient, address: str) -> bool:
    with suppress(httpx.HTTPError):
        url = f"http://{address}:{HTTP_PORT}/-/healthz"
        response = await http.get(url, timeout=_HEALTH_TIMEOUT_S)
        return response.status_code == 200
    return False


async def _json(
    http: httpx.AsyncClient, url: str, headers: Mapping[str, str], **params: str
) -> Any:
    with suppress(httpx.HTTPError, ValueError):
        response = await http.get(url, headers=headers, params=params)
        if response.status_code == 200:
            return response.json()
    return None


def _nodes(answer: Any) -> frozenset[str] | None:
    if not answer or not answer.get("data"):
        return None
    return frozenset(alive_in(answer))


def _running(serve: Any, deployment: str) -> frozenset[str] | None:
    if not serve:
        return None
    application = serve["applications"].get(APP_NAME)
    if application is None:
        return None
    replicas = application["deployments"].get(deployment, {}).get("replicas", [])
    return frozenset(r["replica_id"] for r in replicas if r["state"] == "RUNNING")


def _ready(health: Any) -> frozenset[str] | None:
    if not isinstance(health, dict) or "status" not in health:
        return None
    return frozenset(replica["replica"] for replica in health.get("replicas", ()))


def _scheduler(actors: Any) -> str | None:
    if not actors or not actors.get("result"):
        return None
    listed: Sequence[Mapping[str, Any]] = actors["data"]["result"]["result"]
    alive = [f"{a['actor_id']}/{a.get('pid')}" for a in listed if a["state"] == "ALIVE"]
    return alive[0] if alive else ""


def _metric(text: str | None, name: str, **labels: str) -> int | None:
    """The sum of a metric's samples with these labels."""
    if text is None:
        return None
    return int(
        sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )
    )
