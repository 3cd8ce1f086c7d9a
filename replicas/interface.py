"""What a replica's engine promises to whoever serves it, without any engine behind it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from planner.cost_model import CostModel
from planner.timeline import Link
from planner.types import EngineInfo, EngineLoad, PrefillResult, RagRequest, Ticket
from replicas.cache_types import CacheOperations, TierReport


class EngineDeadError(Exception):
    """The engine process or one of its tensor-parallel ranks is gone; the replica must end."""


class PromptTooLongError(ValueError):
    """The prompt and the tokens to generate do not fit the model's length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDelta:
    """New text of one request. The last delta has `finish_reason` and the prefill's `result`."""

    text: str
    num_generated: int  # tokens so far
    token_ids: tuple[int, ...] = ()  # the new ones
    logprobs: tuple[float, ...] | None = None  # of the new ones, if the request asked for them
    finish_reason: str | None = None  # "stop", "length"
    result: PrefillResult | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyUpdate:
    """Chunks that appeared in and left the node's store since the last update.

    `reset` means that `added` is everything there is.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    reset: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """A chunk in the node's store, as `/v1/chunks` shows it."""

    chunk_id: str
    num_tokens: int
    nbytes: int
    tier: str


class RagEngine(Protocol):
    """An engine that prefills with chunk reuse and decodes.

    Constructing one does no work; `start` loads the model. Aborting an iteration of `generate`
    (`aclose`, cancellation) frees the request's blocks and leases.
    """

    async def start(self) -> EngineInfo: ...

    @property
    def cost(self) -> CostModel:
        """The prefill's cost: the profile's or measured at start, refreshed by every prefill."""
        ...

    @property
    def link(self) -> Link | None:
        """What stored KV comes over; None where it is in this node's memory."""
        ...

    def generate(self, request: RagRequest, ticket: Ticket) -> AsyncIterator[GenerationDelta]:
        """Prefill as the ticket says, then decode.

        Raises PromptTooLongError before the first delta, EngineDeadError at any time.
        """
        ...

    async def ingest(self, token_ids: tuple[int, ...], *, cache_salt: str = "") -> StoredChunk:
        """Compute a chunk's isolated KV and store it; returns at once if it is stored.

        Raises ValueError for a chunk that cannot be stored (empty, too long, store full).
        """
        ...

    def find_chunk(self, chunk_id: str) -> StoredChunk | None: ...

    @property
    def cache(self) -> CacheOperations:
        """What an operator may do with the store, once the engine has started."""
        ...

    def tier_report(self) -> TierReport:
        """What the tiers did and hold, for the metrics."""
        ...

    def load(self) -> EngineLoad: ...

    def residency_update(self) -> ResidencyUpdate: ...

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine cannot serve."""
        ...

    async def close(self) -> None: ...
