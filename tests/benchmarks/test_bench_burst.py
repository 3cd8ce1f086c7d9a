"""The burst benchmark's parts: its settings, its comparison, its engine, and a short simulation."""

import asyncio
import time
from dataclasses import replace

import pytest

from benchmarks.burst.emulated_engine import EmulatedConfig, SleepingEngine
from benchmarks.burst.setting import (
    Burst,
    Outcome,
    best_at_cost,
    cheapest_as_good,
    scenario_of,
    ways,
)
from benchmarks.burst.simulated import simulate
from planner import RagRequest, Ticket
from planner.simulator import prepare
from tests.fakes.costs import every_price
from tests.fakes.records import request_plan

BURST = Burst(
    seconds=30.0, rate_per_s=5.0, load_s=2.0, slo_times=3.0, max_replicas=3, down_after_s=5.0
)


def outcome(way: str, qsa: float, replica_s: float, *, is_fixed: bool = True) -> Outcome:
    return Outcome(
        way=way, is_fixed=is_fixed, qsa=qsa, replica_s=replica_s, p99_ttft_ms=1.0, errors=0
    )


def test_the_fixed_sizes_to_compare_with():
    ours = outcome("slo", 0.8, 300.0, is_fixed=False)
    rows = [ours, outcome("1", 0.4, 100.0), outcome("2", 0.7, 200.0), outcome("4", 0.9, 400.0)]
    assert best_at_cost(rows, ours).way == "2"
    assert cheapest_as_good(rows, ours).way == "4"
    assert cheapest_as_good(rows[:3], ours) is None
    assert best_at_cost([ours, rows[3]], ours) is None
    # a size as good as another is no better for costing more
    assert best_at_cost([*rows, outcome("3", 0.7, 290.0)], ours).way == "2"


def test_every_way_faces_the_same_load():
    prepared = [prepare(scenario_of(BURST, way), seed=3) for way in ways(BURST)]
    first = prepared[0].workload
    for each in prepared[1:]:
        assert (each.workload.arrival_ms == first.arrival_ms).all()
        assert (each.workload.difficulty == first.difficulty).all()
    assert len(first) == BURST.num_requests == 150
    assert [way.name for way in ways(BURST)[3:]] == ["fixed 1", "fixed 2", "fixed 3"]


def test_a_simulated_burst_is_met_by_more_replicas():
    found = {
        way.name: simulate(BURST, way, seeds=range(1))
        for way in ways(BURST)
        if way.name in ("slo", "fixed 1", "fixed 3")
    }
    assert found["fixed 1"].replica_s < found["slo"].replica_s < found["fixed 3"].replica_s
    assert found["fixed 1"].qsa < found["slo"].qsa <= found["fixed 3"].qsa


def ask(engine: SleepingEngine, ticket: Ticket):
    request = RagRequest(
        request_id="r",
        prefix_ids=(1,),
        chunks=((2, 3, 4), (5, 6)),
        suffix_ids=(7,),
        ttft_slo_ms=100.0,
    )

    async def run():
        return [delta async for delta in engine.generate(request, ticket)]

    return asyncio.run(run())


def test_the_emulated_engine_takes_what_the_plan_expects():
    config = EmulatedConfig(cost=every_price(4), load_s=0.0, chunk_ids=("a", "b"))
    engine = SleepingEngine(config)
    info = asyncio.run(engine.start())
    assert info.num_layers == 4 and info.model == "emulated"
    assert engine.residency_update().added == ("a", "b") and not engine.residency_update().added
    plan = request_plan(expected_ms=200.0, coverage=0.4)
    ticket = Ticket(replica_id="r", batch_id=1, batch_size=2, plan=plan, queue_ms=0.0)
    started_s = time.monotonic()
    (delta,) = ask(engine, ticket)
    assert time.monotonic() - started_s >= 0.2
    assert delta.finish_reason == "length" and delta.result is not None
    result = delta.result
    assert (result.coverage, result.num_context_tokens, result.num_recomputed_tokens) == (0.4, 5, 2)
    assert result.timings.first_token_ms == 200.0 and engine.load().num_running == 0
    # nobody has planned it: what its configuration takes alone
    (delta,) = ask(engine, replace(ticket, plan=replace(plan, expected_ms=0.0)))
    assert delta.result is not None and delta.result.timings.first_token_ms > 40.0
    with pytest.raises(ValueError, match="stores nothing"):
        asyncio.run(engine.ingest((1, 2)))
