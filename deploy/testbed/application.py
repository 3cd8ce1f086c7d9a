"""CacheSmith's Serve application on the test cluster: settings, deployment, readiness."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from deploy import serve_config
from deploy.app import APP_NAME
from deploy.settings import Settings, SettingsError, load_settings
from deploy.testbed.client import HTTP_PORT
from deploy.testbed.errors import TestbedError
from deploy.testbed.prompts import Prompt
from deploy.testbed.ray_cluster import RayCluster

DEFAULT_SETTINGS = Path(__file__).with_name("settings.yaml")
MODEL_NAME = "tiny"
IMPORT_PATHS = {"vllm": serve_config.IMPORT_PATH, "emulated": "deploy.testbed.app:build"}
_POLL_S = 0.5


def application_settings(file: Path | None, *, model_dir: Path, redis_url: str) -> Settings:
    """The testbed's, the file's over them, and what the run brings. Raises TestbedError."""
    run = {
        "model": {"name_or_dir": str(model_dir), "served_name": MODEL_NAME},
        "kv_tier": {"redis": {"url": redis_url}},
        "http": {"host": "0.0.0.0", "port": HTTP_PORT},  # within the hosts' own network
    }
    files = [DEFAULT_SETTINGS] if file is None else [DEFAULT_SETTINGS, file]
    try:
        return load_settings(config_file=files, overrides=run)
    except SettingsError as exc:
        raise TestbedError(f"the settings can not be used:\n{exc}") from None


def deploy(cluster: RayCluster, settings: Settings, *, engine: str) -> None:
    """Hand the application to Serve, as `cachesmith deploy` does; `wait_ready` for its end.

    Raises TestbedError.
    """
    app = serve_config.application(
        settings, name=APP_NAME, route_prefix="/", import_path=IMPORT_PATHS[engine]
    )
    response = httpx.put(
        f"{cluster.dashboard}/api/serve/applications/",
        json=serve_config.with_application({}, app, settings),
        headers=cluster.headers,
        timeout=120.0,
    )
    if response.status_code != 200:
        raise TestbedError(f"Serve did not take the application: {response.text}")


def wait_ready(cluster: RayCluster, *, num_replicas: int, timeout_s: float) -> None:
    """Until all replicas are ready. Raises TestbedError when they are not in time."""
    deadline = time.monotonic() + timeout_s
    url = f"http://{cluster.head.address}:{HTTP_PORT}/health"
    seen: Any = "nothing"
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError, ValueError):
            response = httpx.get(url, timeout=5.0)
            seen = response.text
            if response.status_code == 200 and len(response.json()["replicas"]) == num_replicas:
                return
        with suppress(httpx.HTTPError, ValueError):
            status = (
                httpx.get(
                    f"{cluster.dashboard}/api/serve/applications/",
                    headers=cluster.headers,
                    timeout=10.0,
                )
                .json()["applications"]
                .get(APP_NAME, {})
            )
            if status.get("status") == "DEPLOY_FAILED":
                raise TestbedError(f"the application failed to deploy: {status['message']}")
        time.sleep(_POLL_S)
    raise TestbedError(f"the application was not ready within {timeout_s:.0f} s: {seen}")


def store_documents(cluster: RayCluster, prompts: tuple[Prompt, ...]) -> None:
    """Compute the passages' KV on every node, and so in Redis."""
    texts = sorted({text for prompt in prompts for text in prompt.documents})
    httpx.post(
        f"http://{cluster.head.address}:{HTTP_PORT}/v1/chunks",
        json={"documents": texts},
        timeout=120.0,
    ).raise_for_status()
