"""What the launcher's file says, by Ray's own schema, and what is read of Ray's answers."""

import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.testbed.processes import Process
from deploy.testbed.ray_cluster import (
    ClusterPlan,
    alive_in,
    head_command,
    is_ray,
    launcher_config,
)

PLAN = ClusterPlan(
    name="cstest0",
    head="10.0.0.11",
    workers=("10.0.0.12", "10.0.0.13"),
    ssh_key=Path("/keys/id"),
    token_file=Path("/keys/token"),
    gcs_redis="10.0.0.11:6380",
    gcs_redis_password="secret",
)


@pytest.fixture
def config() -> dict[str, Any]:
    return launcher_config(PLAN)


def test_it_fits_rays_schema(config: dict[str, Any]):
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    assert prepared["provider"]["worker_ips"] == ["10.0.0.12", "10.0.0.13"]
    assert prepared["max_workers"] == 2


def test_ray_asks_for_a_token_everywhere(config: dict[str, Any]):
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        (start,) = [command for command in config[key] if " start " in command]
        assert re.search(r"(^| )RAY_AUTH_MODE=token .*ray start ", start)
    assert config["file_mounts"] == {"~/.ray/auth_token": "/keys/token"}


def test_the_head_starts_over_redis_each_time_in_the_same_way(config: dict[str, Any]):
    command = head_command(PLAN)
    assert config["head_start_ray_commands"][-1] == command
    assert "RAY_REDIS_ADDRESS=10.0.0.11:6380" in command
    assert "--redis-password=secret" in command
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in command


def test_workers_do_not_get_the_redis_password(config: dict[str, Any]):
    assert not any("secret" in command for command in config["worker_start_ray_commands"])


def test_commands_are_valid_shell(config: dict[str, Any]):
    commands = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    checked = subprocess.run(
        ["bash", "-n"], input="\n".join(commands), capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_only_alive_nodes_count():
    def node(address: str, state: str) -> dict[str, Any]:
        names = {"nodeId": f"{state} {address}", "nodeManagerAddress": address}
        return {"raylet": {**names, "state": state}}

    summary = [node("10.0.0.12", "DEAD"), node("10.0.0.12", "ALIVE"), node("10.0.0.11", "ALIVE")]
    answer = {"data": {"summary": [*summary, {"raylet": {}}]}}
    assert sorted(alive_in(answer).values()) == ["10.0.0.11", "10.0.0.12"]


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("ray::ServeReplica:cachesmith:Replica", True),
        ("ray-dashboard-NodeHead-0 (python -c x)", True),
        ("/venv/site-packages/ray/core/src/ray/raylet/raylet --a", True),
        ("/venv/bin/python -u /venv/site-packages/ray/autoscaler/_private/monitor.py", True),
        ("redis-server 10.0.0.11:6380", False),
        ("rsync --server", False),
    ],
)
def test_what_is_a_process_of_ray(title: str, expected: bool):
    assert is_ray(Process(1, title)) == expected
