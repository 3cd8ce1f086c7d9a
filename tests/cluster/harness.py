"""A real Ray and Serve on loopback around the fake engine, and what tests ask of it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import ray
from ray import serve
from ray.serve import Application

from cluster import scheduler_actor
from cluster.config import (
    AutoscalingSpec,
    ClusterConfig,
    IngressConfig,
    ReplicaConfig,
    SchedulerConfig,
    scheduler_address,
)
from cluster.deployments import cluster_app
from deploy.local_ray import free_port
from planner import CacheSmithConfig, PolicyConfig, QueueLimits
from tests.fakes.byte_tokenizer import write_model_dir
from tests.fakes.fake_engine import FakeEngineConfig

REPO = Path(__file__).resolve().parents[2]
MODEL = "fake-model"
APP = "cachesmith-test"


@dataclass
class Server:
    url: str
    state_dir: Path
    model_dir: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30.0)

    def delays(
        self,
        *,
        prefill_ms: float = 0.0,
        token_ms: float = 0.0,
        start_ms: float = 0.0,
        cost_ms: float = 0.0,
    ) -> None:
        """cost_ms: what the engine says of itself"""
        told = {
            "prefill_ms": prefill_ms,
            "token_ms": token_ms,
            "start_ms": start_ms,
            "cost_ms": cost_ms,
        }
        for name, value in told.items():
            part = self.state_dir / f"{name}.part"
            part.write_text(str(value))
            part.rename(self.state_dir / name)

    def events(self) -> list[str]:
        return (self.state_dir / "events").read_text().splitlines()

    def num_events(self, kind: str) -> int:
        return sum(event.split()[0] == kind for event in self.events())

    def pids_in_prefill(self) -> set[int]:
        """Processes of the live replicas with a request before its first token."""
        pids: dict[str, int] = {}
        for kind, *fields in (event.split() for event in self.events()):
            if kind == "start":
                pids[fields[0]] = int(fields[1].removeprefix("pid="))
            elif kind in ("first", "done", "cancelled"):
                pids.pop(fields[0], None)
        return {pid for pid in pids.values() if _alive(pid)}

    def replica_pids(self) -> list[int]:
        """Processes of the live replicas."""
        pids = [int(e.split()[1]) for e in self.events() if e.startswith("pid ")]
        return [pid for pid in pids if _alive(pid)]

    def gpus(self) -> dict[int, list[str]]:
        """Process of each live replica → ids of the GPUs that it sees."""
        seen = [e.split(" ")[1:] for e in self.events() if e.startswith("gpus ")]
        return {int(pid): ids.split(",") for pid, ids in seen if _alive(int(pid))}

    def health(self) -> httpx.Response:
        return httpx.get(f"{self.url}/health", timeout=10.0)

    def num_ready(self) -> int:
        response = self.health()
        return len(response.json()["replicas"]) if response.status_code == 200 else 0

    def metrics(self) -> dict[str, float]:
        """Sample line without its value → value."""
        text = httpx.get(f"{self.url}/metrics", timeout=10.0).text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    def scheduler(self) -> Any:
        return scheduler_actor.find(scheduler_address(APP))

    def num_waiting(self) -> int:
        return ray.get(self.scheduler().status.remote()).num_waiting

    def num_leases(self) -> int:
        status = ray.get(self.scheduler().status.remote())
        return sum(replica.num_leases for replica in status.replicas)


def chat_body(text: str = "Why?", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def wait_until(condition: Callable[[], object], *, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.05)


def fake_app(
    server: Server,
    *,
    num_replicas: int = 1,
    autoscaling: AutoscalingSpec | None = None,
    limits: QueueLimits | None = None,
) -> Application:
    """Small queue, small batches, the fake engine."""
    limits = limits or QueueLimits(max_waiting=8, max_batch_requests=4)
    may_sleep = autoscaling is not None and autoscaling.scaling.scale_to_zero_after_s is not None
    scheduler = SchedulerConfig(policy=PolicyConfig(rules=CacheSmithConfig(limits=limits)))
    return cluster_app(
        ClusterConfig(
            app_name=APP,
            ingress=IngressConfig(
                model=str(server.model_dir),
                model_name=MODEL,
                scheduler=scheduler,
                may_sleep=may_sleep,
            ),
            replica=ReplicaConfig(
                builder="tests.fakes.fake_engine:build",
                engine=FakeEngineConfig(state_dir=str(server.state_dir), max_num_seqs=4),
            ),
            num_replicas=num_replicas,
            autoscaling=autoscaling,
            graceful_shutdown_s=5.0,
        )
    )


@contextmanager
def running_cluster(tmp: Path, *, num_replicas: int = 2, **options: Any) -> Iterator[Server]:
    """Everything from nothing to nothing. options: of `fake_app`"""
    model_dir = write_model_dir(tmp / "model")
    state_dir = tmp / "state"
    state_dir.mkdir()
    port = free_port()
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=100 * 1024 * 1024,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(REPO)}},
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        server = Server(url=f"http://127.0.0.1:{port}", state_dir=state_dir, model_dir=model_dir)
        app = fake_app(server, num_replicas=num_replicas, **options)
        serve.run(app, name=APP, route_prefix="/")
        wait_until(lambda: server.num_ready() == num_replicas, timeout_s=30, what="ready")
        yield server
        serve.delete(APP)
        scheduler_actor.stop(scheduler_address(APP))
    finally:
        serve.shutdown()
        ray.shutdown()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
