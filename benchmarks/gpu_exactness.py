"""Do the phases compute what the model's own forward computes, on this device?

Three cases must equal full prefill: everything recomputed (r = 1), WarmUp through all layers
(w = L), and one stored chunk behind its own prefix with nothing recomputed. Small random Llama and
Qwen3. In float32 the log-probabilities after the prompt may differ by 1e-4; in bf16 they may be as
far from float32's as twice the model's own bf16 forward is. Exits with 1 if they are not.

    python -m benchmarks.gpu_exactness
"""

import argparse
import random
import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.random_prefill import random_model, random_tokens, small_config
from benchmarks.report import print_json, print_table
from benchmarks.walked_prefill import ChunkMemory, run_phases, stored_job
from planner.types import Signal
from replicas.transformers_model import TransformersModel

FLOAT32_LOG_PROB = 1e-4  # sums in another order, over 4 layers
# Rounding to bf16 at other places than the model's own forward does gives another error, but of the
# same size; the floor is for a forward that happens to be near.
BF16_TIMES_OWN_ERROR, BF16_FLOOR = 2.0, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    signal: Signal
    w: int
    p: int
    coverage: float
    is_single: bool = False  # one chunk, stored behind the prefix that it stands behind
    is_control: bool = False  # must differ, else the others show nothing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-seeds", type=int, default=2)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    results = []
    for family in ("llama", "qwen3"):
        for seed in range(args.seed, args.seed + args.num_seeds):
            results += _one_model(family, seed, device)
    columns = ["family", "seed", "dtype", "case", "kv_difference", "log_prob_difference", "allowed"]
    print_table([*columns, "holds"], [[r[c] for c in [*columns, "holds"]] for r in results])
    print_json("gpu_exactness", seed=args.seed, results=results)
    if not all(r["holds"] for r in results):
        sys.exit(1)


def _one_model(family: str, seed: int, device: torch.device) -> list[dict[str, object]]:
    config = small_config(family)
    exact = random_model(config, device=device, dtype=torch.float32, seed=seed)
    rounded = random_model(config, device=device, dtype=torch.bfloat16, seed=seed)
    rounded.model.load_state_dict(exact.model.state_dict())  # the angles of RoPE stay float32
    cases = [
        Case(name="r=1 kv_dev", signal=Signal.KV_DEV, w=1, p=2, coverage=1.0),
        Case(name="r=1 qci", signal=Signal.QCI, w=0, p=2, coverage=1.0),
        Case(name="w=L", signal=Signal.KV_DEV, w=exact.num_layers, p=0, coverage=0.0),
        Case(name="one chunk", signal=Signal.KV_DEV, w=0, p=0, coverage=0.0, is_single=True),
        Case(name="control", signal=Signal.KV_DEV, w=0, p=0, coverage=0.0, is_control=True),
    ]
    results = []
    for case in cases:
        rng = random.Random(seed)
        lengths = [rng.randint(1, 200) for _ in range(1 if case.is_single else 4)]
        chunks = [random_tokens(rng, length, config.vocab_size) for length in lengths]
        prefix = random_tokens(rng, rng.randint(1, 40), config.vocab_size)
        suffix = random_tokens(rng, rng.randint(1, 40), config.vocab_size)
        prompt = prefix, chunks, suffix
        tokens = [*prefix, *(token for chunk in chunks for token in chunk), *suffix]
        own_kv, truth = _own_forward(exact, tokens)
        for model in (exact, rounded):
            kv, mine = _through_phases(model, case, *prompt)
            differs = float((mine - truth).abs().max())
            if model is exact:
                allowed, reference = FLOAT32_LOG_PROB, own_kv
            else:
                reference, own = _own_forward(rounded, tokens)
                own_error = float((own - truth).abs().max())
                allowed = max(BF16_FLOOR, BF16_TIMES_OWN_ERROR * own_error)
            results.append(
                {
                    "family": family,
                    "seed": seed,
                    "dtype": str(model.dtype).removeprefix("torch."),
                    "case": case.name,
                    "num_tokens": len(tokens),
                    "kv_difference": float((kv - reference).abs().max()),
                    "log_prob_difference": differs,
                    "allowed": allowed,
                    "holds": (differs <= allowed) is not case.is_control,
                }
            )
    return results


def _through_phases(
    model: TransformersModel,
    case: Case,
    prefix: list[int],
    chunks: list[list[int]],
    suffix: list[int],
) -> tuple[Tensor, Tensor]:
    """KV, as `_own_forward`, and log-probabilities after the prompt."""
    memory = ChunkMemory(model.device)
    anchor = prefix if case.is_single else prefix[:1]
    job = stored_job(model, memory, prefix, chunks, suffix, coverage=case.coverage, anchor=anchor)
    cache = run_phases(model, memory, job, signal=case.signal, w=case.w, p=case.p)
    kv = torch.stack((cache.k, cache.v))[:, :, :-1]
    return kv.float(), _last_log_probs(model, kv, job.token_ids)


@torch.inference_mode()
def _own_forward(model: TransformersModel, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """KV of all tokens but the last, [2, num_layers, num_tokens - 1, num_kv_heads, head_dim], and
    the log-probabilities after all of them."""
    cache = DynamicCache()
    ids = torch.tensor([tokens], device=model.device)
    log_probs = model.model(ids, past_key_values=cache).logits[0, -1].float().log_softmax(-1)
    keys = torch.stack([layer.keys[0].transpose(0, 1) for layer in cache.layers])
    values = torch.stack([layer.values[0].transpose(0, 1) for layer in cache.layers])
    return torch.stack((keys, values))[:, :, :-1].float(), log_probs


@torch.inference_mode()
def _last_log_probs(model: TransformersModel, kv: Tensor, tokens: list[int]) -> Tensor:
    cache = DynamicCache()
    for layer in range(model.num_layers):
        k, v = (x[layer].transpose(0, 1)[None].clone() for x in kv)
        cache.update(k, v, layer)
    last = torch.tensor([tokens[-1:]], device=model.device)
    return model.model(last, past_key_values=cache).logits[0, -1].float().log_softmax(-1)


if __name__ == "__main__":
    main()
