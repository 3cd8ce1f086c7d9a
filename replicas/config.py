"""Settings that a replica's engine reads."""

from dataclasses import dataclass, field
from typing import Any, Literal

from kv_tier.redis.config import RedisTierConfig
from planner.auto_signal import AutoRule
from planner.serving_profile import ServingProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to run one engine. Construction does no I/O; `VllmEngine.start` does it all."""

    model_dir: str
    model_name: str = ""  # what clients call it; the folder's name if empty
    dtype: str = "auto"  # "auto", "bfloat16", "float16", "float32"
    tensor_parallel_size: int = 1
    max_model_len: int | None = None  # the model's own if None
    max_num_seqs: int = 16
    kv_cache_memory_bytes: int | None = None  # paged KV cache; None: 1 GiB on a CPU, else vLLM's
    cpu_threads: int | None = None  # compute threads of each rank without a GPU
    slice_layers: int = 4  # prefill layers a step while other requests decode
    batch_hold_ms: float = 50.0  # longest wait for the other members of a batch
    parking_bytes: int = 1 << 28  # host memory for prompts prefilled before KV blocks are free
    auto_rule: AutoRule = field(default_factory=AutoRule)  # for the signal `auto`
    load_bandwidth_mb_s: float | None = None  # emulates a slower store; None: as fast as it is
    fill_stalls: bool = True  # recompute while stored KV is waited for; False: just wait
    anchor_text: str | None = None  # what chunks are prefilled behind; None: BOS, else EOS
    host_tier_dir: str = ""  # one folder a node, shared by its replicas; empty: no chunk store
    host_tier_bytes: int = 1 << 30
    host_tier_watermarks: tuple[float, float] = (0.93, 0.97)  # low, high; see `HostTierConfig`
    host_tier_eviction: Literal["cost", "lru"] = "cost"
    max_ingest_backlog: int = 1024  # missed chunks remembered for idle time
    redis: RedisTierConfig | None = None  # a second level behind the host tier
    handover_ms: float = 0.0  # of `close`: to copy there what the node has and it lacks
    pin_cores: bool = True  # keep each rank on cores near its GPU, where there is one
    profile: ServingProfile | None = None  # of the model; None: costs are measured at start
    vllm: dict[str, Any] = field(default_factory=dict)  # passed through to vLLM's AsyncEngineArgs

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "max_num_seqs", "slice_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.batch_hold_ms < 0:
            raise ValueError(f"batch_hold_ms must not be negative, got {self.batch_hold_ms}")
        if self.handover_ms < 0:
            raise ValueError(f"handover_ms must not be negative, got {self.handover_ms}")
        if self.parking_bytes < 0:
            raise ValueError(f"parking_bytes must not be negative, got {self.parking_bytes}")
        if self.load_bandwidth_mb_s is not None and self.load_bandwidth_mb_s <= 0:
            raise ValueError(
                f"load_bandwidth_mb_s must be positive, got {self.load_bandwidth_mb_s}"
            )
        if self.load_bandwidth_mb_s is not None and self.redis is not None:
            raise ValueError("load_bandwidth_mb_s emulates a link, and with Redis there is one")
        if self.dtype not in ("auto", "bfloat16", "float16", "float32"):
            raise ValueError(f"dtype must be auto, bfloat16, float16 or float32, got {self.dtype}")
