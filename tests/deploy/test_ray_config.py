"""`ray_config.yaml` is what Ray's cluster launcher takes. Neither AWS nor a network is asked."""

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


def test_it_fits_rays_schema(prepared):
    from ray.autoscaler._private.util import validate_config

    validate_config(prepared)


def test_only_workers_have_gpus_and_none_runs_unasked(prepared):
    head = prepared["head_node_type"]
    workers = {name: t for name, t in prepared["available_node_types"].items() if name != head}
    assert prepared["available_node_types"][head]["max_workers"] == 0
    assert workers
    for node_type in workers.values():
        assert node_type["min_workers"] == 0
        assert 1 <= node_type["max_workers"] <= prepared["max_workers"]


def test_what_to_change_stands_once(config):
    metadata = config["metadata"]
    assert config["provider"]["region"] == metadata["region"]
    assert metadata["clone"] in config["setup_commands"]
    head = config["head_node_type"]
    for name, node_type in config["available_node_types"].items():
        node = node_type["node_config"]
        instance = "head_instance" if name == head else "worker_instance"
        assert (node["InstanceType"], node["ImageId"]) == (metadata[instance], metadata["image"])


def test_every_node_is_installed_by_the_repositorys_script(prepared):
    assert (REPO / "scripts" / "install.sh").is_file()
    for key in ("head_setup_commands", "worker_setup_commands"):
        assert any(command.endswith("scripts/install.sh") for command in prepared[key])


def test_ray_asks_for_a_token_everywhere(prepared):
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        (start,) = [command for command in prepared[key] if "ray start" in command]
        assert "RAY_AUTH_MODE=token ray start" in start
    assert any("get-auth-token --generate" in c for c in prepared["head_setup_commands"])
    assert prepared["cluster_synced_files"] == [TOKEN_FILE]
    assert "autoscaling-config" in " ".join(prepared["head_start_ray_commands"])


def test_commands_are_valid_shell(prepared):
    commands = [
        *prepared["head_setup_commands"],
        *prepared["worker_setup_commands"],
        *prepared["head_start_ray_commands"],
        *prepared["worker_start_ray_commands"],
    ]
    checked = subprocess.run(
        ["bash", "-n"], input="\n".join(commands), capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
