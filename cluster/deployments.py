"""The one module that makes Serve deployments of the ordinary classes."""

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from cluster.config import ClusterConfig, scheduler_address
from cluster.ingress import Ingress
from cluster.replica import Replica
from cluster.router import TicketRouter

_INGRESS_SPARE_CALLS = 64  # health, metrics and chunk calls beside the waiting requests


def cluster_app(config: ClusterConfig) -> Application:
    """Ingresses bound to replicas, ready for `serve.run`."""
    scheduler = scheduler_address(config.app_name)
    bundle = {"CPU": config.cpus_per_replica}
    if config.gpus_per_replica:
        bundle["GPU"] = config.gpus_per_replica
    replicas = serve.deployment(
        Replica,
        name="Replica",
        num_replicas=config.num_replicas,
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
        # the ranks are child processes of the replica, so one bundle holds what they all need
        placement_group_bundles=[bundle],
        placement_group_strategy="STRICT_PACK",
        request_router_config=RequestRouterConfig(
            request_router_class=TicketRouter,
            request_router_kwargs={"name": scheduler.name, "namespace": scheduler.namespace},
        ),
    ).bind(config.replica, scheduler)
    waiting = config.ingress.scheduler.policy.rules.limits.max_waiting
    running = config.num_replicas * config.max_ongoing_per_replica
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=config.num_ingresses,
        # the scheduler refuses what is too much, with a clear answer: Serve must not hold it back
        max_ongoing_requests=waiting + running + _INGRESS_SPARE_CALLS,
        health_check_period_s=config.health_check_period_s,
        health_check_timeout_s=config.health_check_timeout_s,
        graceful_shutdown_timeout_s=config.graceful_shutdown_s,
        graceful_shutdown_wait_loop_s=0.5,
        max_replicas_per_node=config.max_ingresses_per_node,
        ray_actor_options={"num_cpus": config.cpus_per_ingress},
    )
    return ingress.bind(config.ingress, scheduler, replicas)
