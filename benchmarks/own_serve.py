"""A Ray and Serve of a benchmark's own, on loopback: for what it serves with emulated engines.

Call `deploy.local_ray.prepare_environment` before importing this: it imports Ray.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import httpx
import ray
from ray import serve

from deploy.local_ray import free_port

_OBJECT_STORE_BYTES = 256 << 20


@contextmanager
def own_ray(*, num_cpus: int = 16, env: Mapping[str, str] | None = None) -> Iterator[None]:
    """num_cpus: Ray's book-keeping only; env: of all its processes"""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.WARNING,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": dict(env or {})},
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def own_serve() -> Iterator[str]:
    """Serve's proxy on a free port; its URL."""
    port = free_port()
    serve.start(
        http_options={"host": "127.0.0.1", "port": port},
        proxy_location="HeadOnly",
        logging_config={"log_level": "WARNING"},  # as `cachesmith serve`
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()


def wait_until_ready(url: str, num_replicas: int, *, timeout_s: float) -> None:
    """Raises TimeoutError."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        with suppress(httpx.HTTPError):
            response = httpx.get(f"{url}/health", timeout=10.0)
            if response.status_code == 200 and len(response.json()["replicas"]) >= num_replicas:
                return
        time.sleep(0.1)
    raise TimeoutError(f"{url} has not {num_replicas} replicas after {timeout_s:.0f} s")
