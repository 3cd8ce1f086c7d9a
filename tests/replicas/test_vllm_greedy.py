"""Whole greedy answers over reused chunks, all of them recomputed, against plain vLLM, float32."""

import asyncio
import random
from dataclasses import replace

import pytest
import pytest_asyncio

from benchmarks.profiling.cost_grid import cost_profile, grid, measure_point
from planner.types import RagRequest, Signal
from replicas.calibration import measure_cost
from tests.replicas.vllm_harness import (
    GREEDY,
    NUM_LAYERS,
    ask,
    assert_same,
    make_request,
    make_ticket,
    running_engine,
)

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

NUM_PROMPTS, PROMPTS_PER_TEST = 50, 10
LONG = replace(GREEDY, max_tokens=64)
MISSING_SHARE = 0.25


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(tmp_path_factory):
    async with running_engine(tmp_path_factory.mktemp("model"), max_num_seqs=24) as engine:
        yield engine


def make_prompt(rng: random.Random) -> RagRequest:
    """One to five chunks of 1 to 60 tokens, some of them twice, and a question of 1 to 20."""
    lengths = [rng.randint(1, 60) for _ in range(rng.randint(1, 5))]
    prompt = make_request(
        rng,
        lengths,
        prefix=rng.choice((0, 1, 9, 30)),
        suffix=rng.randint(1, 20),
        sampling=LONG,
        salt=f"tenant{rng.random()}",  # no prompt finds another's chunks
    )
    if rng.random() < 0.3:
        repeated = list(prompt.chunks)
        repeated[rng.randrange(len(repeated))] = rng.choice(repeated)
        return replace(prompt, chunks=tuple(repeated))
    return prompt


@pytest.mark.parametrize("seed", range(NUM_PROMPTS // PROMPTS_PER_TEST), ids="seed{}".format)
async def test_64_greedy_tokens_are_those_of_plain_vllm(engine, seed):
    rng = random.Random(seed)
    prompts = [make_prompt(rng) for _ in range(PROMPTS_PER_TEST)]
    num_missing = []
    for prompt in prompts:
        kept = {chunk for chunk in prompt.chunks if rng.random() >= MISSING_SHARE}
        for chunk in kept:
            await engine.ingest(chunk, cache_salt=prompt.cache_salt)
        num_missing.append(sum(len(c) for c in prompt.chunks if c not in kept))
    tickets = [
        make_ticket(idx, signal=(Signal.KV_DEV, Signal.QCI)[idx % 2], coverage=1.0)
        for idx in range(PROMPTS_PER_TEST)
    ]
    reusing = asyncio.gather(*(ask(engine, p, t) for p, t in zip(prompts, tickets, strict=True)))
    plains = await asyncio.gather(*(ask(engine, p) for p in prompts))
    for answer, plain, missed in zip(await reusing, plains, num_missing, strict=True):
        assert_same(answer, plain)
        assert len(answer.token_ids) == LONG.max_tokens
        assert answer.result.num_miss_tokens == missed
        assert not answer.result.full_prefill and plain.result.full_prefill


# ---- what prefills cost, on the same engine; how long anything takes is not looked at ----


async def test_a_grid_of_batches_is_measured_phase_by_phase(engine):
    rng = random.Random(0)
    points = [p for p in grid(NUM_LAYERS, 512) if rng.random() < 0.5]
    measured = [await measure_point(engine, point, repeats=2) for point in points]
    for point, one in zip(points, measured, strict=True):
        assert len(one.runs) == 2
        for run in one.runs:
            ran = {phase for phase, ms in run.phases.items() if ms > 0}
            assert ran == set(point.works(NUM_LAYERS))
            assert run.stall_ms == 0
            assert (run.loaded_bytes > 0) is (point.warmup_depth < NUM_LAYERS)
    profile = cost_profile(measured, **engine.machine)
    assert {fit.phase for fit in profile.fits} == {"warmup", "probe", "patch", "fixed"}
    assert profile.cost.work_ms(points[0].works(NUM_LAYERS)["fixed"]) > 0


async def test_the_measurement_at_start_leaves_nothing_behind(engine):
    before = engine._tier.stats()
    cost = await measure_cost(engine, num_layers=NUM_LAYERS)
    assert cost.row_ms > 0 and cost.relative_error >= 0
    after = engine._tier.stats()
    assert (after.num_entries, after.num_leases) == (before.num_entries, 0)
