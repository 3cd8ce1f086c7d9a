"""A first cost model, measured on the engine itself when it starts: a few small prefills."""

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from planner.cost_fit import fit_phases
from planner.cost_model import CostModel, PrefillShape, Work, phase_works, prefill_work
from planner.types import Signal
from replicas.batch import SegmentKind
from replicas.connector_types import RequestParams, ResultParams, SegmentSpan
from replicas.interface import StoredChunk
from replicas.phase_times import phase_times

LONGEST_TOKENS = 2048
FULL_SHARES = (1 / 32, 1 / 4, 1.0)  # of the longest
BATCH_SIZE = 4  # of the shortest ones, together
# (Probe length, coverage) by share of the longest
REUSES = {1 / 4: ((1, 0.2), (2, 0.2)), 1.0: ((1, 0.05), (2, 0.4))}
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
    """Time full prefills of three lengths and, with chunk reuse, a batch of short ones and a few
    coverages of two chunks, phase by phase."""
    return await _Calibration(engine, num_layers).run()


async def at_present_speed(engine: MeasuredEngine, cost: CostModel) -> CostModel:
    """A profile's cost, scaled by one full prefill: the machine is like the one that was measured,
    and may be busier. It also spares the first request what first calls allocate.
    """
    rng = random.Random()
    length = max(2, min(LONGEST_TOKENS, engine.max_model_len // 2) // 4)
    params = RequestParams(warmup_depth=cost.num_layers, probe_len=0)
    work = prefill_work(
        [PrefillShape(num_cached=0, num_always=length)],
        [1.0],
        signal=Signal.KV_DEV,
        warmup_depth=cost.num_layers,
        probe_len=0,
        num_layers=cost.num_layers,
    )
    runs = []
    for _ in range(1 + REPEATS):
        token_ids = [rng.randrange(engine.vocab_size) for _ in range(length)]
        runs.append((await engine.prefill_ms(token_ids, params))[0])
    expected_ms = cost.work_ms(work)
    return cost.observed(expected_ms, min(runs[1:]), plan_scale=cost.scale, weight=1.0)


class _Calibration:
    def __init__(self, engine: MeasuredEngine, num_layers: int) -> None:
        self._engine = engine
        self._num_layers = num_layers
        self._rng = random.Random()  # of its own: other prompts than any replica before
        self._batch_ids = itertools.count(1)  # far below the scheduler's
        self._batches: list[list[tuple[Work, float]]] = []  # (work, ms) of each phase

    async def run(self) -> CostModel:
        engine = self._engine
        longest = min(LONGEST_TOKENS, engine.max_model_len // 2)
        await engine.prefill_ms(self._tokens(SUFFIX_TOKENS), None)  # first calls allocate
        lengths = [max(2, int(share * longest)) for share in FULL_SHARES]
        if not engine.reuses_chunks:
            for length in lengths:
                await self._plain(length)
            return fit_phases(self._batches, num_layers=self._num_layers)
        for size, length in (*((1, length) for length in lengths), (BATCH_SIZE, lengths[0])):
            prompts = [self._tokens(length) for _ in range(size)]
            shape = PrefillShape(num_cached=0, num_always=length)
            params = RequestParams(
                warmup_depth=self._num_layers,
                probe_len=0,
                batch_size=size,
                wants_timeline=True,
            )
            await self._measure(prompts, params, [shape] * size)
        for share, plans in REUSES.items():
            await self._reuse(max(2, int(share * longest)), plans)
        return fit_phases(self._batches, num_layers=self._num_layers)

    async def _plain(self, length: int) -> None:
        """vLLM's own prefill, of which the whole time is all that is known."""
        token_ids = self._tokens(length)
        runs = [(await self._engine.prefill_ms(token_ids, None))[0] for _ in range(REPEATS)]
        shape = PrefillShape(num_cached=0, num_always=length)
        works = self._works([shape], warmup_depth=self._num_layers, probe_len=0, coverage=1.0)
        self._batches.append([(sum(works.values(), Work()), min(runs))])

    async def _reuse(self, length: int, plans: Sequence[tuple[int, float]]) -> None:
        chunk, salt = self._tokens(length), f"calibration-{self._rng.random()}"
        try:
            stored = await self._engine.ingest(tuple(chunk), cache_salt=salt)
        except ValueError:  # a store without room for it now
            return
        for probe_len, coverage in plans:
            params = RequestParams(
                segments=[SegmentSpan(kind=SegmentKind.CHUNK, start=0, end=length)],
                cache_salt=salt,
                warmup_depth=1,
                probe_len=min(probe_len, self._num_layers - 1),
                coverage=coverage,
                wants_timeline=True,
            )
            shape = PrefillShape(num_cached=length, num_always=SUFFIX_TOKENS)
            await self._measure([[*chunk, *self._tokens(SUFFIX_TOKENS)]], params, [shape])
        self._engine.delete_chunk(stored.chunk_id)

    async def _measure(
        self, prompts: list[list[int]], params: RequestParams, shapes: list[PrefillShape]
    ) -> None:
        """One batch, each phase by the best of a few runs: what else the machine does at start-up
        is not the prefill's cost. Runs that went otherwise do not count."""
        works = self._works(
            shapes,
            warmup_depth=params.warmup_depth,
            probe_len=params.probe_len,
            coverage=params.coverage,
        )
        runs = []
        for _ in range(REPEATS):
            params = replace(params, batch_id=next(self._batch_ids))
            ended = await asyncio.gather(*(self._engine.prefill_ms(p, params) for p in prompts))
            answer = ended[0][1]
            is_planned = (
                answer is not None
                and not answer.missing
                and not answer.result.recovered
                and answer.result.batch_size == len(prompts)
                and answer.result.timeline
            )
            if answer is None or not is_planned:
                continue
            times = phase_times(answer.result)
            runs.append(
                {
                    "warmup": times.warmup_ms,
                    "probe": times.probe_ms,
                    "patch": times.patch_ms,
                    "fixed": max(ms for ms, _ in ended) - times.total_ms,
                }
            )
        if runs:
            best = {phase: min(run[phase] for run in runs) for phase in works}
            self._batches.append(
                [(w, best[phase]) for phase, w in works.items() if best[phase] > 0]
            )

    def _works(
        self, shapes: list[PrefillShape], *, warmup_depth: int, probe_len: int, coverage: float
    ) -> dict[str, Work]:
        """By phase; those that do not run are left out."""
        works = phase_works(
            shapes,
            [coverage] * len(shapes),
            signal=Signal.KV_DEV,
            warmup_depth=warmup_depth,
            probe_len=probe_len,
            num_layers=self._num_layers,
        )
        return {phase: work for phase, work in works.items() if any(work.counts)}

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._engine.vocab_size) for _ in range(count)]
