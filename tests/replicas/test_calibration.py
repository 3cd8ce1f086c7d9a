"""The measurement at start, on an engine whose times are made up."""

import itertools
from dataclasses import replace

import pytest

from planner.cost_model import CostModel, PrefillShape, phase_works
from planner.types import PhaseSpan, PrefillTimings
from replicas.calibration import BATCH_SIZE, at_present_speed, measure_cost
from replicas.connector_types import ResultParams
from replicas.interface import StoredChunk
from tests.fakes.records import prefill_result

NUM_LAYERS = 6
TRUE = CostModel(
    num_layers=NUM_LAYERS,
    fixed_ms=20.0,
    request_ms=3.0,
    layer_ms=0.5,
    member_ms=0.25,
    filter_ms=2.0,
    row_ms=0.02,
    compare_ms=0.006,
    pair_ms=1e-5,
    selected_pair_ms=3e-5,
    reuse_ms=0.001,
)


class MadeUpEngine:
    """Takes exactly what `TRUE` says. The first `num_lost` batches are not run as planned."""

    vocab_size = 100

    def __init__(self, *, reuses_chunks=True, max_model_len=4096, has_room=True, num_lost=0):
        self.reuses_chunks = reuses_chunks
        self.max_model_len = max_model_len
        self.stored: dict[str, int] = {}
        self._has_room = has_room
        self._num_lost = num_lost
        self._ids = itertools.count()

    async def ingest(self, token_ids, *, cache_salt=""):
        if not self._has_room:
            raise ValueError("no room")
        chunk_id = str(next(self._ids))
        self.stored[chunk_id] = len(token_ids)
        return StoredChunk(chunk_id=chunk_id, num_tokens=len(token_ids), nbytes=1, tier="host")

    def delete_chunk(self, chunk_id):
        return self.stored.pop(chunk_id, None) is not None

    async def prefill_ms(self, token_ids, params):
        assert len(token_ids) <= self.max_model_len
        num_cached = sum(s.end - s.start for s in params.segments) if params else 0
        shape = PrefillShape(num_cached=num_cached, num_always=len(token_ids) - num_cached)
        size = params.batch_size if params else 1
        works = phase_works(
            [shape] * size,
            [params.coverage if params else 1.0] * size,
            signal="kv_dev",
            warmup_depth=params.warmup_depth if params else NUM_LAYERS,
            probe_len=params.probe_len if params else 0,
            num_layers=NUM_LAYERS,
        )
        times = {phase: TRUE.work_ms(work) for phase, work in works.items()}
        if params is None:
            return sum(times.values()), None
        self._num_lost -= 1
        ends = list(itertools.accumulate(times.values()))
        spans = tuple(
            PhaseSpan(phase=phase, layer=0, start_ms=end - ms, duration_ms=ms)
            for (phase, ms), end in zip(times.items(), ends, strict=True)
            if ms > 0 and phase != "fixed"
        )
        result = prefill_result(
            batch_size=size if self._num_lost < 0 else size + 1,
            timeline=spans,
            timings=PrefillTimings(compute_ms=ends[-2]),
        )
        return ends[-1], ResultParams(result=result)


async def test_phases_tell_the_prices():
    engine = MadeUpEngine()
    cost = await measure_cost(engine, num_layers=NUM_LAYERS)
    assert cost.prices == pytest.approx(TRUE.prices, rel=1e-6)
    assert engine.stored == {}  # nothing is left behind


@pytest.mark.parametrize(
    "engine",
    [
        MadeUpEngine(reuses_chunks=False),
        MadeUpEngine(has_room=False),
        MadeUpEngine(max_model_len=64),
        MadeUpEngine(num_lost=2),
    ],
    ids=["no reuse", "no room", "short", "a batch that did not run as one"],
)
async def test_less_is_measured_where_less_can_be(engine):
    cost = await measure_cost(engine, num_layers=NUM_LAYERS)
    for length in (50, 500):
        works = phase_works(
            [PrefillShape(num_cached=0, num_always=length)],
            [1.0],
            signal="kv_dev",
            warmup_depth=NUM_LAYERS,
            probe_len=0,
            num_layers=NUM_LAYERS,
        )
        whole = sum(works.values(), replace(works["fixed"], prefills=0.0, requests=0.0))
        assert cost.work_ms(whole) == pytest.approx(TRUE.work_ms(whole), rel=0.02)


async def test_the_batch_is_measured_as_one():
    seen = []

    class Watched(MadeUpEngine):
        async def prefill_ms(self, token_ids, params):
            seen.append(params and (params.batch_id, params.batch_size))
            return await super().prefill_ms(token_ids, params)

    await measure_cost(Watched(), num_layers=NUM_LAYERS)
    batched = [entry for entry in seen if entry and entry[1] > 1]
    assert len(batched) % BATCH_SIZE == 0 and len(batched) > 0


@pytest.mark.parametrize(("slower", "scale"), [(1.0, 1.0), (1.7, 1.7), (0.1, 0.25)])
async def test_a_profiles_cost_takes_on_the_machines_present_speed(slower, scale):
    """By a factor of four at the most: more is a mistake."""

    class Slower(MadeUpEngine):
        async def prefill_ms(self, token_ids, params):
            ms, answer = await super().prefill_ms(token_ids, params)
            return slower * ms, answer

    cost = await at_present_speed(Slower(), TRUE)
    assert cost.prices == TRUE.prices
    assert cost.scale == pytest.approx(scale)
