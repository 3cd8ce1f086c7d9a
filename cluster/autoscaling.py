"""How Serve is told to size the replicas."""

from dataclasses import asdict
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from cluster.autoscaling_policy import SloPolicy
from cluster.config import AutoscalingSpec, SchedulerAddress


def serve_config(spec: AutoscalingSpec, scheduler: SchedulerAddress) -> AutoscalingConfig:
    """What Serve is told. Delays are the rule's own matter, except with Serve's own policy."""
    scaling = spec.scaling
    common: dict[str, Any] = {
        "min_replicas": scaling.min_replicas,
        "initial_replicas": scaling.min_replicas,
        "max_replicas": scaling.max_replicas,
    }
    if spec.policy == "ongoing":
        return AutoscalingConfig(**common, **dict(spec.ongoing))
    if scaling.scale_to_zero_after_s is not None:
        common["min_replicas"] = 0
    return AutoscalingConfig(
        **common,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        downscale_to_zero_delay_s=0.0,
        policy=AutoscalingPolicy(
            policy_function=f"{SloPolicy.__module__}:{SloPolicy.__name__}",
            policy_kwargs={"scheduler": asdict(scheduler), "scaling": asdict(scaling)},
        ),
    )
