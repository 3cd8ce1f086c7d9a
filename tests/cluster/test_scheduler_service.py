"""The scheduler's state, on a clock that the test moves; its loop's ticks are called by hand."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from cluster.config import SchedulerConfig
from cluster.messages import ActiveRequest, Refusal, ReplicaReport
from cluster.metrics import ServerMetrics
from cluster.scheduler_service import SchedulerService
from planner import (
    BudgetPlanner,
    CacheSmithConfig,
    ChunkRef,
    CostModel,
    DemandCurves,
    EngineInfo,
    EngineLoad,
    Link,
    PolicyConfig,
    QueueLimits,
    ReplicaState,
    RequestProfile,
    SloScheduler,
    Ticket,
    build_scheduler,
)
from replicas.cache_types import RedisReport, TierReport
from replicas.interface import ResidencyUpdate
from tests.fakes.fake_clock import FakeClock

COST = CostModel(
    num_layers=4,
    fixed_ms=1.0,
    row_ms=0.01,
    pair_ms=0.0,
    selected_pair_ms=0.0,
    reuse_ms=0.0,
)


def info(**changes: Any) -> EngineInfo:
    values: dict[str, Any] = {
        "model": "m",
        "fingerprint": "f",
        "num_layers": 4,
        "max_model_len": 4096,
        "kv_capacity_tokens": 10_000,
        "max_num_seqs": 8,
        "tensor_parallel_size": 1,
    }
    return EngineInfo(**{**values, **changes})


def report(replica_id: str, **changes: Any) -> ReplicaReport:
    values: dict[str, Any] = {
        "replica_id": replica_id,
        "node_id": "n1",
        "info": info(),
        "cost": COST,
        "load": EngineLoad(num_running=0, num_waiting=0, num_ingest_backlog=0),
    }
    return ReplicaReport(**{**values, **changes})


def profile(
    request_id: str,
    *,
    num_tokens: int = 100,
    chunks: tuple[str, ...] = (),
    slo_ms: float = 1000.0,
    wants_explanation: bool = False,
) -> Any:
    return RequestProfile(
        request_id=request_id,
        num_prefix_tokens=0,
        chunks=tuple(ChunkRef(chunk_id=c, num_tokens=50) for c in chunks),
        num_suffix_tokens=num_tokens,
        ttft_slo_ms=slo_ms,
        wants_explanation=wants_explanation,
    )


INGRESS = "ingress"  # is alive


class Bench:
    """A service with its clock, and requests as tasks."""

    def __init__(self, *, rules: dict[str, Any] | None = None, **config: Any) -> None:
        self.clock = FakeClock()
        limits = QueueLimits(max_waiting=4, max_batch_requests=3)
        policy = PolicyConfig(rules=CacheSmithConfig(limits=limits, **(rules or {})))
        settings = SchedulerConfig(policy=policy, gather_ms=0.0, **config).for_model(4)
        assert settings.demand is not None
        planner = BudgetPlanner(settings.planner, DemandCurves(settings.demand))
        self.service = SchedulerService(
            build_scheduler(policy, planner), planner, settings, self.clock, ServerMetrics()
        )

    def add(self, *replica_ids: str, **changes: Any) -> None:
        self.service.sync_replicas("router", replica_ids)
        for replica_id in replica_ids:
            assert not self.service.report(report(replica_id, **changes)).needs_full

    async def ask(
        self, request_id: str, *, ingress_id: str = INGRESS, **kwargs: Any
    ) -> "asyncio.Task[Ticket | Refusal]":
        asked = self.service.admit(profile(request_id, **kwargs), ingress_id=ingress_id)
        task = asyncio.ensure_future(asked)
        await asyncio.sleep(0)
        return task

    async def tick(self) -> None:
        self.service.heard(INGRESS)
        self.service.tick()
        for _ in range(3):
            await asyncio.sleep(0)


def scenario(test: Callable[[Bench], Awaitable[None]], **config: Any) -> None:
    async def run() -> None:
        await test(Bench(**config))

    asyncio.run(run())


def ticket(task: "asyncio.Task[Ticket | Refusal]") -> Ticket:
    answer = task.result()
    assert isinstance(answer, Ticket)
    return answer


def test_requests_wait_until_a_replica_is_known():
    async def test(bench: Bench) -> None:
        first = await bench.ask("a")
        await bench.tick()
        assert not first.done()
        bench.service.sync_replicas("router", ["r1"])
        await bench.tick()
        assert not first.done()  # it has not said what it is
        bench.service.report(report("r1"))
        await bench.tick()
        assert ticket(first).replica_id == "r1"

    scenario(test)


def test_simultaneous_requests_share_a_batch():
    async def test(bench: Bench) -> None:
        bench.add("r1")
        tasks = [await bench.ask(name) for name in "abc"]
        await bench.tick()
        tickets = [ticket(task) for task in tasks]
        assert [t.batch_size for t in tickets] == [3, 3, 3]
        assert len({t.batch_id for t in tickets}) == 1

    scenario(test)


def test_one_batch_in_prefill_at_a_time():
    async def test(bench: Bench) -> None:
        bench.add("r1")
        first, second = await bench.ask("a"), await bench.ask("b")
        await bench.tick()
        third = await bench.ask("c")
        await bench.tick()
        assert first.done() and second.done() and not third.done()
        bench.service.first_token("r1", "a")
        await bench.tick()
        assert not third.done()  # b is still in prefill
        bench.service.abandon("b")
        await bench.tick()
        assert ticket(third).batch_size == 1

    scenario(test)


def test_two_replicas_take_two_batches():
    async def test(bench: Bench) -> None:
        bench.add("r1", "r2")
        first = await bench.ask("a")
        await bench.tick()
        second = await bench.ask("b")
        await bench.tick()
        assert {ticket(first).replica_id, ticket(second).replica_id} == {"r1", "r2"}

    scenario(test)


def test_cancelling_a_waiting_request_removes_it():
    async def test(bench: Bench) -> None:
        task = await bench.ask("a")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert bench.service.status().num_waiting == 0

    scenario(test)


def test_cancelling_in_the_turn_of_the_grant_frees_the_place():
    async def test(bench: Bench) -> None:
        bench.add("r1")
        task = await bench.ask("a")
        bench.service.tick()  # granted, but the task has not run yet
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert bench.service.status().replicas[0].num_leases == 0

    scenario(test)


def test_who_waits_through_an_ingress_that_is_gone_takes_no_place():
    async def test(bench: Bench) -> None:
        ghosts = [await bench.ask(f"ghost{i}", ingress_id="killed") for i in range(3)]
        alive = await bench.ask("a")
        bench.clock.advance(bench.service._config.ingress_ttl_ms + 1.0)
        await bench.tick()
        assert all(ghost.cancelled() for ghost in ghosts) and not alive.done()
        bench.add("r1")
        await bench.tick()
        assert ticket(alive).batch_size == 1
        assert bench.service.status().replicas[0].num_leases == 1

    scenario(test)


def test_asking_again_replaces_the_first_call():
    async def test(bench: Bench) -> None:
        first = await bench.ask("a")
        second = await bench.ask("a")
        await asyncio.gather(first, return_exceptions=True)
        assert first.cancelled() and bench.service.status().num_waiting == 1
        bench.add("r1")
        await bench.tick()
        assert ticket(second).replica_id == "r1"

    scenario(test)


def test_a_full_queue_refuses():
    async def test(bench: Bench) -> None:
        tasks = [await bench.ask(name) for name in "abcde"]
        refusal = tasks[-1].result()
        assert isinstance(refusal, Refusal) and refusal.status == 429
        assert refusal.retry_after_s
        for task in tasks[:-1]:
            task.cancel()

    scenario(test)


def config_of(generation: int, *, max_waiting: int, policy: str = "edf") -> SchedulerConfig:
    limits = QueueLimits(max_waiting=max_waiting, max_batch_requests=3)
    rules = PolicyConfig(name=policy, rules=CacheSmithConfig(limits=limits))
    return SchedulerConfig(policy=rules, gather_ms=0.0, generation=generation).for_model(4)


def test_an_upgrade_keeps_who_waits_and_who_has_a_ticket():
    async def test(bench: Bench) -> None:
        bench.add("r1")
        running = await bench.ask("running")
        await bench.tick()
        assert ticket(running).replica_id == "r1"
        waiting = [await bench.ask(name, slo_ms=slo) for name, slo in (("b", 900.0), ("c", 300.0))]
        bench.clock.advance(100.0)
        bench.service.reconfigure(config_of(7, max_waiting=4))
        status = bench.service.status()
        assert (status.generation, status.num_waiting) == (7, 2)
        assert status.replicas[0].num_leases == 1 and status.ready
        await bench.tick()
        assert not any(task.done() for task in waiting)  # r1 still has its batch
        bench.service.finished("running")
        await bench.tick()
        assert [ticket(task).queue_ms for task in waiting] == [100.0, 100.0]

    scenario(test)


def test_a_queue_over_the_bound_of_an_upgrade_is_served_and_takes_no_more():
    async def test(bench: Bench) -> None:
        tasks = [await bench.ask(name) for name in "abcd"]
        for policy in ("cachesmith", "fcfs", "edf", "cachesmith-static"):
            bench.service.reconfigure(config_of(1, max_waiting=2, policy=policy))
        refused = (await bench.ask("e")).result()
        assert isinstance(refused, Refusal) and refused.code == "queue_full"
        bench.add("r1", "r2")
        await bench.tick()
        assert len([ticket(task) for task in tasks]) == 4
        assert not (await bench.ask("f")).done()

    scenario(test)


def test_waiting_too_long_is_refused_with_the_reason():
    async def test(bench: Bench) -> None:
        task = await bench.ask("a")
        bench.clock.advance(5_001)
        await bench.tick()
        refusal = task.result()
        assert isinstance(refusal, Refusal) and refusal.status == 503
        assert "no replica" in refusal.message and "5 s" in refusal.message
        assert bench.service.status().num_waiting == 0

    scenario(test, max_wait_ms=5_000.0)


def test_a_ticket_that_nobody_uses_expires():
    async def test(bench: Bench) -> None:
        bench.add("r1")
        await bench.ask("a")
        await bench.tick()
        bench.clock.advance(2_500)
        bench.add("r1")
        waiting = await bench.ask("b")
        await bench.tick()
        assert not waiting.done()
        bench.clock.advance(2_501)
        bench.add("r1")
        await bench.tick()
        assert waiting.done()

    scenario(test)


def test_reports_free_what_lost_events_did_not():
    async def test(bench: Bench) -> None:
        bench.add("r1")
        await bench.ask("a")
        await bench.tick()
        working = ActiveRequest(request_id="a", num_tokens=100, in_prefill=True)
        bench.service.report(report("r1", active=(working,)))
        assert bench.service.status().replicas[0].in_prefill
        bench.service.report(report("r1"))
        assert bench.service.status().replicas[0].num_leases == 0

    scenario(test)


def test_a_restarted_scheduler_learns_from_the_next_pushes():
    async def test(bench: Bench) -> None:
        bench.service.sync_replicas("router", ["r1"])
        # a report of changes only: this life of the scheduler does not know the replica
        assert bench.service.report(report("r1", info=None)).needs_full
        working = ActiveRequest(request_id="old", num_tokens=100, in_prefill=True)
        bench.service.report(report("r1", active=(working,)))
        waiting = await bench.ask("new")
        await bench.tick()
        assert not waiting.done()  # the batch of the former life is still in prefill
        bench.service.first_token("r1", "old")
        await bench.tick()
        assert waiting.done()

    scenario(test)


def test_replicas_that_routers_drop_get_no_tickets():
    async def test(bench: Bench) -> None:
        bench.add("r1", "r2")
        bench.service.sync_replicas("router", ["r2"])
        first, second = await bench.ask("a"), None
        await bench.tick()
        assert ticket(first).replica_id == "r2"
        second = await bench.ask("b")
        await bench.tick()
        assert not second.done()
        bench.clock.advance(3_001)  # r1 is silent too by now
        bench.service.sync_replicas("router", ["r2"])
        await bench.tick()
        assert [r.replica_id for r in bench.service.status().replicas] == ["r2"]
        second.cancel()

    scenario(test)


def test_a_replica_that_failed_is_left_alone_for_a_while():
    async def test(bench: Bench) -> None:
        bench.add("r1")
        bench.service.replica_lost("r1")
        task = await bench.ask("a")
        await bench.tick()
        assert not task.done()
        bench.clock.advance(2_001)
        bench.add("r1")
        await bench.tick()
        assert task.done()

    scenario(test)


def test_room_for_sequences_and_tokens_is_respected():
    async def test(bench: Bench) -> None:
        bench.add("r1", info=info(max_num_seqs=1))
        await bench.ask("a")
        await bench.tick()
        bench.service.first_token("r1", "a")
        second = await bench.ask("b")
        await bench.tick()
        assert not second.done()
        bench.service.finished("a")
        await bench.tick()
        assert second.done()

    scenario(test)


def test_an_idle_replica_takes_what_is_over_its_estimate():
    async def test(bench: Bench) -> None:
        bench.add("r1", info=info(kv_capacity_tokens=100))
        task = await bench.ask("a", num_tokens=4000)
        await bench.tick()
        assert task.done()

    scenario(test)


def test_requests_go_where_their_chunks_are_hot():
    async def test(bench: Bench) -> None:
        bench.add("r1", "r2")
        hot = ResidencyUpdate(added=("c1",), reset=True)
        bench.service.report(report("r2", node_id="n2", residency=hot))
        task = await bench.ask("a", chunks=("c1", "c2"))
        await bench.tick()
        assert ticket(task).replica_id == "r2"

    scenario(test)


def test_busy_replicas_are_shown_with_the_time_at_which_they_should_be_free():
    async def test(bench: Bench) -> None:
        bench.add("r1")
        first = await bench.ask("a")
        await bench.tick()
        expected_ms = ticket(first).plan.expected_ms
        seen = []

        class Watching:
            num_waiting = 1

            def next_batch(self, replicas: Any, *, now_ms: float) -> None:
                seen.append(replicas)

            def take_refused(self, *, now_ms: float) -> tuple[()]:
                return ()

        bench.service._scheduler = Watching()  # type: ignore[assignment]
        granted_ms = bench.clock.now_ms()
        bench.add("r1", "r2")
        bench.service.tick()
        busy, free = seen[-1]
        assert busy.busy_until_ms == pytest.approx(granted_ms + expected_ms)
        assert not busy.is_free and free.is_free and free.node_id == "n1"
        bench.clock.advance(expected_ms + 500.0)  # it takes longer than expected
        bench.service.tick()
        assert seen[-1][0].busy_until_ms == bench.clock.now_ms()
        bench.service.first_token("r1", "a")
        bench.service.tick()
        assert all(state.is_free for state in seen[-1])

    scenario(test)


def test_hopeless_requests_are_refused_where_the_deployment_says_so():
    async def test(bench: Bench) -> None:
        bench.add("r1")
        hopeless = await bench.ask("a", num_tokens=4000, slo_ms=20.0)
        possible = await bench.ask("b")
        await bench.tick()
        refusal = hopeless.result()
        assert isinstance(refusal, Refusal)
        assert (refusal.status, refusal.code) == (429, "slo_unreachable")
        assert "20 ms are left" in refusal.message and "ms at least" in refusal.message
        assert ticket(possible).batch_size == 1

    scenario(test, rules={"refuse_hopeless": True})

    async def served(bench: Bench) -> None:
        bench.add("r1")
        hopeless = await bench.ask("a", num_tokens=4000, slo_ms=20.0)
        await bench.tick()
        assert ticket(hopeless).plan.expected_ms > 20.0

    scenario(served)


def test_a_prompt_over_every_capacity_is_an_error():
    async def test(bench: Bench) -> None:
        bench.add("r1", info=info(kv_capacity_tokens=1000, max_model_len=500))
        task = await bench.ask("a", num_tokens=1001)
        await bench.tick()
        refusal = task.result()
        assert isinstance(refusal, Refusal)
        assert (refusal.status, refusal.code) == (400, "context_length_exceeded")

    scenario(test)


def test_a_request_that_asks_is_told_why():
    async def test(bench: Bench) -> None:
        bench.add("r1", residency=ResidencyUpdate(added=("c1",)))
        asks = await bench.ask("a", chunks=("c1",), wants_explanation=True)
        other = await bench.ask("b", chunks=("c1",))
        await bench.tick()
        assert ticket(asks).batch_size == 2
        first, head, *table = ticket(asks).explanation.splitlines()
        assert "batch of 2" in first and "2 requests, budget" in head
        chosen = [line for line in table if line.startswith("*")]
        assert len(chosen) == 1 and str(ticket(asks).plan.warmup_depth) in chosen[0]
        assert ticket(other).explanation == ""

    scenario(test)


def test_plans_know_the_link_that_stored_kv_comes_over():
    async def test(bench: Bench) -> None:
        depths = {}
        for mb_s in (1.0, 1e3):
            name = f"r{mb_s}"
            bench.add(
                name,
                info=info(kv_token_bytes=100.0),
                residency=ResidencyUpdate(added=("c1",)),
                link=Link(bytes_per_ms=mb_s * 1e3),
            )
            task = await bench.ask(name, chunks=("c1",), num_tokens=10)
            await bench.tick()
            depths[mb_s] = ticket(task).plan.warmup_depth
        # 50 tokens of 100 bytes in each layer, at 1 kB a millisecond: computing them takes less
        assert depths[1.0] == 4 > depths[1e3]

    scenario(test)


def test_drift_is_what_the_replicas_report():
    async def test(bench: Bench) -> None:
        bench.add("r1", cost=replace(COST, scale=1.5))
        text = bench.service.metrics_text().decode()
        assert 'cachesmith_cost_drift{replica="r1"} 1.5' in text

    scenario(test)


class WatchedScheduler:
    """The policy, with what it is offered."""

    def __init__(self, scheduler: SloScheduler) -> None:
        self._scheduler = scheduler
        self.offers: list[dict[str, ReplicaState]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def next_batch(self, replicas: Sequence[ReplicaState], *, now_ms: float) -> Any:
        self.offers.append({state.replica_id: state for state in replicas})
        return self._scheduler.next_batch(replicas, now_ms=now_ms)


def test_a_replica_that_has_not_changed_is_the_same_object():
    """The policy's tables go by that."""

    async def test(bench: Bench) -> None:
        watched = bench.service._scheduler = WatchedScheduler(bench.service._scheduler)
        bench.add("r1", "r2")
        await bench.ask("a")
        await bench.tick()
        await bench.ask("b")
        await bench.tick()
        first, second = watched.offers
        taken = next(r for r in ("r1", "r2") if second[r].busy_until_ms is not None)
        other = "r2" if taken == "r1" else "r1"
        assert second[other] is first[other] and second[taken] is not first[taken]

        until_ms = second[taken].busy_until_ms
        await bench.ask("c")  # nobody is free
        await bench.tick()
        third = watched.offers[-1]
        assert third[taken] is second[taken] and third[other].busy_until_ms is not None
        bench.clock.advance(until_ms - bench.clock.now_ms() + 1.0)  # it takes longer than planned
        await bench.tick()
        assert watched.offers[-1][taken].busy_until_ms == bench.clock.now_ms()

        bench.service.finished("a")
        bench.service.report(report(other, cost=replace(COST, scale=2.0)))
        bench.service.sync_replicas("router", ["r1", "r2"])
        await bench.tick()
        fresh = watched.offers[-1]
        assert (
            fresh[taken].busy_until_ms is None and fresh[taken].free_seqs == second[other].free_seqs
        )
        assert fresh[other].cost.scale == 2.0

    scenario(test)


def test_the_policy_is_not_asked_again_when_no_replica_is_free():
    async def test(bench: Bench) -> None:
        watched = bench.service._scheduler = WatchedScheduler(bench.service._scheduler)
        bench.add("r1")
        tasks = [await bench.ask(name) for name in "abcd"]  # a batch has three at most
        await bench.tick()
        assert sum(task.done() for task in tasks) == 3 and len(watched.offers) == 1
        await bench.tick()
        assert sum(task.done() for task in tasks) == 3 and len(watched.offers) == 2
        next(task for task in tasks if not task.done()).cancel()

    scenario(test)


def test_the_loop_sleeps_while_nobody_waits():
    async def run() -> None:
        bench = Bench()
        bench.add("r1")
        bench.service.first_token("r1", "unknown")
        bench.service.finished("unknown")
        assert bench.service._due_ms is None
        waiting = await bench.ask("a")
        bench.service.report(report("r1"))
        assert bench.service._due_ms == bench.clock.now_ms()
        waiting.cancel()

    asyncio.run(run())


def test_the_loop_gathers_and_survives():
    async def run() -> None:
        bench = Bench()
        bench.add("r1")
        loop = asyncio.ensure_future(bench.service.run())
        tasks = [await bench.ask(name) for name in "ab"]
        tickets = await asyncio.wait_for(asyncio.gather(*tasks), 5.0)
        assert [t.batch_size for t in tickets if isinstance(t, Ticket)] == [2, 2]
        loop.cancel()

    asyncio.run(run())


def test_metrics_follow_the_state():
    async def test(bench: Bench) -> None:
        bench.add("r1", load=EngineLoad(num_running=3, num_waiting=0, num_ingest_backlog=2))
        task = await bench.ask("a")
        text = bench.service.metrics_text().decode()
        assert "cachesmith_waiting_requests 1.0" in text
        assert 'cachesmith_running_requests{replica="r1"} 3.0' in text
        assert "cachesmith_ready_replicas 1.0" in text
        task.cancel()

    scenario(test)


@pytest.mark.parametrize("wrong", [{"lease_ms": 0}, {"gather_ms": -1}, {"tick_ms": 0}])
def test_impossible_configs(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SchedulerConfig(**wrong)


def test_what_a_replica_reported_of_its_tiers_holds_until_it_says_more():
    bench = Bench()
    tiers = TierReport(redis=RedisReport(breaker_openings=2))
    bench.add("r1", tiers=tiers)
    bench.add("r1", info=None)
    (summary,) = bench.service.status().replicas
    assert summary.tiers == tiers
    assert b'cachesmith_redis_breaker_openings_total{replica="r1"} 2.0' in (
        bench.service.metrics_text()
    )
    bench.add("r1", tiers=TierReport())
    assert b"cachesmith_redis_breaker_openings_total{" not in bench.service.metrics_text()
