"""Fixtures of the cluster's tests."""

from pathlib import Path

import pytest

from cluster.tokenizer import HfTokenizer
from deploy.local_ray import prepare_environment
from tests.fakes.byte_tokenizer import write_model_dir

prepare_environment()  # here: no test module has imported Ray yet


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer that makes one token of every byte."""
    return write_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> HfTokenizer:
    return HfTokenizer.load(model_dir)
