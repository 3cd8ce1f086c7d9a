"""The training network against transformers, and the merge of what it saves."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.training.english_network import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    RANK,
    TARGETS,
    AdaptedLlama,
    BlockMask,
)
from deploy.lora import AdapterError, merge_adapter
from deploy.tiny_models import make_tiny_llama

TOKENS = 300  # more than one block of queries
A_WEIGHT = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    # 16 wide heads, 3 queries to a key; float32 shows small differences
    return make_tiny_llama(
        folder, num_layers=2, hidden=48, num_heads=6, num_kv_heads=2, head_dim=16, tie=True
    )


@pytest.fixture
def adapted(base: Path) -> AdaptedLlama:
    model = AdaptedLlama(base, torch.float32, seed=1)
    with torch.no_grad():
        for _, b in model.adapters.values():
            b.normal_(std=0.05)
    model.refresh()
    return model


@pytest.fixture
def adapter(adapted: AdaptedLlama, tmp_path: Path) -> Path:
    adapted.save_adapter(tmp_path / "adapter")
    return tmp_path / "adapter"


def causal(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def merged_by_hand(base: Path, model: AdaptedLlama) -> torch.nn.Module:
    hf = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for module, (a, b) in model.adapters.items():
            hf.get_submodule(module).weight += 2.0 * b @ a
    return hf


def test_forward_and_gradients_are_those_of_transformers(base: Path, adapted: AdaptedLlama) -> None:
    hf = merged_by_hand(base, adapted)
    ids = torch.arange(2 * TOKENS) * 37 % 512
    masks = [BlockMask(causal(TOKENS), 3, torch.float32) for _ in range(2)]
    positions = torch.arange(TOKENS).repeat(2)
    wanted = torch.tensor([0, TOKENS - 1, TOKENS, 2 * TOKENS - 1])
    ours = adapted.logits(ids, positions, masks, wanted)
    theirs = hf(ids.view(2, TOKENS)).logits.view(2 * TOKENS, -1)[wanted]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)

    ours.logsumexp(-1).sum().backward()
    theirs.logsumexp(-1).sum().backward()
    for module, (a, b) in adapted.adapters.items():
        grad = 2.0 * hf.get_submodule(module).weight.grad
        torch.testing.assert_close(b.grad, grad @ a.detach().t(), atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(a.grad, b.detach().t() @ grad, atol=1e-4, rtol=1e-3)


def test_masks_are_those_of_transformers(base: Path, adapted: AdaptedLlama) -> None:
    hf = merged_by_hand(base, adapted)
    visible = causal(TOKENS) & (torch.rand(TOKENS, TOKENS).gt(0.5) | torch.eye(TOKENS).bool())
    ids, positions = torch.arange(TOKENS) % 512, torch.arange(TOKENS) // 2
    masks = [BlockMask(visible, 3, torch.float32)]
    ours = adapted.logits(ids, positions, masks, torch.arange(TOKENS))
    theirs = hf(ids[None], position_ids=positions[None], attention_mask=visible[None, None]).logits
    torch.testing.assert_close(ours, theirs[0], atol=1e-4, rtol=1e-4)


class TestMerge:
    def test_folder_holds_the_sum_in_bfloat16(
        self, base: Path, adapted: AdaptedLlama, adapter: Path, tmp_path: Path
    ) -> None:
        merge_adapter(base, adapter, tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert merged.dtype == torch.bfloat16
        weights = load_file(base / "model.safetensors")
        saved = load_file(adapter / ADAPTER_WEIGHTS)
        for module in adapted.adapters:
            a, b = (
                saved[f"base_model.model.{module}.lora_{letter}.weight"].float() for letter in "AB"
            )
            expected = (weights[f"{module}.weight"] + 2.0 * (b @ a)).bfloat16()
            assert torch.equal(merged.get_submodule(module).weight, expected)
        norm = "model.norm.weight"
        assert torch.equal(merged.model.norm.weight, weights[norm].bfloat16())
        copied = {file.name for file in base.iterdir()} - {"tiny_model.json"}
        assert copied <= {file.name for file in (tmp_path / "merged").iterdir()}

    def test_adapter_is_in_the_files_of_peft(self, adapter: Path) -> None:
        config = json.loads((adapter / ADAPTER_CONFIG).read_text())
        assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", RANK, 2 * RANK)
        assert set(config["target_modules"]) == {name.split(".")[1] for name in TARGETS}
        tensors = load_file(adapter / ADAPTER_WEIGHTS)
        assert len(tensors) == 2 * 2 * len(TARGETS)
        assert tensors[A_WEIGHT].shape == (RANK, 48)
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        assert os.stat(adapter / ADAPTER_WEIGHTS).st_mode & 0o777 == 0o644

    def test_saved_adapter_is_read_back(
        self, base: Path, adapted: AdaptedLlama, adapter: Path
    ) -> None:
        again = AdaptedLlama(base, torch.float32, seed=2)
        again.load_adapter(adapter)
        for module, pair in again.adapters.items():
            for ours, saved in zip(pair, adapted.adapters[module], strict=True):
                assert torch.equal(ours, saved.bfloat16().float())

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({A_WEIGHT: torch.zeros(RANK, 47)}, "q_proj has the shapes"),
            ({A_WEIGHT: torch.zeros(8, 48)}, "q_proj has the shapes"),
            ({A_WEIGHT: None}, "only one of its two matrices"),
            ({A_WEIGHT.replace("layers.0", "layers.7"): torch.zeros(RANK, 48)}, "only one of its"),
            ({"base_model.model.lm_head.weight": torch.zeros(2)}, "another kind: .*lm_head"),
        ],
    )
    def test_tensors_that_do_not_fit_are_refused(
        self, base: Path, adapter: Path, tmp_path: Path, change: dict, told: str
    ) -> None:
        tensors = load_file(adapter / ADAPTER_WEIGHTS) | change
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(kept, adapter / ADAPTER_WEIGHTS)
        with pytest.raises(AdapterError, match=told):
            merge_adapter(base, adapter, tmp_path / "merged")
        assert not (tmp_path / "merged").exists()

    def test_other_number_of_layers_is_refused(self, adapter: Path, tmp_path: Path) -> None:
        deeper, shallower = (
            make_tiny_llama(
                tmp_path / name / "tiny",
                num_layers=layers,
                hidden=48,
                num_heads=6,
                num_kv_heads=2,
                head_dim=16,
            )
            for name, layers in (("deeper", 3), ("shallower", 1))
        )
        with pytest.raises(AdapterError, match="not the same number"):
            merge_adapter(deeper, adapter, tmp_path / "merged")
        with pytest.raises(AdapterError, match=r"has no model\.layers\.1"):
            merge_adapter(shallower, adapter, tmp_path / "merged")

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"base_model_name_or_path": "org/other"}, "trained on other, not on tiny"),
            ({"peft_type": "IA3"}, "IA3 adapter"),
            ({"use_dora": True}, "uses use_dora"),
        ],
    )
    def test_configs_that_do_not_fit_are_refused(
        self, base: Path, adapter: Path, tmp_path: Path, change: dict, told: str
    ) -> None:
        file = adapter / ADAPTER_CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        with pytest.raises(AdapterError, match=told):
            merge_adapter(base, adapter, tmp_path / "merged")

    def test_missing_file_is_told(self, base: Path, tmp_path: Path) -> None:
        with pytest.raises(AdapterError, match=r"no file .*adapter_config"):
            merge_adapter(base, tmp_path, tmp_path / "merged")
