"""The settings that the testbed deploys."""

from pathlib import Path

import pytest

from deploy.app import AppArgs, cluster_config
from deploy.serve_config import application
from deploy.testbed.application import application_settings
from deploy.testbed.errors import TestbedError


def settings_with(tmp_path: Path, text: str):
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    return application_settings(file, model_dir=tmp_path, redis_url="redis://:word@10.0.0.1:1/0")


def test_the_testbeds_own_settings_can_be_used(tmp_path: Path):
    settings = application_settings(
        None, model_dir=tmp_path, redis_url="redis://:word@10.0.0.1:1/0"
    )
    args = application(settings, name="cachesmith", route_prefix="/")["args"]
    config = cluster_config(AppArgs(**args))
    assert (settings.replicas.num, config.num_ingresses) == (2, 2)
    assert config.ingress.redis is not None and config.ingress.redis.url.endswith("10.0.0.1:1/0")


def test_a_file_wins_key_by_key(tmp_path: Path):
    settings = settings_with(tmp_path, "engine: {max_num_seqs: 3}")
    assert settings.engine.max_num_seqs == 3
    assert settings.engine.tensor_parallel_size == 2


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
        settings_with(tmp_path, text)
    assert told in str(error.value)
