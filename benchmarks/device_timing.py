"""Interleaved timing on a GPU: by its own events, with nothing of the inputs left in its caches."""

from collections.abc import Callable, Mapping

import torch

from benchmarks.timing import interleaved_ms

# Larger than any level-two cache, and long enough to write that the candidate's launches are queued
# behind it: the events then enclose the GPU's time, not the host's.
FLUSH_BYTES = 1 << 30


def device_ms(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of each candidate, one call of each a round, after one call to warm up."""
    if device.type != "cuda":
        return interleaved_ms(candidates, rounds=rounds)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    for call in candidates.values():
        call()
    torch.cuda.synchronize(device)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return times
