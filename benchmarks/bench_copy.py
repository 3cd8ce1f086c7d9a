"""How fast do stored KV reach the GPU, and how much of it hides behind matrix products?

Ceilings: the bus (a page-locked copy of one large buffer), max(compute, transfer) for the two at
once, and the memory's own bandwidth (a copy on the device) for rotating and placing what arrived.

    python -m benchmarks.bench_copy
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.device_timing import device_ms
from benchmarks.report import argument_parser, print_json, print_table
from benchmarks.timing import medians

NUM_LAYERS = 36
NUM_KV_HEADS, HEAD_DIM = 8, 128  # Qwen3-8B, bf16
HIDDEN, WIDE = 4096, 12_288


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("copy", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no CUDA device: nothing to measure")
        print_json("copy", seed=args.seed, results=[])
        return
    torch.manual_seed(args.seed)
    device = torch.device("cuda")
    results = []
    for num_tokens in args.tokens:
        results += _bandwidths(num_tokens, args.rounds, device)
        results += _stitches(num_tokens, args.rounds, device)
        results += _overlap(num_tokens, args.rounds, device)
    columns = ["tokens", "what", "ms", "gb_per_s", "share_of_ceiling"]
    print_table(columns, [[r.get(c, "") for c in columns] for r in results])
    print_json("copy", seed=args.seed, results=results)


def _bandwidths(num_tokens: int, rounds: int, device: torch.device) -> list[dict[str, object]]:
    """One layer of stored KV by either kind of host memory, against one large pinned buffer."""
    shape = (2, NUM_KV_HEADS, num_tokens, HEAD_DIM)
    there = torch.empty(shape, dtype=torch.bfloat16, device=device)
    pageable = torch.zeros(shape, dtype=torch.bfloat16)
    pinned = torch.zeros(shape, dtype=torch.bfloat16, pin_memory=True)
    large = torch.zeros(1 << 28, dtype=torch.uint8, pin_memory=True)
    large_there = torch.empty_like(large, device=device)
    candidates: dict[str, Callable[[], object]] = {
        "bus": lambda: large_there.copy_(large, non_blocking=True),
        "pinned": lambda: there.copy_(pinned, non_blocking=True),
        "pageable": lambda: there.copy_(pageable, non_blocking=True),
    }
    times = medians(device_ms(candidates, rounds=rounds, device=device))
    sizes = {"bus": large.nbytes, "pinned": pinned.nbytes, "pageable": pageable.nbytes}
    ceiling = sizes["bus"] / times["bus"]
    return [
        {
            "tokens": num_tokens,
            "what": name,
            "ms": spent_ms,
            "gb_per_s": sizes[name] / spent_ms / 1e6,
            "share_of_ceiling": sizes[name] / spent_ms / ceiling,
        }
        for name, spent_ms in times.items()
    ]


def _stitches(num_tokens: int, rounds: int, device: torch.device) -> list[dict[str, object]]:
    """One layer of KV on the device into its rows, K rotated: the kernel and plain torch."""
    from replicas.triton_stitch import stitch_rotated, stitch_rotated_ref

    shape = (2, NUM_KV_HEADS, num_tokens, HEAD_DIM)
    stored = torch.randn(shape, dtype=torch.bfloat16, device=device)
    copied = torch.empty_like(stored)
    out = torch.empty(2, num_tokens, NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    angle = torch.rand(num_tokens, HEAD_DIM // 2, device=device)
    cos, sin = angle.cos(), angle.sin()
    rows = torch.randperm(num_tokens, device=device)
    candidates: dict[str, Callable[[], object]] = {
        "device copy": lambda: copied.copy_(stored),
        "stitch": lambda: stitch_rotated(*stored, cos, sin, *out, rows),
        "stitch in torch": lambda: stitch_rotated_ref(*stored, cos, sin, *out, rows),
    }
    times = medians(device_ms(candidates, rounds=rounds, device=device))
    return [
        {
            "tokens": num_tokens,
            "what": name,
            "ms": spent_ms,
            "gb_per_s": 2 * stored.nbytes / spent_ms / 1e6,  # read and written
            "share_of_ceiling": times["device copy"] / spent_ms,
        }
        for name, spent_ms in times.items()
    ]


def _overlap(num_tokens: int, rounds: int, device: torch.device) -> list[dict[str, object]]:
    """All layers' KV on a stream of their own, beside matrix products of 15% of the rows."""
    shape = (2, NUM_KV_HEADS, num_tokens, HEAD_DIM)
    pinned = [torch.zeros(shape, dtype=torch.bfloat16, pin_memory=True) for _ in range(NUM_LAYERS)]
    there = [torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(NUM_LAYERS)]
    rows = max(64, num_tokens * 15 // 100)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    x, up, down = rand(rows, HIDDEN), rand(HIDDEN, 2 * WIDE), rand(2 * WIDE, HIDDEN)
    side = torch.cuda.Stream(device)

    def compute(layer: int) -> None:
        """About the multiplications of one layer: its projections are a quarter of its MLP."""
        (x @ up) @ down

    def computes() -> None:
        for layer in range(NUM_LAYERS):
            compute(layer)

    def transfers() -> None:
        for source, target in zip(pinned, there, strict=True):
            target.copy_(source, non_blocking=True)

    def both() -> None:
        main_stream = torch.cuda.current_stream(device)
        side.wait_stream(main_stream)
        arrived = []
        with torch.cuda.stream(side):
            for source, target in zip(pinned, there, strict=True):
                target.copy_(source, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                arrived.append(event)
        for layer in range(NUM_LAYERS):  # a layer starts when its KV is there
            main_stream.wait_event(arrived[layer])
            compute(layer)

    candidates = {"compute": computes, "transfer": transfers, "both": both}
    times = medians(device_ms(candidates, rounds=rounds, device=device))
    ceiling_ms = max(times["compute"], times["transfer"])
    num_bytes = sum(x.nbytes for x in pinned)
    return [
        {
            "tokens": num_tokens,
            "what": f"{NUM_LAYERS} layers: {name}",
            "ms": spent_ms,
            **({} if name == "compute" else {"gb_per_s": num_bytes / spent_ms / 1e6}),
            **({"share_of_ceiling": ceiling_ms / spent_ms} if name == "both" else {}),
        }
        for name, spent_ms in times.items()
    ]


if __name__ == "__main__":
    main()
