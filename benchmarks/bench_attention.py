"""How far is attention of selected queries from torch's fused causal attention, pair for pair?

Ceiling: the time of the whole causal triangle times the share of query-key pairs that the selected
queries need. bf16, SmolLM2-135M's head shape unless told otherwise.

    python -m benchmarks.bench_attention
"""

import argparse

import torch
import torch.nn.functional as F

from benchmarks.report import print_json, print_table
from benchmarks.timing import interleaved_ms, medians
from replicas.attention import SelectedAttention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--coverage", type=float, default=0.15)
    parser.add_argument(
        "--heads", type=int, nargs=3, default=[9, 3, 64], metavar=("Q", "KV", "DIM")
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    rows, results = [], []
    for num_tokens in args.tokens:
        result = _measure(num_tokens, args.coverage, args.heads, args.rounds, device)
        results.append(result)
        rows.append(
            [result[k] for k in ("num_tokens", "full_ms", "selected_ms", "ideal_ms", "times_ideal")]
        )
    print_table(["tokens", "causal ms", "selected ms", "ideal ms", "times ideal"], rows)
    print_json("attention", seed=args.seed, results=results)


def _measure(
    num_tokens: int, coverage: float, heads: list[int], rounds: int, device: torch.device
) -> dict[str, float]:
    num_heads, num_kv_heads, head_dim = heads

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    q, k = rand(num_tokens, num_heads, head_dim), rand(num_tokens, num_kv_heads, head_dim)
    v, scale = rand(num_tokens, num_kv_heads, head_dim), head_dim**-0.5
    chosen = torch.randperm(num_tokens, device=device)[: int(coverage * num_tokens)].sort().values
    plan = SelectedAttention(chosen, [0, len(chosen)], [0, num_tokens], torch.bfloat16)

    def full() -> None:
        F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            is_causal=True,
            enable_gqa=True,
        )
        _wait(device)

    def selected() -> None:
        plan(q[chosen], k, v, scale)
        _wait(device)

    times = medians(interleaved_ms({"full": full, "selected": selected}, rounds=rounds))
    pairs = float((chosen + 1).sum()) / (num_tokens * (num_tokens + 1) / 2)
    ideal_ms = pairs * times["full"]
    return {
        "num_tokens": num_tokens,
        "full_ms": times["full"],
        "selected_ms": times["selected"],
        "ideal_ms": ideal_ms,
        "times_ideal": times["selected"] / ideal_ms,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
