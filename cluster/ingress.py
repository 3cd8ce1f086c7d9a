"""The ingress' Serve shell: loads the tokenizer, wires ports and gateway, gives Serve the API."""

import asyncio
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.access import Access, KeyRing
from cluster.api import ApiFront, create_api
from cluster.config import GatewayConfig, IngressConfig, SchedulerAddress, scheduler_address
from cluster.gateway import Gateway
from cluster.prompt import PromptBuilder
from cluster.ray_ports import RayReplicas, RayScheduler
from cluster.replica import load_function
from cluster.shared_chunks import SharedChunks
from cluster.tokenizer import HfTokenizer
from planner import MonotonicClock


class Ingress:
    """One HTTP front. All of them are alike; what they share is in the scheduler actor."""

    async def __init__(
        self, config: IngressConfig, scheduler: SchedulerAddress, replicas: DeploymentHandle
    ) -> None:
        _check_name(scheduler, serve.get_replica_context().app_name)
        model_dir = await asyncio.to_thread(_model_dir, config)
        num_layers = _num_layers(model_dir)
        ray_scheduler = RayScheduler(
            scheduler,
            config.scheduler.for_model(num_layers),
            gone_after_s=config.scheduler_gone_s,
        )
        await ray_scheduler.start()
        tokenizer = await asyncio.to_thread(HfTokenizer.load, model_dir)
        clock = MonotonicClock()
        gateway = Gateway(
            ray_scheduler,
            RayReplicas(replicas),
            GatewayConfig(
                num_layers=num_layers,
                floor=config.scheduler.policy.slack.floor,
                max_model_len=config.max_model_len,
                default_max_tokens=config.default_max_tokens,
            ),
            clock,
            shared=None if config.redis is None else SharedChunks(config.redis),
        )
        front = ApiFront(
            gateway,
            PromptBuilder(tokenizer, config.prompt),
            clock,
            model_name=config.model_name,
            default_ttft_slo_ms=config.default_ttft_slo_ms,
            may_sleep=config.may_sleep,
        )
        keys = KeyRing(Path(config.api_keys_file)) if config.api_keys_file else None
        self._api = create_api(
            front,
            clock,
            version=_version(),
            access=Access(keys=keys, admin_token=config.admin_token),
            max_body_bytes=config.max_body_bytes,
        )
        self._watching = asyncio.get_running_loop().create_task(ray_scheduler.watch())

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor."""
        return self._api


def _check_name(scheduler: SchedulerAddress, app_name: str) -> None:
    """Two applications under one name would share a scheduler, which then knows no replica."""
    if scheduler != scheduler_address(app_name):
        raise ValueError(
            f"app_name: must be the name that Serve knows the application by, {app_name!r}"
        )


def _model_dir(config: IngressConfig) -> Path:
    if not config.resolve_model:
        return Path(config.model)
    return load_function(config.resolve_model)(config.model)


def _num_layers(model_dir: Path) -> int:
    """From the model's config: planning starts before a replica can say it."""
    config = json.loads((model_dir / "config.json").read_text())
    return int(config.get("text_config", config)["num_hidden_layers"])


def _version() -> str:
    try:
        return version("cachesmith")
    except PackageNotFoundError:
        return "0+unknown"
