"""From a model's files to a lookup: one changed field is a miss, the same model elsewhere a hit."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kv_tier import ChunkQuery, KeySpace, model_fingerprint
from tests.kv_tier.arena_cases import open_tier, tokens_of

CONFIG = {
    "hidden_size": 64,
    "num_key_value_heads": 4,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
}
WEIGHTS = bytes(range(256)) * 100

PRINT_KEY = """
import sys
from pathlib import Path
from kv_tier import KeySpace, model_fingerprint
fingerprint = model_fingerprint(Path(sys.argv[1]), lora_id="legal")
space = KeySpace(fingerprint=fingerprint, kv_dtype="float32", anchor_ids=(1, 2))
print(space.key([5, 6, 7], cache_salt="tenant").hex())
"""


@dataclass(frozen=True)
class Served:
    """What decides a chunk's KV."""

    config: dict[str, Any] = field(default_factory=lambda: CONFIG)
    weights: bytes = WEIGHTS
    lora_id: str | None = "legal"
    kv_dtype: str = "float32"
    anchor_ids: tuple[int, ...] = (1, 2)
    layout_version: int = 1
    cache_salt: str = "tenant"
    anchored: bool = True

    def write(self, directory: Path) -> Path:
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(self.config))
        (directory / "model.safetensors").write_bytes(self.weights)
        return directory

    def query(self, directory: Path) -> ChunkQuery:
        space = KeySpace(
            fingerprint=model_fingerprint(self.write(directory), lora_id=self.lora_id),
            kv_dtype=self.kv_dtype,
            anchor_ids=self.anchor_ids,
            layout_version=self.layout_version,
        )
        token_ids = tokens_of(1)
        key = space.key(token_ids, cache_salt=self.cache_salt, anchored=self.anchored)
        return ChunkQuery(key=key, token_ids=token_ids)


def with_config(**changes: Any) -> Callable[[Served], Served]:
    return lambda served: replace(served, config={**served.config, **changes})


CHANGES: dict[str, Callable[[Served], Served]] = {
    "KV dtype": lambda served: replace(served, kv_dtype="float16"),
    "RoPE base": with_config(rope_theta=10001.0),
    "RoPE scaling": with_config(rope_scaling={"rope_type": "yarn", "factor": 8.0}),
    "RoPE kind": with_config(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "shape": with_config(num_key_value_heads=2),
    "one bit of a weight": lambda served: replace(served, weights=WEIGHTS[:-1] + b"\xfe"),
    "another LoRA": lambda served: replace(served, lora_id="medical"),
    "no LoRA": lambda served: replace(served, lora_id=None),
    "anchor": lambda served: replace(served, anchor_ids=(2, 1)),
    "no anchor": lambda served: replace(served, anchor_ids=()),
    "prompt prefix": lambda served: replace(served, anchored=False),
    "salt": lambda served: replace(served, cache_salt="other tenant"),
    "no salt": lambda served: replace(served, cache_salt=""),
    "layout version": lambda served: replace(served, layout_version=2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_one_changed_field_is_a_miss(tmp_path: Path, change: Callable[[Served], Served]) -> None:
    with open_tier(tmp_path / "arena") as tier:
        stored = Served().query(tmp_path / "a")
        reservation = tier.reserve(stored.key, stored.token_ids)
        assert reservation is not None and tier.commit(reservation)
        same, other = Served().query(tmp_path / "b"), change(Served()).query(tmp_path / "c")
        found, missed = tier.lookup([same, other])
        assert found is not None
        assert missed is None
        assert tier.stats().collisions == 0  # another key, not another chunk under the same key


def test_processes_without_a_common_seed_make_one_key_from_a_model(tmp_path: Path) -> None:
    folders = [Served().write(tmp_path / name) for name in ("one", "two")]
    keys = {
        subprocess.run(
            [sys.executable, "-c", PRINT_KEY, str(folder)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for folder, seed in zip(folders, ("1", "2"), strict=True)
    }
    assert len(keys) == 1 and len(keys.pop()) == 64
