"""A Ray of the benchmark's own: CacheSmith on the instant engine beside the bare application."""

import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import ray
from ray import serve

from benchmarks.control_plane.bare_app import BareScheduler, bare_app
from benchmarks.control_plane.instant_engine import InstantEngineConfig
from benchmarks.control_plane.prompts import MODEL
from cluster import scheduler_actor
from cluster.config import (
    ClusterConfig,
    IngressConfig,
    ReplicaConfig,
    SchedulerConfig,
    scheduler_address,
)
from cluster.deployments import cluster_app

BARE = "bare"
_READY_S = 120.0


@contextlib.contextmanager
def own_ray() -> Iterator[None]:
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray.init(
        address="local",
        num_cpus=16,  # Ray's book-keeping only
        include_dashboard=False,
        object_store_memory=256 << 20,
        log_to_driver=False,
        logging_level=logging.WARNING,
        _node_ip_address="127.0.0.1",
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def serving(
    model_dir: Path, schedulers: dict[str, SchedulerConfig], *, num_layers: int, num_replicas: int
) -> Iterator[dict[str, str]]:
    """The bare application and CacheSmith with each of the scheduler configs; URL by name."""
    port = _free_port()
    serve.start(
        http_options={"host": "127.0.0.1", "port": port},
        proxy_location="HeadOnly",
        logging_config={"log_level": "WARNING"},  # as `cachesmith serve`
    )
    admitting = ray.remote(BareScheduler).options(num_cpus=0).remote()
    bare = bare_app(num_replicas=num_replicas, scheduler=admitting)
    serve.run(bare, name=BARE, route_prefix=f"/{BARE}")
    urls = {BARE: f"http://127.0.0.1:{port}/{BARE}"}
    try:
        for name, scheduler in schedulers.items():
            config = _cluster(name, scheduler, model_dir, num_layers, num_replicas)
            serve.run(cluster_app(config), name=name, route_prefix=f"/{name}")
            urls[name] = f"http://127.0.0.1:{port}/{name}"
        _wait_until_ready([urls[name] for name in schedulers], num_replicas)
        yield urls
    finally:
        for name in schedulers:
            serve.delete(name)
            scheduler_actor.stop(scheduler_address(name))
        serve.shutdown()


def _cluster(
    name: str, scheduler: SchedulerConfig, model_dir: Path, num_layers: int, num_replicas: int
) -> ClusterConfig:
    return ClusterConfig(
        app_name=name,
        ingress=IngressConfig(model=str(model_dir), model_name=MODEL, scheduler=scheduler),
        replica=ReplicaConfig(
            builder="benchmarks.control_plane.instant_engine:build",
            engine=InstantEngineConfig(num_layers=num_layers),
        ),
        num_replicas=num_replicas,
        cpus_per_replica=0.1,
    )


def _wait_until_ready(urls: Sequence[str], num_replicas: int) -> None:
    deadline = time.monotonic() + _READY_S
    for url in urls:
        while True:
            health = httpx.get(f"{url}/health", timeout=10.0)
            if health.status_code == 200 and len(health.json()["replicas"]) == num_replicas:
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"{url} is not ready: {health.text}")
            time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
