"""Static configurations by name: the baselines that the same engine can run."""

from planner.types import RecomputeConfig, Signal

ADAPTIVE = "adaptive"
FULL_PREFILL = "full_prefill"
CUSTOM = "custom"

STATIC_POLICIES: dict[str, RecomputeConfig] = {
    FULL_PREFILL: RecomputeConfig(warmup_depth=None, probe_len=0, coverage=1.0),
    "full_reuse": RecomputeConfig(warmup_depth=0, probe_len=0, coverage=0.0),
    # CacheBlend (arXiv 2405.16444): layer 0 in full, deviation at layer 1, 15% recomputed
    "cacheblend": RecomputeConfig(signal=Signal.KV_DEV, warmup_depth=1, probe_len=1, coverage=0.15),
    # EPIC (arXiv 2410.15332): the first 16 tokens of every chunk but the first
    "epic": RecomputeConfig(
        signal=Signal.POSITION, warmup_depth=0, probe_len=0, tokens_per_chunk=16
    ),
    # FusionRAG (arXiv 2601.12904): the question alone ranks by the last layer, 15% recomputed
    "fusionrag": RecomputeConfig(
        signal=Signal.QCI_FINAL, warmup_depth=0, probe_len=0, coverage=0.15
    ),
    # ProphetKV (arXiv 2602.02579): question over the cache through all layers, 20% recomputed
    "prophetkv": RecomputeConfig(signal=Signal.QCI, warmup_depth=0, probe_len=None, coverage=0.20),
}


def policy_names() -> list[str]:
    """Every name that a request may ask for, the default first."""
    return [ADAPTIVE, *STATIC_POLICIES]
