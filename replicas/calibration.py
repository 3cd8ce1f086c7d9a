"""A first cost model, measured on the engine itself when it starts: a few small prefills."""

import random
from typing import Protocol

from planner.cost_model import CostModel, PrefillShape, Work, fit_cost_model, prefill_work
from planner.types import Signal
from replicas.batch import SegmentKind
from replicas.connector_types import RequestParams, ResultParams, SegmentSpan
from replicas.interface import StoredChunk

LONGEST_TOKENS = 2048
REUSE_COVERAGES = (0.0, 0.1, 0.4)
SUFFIX_TOKENS = 16
REPEATS = 2


class MeasuredEngine(Protocol):
    """What the calibration runs on."""

    @property
    def reuses_chunks(self) -> bool: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    async def prefill_ms(
        self, token_ids: list[int], params: RequestParams | None
    ) -> tuple[float, ResultParams | None]: ...

    async def ingest(self, token_ids: tuple[int, ...], *, cache_salt: str = "") -> StoredChunk: ...

    def delete_chunk(self, chunk_id: str) -> bool: ...


async def measure_cost(engine: MeasuredEngine, *, num_layers: int) -> CostModel:
    """Time full prefills of three lengths and, with chunk reuse, three coverages of two chunks."""
    rng = random.Random()  # of its own: other prompts than any replica before
    longest = min(LONGEST_TOKENS, engine.max_model_len // 2)
    works: list[Work] = []
    times: list[float] = []

    def tokens(count: int) -> list[int]:
        return [rng.randrange(engine.vocab_size) for _ in range(count)]

    async def measure(work: Work, token_ids: list[int], params: RequestParams | None) -> None:
        # the best of a few: what else the machine does at start-up is not the prefill's cost
        runs = [(await engine.prefill_ms(token_ids, params))[0] for _ in range(REPEATS)]
        works.append(work)
        times.append(min(runs))

    await engine.prefill_ms(tokens(SUFFIX_TOKENS), None)  # warm-up: first calls allocate
    for length in (max(2, longest // 32), longest // 4, longest):
        work = _work(0, length, num_layers=num_layers, warmup_depth=num_layers, coverage=1.0)
        await measure(work, tokens(length), _exact(num_layers, engine))
    for length in (longest // 4, longest) if engine.reuses_chunks else ():
        chunk, salt = tokens(length - SUFFIX_TOKENS), f"calibration-{rng.random()}"
        try:
            stored = await engine.ingest(tuple(chunk), cache_salt=salt)
        except ValueError:  # a store without room for it now
            continue
        for coverage in REUSE_COVERAGES:
            work = _work(
                len(chunk), SUFFIX_TOKENS, num_layers=num_layers, warmup_depth=1, coverage=coverage
            )
            prompt = [*chunk, *tokens(SUFFIX_TOKENS)]
            await measure(work, prompt, _reuse(len(chunk), salt, coverage))
        engine.delete_chunk(stored.chunk_id)
    return fit_cost_model(works, times, num_layers=num_layers)


def _exact(num_layers: int, engine: MeasuredEngine) -> RequestParams | None:
    """All layers for all tokens by our own walk; vLLM's prefill where reuse is off."""
    if not engine.reuses_chunks:
        return None
    return RequestParams(warmup_depth=num_layers, probe_len=0)


def _reuse(num_chunk: int, salt: str, coverage: float) -> RequestParams:
    span = SegmentSpan(kind=SegmentKind.CHUNK, start=0, end=num_chunk)
    return RequestParams(
        segments=[span], cache_salt=salt, warmup_depth=1, probe_len=1, coverage=coverage
    )


def _work(
    num_cached: int, num_always: int, *, num_layers: int, warmup_depth: int, coverage: float
) -> Work:
    return prefill_work(
        [PrefillShape(num_cached=num_cached, num_always=num_always)],
        [coverage],
        signal=Signal.KV_DEV,
        warmup_depth=warmup_depth,
        probe_len=min(1, num_layers - warmup_depth),
        num_layers=num_layers,
    )
