"""What the benchmark compares: CacheSmith on the instant engine beside the bare application."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray import serve

from benchmarks.control_plane.bare_app import BareScheduler, bare_app
from benchmarks.control_plane.instant_engine import InstantEngineConfig
from benchmarks.control_plane.prompts import MODEL
from benchmarks.own_serve import own_serve, wait_until_ready
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


@contextmanager
def serving(
    model_dir: Path, schedulers: dict[str, SchedulerConfig], *, num_layers: int, num_replicas: int
) -> Iterator[dict[str, str]]:
    """The bare application and CacheSmith with each of the scheduler configs; URL by name."""
    with own_serve() as url:
        admitting = ray.remote(BareScheduler).options(num_cpus=0).remote()
        bare = bare_app(num_replicas=num_replicas, scheduler=admitting)
        serve.run(bare, name=BARE, route_prefix=f"/{BARE}")
        urls = {BARE: f"{url}/{BARE}"}
        try:
            for name, scheduler in schedulers.items():
                config = _cluster(name, scheduler, model_dir, num_layers, num_replicas)
                serve.run(cluster_app(config), name=name, route_prefix=f"/{name}")
                urls[name] = f"{url}/{name}"
            for name in schedulers:
                wait_until_ready(urls[name], num_replicas, timeout_s=_READY_S)
            yield urls
        finally:
            for name in schedulers:
                serve.delete(name)
                scheduler_actor.stop(scheduler_address(name))


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
