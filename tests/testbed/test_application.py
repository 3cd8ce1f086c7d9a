"""The settings that the testbed deploys."""

from pathlib import Path

import pytest

from deploy.app import AppArgs, cluster_config
from deploy.testbed.application import application_args
from deploy.testbed.errors import TestbedError


def args_with(tmp_path: Path, text: str):
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    return application_args(file, model_dir=tmp_path, redis_url="redis://:word@10.0.0.1:1/0")


def test_the_testbeds_own_settings_can_be_used(tmp_path: Path):
    args = application_args(None, model_dir=tmp_path, redis_url="redis://:word@10.0.0.1:1/0")
    config = cluster_config(AppArgs(**args))
    assert (config.num_replicas, config.num_ingresses) == (2, 2)
    assert config.ingress.redis is not None and config.ingress.redis.url.endswith("10.0.0.1:1/0")


def test_a_file_wins_key_by_key(tmp_path: Path):
    args = args_with(tmp_path, "engine: {max_num_seqs: 3}")
    assert args["engine"]["max_num_seqs"] == 3
    assert args["engine"]["tensor_parallel_size"] == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("engine: {threads: 3}", "engine.threads: unknown key"),
        ("replicas: {num: 0}", "replicas.num: "),
        ("- engine", "must hold sections"),
    ],
)
def test_wrong_settings_name_the_key(tmp_path: Path, text: str, told: str):
    with pytest.raises(TestbedError) as error:
        args_with(tmp_path, text)
    assert told in str(error.value)
