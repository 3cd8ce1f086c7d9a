"""Prefill without KV blocks: finished layers stay in host memory until vLLM has room for them.

A prompt needs its blocks in all layers at once to be decoded, but only one layer at a time to be
prefilled. So a prompt that does not fit is prefilled all the same, its layers are parked, its first
token is served, and decoding starts when blocks are free.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenSampling:
    """vLLM's sampling parameters of the same names, those that a single token needs."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkOrder:
    """Where to keep the layers, and how to choose the first token: vLLM's sampler never sees it."""

    park_id: str
    sampling: FirstTokenSampling


def sample_first(logits: Tensor, options: FirstTokenSampling) -> int:
    """One token id: greedy at temperature 0, else filtered by top_k, min_p and top_p in turn.

    logits: [vocab_size], float32
    """
    if options.temperature < 1e-5:
        return int(logits.argmax())
    scores = logits / options.temperature
    if 0 < options.top_k < len(scores):
        lowest = scores.topk(options.top_k).values[-1]
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    probabilities = scores.softmax(-1)
    if options.min_p > 0.0:
        probabilities = probabilities.where(
            probabilities >= options.min_p * probabilities.max(), 0.0
        )
    if options.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # the mass of the more likely ones
        ordered = ordered.where(before < options.top_p * ordered.sum(), 0.0)
        probabilities = torch.zeros_like(probabilities).scatter_(0, order, ordered)
    return int(torch.multinomial(probabilities, 1))


class ParkingLot:
    """One rank's parked KV in host memory, page-locked where there is a GPU."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self._num_layers = num_layers
        self._pin = device.type == "cuda"
        self._parked: dict[str, list[tuple[Tensor, Tensor] | None]] = {}

    def __len__(self) -> int:
        return len(self._parked)

    def put(self, park_id: str, layer: int, k: Tensor, v: Tensor) -> None:
        """Copy one layer's rotated K and V, [num_tokens, num_kv_heads, head_dim]."""
        layers = self._parked.setdefault(park_id, [None] * self._num_layers)
        layers[layer] = (self._copy(k), self._copy(v))

    def rewrite(self, park_id: str, layer: int, at: Tensor, k: Tensor, v: Tensor) -> None:
        """Better K and V of some tokens of a layer that is there; at: [n], int64."""
        parked = self._parked[park_id][layer]
        assert parked is not None, "the layer was never put"
        for kept, fresh in zip(parked, (k, v), strict=True):
            kept[at.to(kept.device)] = fresh.to(kept.device)

    def take(self, park_id: str) -> list[tuple[Tensor, Tensor]] | None:
        """All layers, which are forgotten here; None if one is not there."""
        layers = self._parked.pop(park_id, None)
        if layers is None or any(layer is None for layer in layers):
            return None
        return [layer for layer in layers if layer is not None]

    def drop(self, park_id: str) -> None:
        self._parked.pop(park_id, None)

    def _copy(self, x: Tensor) -> Tensor:
        kept = torch.empty(x.shape, dtype=x.dtype, pin_memory=self._pin)
        return kept.copy_(x)  # blocking: what is parked must be whole when it is reported
