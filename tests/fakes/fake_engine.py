"""A RagEngine without a model: sleeps where an engine computes, and answers with known text."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from kv_tier.keys import content_id
from planner import (
    CostModel,
    EngineInfo,
    EngineLoad,
    PrefillResult,
    PrefillTimings,
    RagRequest,
    Ticket,
)
from replicas.cache_types import CacheOperations, TierReport
from replicas.config import EngineConfig
from replicas.interface import (
    EngineDeadError,
    GenerationDelta,
    PromptTooLongError,
    ResidencyUpdate,
    StoredChunk,
)
from tests.fakes.fake_cache import FakeCache

NUM_LAYERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeEngineConfig:
    """`state_dir` is how a test in another process sees and steers the engine.

    `events` there gets a line for each thing that happens ("start ID", "first ID", "done ID",
    "cancelled ID"); the files `prefill_ms`, `token_ms` and `start_ms` hold delays, `cost_ms` what
    the engine says that a prefill takes; a file `die` makes the engine dead, a file `broken` makes
    it fail to start.
    """

    state_dir: str
    max_model_len: int = 4096
    max_num_seqs: int = 8
    kv_capacity_tokens: int = 1 << 20
    model: str = "fake-model"


def build(config: FakeEngineConfig) -> "FakeEngine":
    return FakeEngine(config)


def build_for_server(config: EngineConfig) -> "FakeEngine":
    """The fake in the place of the real engine, with the host tier's folder for its state."""
    Path(config.host_tier_dir).mkdir(parents=True, exist_ok=True)
    return FakeEngine(
        FakeEngineConfig(
            state_dir=config.host_tier_dir,
            model=config.model_name,
            max_num_seqs=config.max_num_seqs,
        )
    )


def token_text(index: int) -> str:
    """What the fake generates as its token number `index`."""
    return f"t{index} "


class FakeEngine:
    """Stores every chunk that it sees, as if each were computed after its request."""

    def __init__(
        self, config: FakeEngineConfig, *, operations: CacheOperations | None = None
    ) -> None:
        """operations: in the place of those on the engine's own chunks"""
        self._config = config
        self._dir = Path(config.state_dir)
        self.fake_cache = FakeCache()
        self._operations = operations or self.fake_cache
        self._added: list[str] = []
        self._num_running = 0

    async def start(self) -> EngineInfo:
        if (self._dir / "broken").exists():
            raise RuntimeError("the fake engine is told to be broken")
        await asyncio.sleep(self._delay_ms("start_ms") / 1e3)
        self._note(f"pid {os.getpid()}")
        self._note(f"gpus {os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}")
        return EngineInfo(
            model=self._config.model,
            fingerprint="fake",
            num_layers=NUM_LAYERS,
            max_model_len=self._config.max_model_len,
            kv_capacity_tokens=self._config.kv_capacity_tokens,
            max_num_seqs=self._config.max_num_seqs,
            tensor_parallel_size=1,
        )

    @property
    def link(self) -> None:
        return None

    @property
    def cost(self) -> CostModel:
        return CostModel(
            num_layers=NUM_LAYERS,
            fixed_ms=max(1.0, self._delay_ms("cost_ms")),
            row_ms=0.01,
            pair_ms=0.0,
            selected_pair_ms=0.0,
            reuse_ms=0.0,
        )

    async def generate(self, request: RagRequest, ticket: Ticket) -> AsyncIterator[GenerationDelta]:
        self._raise_if_dead()
        num_prompt, max_tokens = request.num_prompt_tokens, request.sampling.max_tokens
        if num_prompt + max_tokens > self._config.max_model_len:
            raise PromptTooLongError(f"{num_prompt} and {max_tokens} tokens do not fit")
        ids = [content_id(chunk, cache_salt=request.cache_salt) for chunk in request.chunks]
        cached = sum(
            len(chunk)
            for chunk, chunk_id in zip(request.chunks, ids, strict=True)
            if chunk_id in self.fake_cache.host
        )
        self._num_running += 1
        self._note(
            f"start {request.request_id} pid={os.getpid()} batch={ticket.batch_size} "
            f"salt={request.cache_salt}"
        )
        finished = False
        try:
            await self._pause("prefill_ms")
            self._note(f"first {request.request_id}")
            result = self._result(request, ticket, cached)
            for chunk, chunk_id in zip(request.chunks, ids, strict=True):
                self._store(chunk_id, len(chunk))
            for index in range(max_tokens):
                self._raise_if_dead()
                last = index == max_tokens - 1
                finished = last
                yield GenerationDelta(
                    text=token_text(index),
                    num_generated=index + 1,
                    finish_reason="length" if last else None,
                    result=result if last else None,
                )
                await self._pause("token_ms")
        finally:
            self._num_running -= 1
            self._note(f"{'done' if finished else 'cancelled'} {request.request_id}")

    async def ingest(self, token_ids: tuple[int, ...], *, cache_salt: str = "") -> StoredChunk:
        self._raise_if_dead()
        if not token_ids:
            raise ValueError("a chunk needs at least one token")
        if len(token_ids) > self._config.max_model_len:
            raise ValueError(f"a chunk of {len(token_ids)} tokens is too long")
        return self._store(content_id(token_ids, cache_salt=cache_salt), len(token_ids))

    def find_chunk(self, chunk_id: str) -> StoredChunk | None:
        return self.fake_cache.host.get(chunk_id)

    @property
    def cache(self) -> CacheOperations:
        return self._operations

    def tier_report(self) -> TierReport:
        return self._operations.report()

    def load(self) -> EngineLoad:
        return EngineLoad(num_running=self._num_running, num_waiting=0, num_ingest_backlog=0)

    def residency_update(self) -> ResidencyUpdate:
        removed = self.fake_cache.removed
        update = ResidencyUpdate(added=tuple(self._added), removed=tuple(removed))
        self._added.clear()
        removed.clear()
        return update

    async def check_health(self) -> None:
        self._raise_if_dead()

    async def close(self) -> None:
        self._note("closed")

    def _store(self, chunk_id: str, num_tokens: int) -> StoredChunk:
        chunk = StoredChunk(
            chunk_id=chunk_id, num_tokens=num_tokens, nbytes=num_tokens * 64, tier="host"
        )
        if self.fake_cache.host.setdefault(chunk_id, chunk) is chunk:
            self._added.append(chunk_id)
        return chunk

    def _result(self, request: RagRequest, ticket: Ticket, cached: int) -> PrefillResult:
        plan = ticket.plan
        num_context = sum(map(len, request.chunks))
        recomputed = num_context - cached + round(plan.coverage * cached)
        return PrefillResult(
            policy=plan.policy,
            signal=plan.signal,
            warmup_depth=plan.warmup_depth,
            probe_len=plan.probe_len,
            coverage=recomputed / num_context if num_context else 0.0,
            num_prompt_tokens=request.num_prompt_tokens,
            num_context_tokens=num_context,
            num_miss_tokens=num_context - cached,
            num_recomputed_tokens=recomputed,
            cached_tokens={"host": cached},
            batch_size=ticket.batch_size,
            timings=PrefillTimings(
                compute_ms=self._delay_ms("prefill_ms"),
                first_token_ms=self._delay_ms("prefill_ms"),
            ),
        )

    async def _pause(self, delay: str) -> None:
        """Sleep for a delay, also where it is changed meanwhile."""
        started_s = time.monotonic()
        while (left_s := started_s + self._delay_ms(delay) / 1e3 - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, 0.05))

    def _delay_ms(self, name: str) -> float:
        try:
            return float((self._dir / name).read_text())
        except (FileNotFoundError, ValueError):
            return 0.0

    def _raise_if_dead(self) -> None:
        if (self._dir / "die").exists():
            raise EngineDeadError("the fake engine is told to die")

    def _note(self, event: str) -> None:
        with (self._dir / "events").open("a") as file:
            file.write(event + "\n")
