"""What a prefill costs on hardware that nobody has measured: arithmetic on published numbers.

Sources. Models: the config.json and model cards of Qwen/Qwen3-8B and Qwen/Qwen3-32B (parameters
without embeddings, layers, heads). GPU: NVIDIA's H200 SXM data sheet (dense BF16 FLOP/s, HBM
bandwidth and size). Every efficiency and overhead is assumed and says so. A measured
`ServingProfile` replaces all of it.
"""

from dataclasses import dataclass

from planner.cost_model import CostModel, PrefillShape, prefill_work
from planner.types import Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """weights_bytes: in BF16; block_params: of all layers, without embeddings."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_params: float
    weights_bytes: float

    @property
    def kv_token_bytes(self) -> float:
        """Stored KV of one token in one layer, BF16."""
        return 2.0 * self.num_kv_heads * self.head_dim * 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClass:
    """One GPU. From the data sheet: peaks and memory. Assumed: the rest."""

    flops_per_s: float
    hbm_bytes_per_s: float
    memory_bytes: float
    dense_efficiency: float = 0.55  # assumed: of the peak, large matrix products
    attention_efficiency: float = 0.40  # assumed: dense causal attention
    sparse_efficiency: float = 0.20  # assumed: attention of selected rows
    hbm_efficiency: float = 0.60  # assumed: of the peak, decoding
    host_bytes_per_s: float = 50e9  # assumed: PCIe 5 x16, page-locked; its peak is 64e9
    tensor_parallel_efficiency: float = 0.90  # assumed: of the ideal speed-up
    fixed_ms: float = 8.0  # assumed: admission, engine steps, the last token
    request_ms: float = 0.3  # assumed
    layer_ms: float = 0.05  # assumed: launches of a layer
    member_ms: float = 0.01  # assumed: launches for each request of a layer
    memory_share: float = 0.90  # assumed: what the engine takes
    activation_bytes: float = 10e9  # assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a simulated replica is: prices, KV sizes, decode speed."""

    name: str
    source: str
    cost: CostModel
    kv_token_bytes: float
    kv_capacity_tokens: int
    decode_ms: float  # of one token, alone
    decode_seq_ms: float  # more, for each other sequence

    def full_prefill_ms(self, num_tokens: int) -> float:
        """Of one request alone."""
        shape = [PrefillShape(num_cached=0, num_always=num_tokens)]
        layers = self.cost.num_layers
        work = prefill_work(
            shape,
            [1.0],
            signal=Signal.KV_DEV,
            warmup_depth=layers,
            probe_len=0,
            num_layers=layers,
        )
        return self.cost.work_ms(work)


QWEN3_8B = ModelShape(
    num_layers=36,
    hidden=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    block_params=6.95e9,
    weights_bytes=16.4e9,
)
QWEN3_32B = ModelShape(
    num_layers=64,
    hidden=5120,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    block_params=31.2e9,
    weights_bytes=65.6e9,
)
H200 = GpuClass(flops_per_s=989e12, hbm_bytes_per_s=4.8e12, memory_bytes=141e9)

DECODED_TOKENS = 8_000  # assumed: of a sequence's KV, read for each decoded token


def by_arithmetic(name: str, model: ModelShape, gpu: GpuClass, num_gpus: int) -> Machine:
    """FLOPs over speed: 2 a parameter and row, 4 a head dimension and row-key pair."""
    speed = num_gpus * (gpu.tensor_parallel_efficiency if num_gpus > 1 else 1.0)
    per_ms = gpu.flops_per_s * speed / 1e3
    row_flops = 2.0 * model.block_params / model.num_layers
    pair_flops = 4.0 * model.num_heads * model.head_dim
    project_flops = 2.0 * model.hidden * 2.0 * model.num_kv_heads * model.head_dim
    cost = CostModel(
        num_layers=model.num_layers,
        fixed_ms=gpu.fixed_ms,
        request_ms=gpu.request_ms,
        layer_ms=gpu.layer_ms,
        member_ms=gpu.member_ms,
        row_ms=row_flops / (per_ms * gpu.dense_efficiency),
        compare_ms=project_flops / (per_ms * gpu.dense_efficiency),
        pair_ms=pair_flops / (per_ms * gpu.attention_efficiency),
        selected_pair_ms=pair_flops / (per_ms * gpu.sparse_efficiency),
        # each GPU copies its own heads from host memory
        reuse_ms=model.kv_token_bytes / (gpu.host_bytes_per_s * num_gpus / 1e3),
    )
    token_bytes = model.kv_token_bytes * model.num_layers
    free_bytes = num_gpus * (gpu.memory_bytes * gpu.memory_share - gpu.activation_bytes)
    read_per_ms = gpu.hbm_bytes_per_s * gpu.hbm_efficiency * speed / 1e3
    return Machine(
        name=name,
        source="arithmetic, efficiencies assumed",
        cost=cost,
        kv_token_bytes=model.kv_token_bytes,
        kv_capacity_tokens=int((free_bytes - model.weights_bytes) / token_bytes),
        decode_ms=model.weights_bytes / read_per_ms,
        decode_seq_ms=DECODED_TOKENS * token_bytes / read_per_ms,
    )


MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        by_arithmetic("qwen3-8b-h200", QWEN3_8B, H200, 1),
        by_arithmetic("qwen3-32b-2xh200", QWEN3_32B, H200, 2),
    )
}
