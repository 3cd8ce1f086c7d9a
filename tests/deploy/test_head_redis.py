"""scripts/head_redis.sh on this machine: two real servers on free loopback ports."""

import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from tests.kv_tier.redis.servers import eventually, free_port

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "scripts" / "head_redis.sh"

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(
        shutil.which("redis-cli") is None or Path("/run/systemd/system").is_dir(),
        reason="starts servers by themselves: not where systemd would start them",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    folder: Path
    gcs_port: int
    kv_port: int

    def run(self, kv_memory: str = "64mb") -> None:
        options = {
            "--address": "127.0.0.1",
            "--dir": str(self.folder),
            "--kv-memory": kv_memory,
            "--gcs-port": str(self.gcs_port),
            "--kv-port": str(self.kv_port),
        }
        words = [word for option in options.items() for word in option]
        subprocess.run([str(SCRIPT), *words], check=True, capture_output=True, timeout=300)

    def variables(self, name: str) -> dict[str, str]:
        lines = (self.folder / name).read_text().splitlines()
        return dict(line.removeprefix("export ").split("=", 1) for line in lines)

    def pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    def client(self, port: int) -> redis.Redis:
        password = (self.folder / "redis_password").read_text().strip()
        return redis.Redis(host="127.0.0.1", port=port, password=password)


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    ports = {free_port(), free_port(), free_port()}
    head = Head(folder=tmp_path / "redis", gcs_port=ports.pop(), kv_port=ports.pop())
    try:
        head.run()
        yield head
    finally:
        for port in (head.gcs_port, head.kv_port):
            try:
                head.client(port).shutdown(nosave=True)
            except (redis.ConnectionError, FileNotFoundError):
                continue


def test_each_server_is_for_its_purpose_and_asks_for_the_password(head):
    for port, policy, append in [
        (head.gcs_port, "noeviction", "yes"),
        (head.kv_port, "allkeys-lru", "no"),
    ]:
        client = head.client(port)
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": policy}
        assert client.config_get("appendonly") == {"appendonly": append}
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(host="127.0.0.1", port=port).ping()
    assert head.client(head.kv_port).config_get("maxmemory") == {"maxmemory": str(64 << 20)}


def test_the_variables_lead_to_the_servers(head):
    started = head.variables("head.env")
    assert started["RAY_REDIS_ADDRESS"] == f"{started['NODE_ADDRESS']}:{head.gcs_port}"
    assert started["REDIS_PASSWORD"] == (head.folder / "redis_password").read_text().strip()
    deploying = head.variables("deploy.env")
    assert redis.Redis.from_url(deploying["CACHESMITH_KV_TIER__REDIS__URL"]).ping()
    assert deploying["RAY_DASHBOARD_ADDRESS"] == "http://127.0.0.1:8265"


def test_secrets_are_for_their_owner_alone(head):
    files = [path for path in head.folder.iterdir() if path.is_file()]
    assert {"head.env", "deploy.env", "redis_password", "gcs.conf"} <= {p.name for p in files}
    for path in [head.folder, *files]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    command_lines = [
        (Path("/proc") / str(head.pid(name)) / "cmdline").read_bytes() for name in ("gcs", "kv")
    ]
    password = (head.folder / "redis_password").read_text().strip().encode()
    assert all(password not in line for line in command_lines)


def test_a_second_call_restarts_only_what_has_changed(head):
    gcs, kv = head.pid("gcs"), head.pid("kv")
    password = (head.folder / "redis_password").read_text()
    head.run()
    assert (head.pid("gcs"), head.pid("kv")) == (gcs, kv)
    head.run(kv_memory="96mb")
    eventually(lambda: head.pid("kv") != kv)
    assert head.pid("gcs") == gcs
    assert head.client(head.kv_port).config_get("maxmemory") == {"maxmemory": str(96 << 20)}
    assert (head.folder / "redis_password").read_text() == password


def test_rays_state_outlives_its_server(head):
    head.client(head.gcs_port).set("actor", "known")
    process = Path("/proc") / str(head.pid("gcs"))
    head.client(head.gcs_port).shutdown(nosave=True)
    eventually(lambda: not process.exists() or "Z" in (process / "stat").read_text().split()[2])
    head.run()
    assert head.client(head.gcs_port).get("actor") == b"known"


@pytest.mark.parametrize("arguments", [["--kv-port"], ["--unknown"]])
def test_wrong_arguments_are_refused(arguments):
    done = subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert "--kv-port" in done.stderr
