import random
from dataclasses import replace

import pytest

from planner import (
    FULL_PREFILL,
    STATIC_POLICIES,
    ChunkRef,
    CostModel,
    Deviation,
    FcfsScheduler,
    QueueFullError,
    QueueLimits,
    RecomputeConfig,
    ReplicaState,
    RequestProfile,
    SlackPlanner,
    SlackPlannerConfig,
    request_shape,
)
from planner.scheduler import hot_tokens, plan_input

COST = CostModel(
    num_layers=30,
    fixed_ms=20.0,
    row_ms=0.02,
    pair_ms=1e-6,
    selected_pair_ms=1e-6,
    reuse_ms=0.0005,
)


def scheduler(**config):
    return FcfsScheduler(QueueLimits(**config), SlackPlanner(SlackPlannerConfig()))


def profile(name, *, chunks=("a", "b"), tokens=300, slo=2000.0, policy="adaptive", elapsed=0.0):
    return RequestProfile(
        request_id=name,
        num_prefix_tokens=20,
        chunks=tuple(ChunkRef(chunk_id=c, num_tokens=tokens) for c in chunks),
        num_suffix_tokens=30,
        ttft_slo_ms=slo,
        elapsed_ms=elapsed,
        policy=policy,
        config=STATIC_POLICIES.get(policy),
    )


def replica(
    name="r", *, resident=("a", "b"), free_seqs=8, free_kv_tokens=100_000, parking_tokens=0
):
    return ReplicaState(
        replica_id=name,
        cost=COST,
        free_seqs=free_seqs,
        free_kv_tokens=free_kv_tokens,
        parking_tokens=parking_tokens,
        resident=frozenset(resident),
    )


def ids(decision):
    return [p.request_id for p in decision.requests]


def test_first_come_first_served_up_to_the_limit():
    queue = scheduler(max_batch_requests=3)
    for i in range(5):
        queue.submit(profile(f"q{i}"), now_ms=float(i))
    first = queue.next_batch([replica()], now_ms=10.0)
    second = queue.next_batch([replica()], now_ms=10.0)
    assert ids(first) == ["q0", "q1", "q2"]
    assert ids(second) == ["q3", "q4"]
    assert first.queue_ms == (10.0, 9.0, 8.0)
    assert queue.next_batch([replica()], now_ms=10.0) is None


def test_the_budget_is_the_smallest_slack():
    queue = scheduler()
    queue.submit(profile("a", slo=2000.0), now_ms=0.0)
    queue.submit(profile("b", slo=900.0, elapsed=100.0), now_ms=50.0)
    decision = queue.next_batch([replica()], now_ms=150.0)
    assert decision.plan.budget_ms == 900.0 - 100.0 - 100.0


def test_only_requests_of_the_same_phases_share_a_batch():
    queue = scheduler()
    for i, policy in enumerate(["adaptive", FULL_PREFILL, "cacheblend", "adaptive", FULL_PREFILL]):
        queue.submit(profile(f"q{i}", policy=policy), now_ms=0.0)
    batches = []
    while decision := queue.next_batch([replica()], now_ms=1.0):
        batches.append(ids(decision))
    assert batches == [["q0", "q3"], ["q1", "q4"], ["q2"]]


def test_requests_without_chunks_do_not_hold_up_those_with_some():
    queue = scheduler()
    for i, chunks in enumerate([("a",), (), ("b",)]):
        queue.submit(profile(f"q{i}", chunks=chunks), now_ms=0.0)
    assert ids(queue.next_batch([replica()], now_ms=1.0)) == ["q0", "q2"]
    assert ids(queue.next_batch([replica()], now_ms=1.0)) == ["q1"]


def test_the_replica_with_the_hot_chunks_is_preferred():
    queue = scheduler()
    queue.submit(profile("q", chunks=("x", "y")), now_ms=0.0)
    choices = [replica("cold", resident=("a",)), replica("hot", resident=("x", "y"))]
    assert queue.next_batch(choices, now_ms=0.0).replica_id == "hot"


def test_a_request_that_does_not_fit_waits_and_keeps_its_turn():
    queue = scheduler()
    queue.submit(profile("big", tokens=5000), now_ms=0.0)
    queue.submit(profile("small", tokens=10), now_ms=0.0)
    assert queue.next_batch([replica(free_kv_tokens=1000)], now_ms=0.0) is None
    assert queue.next_batch([replica(free_seqs=0)], now_ms=0.0) is None
    assert ids(queue.next_batch([replica()], now_ms=0.0)) == ["big", "small"]


def test_batches_stay_within_the_free_blocks():
    queue = scheduler()
    for i in range(6):
        queue.submit(profile(f"q{i}", tokens=475), now_ms=0.0)  # 1,000 tokens each
    assert len(queue.next_batch([replica(free_kv_tokens=2500)], now_ms=0.0).requests) == 2


def test_the_queue_is_bounded():
    queue = scheduler(max_waiting=2)
    queue.submit(profile("a"), now_ms=0.0)
    queue.submit(profile("b"), now_ms=0.0)
    with pytest.raises(QueueFullError, match="2 requests") as error:
        queue.submit(profile("c"), now_ms=0.0)
    assert error.value.retry_after_s > 0
    with pytest.raises(ValueError, match="already waiting"):
        scheduler_with("a").submit(profile("a"), now_ms=0.0)


def scheduler_with(*names):
    queue = scheduler()
    for name in names:
        queue.submit(profile(name), now_ms=0.0)
    return queue


def test_cancelled_requests_never_run():
    queue = scheduler_with("a", "b", "c")
    assert queue.cancel("b")
    assert not queue.cancel("b")
    assert not queue.cancel("never seen")
    assert ids(queue.next_batch([replica()], now_ms=0.0)) == ["a", "c"]


def test_every_request_is_dispatched_or_cancelled_once():
    rng = random.Random(0)
    queue = scheduler(max_batch_requests=4, max_waiting=50)
    submitted, cancelled, dispatched = set(), set(), []
    for step in range(2000):
        action = rng.random()
        if action < 0.5:
            name = f"q{step}"
            try:
                queue.submit(
                    profile(name, policy=rng.choice(["adaptive", FULL_PREFILL, "cacheblend"])),
                    now_ms=float(step),
                )
                submitted.add(name)
            except QueueFullError:
                pass
        elif action < 0.6 and submitted:
            name = rng.choice(sorted(submitted))
            if queue.cancel(name):
                cancelled.add(name)
        else:
            decision = queue.next_batch(
                [replica(free_seqs=rng.randint(0, 5)), replica("s")], now_ms=float(step)
            )
            if decision:
                assert len(decision.requests) == len(decision.plan.requests)
                dispatched.extend(ids(decision))
    while decision := queue.next_batch([replica()], now_ms=1e6):
        dispatched.extend(ids(decision))
    assert len(dispatched) == len(set(dispatched))
    assert set(dispatched) | cancelled == submitted
    assert not set(dispatched) & cancelled


def test_shapes_follow_what_is_resident():
    shape = request_shape(profile("q", chunks=("a", "z"), tokens=100), {"a"})
    assert (shape.num_cached, shape.num_always) == (100, 150)


def test_requests_with_another_deviation_do_not_share_a_batch():
    queue = scheduler()
    for name, deviation in (("a", Deviation.K), ("b", Deviation.V), ("c", Deviation.K)):
        config = RecomputeConfig(deviation=deviation)
        queue.submit(replace(profile(name, policy="custom"), config=config), now_ms=0.0)
    assert ids(queue.next_batch([replica()], now_ms=0.0)) == ["a", "c"]
    assert ids(queue.next_batch([replica()], now_ms=0.0)) == ["b"]


def test_prompts_without_blocks_go_where_host_memory_is():
    queue = scheduler_with("a", "b", "c")  # of 650 tokens each
    full = replica(free_kv_tokens=100)
    assert queue.next_batch([full], now_ms=0.0) is None
    parking = replica(free_kv_tokens=100, parking_tokens=1300)
    assert ids(queue.next_batch([full, parking], now_ms=0.0)) == ["a", "b"]
    over = replica(free_kv_tokens=-1300, parking_tokens=1300)  # two are parked there
    assert queue.next_batch([over], now_ms=0.0) is None


def test_the_engines_own_prefill_has_no_use_for_host_memory():
    queue = scheduler()
    queue.submit(profile("a", policy=FULL_PREFILL), now_ms=0.0)
    assert queue.next_batch([replica(free_kv_tokens=100, parking_tokens=9000)], now_ms=0.0) is None
    assert ids(queue.next_batch([replica(free_kv_tokens=650)], now_ms=0.0)) == ["a"]


def test_what_every_node_can_load_counts_as_stored_but_not_as_hot():
    chunks = tuple(
        ChunkRef(chunk_id=c, num_tokens=300, is_shared=shared)
        for c, shared in (("a", False), ("x", True), ("y", False))
    )
    asked = replace(profile("q"), chunks=chunks)
    assert plan_input(asked, replica()).shape.num_cached == 600
    assert hot_tokens(asked, replica().resident) == 300
    queue = scheduler()
    queue.submit(asked, now_ms=0.0)
    nodes = [replica("empty", resident=()), replica("hot", resident=("x",))]
    assert queue.next_batch(nodes, now_ms=0.0).replica_id == "hot"
