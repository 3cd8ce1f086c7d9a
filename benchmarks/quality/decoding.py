"""Greedy answers over several KV caches of one prompt, decoded together."""

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from benchmarks.walked_prefill import DeviceCache


def greedy_answers(
    model: Any,
    last_token: int,
    caches: Sequence[DeviceCache],
    *,
    num_tokens: int,
    max_new_tokens: int,
    eos: Set[int],
) -> list[list[int]]:
    """What follows a prompt of which all but the last token have their KV, without the end token.

    model: a Hugging Face causal language model
    num_tokens: of the prompt that have KV, the first rows of each cache
    """
    cache = DynamicCache()
    cache.layers = [
        _RoomyLayer(
            [c.k[layer, :num_tokens] for c in caches],
            [c.v[layer, :num_tokens] for c in caches],
            room=max_new_tokens,
        )
        for layer in range(len(caches[0].k))
    ]
    last = torch.full((len(caches), 1), last_token, device=caches[0].k.device)
    answers: list[list[int]] = [[] for _ in caches]
    open_ = set(range(len(caches)))
    for _ in range(max_new_tokens):
        logits = model(last, past_key_values=cache).logits[:, -1]
        last = logits.argmax(-1, keepdim=True)
        for idx, token in enumerate(last[:, 0].tolist()):
            if token in eos:
                open_.discard(idx)
            elif idx in open_:
                answers[idx].append(token)
        if not open_:
            break
    return answers


class _RoomyLayer(DynamicLayer):
    """A layer with room for the answer: appending to transformers' own copies all of it."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], *, room: int) -> None:
        """keys, values: of each sequence, [num_tokens, num_kv_heads, head_dim]"""
        super().__init__()
        self._buffers = [self._stacked(parts, room) for parts in (keys, values)]
        self._used = len(keys[0])
        self.dtype, self.device = keys[0].dtype, keys[0].device
        self.is_initialized = True
        self._show()

    @staticmethod
    def _stacked(parts: Sequence[Tensor], room: int) -> Tensor:
        """[num_sequences, num_kv_heads, num_tokens + room, head_dim]"""
        num_tokens, num_heads, head_dim = parts[0].shape
        buffer = parts[0].new_empty(len(parts), num_heads, num_tokens + room, head_dim)
        for sequence, part in zip(buffer, parts, strict=True):
            sequence[:, :num_tokens] = part.transpose(0, 1)
        return buffer

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        end = self._used + key_states.shape[-2]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._used : end] = new
        self._used = end
        self._show()
        return self.keys, self.values

    def _show(self) -> None:
        self.keys, self.values = (buffer[:, :, : self._used] for buffer in self._buffers)
