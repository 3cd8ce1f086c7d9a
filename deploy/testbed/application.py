"""CacheSmith's Serve application on the test cluster: settings, deployment, readiness."""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import yaml
from pydantic import ValidationError

from deploy.app import APP_NAME, AppArgs
from deploy.settings import readable_errors
from deploy.testbed.client import HTTP_PORT
from deploy.testbed.errors import TestbedError
from deploy.testbed.prompts import Prompt
from deploy.testbed.ray_cluster import RayCluster

DEFAULT_SETTINGS = Path(__file__).with_name("settings.yaml")
MODEL_NAME = "tiny"
IMPORT_PATHS = {"vllm": "deploy.app:build", "emulated": "deploy.testbed.app:build"}
_POLL_S = 0.5


def application_args(file: Path | None, *, model_dir: Path, redis_url: str) -> dict[str, Any]:
    """The application's `args:`: the testbed's, the file's over them. Raises TestbedError."""
    args = _merged(_read(DEFAULT_SETTINGS), _read(file) if file is not None else {})
    run = {
        "model": {"name_or_dir": str(model_dir), "served_name": MODEL_NAME},
        "kv_tier": {"redis": {"url": redis_url}},
    }
    args = _merged(args, run)
    try:
        AppArgs(**args)
    except ValidationError as exc:
        raise TestbedError(f"the settings can not be used:\n{readable_errors(exc)}") from None
    return args


def deploy(cluster: RayCluster, args: Mapping[str, Any], *, engine: str) -> None:
    """Hand the application to Serve; `wait_ready` for its end. Raises TestbedError."""
    config = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": HTTP_PORT},  # within the hosts' own network
        "applications": [
            {
                "name": APP_NAME,
                "route_prefix": "/",
                "import_path": IMPORT_PATHS[engine],
                "args": dict(args),
            }
        ],
    }
    response = httpx.put(
        f"{cluster.dashboard}/api/serve/applications/",
        json=config,
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


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as exc:
        raise TestbedError(f"can not read {file}: {exc.strerror}") from None
    except yaml.YAMLError as exc:
        raise TestbedError(f"{file} is not valid YAML: {exc}") from None
    if content is not None and not isinstance(content, dict):
        raise TestbedError(f"{file} must hold sections such as engine: and replicas:")
    return content or {}


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Both, sections within each other too; `over` wins."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        result[key] = _merged(below, value) if both else value
    return result
