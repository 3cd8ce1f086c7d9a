"""Plans and results with every field set; a test names those that it is about."""

from typing import Any

from planner import PrefillResult, PrefillTimings, RequestPlan, Signal


def request_plan(**fields: Any) -> RequestPlan:
    base: dict[str, Any] = {
        "policy": "adaptive",
        "signal": Signal.KV_DEV,
        "warmup_depth": 1,
        "probe_len": 1,
        "coverage": 0.2,
        "expected_ms": 10.0,
        "budget_ms": 100.0,
    }
    return RequestPlan(**{**base, **fields})


def prefill_result(**fields: Any) -> PrefillResult:
    """Of a prompt of 100 tokens, 80 of them in stored chunks."""
    base: dict[str, Any] = {
        "policy": "adaptive",
        "signal": Signal.KV_DEV,
        "warmup_depth": 1,
        "probe_len": 1,
        "coverage": 0.2,
        "num_prompt_tokens": 100,
        "num_context_tokens": 80,
        "num_miss_tokens": 0,
        "num_recomputed_tokens": 36,
        "cached_tokens": {"host": 80},
        "batch_size": 1,
        "timings": PrefillTimings(),
    }
    return PrefillResult(**{**base, **fields})
