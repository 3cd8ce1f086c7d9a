"""Interleaved timing: a shared machine's noise then hurts all candidates alike."""

import time
from collections.abc import Callable, Mapping
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
