"""What a request gives back when its client leaves, at each point of its way."""

import asyncio
from pathlib import Path

import pytest

from cluster.config import GatewayConfig
from cluster.errors import ApiError
from cluster.gateway import Gateway, Job
from cluster.prompt import Prompt
from planner import MonotonicClock, SamplingOptions
from tests.fakes.fake_engine import FakeEngine, FakeEngineConfig
from tests.fakes.fake_ports import FakeReplicas, FakeScheduler, ready_status


class Bench:
    """A gateway in the running loop, with one job."""

    def __init__(self, state_dir: Path, **config: float) -> None:
        self.state_dir = state_dir
        self.engine = FakeEngine(FakeEngineConfig(state_dir=str(state_dir)))
        self.scheduler = FakeScheduler(None)
        self.replicas = FakeReplicas(self.engine)
        clock = MonotonicClock()
        self.gateway = Gateway(
            self.scheduler,
            self.replicas,
            GatewayConfig(num_layers=4, **config),
            clock,
        )
        self.job = Job(
            prompt=Prompt(prefix_ids=(1,), chunks=((2, 3),), suffix_ids=(4,)),
            ttft_slo_ms=100.0,
            sampling=SamplingOptions(max_tokens=5),
            arrived_ms=clock.now_ms(),
        )

    async def start(self) -> None:
        self.scheduler.status = ready_status(await self.engine.start())

    def events(self) -> list[str]:
        lines = (self.state_dir / "events").read_text().splitlines()
        return [line.split()[0] for line in lines if line.split()[0] not in ("pid", "gpus")]


async def test_leaving_while_waiting_for_a_ticket(tmp_path: Path):
    bench = Bench(tmp_path)
    await bench.start()
    bench.scheduler.block = True
    answer = asyncio.ensure_future(anext(bench.gateway.run(bench.job)))
    await asyncio.sleep(0)
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    assert [outcome.outcome for outcome in bench.scheduler.outcomes] == ["cancelled"]
    assert bench.events() == []


async def test_leaving_in_mid_answer_ends_the_engines_work(tmp_path: Path):
    bench = Bench(tmp_path)
    await bench.start()
    pieces = bench.gateway.run(bench.job)
    await anext(pieces)
    await anext(pieces)
    await pieces.aclose()
    assert bench.events() == ["start", "first", "cancelled"]
    assert [outcome.outcome for outcome in bench.scheduler.outcomes] == ["cancelled"]


async def test_leaving_gives_the_ticket_back(tmp_path: Path):
    """The replica cannot do it: the call with the ticket may not have reached it."""
    bench = Bench(tmp_path)
    await bench.start()
    (tmp_path / "prefill_ms").write_text("60000")
    answer = asyncio.ensure_future(anext(bench.gateway.run(bench.job)))
    while not bench.events():
        await asyncio.sleep(0)
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    (profile,) = bench.scheduler.profiles
    assert bench.scheduler.abandoned == [profile.request_id]


async def test_a_whole_answer_is_recorded_once(tmp_path: Path):
    bench = Bench(tmp_path)
    await bench.start()
    pieces = [piece async for piece in bench.gateway.run(bench.job)]
    assert [piece.num_generated for piece in pieces] == [1, 2, 3, 4, 5]
    assert pieces[-1].served is not None and pieces[-1].served.replica_id == "r1"
    (outcome,) = bench.scheduler.outcomes
    assert (outcome.outcome, outcome.num_generated_tokens) == ("ok", 5)


async def test_no_token_in_time_is_an_error_and_frees_the_engine(tmp_path: Path):
    bench = Bench(tmp_path, first_token_timeout_s=0.01)
    await bench.start()
    (tmp_path / "prefill_ms").write_text("60000")
    with pytest.raises(ApiError) as error:
        await anext(bench.gateway.run(bench.job))
    assert error.value.status == 503 and error.value.code == "first_token_timeout"
    assert bench.events() == ["start", "cancelled"]


async def test_a_request_is_admitted_with_what_every_node_can_load(tmp_path: Path):
    asked = []

    class Shared:
        async def are_shared(self, chunks, *, cache_salt, info):
            asked.append((chunks, cache_salt, info.model))
            return [True]

    bench = Bench(tmp_path)
    await bench.start()
    bench.gateway._shared = Shared()
    _ = [piece async for piece in bench.gateway.run(bench.job)]
    assert asked == [(((2, 3),), "", "fake-model")]
    (profile,) = bench.scheduler.profiles
    assert [chunk.is_shared for chunk in profile.chunks] == [True]


async def test_a_replica_lost_after_its_last_token_has_answered(tmp_path: Path):
    bench = Bench(tmp_path)
    await bench.start()
    bench.replicas.lose_after = [bench.job.sampling.max_tokens]
    pieces = [piece async for piece in bench.gateway.run(bench.job)]
    assert [piece.num_generated for piece in pieces] == [1, 2, 3, 4, 5]
    assert pieces[-1].served is not None
    assert len(bench.replicas.requests) == 1
    assert bench.scheduler.lost == ["r1"]
    assert [outcome.outcome for outcome in bench.scheduler.outcomes] == ["ok"]
