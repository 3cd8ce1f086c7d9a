"""The model fingerprint: all that can change KV changes it, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from kv_tier import ModelIdentityError, model_fingerprint

CONFIG = {"hidden_size": 64, "rope_theta": 10000.0, "transformers_version": "4.57.0"}


def make_model(directory: Path, **config: Any) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (directory / "model-1.safetensors").write_bytes(bytes(range(256)) * 1000)
    (directory / "model-2.safetensors").write_bytes(b"more weights")
    return directory


def test_one_weight_byte_changes_it(tmp_path: Path) -> None:
    model = make_model(tmp_path / "a")
    before = model_fingerprint(model)
    assert model_fingerprint(make_model(tmp_path / "b")) == before
    weights = model / "model-1.safetensors"
    content = bytearray(weights.read_bytes())
    content[100_000] ^= 1
    weights.write_bytes(content)
    assert model_fingerprint(model) != before


def test_moving_bytes_between_files_changes_it(tmp_path: Path) -> None:
    one, other = make_model(tmp_path / "a"), make_model(tmp_path / "b")
    content = (other / "model-1.safetensors").read_bytes()
    (other / "model-1.safetensors").write_bytes(content[:-1])
    (other / "model-2.safetensors").write_bytes(content[-1:] + b"more weights")
    assert model_fingerprint(one) != model_fingerprint(other)


def test_config_that_shapes_kv_counts(tmp_path: Path) -> None:
    base = model_fingerprint(make_model(tmp_path / "a"))
    assert model_fingerprint(make_model(tmp_path / "b", rope_theta=5e5)) != base
    nested = make_model(tmp_path / "c", text_config={"num_layers": 4, "_name_or_path": "here"})
    moved = make_model(tmp_path / "d", text_config={"num_layers": 4, "_name_or_path": "there"})
    assert model_fingerprint(nested) == model_fingerprint(moved) != base


def test_config_that_tools_write_does_not(tmp_path: Path) -> None:
    base = model_fingerprint(make_model(tmp_path / "a"))
    other = make_model(tmp_path / "b", transformers_version="5.0.0", _name_or_path="somewhere")
    reordered = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(dict(reversed(reordered.items())), indent=4))
    (other / "README.md").write_text("not a weight")
    assert model_fingerprint(other) == base


def test_lora_counts(tmp_path: Path) -> None:
    model = make_model(tmp_path / "a")
    ids = [model_fingerprint(model, lora_id=lora_id) for lora_id in (None, "", "legal", "law")]
    assert len(set(ids)) == len(ids)


def test_bin_weights_are_read_where_there_are_no_safetensors(tmp_path: Path) -> None:
    model = make_model(tmp_path / "a")
    for path in model.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ModelIdentityError, match=str(model)):
        model_fingerprint(model)
    (model / "pytorch_model.bin").write_bytes(b"weights")
    assert len(model_fingerprint(model)) == 64


def test_missing_config_is_named(tmp_path: Path) -> None:
    model = make_model(tmp_path / "a")
    (model / "config.json").unlink()
    with pytest.raises(ModelIdentityError, match=r"config\.json"):
        model_fingerprint(model)
