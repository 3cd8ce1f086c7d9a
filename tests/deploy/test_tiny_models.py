import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deploy.tiny_models import make_tiny_llama, make_tiny_qwen3

MAKERS = {"qwen3": make_tiny_qwen3, "llama": make_tiny_llama}
TEXTS = [
    "Who built the bridge in 1847?",
    "  two spaces,\ttabs\r\nand\n\nlines  ",
    "🙂🏳️‍🌈 café naïve Ærø 東京 मुंबई \u202eabc\x00 don't . , !",
    "",
]


@pytest.fixture(scope="module", params=MAKERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKERS[request.param](tmp_path_factory.mktemp("tiny") / request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_round_trips(folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < 512 for i in ids)


def test_chat_template_is_chatml(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi 🙂"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    expected = (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi 🙂<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == expected + "<|im_start|>assistant\n"
    # the markers are single tokens, and the answer ends at one of them
    ids = tokenizer(prompt).input_ids
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 5
    assert ids.count(tokenizer.eos_token_id) == 4
    assert tokenizer.eos_token == "<|im_end|>"


def test_config_follows_the_arguments(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    folder = make_tiny_llama(
        tmp_path / "m", num_layers=2, tie=True, dtype="bfloat16", rope_scaling=scaling
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.num_hidden_layers, model.dtype) == (2, torch.bfloat16)
    assert model.config.rope_parameters == {"rope_theta": 10_000.0, **scaling}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_logits_are_well_separated(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("The keeper wrote down the height of the water.", return_tensors="pt").input_ids
    with torch.inference_mode():
        best = model(ids).logits[0].topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 0.1


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_made_once_and_again_when_the_arguments_change(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make(tmp_path / "m", num_layers=1)
    weights = folder / "model.safetensors"
    first = (weights.stat().st_mtime_ns, weights.read_bytes())
    assert make(tmp_path / "m", num_layers=1) == folder
    assert (weights.stat().st_mtime_ns, weights.read_bytes()) == first
    assert make(tmp_path / "again", num_layers=1).joinpath(weights.name).read_bytes() == first[1]
    make(folder, num_layers=1, seed=1)
    assert weights.read_bytes() != first[1]


def test_global_random_state_is_left_alone(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    make_tiny_qwen3(tmp_path / "m", num_layers=1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_unfinished_folder_is_made_anew(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "m", num_layers=1)
    (folder / "tiny_model.json").unlink()
    (folder / "config.json").write_text("{}")
    make_tiny_qwen3(folder, num_layers=1)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1


def test_vocabulary_that_the_text_can_not_fill_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not 5000"):
        make_tiny_qwen3(tmp_path / "m", vocab_size=5000)
