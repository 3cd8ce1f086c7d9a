"""Merges a low-rank adapter, in the files of PEFT, into a model folder.

Imports nothing heavy by itself: `deploy/models.py` runs this file in a fresh interpreter.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

WEIGHTS, CONFIG = "model.safetensors", "config.json"
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PEFT_PREFIX = "base_model.model."
COPIED = ("*.json", "*.jinja", "*.model", "*.txt")  # tokenizer, chat template, generation
NOT_PLAIN = ("use_dora", "use_rslora", "modules_to_save", "fan_in_fan_out", "rank_pattern")


class AdapterError(ValueError):
    """An adapter and a base do not belong together; the message says what differs."""


def merge_adapter(base: Path, adapter: Path, dest: Path) -> None:
    """Writes the folder dest: W + alpha / rank · B A, summed in float32, kept in bfloat16.

    base: a Hugging Face folder with one file of weights. Its other files are copied, but for
    CacheSmith's own marker. dest must not exist.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = _adapter_config(base, adapter)
    scale = config["lora_alpha"] / config["r"]
    weights = load_file(base / WEIGHTS)
    pairs = _pairs(load_file(adapter / ADAPTER_WEIGHTS))
    _check_coverage(pairs, weights, base)
    for module, (a, b) in pairs.items():
        weight = weights[f"{module}.weight"]
        expected = ((config["r"], weight.shape[1]), (weight.shape[0], config["r"]))
        if (tuple(a.shape), tuple(b.shape)) != expected:
            raise AdapterError(
                f"the adapter of {module} has the shapes {tuple(a.shape)} and {tuple(b.shape)}, "
                f"but a weight of {tuple(weight.shape)} needs {expected[0]} and {expected[1]}"
            )
        # in double precision, so that the rounded weights are the same on every machine
        weights[f"{module}.weight"] = weight.double() + scale * (b.double() @ a.double())
    dest.mkdir(parents=True)
    for pattern in COPIED:
        for file in base.glob(pattern):
            if file.name != "cachesmith.json":
                shutil.copyfile(file, dest / file.name)
    merged = json.loads((base / CONFIG).read_text()) | {"dtype": "bfloat16"}
    merged.pop("torch_dtype", None)  # the older name of the same
    (dest / CONFIG).write_text(json.dumps(merged, indent=2) + "\n")
    tensors = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(tensors, dest / WEIGHTS, metadata={"format": "pt"})
    (dest / WEIGHTS).chmod(0o644)  # safetensors are written for the owner alone


def _adapter_config(base: Path, adapter: Path) -> dict:
    for file in (
        base / CONFIG,
        base / WEIGHTS,
        adapter / ADAPTER_CONFIG,
        adapter / ADAPTER_WEIGHTS,
    ):
        if not file.is_file():
            raise AdapterError(f"there is no file {file}")
    config = json.loads((adapter / ADAPTER_CONFIG).read_text())
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{adapter} is a {config.get('peft_type')} adapter, not a LORA one")
    if used := [name for name in NOT_PLAIN if config.get(name)]:
        raise AdapterError(f"{adapter} uses {', '.join(used)}, which can not be merged here")
    trained_on = Path(config["base_model_name_or_path"]).name
    if trained_on != base.name:
        raise AdapterError(f"{adapter} was trained on {trained_on}, not on {base.name}")
    return config


def _pairs(tensors: dict) -> dict[str, tuple]:
    """A and B of each module of the base."""
    found: dict[str, dict] = {}
    for name, tensor in tensors.items():
        module, _, letter = name.removeprefix(PEFT_PREFIX).partition(".lora_")
        if not name.startswith(PEFT_PREFIX) or letter not in ("A.weight", "B.weight"):
            raise AdapterError(f"the adapter has a tensor of another kind: {name}")
        found.setdefault(module, {})[letter[0]] = tensor
    for module, letters in found.items():
        if len(letters) != 2:
            raise AdapterError(f"the adapter of {module} has only one of its two matrices")
    return {module: (letters["A"], letters["B"]) for module, letters in found.items()}


def _check_coverage(pairs: dict, weights: dict, base: Path) -> None:
    """What is adapted in one layer exists, and is adapted, in every layer of the base."""
    for module in pairs:
        if f"{module}.weight" not in weights:
            raise AdapterError(f"{base.name} has no {module}, which the adapter changes")
    num_layers = json.loads((base / CONFIG).read_text())["num_hidden_layers"]
    if len(pairs) % num_layers != 0 or not pairs:
        raise AdapterError(
            f"the adapter changes {len(pairs)} linears, which is not the same number in each of "
            f"the {num_layers} layers of {base.name}"
        )


def main(argv: Sequence[str]) -> int:
    base, adapter, dest = map(Path, argv)
    try:
        merge_adapter(base, adapter, dest)
    except AdapterError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
