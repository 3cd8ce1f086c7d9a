"""How near is attention of selected queries to torch's fused causal attention, pair for pair?

A pair is a query row and a key that it sees; selected rows need fewer of them than the causal
triangle. Ceiling: SDPA's rate, pairs a second over the whole triangle, so a share of 1. The goal on
an H200 is a share of 0.6 at 16,384 tokens and a coverage of 0.15.

    python -m benchmarks.bench_attention
    python -m benchmarks.bench_attention --sweep    # tile shapes of the Triton kernel, on a GPU
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.device_timing import device_ms
from benchmarks.report import argument_parser, print_json, print_table
from benchmarks.timing import medians
from replicas.attention import SelectedAttention

SUFFIX_ROWS = 31  # the question, all of it computed, behind the context
BLOCK_SIZE = 16  # keys a page, as in vLLM
HEADS = {  # query heads, KV heads, head dim
    "smollm2-135m": (9, 3, 64),
    "qwen3-8b": (32, 8, 128),
    "qwen3-32b": (64, 8, 128),
}
CPU_SHAPES, CPU_TOKENS = ["smollm2-135m"], [512, 2048, 4144]
CUDA_SHAPES, CUDA_TOKENS = ["qwen3-8b", "qwen3-32b"], [4096, 16384]
# rows, keys of a step, warps, stages
SWEEP = [
    (128, 128, 8, 2),
    (128, 128, 8, 3),
    (128, 64, 8, 3),
    (128, 64, 8, 4),
    (64, 64, 4, 3),
    (64, 128, 4, 2),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One set of selected rows over one context."""

    q: Tensor  # [num_tokens, num_heads, head_dim]
    k: Tensor  # [num_tokens, num_kv_heads, head_dim]
    v: Tensor
    chosen: Tensor  # [num_selected], int64, ascending

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5

    @property
    def num_tokens(self) -> int:
        return len(self.q)

    @property
    def full_pairs(self) -> int:
        return self.num_tokens * (self.num_tokens + 1) // 2

    @property
    def selected_pairs(self) -> int:
        return int((self.chosen + 1).sum())


def main(argv: Sequence[str] | None = None) -> None:
    cuda = torch.cuda.is_available()
    parser = argument_parser("attention", __doc__)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--shapes", nargs="+", choices=HEADS)
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--coverage", type=float, nargs="+", default=[0.0, 0.05, 0.15, 0.30])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if args.sweep and device.type != "cuda":
        parser.error("--sweep needs a CUDA device")
    shapes = args.shapes or (CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES)
    lengths = args.tokens or (CUDA_TOKENS if device.type == "cuda" else CPU_TOKENS)
    torch.manual_seed(args.seed)
    results = []
    for shape in shapes:
        for num_tokens in lengths:
            for coverage in args.coverage:
                case = _case(HEADS[shape], num_tokens, coverage, device)
                candidates = _swept(case) if args.sweep else _candidates(case)
                measured = _measure(case, candidates, args.rounds, device)
                results += [
                    {"shape": shape, "num_tokens": num_tokens, "coverage": coverage, **result}
                    for result in measured
                ]
    columns = ["shape", "num_tokens", "coverage", "path", "ms", "tflops", "rate_share"]
    header = ["shape", "tokens", "coverage", "path", "ms", "TFLOP/s", "share of SDPA's rate"]
    print_table(header, [[result[c] for c in columns] for result in results])
    print_json("attention_tiles" if args.sweep else "attention", seed=args.seed, results=results)


def _case(
    heads: tuple[int, int, int], num_tokens: int, coverage: float, device: torch.device
) -> Case:
    num_heads, num_kv_heads, head_dim = heads

    def rand(num_heads: int) -> Tensor:
        return torch.randn(num_tokens, num_heads, head_dim, dtype=torch.bfloat16, device=device)

    num_context = num_tokens - SUFFIX_ROWS
    picked = torch.randperm(num_context, device=device)[: int(coverage * num_context)]
    suffix = torch.arange(num_context, num_tokens, device=device)
    return Case(
        q=rand(num_heads),
        k=rand(num_kv_heads),
        v=rand(num_kv_heads),
        chosen=torch.cat((picked.sort().values, suffix)),
    )


def _candidates(case: Case) -> dict[str, Callable[[], object]]:
    """What is compared; `sdpa` is the reference."""
    q, k, v = (x.transpose(0, 1)[None] for x in (case.q, case.k, case.v))
    offsets = [0, len(case.chosen)], [0, case.num_tokens]
    chosen_q = case.q[case.chosen]
    torch_plan = SelectedAttention(case.chosen, *offsets, case.q.dtype, backend="torch")

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    candidates: dict[str, Callable[[], object]] = {
        "sdpa": sdpa,
        "selected torch": lambda: torch_plan(chosen_q, case.k, case.v, case.scale),
    }
    if case.q.device.type != "cuda":
        return candidates
    from replicas.triton_attention import TritonSelectedAttention

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return sdpa()

    try:
        cudnn()
        candidates["sdpa cudnn"] = cudnn
    except RuntimeError as error:
        print(f"cuDNN's attention does not run here: {error}")
    triton_plan = TritonSelectedAttention(case.chosen, *offsets)
    candidates["triton"] = lambda: triton_plan(chosen_q, case.k, case.v, case.scale)
    pages, table = _paged(case)
    candidates["triton paged"] = lambda: triton_plan(
        chosen_q, *pages, case.scale, block_table=table
    )
    return candidates


def _paged(case: Case) -> tuple[Tensor, Tensor]:
    """K and V as halves of a paged cache, pages in random order; and the block table."""
    num_blocks = -(-case.num_tokens // BLOCK_SIZE)
    order = torch.randperm(num_blocks, device=case.k.device)
    shape = (2, num_blocks, BLOCK_SIZE, *case.k.shape[1:])
    pages = torch.zeros(shape, dtype=case.k.dtype, device=case.k.device)
    at = torch.arange(case.num_tokens, device=case.k.device)
    for half, values in zip(pages, (case.k, case.v), strict=True):
        half[order[at // BLOCK_SIZE], at % BLOCK_SIZE] = values
    return pages, order[None].to(torch.int32)


def _swept(case: Case) -> dict[str, Callable[[], object]]:
    """The Triton kernel with several tile shapes."""
    from replicas.triton_attention import TileShape, TritonSelectedAttention

    chosen_q = case.q[case.chosen]
    candidates = {"sdpa": _candidates(case)["sdpa"]}
    for rows, keys, num_warps, num_stages in SWEEP:
        shape = TileShape(rows=rows, keys=keys, num_warps=num_warps, num_stages=num_stages)
        plan = TritonSelectedAttention(
            case.chosen, [0, len(case.chosen)], [0, case.num_tokens], shape=shape
        )
        name = f"triton {rows}x{keys} warps {num_warps} stages {num_stages}"

        def call(plan: TritonSelectedAttention = plan) -> Tensor:
            return plan(chosen_q, case.k, case.v, case.scale)

        try:
            call()
            candidates[name] = call
        except Exception as error:  # more shared memory than there is: not a candidate
            print(f"{name} does not run: {error}")
    return candidates


def _measure(
    case: Case,
    candidates: dict[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
) -> list[dict[str, object]]:
    times = medians(device_ms(candidates, rounds=rounds, device=device))
    num_heads, head_dim = case.q.shape[1:]
    sdpa_rate = case.full_pairs / times["sdpa"]
    results = []
    for path, spent_ms in times.items():
        pairs = case.full_pairs if path.startswith("sdpa") else case.selected_pairs
        results.append(
            {
                "path": path,
                "ms": spent_ms,
                "pairs": pairs,
                "tflops": 4 * head_dim * num_heads * pairs / spent_ms / 1e9,
                "rate_share": pairs / spent_ms / sdpa_rate,
            }
        )
    return results


if __name__ == "__main__":
    main()
