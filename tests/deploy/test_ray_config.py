"""What the files for Ray's cluster launcher make of nodes. Neither AWS nor a network is asked."""

import copy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

REPO = Path(__file__).resolve().parents[2]
TOKEN_FILE = "~/.ray/auth_token"


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return yaml.safe_load((REPO / "ray_config.yaml").read_text())


@pytest.fixture(scope="module")
def prepared(config: dict[str, Any]) -> dict[str, Any]:
    """With Ray's defaults filled in and its setup commands merged, as `ray up` does it."""
    from ray.autoscaler._private.util import prepare_config

    return prepare_config(copy.deepcopy(config))


@pytest.fixture(scope="module", params=["ray_config.yaml", "deploy/onpremise.yaml"])
def either(request) -> dict[str, Any]:
    """Any of the files, prepared."""
    from ray.autoscaler._private.util import prepare_config

    return prepare_config(yaml.safe_load((REPO / request.param).read_text()))


def test_only_workers_have_gpus_and_none_runs_unasked(prepared):
    head = prepared["head_node_type"]
    workers = {name: t for name, t in prepared["available_node_types"].items() if name != head}
    assert prepared["available_node_types"][head]["max_workers"] == 0
    assert workers
    for node_type in workers.values():
        assert node_type["min_workers"] == 0
    assert 1 <= sum(t["max_workers"] for t in workers.values()) <= prepared["max_workers"]


def test_what_to_change_stands_once(config):
    metadata = config["metadata"]
    assert config["provider"]["region"] == metadata["region"]
    assert metadata["clone"] in config["setup_commands"]
    head = config["head_node_type"]
    for name, node_type in config["available_node_types"].items():
        node = node_type["node_config"]
        instance = "head_instance" if name == head else "worker_instance"
        assert (node["InstanceType"], node["ImageId"]) == (metadata[instance], metadata["image"])


def test_the_head_gives_the_token_to_workers(prepared):
    assert any("get-auth-token --generate" in c for c in prepared["head_setup_commands"])
    assert prepared["cluster_synced_files"] == [TOKEN_FILE]


def test_machines_of_your_own_get_the_token_from_here():
    config = yaml.safe_load((REPO / "deploy" / "onpremise.yaml").read_text())
    assert config["file_mounts"] == {TOKEN_FILE: TOKEN_FILE}


def test_every_node_is_installed_by_the_repositorys_script(either):
    assert (REPO / "scripts" / "install.sh").is_file()
    for key in ("head_setup_commands", "worker_setup_commands"):
        assert any(command.endswith("scripts/install.sh") for command in either[key])


def test_ray_asks_for_a_token_everywhere(either):
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        (start,) = [command for command in either[key] if "ray start" in command]
        assert start.index("RAY_AUTH_MODE=token ") < start.index("ray start")
    assert "autoscaling-config" in " ".join(either["head_start_ray_commands"])


def test_the_head_has_redis_before_ray_starts(either):
    assert any("scripts/head_redis.sh --kv-memory" in c for c in either["head_setup_commands"])
    assert not any("head_redis.sh" in c for c in either["worker_setup_commands"])
    (start,) = [c for c in either["head_start_ray_commands"] if "ray start" in c]
    assert start.index(". ~/.cachesmith/head.env;") < start.index("ray start")
    assert "--redis-password=$REDIS_PASSWORD" in start
    assert "--dashboard-host=$NODE_ADDRESS" in start


def test_commands_are_valid_shell(either):
    commands = [
        *either["head_setup_commands"],
        *either["worker_setup_commands"],
        *either["head_start_ray_commands"],
        *either["worker_start_ray_commands"],
    ]
    checked = subprocess.run(
        ["bash", "-n"], input="\n".join(commands), capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
