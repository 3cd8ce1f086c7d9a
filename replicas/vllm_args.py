"""From our settings to vLLM's: the arguments, and the environment that vLLM reads."""

import os
import platform
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_tier.keys import KeySpace
from replicas.config import EngineConfig
from replicas.core_pinning import PIN_CORES

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

CONNECTOR_MODULE = "replicas.vllm_connector"
CPU_KV_CACHE_BYTES = 1 << 30  # vLLM's own default on a CPU is a share of the whole memory
IDLE_SLICE_FACTOR = 4  # layers a step when nothing decodes, relative to `slice_layers`


def prepare_environment(config: EngineConfig) -> None:
    """Set what vLLM reads from the environment; call it before vLLM is imported.

    A value that the user has set stands.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if _has_gpu():
        return
    # a thread that spins at a barrier keeps its core from the one it waits for: on a busy machine
    # that costs several times the whole prefill, on an idle one sleeping costs next to nothing
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # vLLM would split the keys of a lone request over threads that then wait for each other: one
    # query over 4,096 keys took ten times as long and more
    os.environ.setdefault("VLLM_CPU_ATTN_SPLIT_KV", "0")
    # oneDNN keeps a kernel for each number of rows that it has seen, a thousand by default: that
    # grows for hours, as prompts and selections have all lengths
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    if "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        # vLLM would bind each engine's threads to the same first cores; the kernel spreads
        # several engines better. `OMP_NUM_THREADS` says how many threads each has.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # ranks that share cores wait for each other's threads, many times a layer
        cores = len(os.sched_getaffinity(0))
        threads = config.cpu_threads or max(1, cores // config.tensor_parallel_size)
        os.environ["OMP_NUM_THREADS"] = str(threads)


def machine_facts(config: EngineConfig, *, dtype: str) -> dict[str, Any]:
    """This machine as `CostProfile` names it; call it where the ranks run, or on their like."""
    on_gpu = _has_gpu()
    threads = None if on_gpu else int(os.environ.get("OMP_NUM_THREADS", "1"))
    return {
        "device": _gpu_name() if on_gpu else _processor_name(),
        "num_threads": threads,
        "tensor_parallel_size": config.tensor_parallel_size,
        "dtype": dtype,
    }


def _processor_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def engine_args(config: EngineConfig) -> "AsyncEngineArgs":
    """vLLM's arguments without chunk reuse. What the user passes through in `vllm` wins."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    on_gpu = _has_gpu()
    args: dict[str, Any] = {
        "model": config.model_dir,
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        # reused KV may not enter the prefix cache, and prompts with chunks rarely share prefixes
        "enable_prefix_caching": False,
        # a prefill without KV blocks passes those that wait for blocks
        "scheduling_policy": "priority",
        "worker_cls": "replicas.vllm_worker.CacheSmithWorker",
        "enable_log_requests": False,
        "disable_log_stats": True,
    }
    if config.tensor_parallel_size > 1:
        # inside a Ray placement group vLLM would choose its Ray executor
        args["distributed_executor_backend"] = "mp"
    if config.kv_cache_memory_bytes is not None:
        args["kv_cache_memory_bytes"] = config.kv_cache_memory_bytes
    elif not on_gpu:
        args["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    if not on_gpu:
        args["enforce_eager"] = True  # compiling on a CPU costs minutes at start and gains little
    args |= config.vllm
    if on_gpu and config.pin_cores and not config.vllm.get("numa_bind"):
        args["additional_config"] = {**args.get("additional_config", {}), PIN_CORES: True}
    return AsyncEngineArgs(**args)


def chunk_reuse_args(config: EngineConfig, keys: KeySpace) -> "AsyncEngineArgs":
    """`engine_args` with our connector."""
    from vllm.config import KVTransferConfig

    # members that are looked up in Redis come apart by that much
    lookup_ms = config.redis.lookup_deadline_ms if config.redis is not None else 0.0
    extra = {
        "arena_dir": config.host_tier_dir,
        "arena_bytes": config.host_tier_bytes,
        "arena_eviction": config.host_tier_eviction,
        "arena_watermarks": list(config.host_tier_watermarks),
        "fingerprint": keys.fingerprint,
        "anchor_ids": list(keys.anchor_ids),
        "slice_layers": config.slice_layers,
        "idle_slice_layers": config.slice_layers * IDLE_SLICE_FACTOR,
        "hold_ms": config.batch_hold_ms + lookup_ms,
        "auto_rule": asdict(config.auto_rule),
        "load_bandwidth_mb_s": config.load_bandwidth_mb_s,
        "fill_stalls": config.fill_stalls,
    }
    transfer = KVTransferConfig(
        kv_connector="CacheSmithConnector",
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=extra,
    )
    return replace(engine_args(config), kv_transfer_config=transfer)


def anchor_ids(config: EngineConfig) -> tuple[int, ...]:
    """Tokens that chunks are prefilled behind: the configured text, or BOS, or else EOS."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model_dir)
    if config.anchor_text:
        return tuple(tokenizer.encode(config.anchor_text, add_special_tokens=False))
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return (token_id,)
    return ()


def _gpu_name() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name())  # asks the driver; does not start CUDA here


def _has_gpu() -> bool:
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()
