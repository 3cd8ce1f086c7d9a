"""The emulated engine keeps what a real one promises of its text and of its ranks."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from deploy.testbed.emulated_engine import RankedEngine
from planner import RagRequest, SamplingOptions, Ticket
from replicas.config import EngineConfig
from replicas.interface import EngineDeadError, PromptTooLongError
from tests.fakes.records import request_plan

TICKET = Ticket(
    replica_id="r1", batch_id=1, batch_size=1, plan=request_plan(coverage=0.25), queue_ms=0.0
)


@asynccontextmanager
async def running(**config: int) -> AsyncIterator[RankedEngine]:
    engine = RankedEngine(EngineConfig(model_dir="", tensor_parallel_size=2, **config))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def request(*chunk: int, num_tokens: int = 5) -> RagRequest:
    return RagRequest(
        request_id="q",
        prefix_ids=(1,),
        chunks=(chunk,),
        suffix_ids=(2,),
        ttft_slo_ms=100.0,
        sampling=SamplingOptions(max_tokens=num_tokens),
    )


async def text_of(engine: RankedEngine, asked: RagRequest) -> str:
    return "".join([delta.text async for delta in engine.generate(asked, TICKET)])


def ranks() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "emulated_rank.py" in " ".join(p.cmdline())]


async def test_the_text_follows_from_the_prompt_on_every_engine():
    async with running() as one, running() as other:
        text = await text_of(one, request(5, 6))
        assert len(text.split()) == 5
        assert await text_of(other, request(5, 6)) == text
        assert await text_of(one, request(5, 7)) != text


async def test_the_last_delta_has_the_result():
    async with running() as engine:
        deltas = [delta async for delta in engine.generate(request(5, 6), TICKET)]
    assert [delta.num_generated for delta in deltas] == [1, 2, 3, 4, 5]
    assert [delta.finish_reason for delta in deltas] == [None] * 4 + ["length"]
    assert [delta.result is not None for delta in deltas] == [False] * 4 + [True]


async def test_a_killed_rank_ends_the_engine():
    async with running() as engine:
        await engine.check_health()
        first, second = ranks()
        deltas = engine.generate(request(5, 6, num_tokens=500), TICKET)
        await anext(deltas)
        os.kill(second.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            async for _ in deltas:
                pass
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        assert first.is_running()
    assert ranks() == []


async def test_a_prompt_that_is_too_long_is_refused():
    async with running(max_model_len=6) as engine:
        with pytest.raises(PromptTooLongError):
            await text_of(engine, request(5, 6))
