"""What a model takes, and how many tokens' KV each tier holds: arithmetic, nothing is measured.

Weights are counted on a model that is built without memory, so a config.json is all it needs.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter

from benchmarks.report import print_table
from deploy.app import kv_bytes_per_token
from deploy.console import fail
from deploy.settings import Settings, SettingsError, load_settings

VLLM_MEMORY_SHARE = 0.9  # vLLM's default of gpu_memory_utilization


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int  # keys and values of all layers
    num_kv_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRoom:
    """One GPU of a replica, in bytes."""

    memory_bytes: int
    vllm_bytes: int  # what vLLM may use of it
    weight_bytes: int
    overhead_bytes: int
    kv_bytes: int  # what is left
    kv_bytes_per_token: int

    @property
    def num_tokens(self) -> int:
        """Tokens of KV that the replica holds: each of its GPUs has a part of every token."""
        return self.kv_bytes // self.kv_bytes_per_token


def model_size(model_dir: Path, dtype: str) -> ModelSize:
    """From the folder's config.json. dtype: as in `model.dtype`"""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_dir)
    wanted = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=wanted)
    text = config.get_text_config()
    return ModelSize(
        num_parameters=model.num_parameters(),
        weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        kv_bytes_per_token=kv_bytes_per_token(model_dir, dtype),
        num_kv_heads=text.num_key_value_heads,
    )


def gpu_room(
    model: ModelSize, settings: Settings, *, memory_bytes: int, overhead_bytes: int
) -> GpuRoom:
    """What a rank's GPU has left for KV. Raises SettingsError if the model does not fit."""
    ranks = settings.engine.tensor_parallel_size
    share = float(settings.engine.vllm.get("gpu_memory_utilization", VLLM_MEMORY_SHARE))
    usable = int(memory_bytes * share)
    weights = model.weight_bytes // ranks
    left = usable - weights - overhead_bytes
    # with more ranks than KV heads, heads are copied
    per_token = model.kv_bytes_per_token // min(ranks, model.num_kv_heads)
    if left < per_token:
        raise SettingsError(
            f"engine.tensor_parallel_size: at {ranks} a GPU gets {_gb(weights)} of weights, and "
            f"vLLM may use {_gb(usable)} of its {_gb(memory_bytes)}: nothing is left for KV"
        )
    return GpuRoom(
        memory_bytes=memory_bytes,
        vllm_bytes=usable,
        weight_bytes=weights,
        overhead_bytes=overhead_bytes,
        kv_bytes=left,
        kv_bytes_per_token=per_token,
    )


def sizing_rows(
    model: ModelSize, settings: Settings, gpu: GpuRoom | None, redis_bytes: int | None
) -> list[tuple[str, str, str]]:
    """Rows of what, size and how it comes about."""
    ranks, per_token = settings.engine.tensor_parallel_size, model.kv_bytes_per_token
    chunk_tokens, host = settings.prompt.max_chunk_tokens, settings.kv_tier.host.capacity_bytes
    rows = [
        ("GPUs", str(settings.replicas.num * ranks), f"{settings.replicas.num} replicas x {ranks}"),
        ("weights", _gb(model.weight_bytes), f"{model.num_parameters:,} parameters"),
        ("KV of a token", f"{per_token:,} B", "2 x layers x KV heads x head size x bytes"),
        ("a chunk's KV at most", _mib(chunk_tokens * per_token), f"{chunk_tokens:,} tokens"),
    ]
    if gpu is not None:
        rows += [
            ("a GPU: vLLM may use", _gb(gpu.vllm_bytes), f"of {_gb(gpu.memory_bytes)}"),
            ("a GPU: weights", _gb(gpu.weight_bytes), f"/ {ranks}"),
            ("a GPU: overhead", _gb(gpu.overhead_bytes), "allowance: activations, CUDA graphs"),
            ("a GPU: left for KV", _gb(gpu.kv_bytes), f"{gpu.kv_bytes_per_token:,} B a token"),
            ("a replica's KV cache", f"{gpu.num_tokens:,} tokens", ""),
        ]
    rows.append(("host tier of a node", f"{host // per_token:,} tokens", _gib(host)))
    if redis_bytes is not None:
        rows.append(("Redis", f"{redis_bytes // per_token:,} tokens", _gib(redis_bytes)))
    return rows


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


def _byte_size(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 80GB or 96GiB") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.sizing",
        description="What a model takes on its GPUs, and how many tokens' KV each tier holds.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings")
    parser.add_argument(
        "--model", metavar="DIR", help="folder with a config.json (default: model.name_or_dir)"
    )
    parser.add_argument("--gpu-memory", type=_byte_size, metavar="SIZE", help="of a GPU: 80GB")
    parser.add_argument(
        "--gpu-overhead",
        type=_byte_size,
        default="5GB",
        metavar="SIZE",
        help="allowance for activations and CUDA graphs (default: %(default)s)",
    )
    parser.add_argument(
        "--redis-memory", type=_byte_size, metavar="SIZE", help="maxmemory of the chunks' Redis"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args: Any = _parser().parse_args(argv)
    try:
        settings = load_settings(config_file=args.config)
        model_dir = Path(args.model or settings.model.name_or_dir).expanduser()
        if not (model_dir / "config.json").is_file():
            return fail(f"{model_dir} has no config.json: name a model's folder with --model")
        model = model_size(model_dir, settings.model.dtype)
        gpu = None
        if args.gpu_memory is not None:
            gpu = gpu_room(
                model, settings, memory_bytes=args.gpu_memory, overhead_bytes=args.gpu_overhead
            )
    except SettingsError as exc:
        return fail(str(exc))
    print_table(("what", "size", "from"), sizing_rows(model, settings, gpu, args.redis_memory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
