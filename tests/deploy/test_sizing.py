"""`python -m deploy.sizing`: counts by hand, and the table of docs/deploy.md."""

import json
import re
from pathlib import Path

import pytest

from deploy.settings import SettingsError, load_settings
from deploy.sizing import ModelSize, gpu_room, main, model_size

REPO = Path(__file__).resolve().parents[2]
QWEN3_32B = REPO / "deploy" / "examples" / "qwen3-32b"
SETTINGS = REPO / "deploy" / "examples" / "qwen3-32b-tp2.yaml"
GUIDE = (REPO / "docs" / "deploy.md").read_text()


@pytest.fixture(scope="module")
def qwen() -> ModelSize:
    return model_size(QWEN3_32B, "auto")


def test_qwen3_32b_is_counted_as_by_hand(qwen):
    config = json.loads((QWEN3_32B / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    layer = attention + 3 * hidden * config["intermediate_size"] + 2 * hidden + 2 * head
    embeddings = 2 * config["vocab_size"] * hidden
    assert qwen.num_parameters == config["num_hidden_layers"] * layer + embeddings + hidden
    assert qwen.weight_bytes == 2 * qwen.num_parameters
    assert qwen.kv_bytes_per_token == 2 * 64 * 8 * 128 * 2


def test_float32_takes_twice_as_much(qwen):
    wide = model_size(QWEN3_32B, "float32")
    assert wide.weight_bytes == 2 * qwen.weight_bytes
    assert wide.kv_bytes_per_token == 2 * qwen.kv_bytes_per_token


@pytest.mark.parametrize(("ranks", "heads_each"), [(2, 4), (8, 1), (16, 1)])
def test_ranks_share_the_kv_heads_as_far_as_there_are_any(qwen, ranks, heads_each):
    settings = load_settings(overrides={"engine": {"tensor_parallel_size": ranks}})
    room = gpu_room(qwen, settings, memory_bytes=80 * 10**9, overhead_bytes=0)
    assert room.kv_bytes_per_token == 2 * 64 * heads_each * 128 * 2
    assert room.weight_bytes == qwen.weight_bytes // ranks
    assert room.weight_bytes + room.kv_bytes == room.vllm_bytes == 72 * 10**9


def test_a_model_that_does_not_fit_is_refused(qwen):
    settings = load_settings(config_file=SETTINGS)
    room = gpu_room(qwen, settings, memory_bytes=40 * 10**9, overhead_bytes=0)
    assert room.kv_bytes == 36 * 10**9 - qwen.weight_bytes // 2
    with pytest.raises(SettingsError, match=r"engine\.tensor_parallel_size: at 2 .* left for KV"):
        gpu_room(qwen, settings, memory_bytes=40 * 10**9, overhead_bytes=5 * 10**9)


def test_a_folder_without_a_config_is_refused(tmp_path, capsys):
    assert main(["--model", str(tmp_path)]) == 1
    assert "has no config.json" in capsys.readouterr().err


def test_a_size_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--gpu-memory", "plenty"])
    assert "no size such as 80GB" in capsys.readouterr().err


def printed(gpu_memory: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    given = ["--config", str(SETTINGS), "--model", str(QWEN3_32B), "--redis-memory", "96GiB"]
    assert main([*given, "--gpu-memory", gpu_memory]) == 0
    return [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]


def documented(header: str) -> list[list[str]]:
    """Rows of the table of docs/deploy.md with this header, without empty cells."""
    table = GUIDE.split(f"{header}\n", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split("|") if cell.strip()] for row in table]


def test_the_documented_sizes_are_those_that_are_printed(capsys):
    assert printed("80GB", capsys)[1:] == documented("| what | size | from |")


def test_the_documented_gpus_are_those_that_are_printed(capsys):
    table = documented("| a GPU's memory | left for KV on it | a replica's KV cache |")
    assert len(table) == 3
    for memory, left, tokens in table:
        sizes = {row[0]: row[1] for row in printed(memory, capsys)}
        assert (sizes["a GPU: left for KV"], sizes["a replica's KV cache"]) == (left, tokens)
