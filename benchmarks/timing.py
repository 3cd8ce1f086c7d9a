"""Interleaved timing: a shared machine's noise then hurts all candidates alike."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median


def interleaved_ms(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each candidate, one call of each a round, after one call to warm up."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        call()
    for _ in range(rounds):
        for name, call in candidates.items():
            started = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - started) * 1e3)
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in times.items()}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0–1) of the values do not exceed."""
    if not values or not 0.0 < share <= 1.0:
        raise ValueError(f"need values and 0 < share <= 1, got {len(values)} and {share}")
    rank = math.ceil(round(share * len(values), 9))
    return sorted(values)[rank - 1]


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median and range as fields of a result: `name`, `name_min`, `name_max`."""
    return {name: median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
