"""What does a prefill with chunk reuse cost on a GPU, against full prefill and its own arithmetic?

Ceiling: the share of token-layers that a configuration computes, times full prefill's time (or the
transfer of the stored KV, where that is longer). A random model in Qwen3-8B's shape, bf16, chunks
of 512 tokens in page-locked host memory, copied layer by layer while the phases run; no vLLM.

    python -m benchmarks.bench_gpu_prefill
    python -m benchmarks.bench_gpu_prefill --tiny     # a toy shape, for any device
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from transformers import Qwen3Config

from benchmarks.random_prefill import random_model, random_tokens, small_config
from benchmarks.report import argument_parser, print_json, print_table
from benchmarks.walked_prefill import ChunkMemory, DeviceCache, run_phases, stored_job
from planner.cost_model import PrefillShape, prefill_work
from planner.types import Signal
from replicas.transformers_model import TransformersModel

SUFFIX_TOKENS = 32
ANCHOR_TOKENS = 1
OWN, FULL = "model's own forward", "w=L"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    w: int | None  # None: all layers
    p: int
    coverage: float
    signal: Signal = Signal.KV_DEV


CONFIGS = {
    FULL: Config(w=None, p=0, coverage=0.0),
    "w1 p1 r.15": Config(w=1, p=1, coverage=0.15),
    "w1 p2 r.15": Config(w=1, p=2, coverage=0.15),
    "qci w1 p2 r.15": Config(w=1, p=2, coverage=0.15, signal=Signal.QCI),
    "full_reuse": Config(w=0, p=0, coverage=0.0),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("gpu-prefill", __doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if args.tiny:
        config, chunk_tokens, lengths = small_config("qwen3"), 32, args.tokens or [128, 512]
    else:
        config, chunk_tokens = _qwen3_8b(args.layers), 512
        lengths = args.tokens or [4096, 16384]
    model = random_model(config, device=device, dtype=torch.bfloat16, seed=args.seed)
    results = []
    for num_tokens in lengths:
        results += _one_length(
            model, num_tokens, chunk_tokens, args.rounds, random.Random(args.seed)
        )
    print_json("gpu_prefill", seed=args.seed, results=results)


def _qwen3_8b(num_layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )


def _one_length(
    model: TransformersModel, num_tokens: int, chunk_tokens: int, rounds: int, rng: random.Random
) -> list[dict[str, object]]:
    vocab_size = model.model.config.vocab_size
    anchor = random_tokens(rng, ANCHOR_TOKENS, vocab_size)
    chunks = [
        random_tokens(rng, chunk_tokens, vocab_size) for _ in range(num_tokens // chunk_tokens)
    ]
    suffix = random_tokens(rng, SUFFIX_TOKENS, vocab_size)
    memory = ChunkMemory(model.device)
    jobs = {
        name: stored_job(
            model, memory, anchor, chunks, suffix, coverage=config.coverage, anchor=anchor
        )
        for name, config in CONFIGS.items()
    }
    prompt = jobs[FULL].token_ids
    cache = DeviceCache(model, len(prompt), memory)
    ids = torch.tensor([prompt[:-1]], device=model.device)

    def own() -> None:
        with torch.inference_mode():
            model.model.model(ids, use_cache=True)

    def phases(name: str) -> Callable[[], None]:
        config = CONFIGS[name]
        w = model.num_layers if config.w is None else config.w

        def call() -> None:
            run_phases(
                model, memory, jobs[name], signal=config.signal, w=w, p=config.p, cache=cache
            )

        return call

    calls = {OWN: own, **{name: phases(name) for name in CONFIGS}}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_no in range(rounds + 1):  # the first one warms up
        for name, call in calls.items():
            spent_ms = _wall_ms(call, model.device)
            if round_no > 0:
                times[name].append(spent_ms)
    stored_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 2
    stored_bytes *= len(chunks) * chunk_tokens
    transfer_ms = _transfer_ms(stored_bytes, model.device)
    full_ms = median(times[OWN])  # the faster of the two would do; vLLM users have this one
    results, rows = [], []
    for name, values in times.items():
        spent_ms = median(values)
        share = 1.0 if name == OWN else _share(CONFIGS[name], chunk_tokens * len(chunks), model)
        ideal_ms = share * min(full_ms, median(times[FULL]))
        if name not in (OWN, FULL):
            ideal_ms = max(ideal_ms, transfer_ms)
        results.append(
            {
                "num_tokens": len(prompt),
                "config": name,
                "ms": spent_ms,
                "speedup": full_ms / spent_ms,
                "token_layer_share": share,
                "transfer_ms": transfer_ms,
                "ideal_ms": ideal_ms,
                "times_ideal": spent_ms / ideal_ms,
            }
        )
        rows.append((name, spent_ms, full_ms / spent_ms, share, ideal_ms, spent_ms / ideal_ms))
    print(f"\n{len(prompt)} tokens, stored KV {stored_bytes / 1e6:.4g} MB, {transfer_ms:.3g} ms")
    print_table(["config", "ms", "speed-up", "share", "ideal ms", "times ideal"], rows)
    return results


def _wall_ms(call: Callable[[], None], device: torch.device) -> float:
    """The host's time too: it is part of a prefill."""
    _wait(device)
    started = time.perf_counter()
    call()
    _wait(device)
    return (time.perf_counter() - started) * 1e3


def _transfer_ms(num_bytes: int, device: torch.device) -> float:
    """Of so many bytes from page-locked memory, by the best of three copies; 0 without a GPU."""
    if device.type != "cuda":
        return 0.0
    piece = torch.empty(min(num_bytes, 1 << 28), dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(piece, device=device)
    best = min(_wall_ms(lambda: there.copy_(piece, non_blocking=True), device) for _ in range(3))
    return best * num_bytes / len(piece)


def _share(config: Config, num_context: int, model: TransformersModel) -> float:
    """Token-layers computed over those of full prefill."""
    num_always = ANCHOR_TOKENS + SUFFIX_TOKENS
    work = prefill_work(
        [PrefillShape(num_cached=num_context, num_always=num_always)],
        [config.coverage],
        signal=config.signal,
        warmup_depth=model.num_layers if config.w is None else config.w,
        probe_len=config.p,
        num_layers=model.num_layers,
    )
    return work.rows / ((num_always + num_context) * model.num_layers)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
