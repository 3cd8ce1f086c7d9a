"""How full an engine's paged KV cache is, as far as its own requests tell."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class _Held:
    num_tokens: int
    room: "KvRoom"

    def grow_to(self, num_tokens: int) -> None:
        self.room.resident_tokens += num_tokens - self.num_tokens
        self.num_tokens = num_tokens


@dataclass(slots=True, kw_only=True)
class KvRoom:
    """Counts tokens of prompts and answers; vLLM counts blocks, of which each request starts one.

    resident_tokens: in KV blocks, or waiting for them
    parked_tokens: of prompts in host memory
    """

    capacity_tokens: int = 0
    parking_tokens: int = 0
    block_size: int = 1
    resident_tokens: int = 0
    parked_tokens: int = 0
    num_resident: int = 0

    def has_to_park(self, num_tokens: int) -> bool:
        """Whether a prompt has no blocks now, but host memory, and will have blocks one day."""
        parts = (self.num_resident + 1) * self.block_size  # blocks that are not full
        is_full = self.resident_tokens + num_tokens + parts > self.capacity_tokens
        fits_later = num_tokens + 2 * self.block_size <= self.capacity_tokens
        can_park = self.parked_tokens + num_tokens <= self.parking_tokens
        return is_full and fits_later and can_park

    @contextmanager
    def resident(self, num_tokens: int) -> Iterator[_Held]:
        held = _Held(0, self)
        self.num_resident += 1
        held.grow_to(num_tokens)
        try:
            yield held
        finally:
            held.grow_to(0)
            self.num_resident -= 1

    @contextmanager
    def parked(self, num_tokens: int) -> Iterator[None]:
        self.parked_tokens += num_tokens
        try:
            yield
        finally:
            self.parked_tokens -= num_tokens
