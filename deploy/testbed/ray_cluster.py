"""A Ray cluster over test hosts, by Ray's own launcher: `ray up` with `provider: local`."""

import asyncio
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from deploy.testbed.errors import TestbedError
from deploy.testbed.hosts import SOURCE_ROOT, Host
from deploy.testbed.processes import Process, kill
from deploy.testbed.redis_server import HostRedis

GCS_PORT = 6379
DASHBOARD_PORT = 8265
_TOKEN_FILE = ".ray/auth_token"
_RAY = str(Path(sys.prefix) / "bin" / "ray")
_POLL_S = 0.5
_NUM_STARTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """What the launcher's file says.

    gcs_redis: host:port of the Redis that the GCS keeps its tables in
    worker_cpus: what Ray may reserve on each worker; replicas are placed by it
    """

    name: str
    head: str
    workers: tuple[str, ...]
    ssh_key: Path
    token_file: Path
    gcs_redis: str
    gcs_redis_password: str
    head_cpus: int = 1
    worker_cpus: int = 2
    object_store_bytes: int = 100_000_000


def launcher_config(plan: ClusterPlan) -> dict[str, Any]:
    """The content of a `ray up` file."""
    return {
        "cluster_name": plan.name,
        "min_workers": len(plan.workers),
        "max_workers": len(plan.workers),
        "idle_timeout_minutes": 60,
        "provider": {
            "type": "local",
            "head_ip": plan.head,
            "worker_ips": list(plan.workers),
        },
        "auth": {"ssh_user": "root", "ssh_private_key": str(plan.ssh_key)},
        "file_mounts": {f"~/{_TOKEN_FILE}": str(plan.token_file)},
        "head_start_ray_commands": [head_command(plan)],
        "worker_start_ray_commands": [_worker_command(plan)],
    }


def head_command(plan: ClusterPlan) -> str:
    """The shell command that starts Ray on the head, the first time and after a crash."""
    env = {
        **_NODE_ENV,
        "RAY_REDIS_ADDRESS": plan.gcs_redis,
        "RAY_external_storage_namespace": plan.name,
        # a node that was lost without a word is given up after three seconds, and started again
        # by the launcher's monitor when it has been away for ten
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "2000",
        "RAY_health_check_failure_threshold": "3",
        "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "10",
    }
    return _start_command(
        env,
        "--head",
        f"--node-ip-address={plan.head}",
        f"--port={GCS_PORT}",
        f"--dashboard-host={plan.head}",
        f"--redis-password={plan.gcs_redis_password}",
        f"--num-cpus={plan.head_cpus}",
        "--autoscaling-config=~/ray_bootstrap_config.yaml",
        *_common_options(plan),
    )


def _worker_command(plan: ClusterPlan) -> str:
    return _start_command(
        _NODE_ENV,
        f"--address=$RAY_HEAD_IP:{GCS_PORT}",
        f"--num-cpus={plan.worker_cpus}",
        *_common_options(plan),
    )


_NODE_ENV = {
    "RAY_AUTH_MODE": "token",
    "PYTHONPATH": str(SOURCE_ROOT),
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",  # raylets outlive a head that is restarted
    "RAY_agent_register_timeout_ms": "120000",
}


def _start_command(env: Mapping[str, str], *options: str) -> str:
    """Starts Ray where nothing of it is left, and again when that failed.

    Ray gives its processes 30 s, which a busy machine may need more than once; and its autoscaler
    never returns to a node that failed to start.
    """
    variables = " ".join(f"{name}={value}" for name, value in env.items())
    start = f"{variables} {_RAY} start {' '.join(options)}"
    return f"for _ in {{1..{_NUM_STARTS}}}; do {start} && exit 0; {_RAY} stop --force; done; exit 1"


def _common_options(plan: ClusterPlan) -> tuple[str, ...]:
    return (
        "--num-gpus=0",
        # named: else a raylet gives its agents 15 s to say them, too little on a busy machine
        "--dashboard-agent-grpc-port=52366",
        "--dashboard-agent-listen-port=52365",
        "--runtime-env-agent-port=52367",
        "--metrics-export-port=8080",
        f"--object-store-memory={plan.object_store_bytes}",
        "--disable-usage-stats",
    )


class RayCluster:
    """The cluster that `ray up` makes of the hosts, seen from the machine."""

    def __init__(self, hosts: Sequence[Host], plan: ClusterPlan, folder: Path, token: str) -> None:
        self.hosts = tuple(hosts)
        self.head = hosts[0]
        self.token = token
        self._plan = plan
        self._folder = folder
        self._config = folder / "cluster.yaml"

    @property
    def dashboard(self) -> str:
        return f"http://{self._plan.head}:{DASHBOARD_PORT}"

    @property
    def headers(self) -> dict[str, str]:
        """What Ray's dashboard asks for."""
        return {"Authorization": f"Bearer {self.token}"}

    def up(self, *, timeout_s: float = 300.0) -> None:
        """Raises TestbedError when the nodes are not there in time."""
        self._config.write_text(yaml.safe_dump(launcher_config(self._plan), sort_keys=False))
        deadline = time.monotonic() + timeout_s
        self._launcher("up", "--no-config-cache", timeout_s=timeout_s)
        while len(self.alive_nodes()) < len(self.hosts):
            if time.monotonic() > deadline:
                raise TestbedError(
                    f"{len(self.alive_nodes())} of {len(self.hosts)} nodes after {timeout_s:.0f} s,"
                    f" see {self._folder} and Ray's logs"
                )
            time.sleep(_POLL_S)

    def down(self, *, beside: HostRedis) -> dict[str, list[Process]]:
        """`ray down`, and `ray stop` where that did not reach. Returns what is left by host.

        beside: the GCS' Redis, which Ray needs to the end
        """
        # the monitor on the head would start what is stopped on the workers
        self._launcher("down", timeout_s=180.0)
        for host in self.hosts:
            if any(map(is_ray, host.processes())):
                host.run(_RAY, "stop", "--force", timeout_s=120.0)
        deadline = time.monotonic() + 30.0
        while (left := self._left(beside)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return left

    def alive_nodes(self) -> list[str]:
        """Addresses of the nodes that the GCS holds for alive; none while it does not answer."""
        with suppress(httpx.HTTPError, KeyError, TypeError, ValueError):
            response = httpx.get(
                f"{self.dashboard}/nodes", params={"view": "summary"}, headers=self.headers
            )
            return sorted(alive_in(response.json()).values())
        return []

    def kill_head(self) -> None:
        """End all of Ray on the head at once, and with it what runs there."""
        for process in self.head.processes():
            if is_ray(process):
                kill(process.pid)

    async def start_head(self) -> None:
        """Ray on the head again, over the same Redis. Raises TestbedError when it fails."""
        words = self.head.command(["bash", "-c", head_command(self._plan)], {})
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            raise TestbedError(f"the head did not start again: {output.decode(errors='replace')}")

    def _left(self, beside: HostRedis) -> dict[str, list[Process]]:
        left = {
            host.name: [p for p in host.processes() if not beside.is_process(p)]
            for host in self.hosts
        }
        return {name: processes for name, processes in left.items() if processes}

    def _launcher(self, verb: str, *options: str, timeout_s: float) -> None:
        """Run `ray up` or `ray down`. Its output goes to a file."""
        log = self._folder / f"ray_{verb}.log"
        env = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_TMPDIR": str(self._folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            # version 2 starts one worker of several of a local provider, and no crashed one again
            "RAY_UP_enable_autoscaler_v2": "0",
        }
        with log.open("ab") as output:
            done = subprocess.run(
                [_RAY, verb, "-y", *options, str(self._config)],
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=timeout_s,
                env=env,
            )
        if done.returncode:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise TestbedError(f"`ray {verb}` failed:\n{end}")


def start_cluster(
    hosts: Sequence[Host], folder: Path, *, name: str, gcs_redis: HostRedis
) -> RayCluster:
    """The cluster, up. It ends with its hosts; `down` is the orderly way. Raises TestbedError."""
    token = secrets.token_hex(32)
    token_file = folder / "auth_token"
    token_file.write_text(token)
    token_file.chmod(0o600)
    plan = ClusterPlan(
        name=name,
        head=hosts[0].address,
        workers=tuple(host.address for host in hosts[1:]),
        ssh_key=hosts[0].ssh_key,
        token_file=token_file,
        gcs_redis=gcs_redis.address,
        gcs_redis_password=gcs_redis.password,
    )
    cluster = RayCluster(hosts, plan, folder, token)
    cluster.up()
    return cluster


def alive_in(answer: Mapping[str, Any]) -> dict[str, str]:
    """Id → address of the living nodes, of the dashboard's `/nodes?view=summary`."""
    raylets = [node["raylet"] for node in answer["data"]["summary"]]
    return {
        raylet["nodeId"]: raylet["nodeManagerAddress"]
        for raylet in raylets
        if raylet.get("state") == "ALIVE"
    }


def is_ray(process: Process) -> bool:
    return "ray" in process.title.split(" ")[0] or "/ray/" in process.title
