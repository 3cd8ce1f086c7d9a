"""The one module that makes Serve deployments of the ordinary classes."""

import time
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from cluster.autoscaling import serve_config
from cluster.config import ClusterConfig, SchedulerAddress, scheduler_address
from cluster.ingress import Ingress
from cluster.replica import Replica
from cluster.router import TicketRouter

_LOGGING = LoggingConfig(enable_access_log=False)  # the metrics count requests, for less
_INGRESS_SPARE_CALLS = 64  # health, metrics and chunk calls beside the waiting requests


def cluster_app(config: ClusterConfig) -> Application:
    """Ingresses bound to replicas, ready for `serve.run`. Later calls make newer deployments."""
    scheduler = scheduler_address(config.app_name)
    rules = replace(config.ingress.scheduler, generation=time.time_ns())
    bundle = {"CPU": config.cpus_per_replica}
    if config.gpus_per_replica:
        bundle["GPU"] = config.gpus_per_replica
    replicas = serve.deployment(
        Replica,
        name="Replica",
        **_size(config, scheduler),
        max_ongoing_requests=config.max_ongoing_per_replica,
        health_check_period_s=config.health_check_period_s,
        health_check_timeout_s=config.health_check_timeout_s,
        graceful_shutdown_timeout_s=config.graceful_shutdown_s,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={
            "num_cpus": config.cpus_per_replica,
            "num_gpus": config.gpus_per_replica,
            "runtime_env": {"env_vars": dict(config.replica_env)},
        },
        logging_config=_LOGGING,
        # one bundle: the ranks are child processes of the replica, which see the GPUs that Ray
        # gives to it, and share memory with it, so that all must be on one node
        placement_group_bundles=[bundle],
        placement_group_strategy="STRICT_PACK",
        request_router_config=RequestRouterConfig(
            request_router_class=TicketRouter,
            request_router_kwargs={"name": scheduler.name, "namespace": scheduler.namespace},
        ),
        max_surge_percent=round(100 * config.max_surge),
    ).bind(config.replica, scheduler)
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=config.num_ingresses,
        max_ongoing_requests=max_ongoing_per_ingress(
            max_waiting=rules.policy.rules.limits.max_waiting,
            num_replicas=config.max_replicas,
            max_ongoing_per_replica=config.max_ongoing_per_replica,
        ),
        health_check_period_s=config.health_check_period_s,
        health_check_timeout_s=config.health_check_timeout_s,
        graceful_shutdown_timeout_s=config.graceful_shutdown_s,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=_LOGGING,
        ray_actor_options={"num_cpus": config.cpus_per_ingress},
        max_replicas_per_node=config.max_ingresses_per_node,
        # a lone ingress goes only when the next one runs; where their number on a node is limited,
        # there may be no place for the next one
        max_surge_percent=100 if config.max_ingresses_per_node is None else 0,
    )
    return ingress.bind(replace(config.ingress, scheduler=rules), scheduler, replicas)


def max_ongoing_per_ingress(
    *, max_waiting: int, num_replicas: int, max_ongoing_per_replica: int
) -> int:
    """More than what can wait and run: the scheduler refuses with a clear answer, not Serve."""
    return max_waiting + num_replicas * max_ongoing_per_replica + _INGRESS_SPARE_CALLS


def _size(config: ClusterConfig, scheduler: SchedulerAddress) -> dict[str, Any]:
    """The option of a deployment that says how many replicas it has."""
    if config.autoscaling is None:
        return {"num_replicas": config.num_replicas}
    return {"autoscaling_config": serve_config(config.autoscaling, scheduler)}
