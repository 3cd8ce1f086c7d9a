"""Which replica gets a batch, and what is kept of requests and replicas that are gone."""

from dataclasses import replace

import pytest

from planner.batch_choice import CacheSmithConfig
from planner.policies import FULL_PREFILL, STATIC_POLICIES
from planner.scheduler import QueueLimits, plan_input
from planner.slo_scheduler import CacheSmithScheduler
from planner.timeline import Link
from tests.planner.scheduler_worlds import COST, ConcavePlanner, profile, replica

PLANNER = ConcavePlanner()


def queue_of(*profiles):
    made = CacheSmithScheduler(CacheSmithConfig(limits=QueueLimits(max_waiting=10_000)), PLANNER)
    for waiting in profiles:
        made.submit(waiting, now_ms=0.0)
    return made


def floor_ms(name, on):
    request = plan_input(profile(name), on)
    return PLANNER.plan([request], budget_ms=0.0, cost=on.cost).expected_ms


def test_a_replica_that_can_take_nothing_does_not_keep_others_from_it():
    """The first request in line is hot on the first node, where it would be late all the same."""
    hot = replace(replica("a"), node_id="na", resident=frozenset(["chunk-q"]))
    slow = replace(hot, cost=replace(COST, scale=3.0))
    fast = replace(replica("b"), node_id="nb", resident=frozenset(["chunk-q"]))
    slack = 1.5 * floor_ms("q", fast)
    assert floor_ms("q", slow) > slack
    queue = queue_of(profile("q", slo=slack))
    decision = queue.next_batch([replace(slow, free_kv_tokens=10**6), fast], now_ms=0.0)
    assert decision is not None and decision.replica_id == "b"


def test_a_request_waits_for_the_replica_on_which_it_can_be_on_time():
    fast = replica("fast", busy_until_ms=5.0)
    slow = replace(replica("slow"), cost=replace(COST, scale=2.0))
    slack = 1.3 * floor_ms("q", fast) + 5.0
    assert floor_ms("q", slow) > slack
    queue = queue_of(profile("q", slo=slack))
    assert queue.next_batch([fast, slow], now_ms=0.0) is None
    decision = queue.next_batch([replace(fast, busy_until_ms=None), slow], now_ms=5.0)
    assert decision.replica_id == "fast"
    # once it is hopeless it runs where there is room
    queue.submit(profile("late", slo=1.0), now_ms=5.0)
    assert queue.next_batch([fast, slow], now_ms=5.0).replica_id == "slow"


def test_a_replica_without_a_seat_is_not_counted_on():
    waiting = [profile("a", tokens=3000, slo=1100.0), profile("b", tokens=3000, slo=1200.0)]
    coverages = {}
    for free_seqs in (0, 8):
        decision = queue_of(*waiting).next_batch(
            [replica("r0"), replace(replica("r1"), free_seqs=free_seqs)], now_ms=0.0
        )
        coverages[free_seqs] = decision.plan.requests[0].coverage
    assert coverages[0] < coverages[8]


@pytest.mark.parametrize("policy", [FULL_PREFILL, "cacheblend"])
def test_what_the_engine_prefills_as_a_whole_is_planned_so(policy):
    config = STATIC_POLICIES[policy]
    asked = profile("q", policy=policy, config=config)
    if policy != FULL_PREFILL:  # without chunks there is nothing to reuse
        asked = replace(asked, chunks=(), num_suffix_tokens=1500)
    far = replace(replica(), link=Link(bytes_per_ms=1.0), kv_token_bytes=1e6)
    made = plan_input(asked, far)
    assert made.shape.num_cached == made.layer_bytes == 0
    assert made.shape.num_always == asked.num_prompt_tokens
    assert made.config == STATIC_POLICIES[FULL_PREFILL]


def test_nothing_is_kept_of_requests_that_gave_up():
    queue = queue_of()
    for number in range(2_000):
        queue.submit(profile(f"q{number}"), now_ms=0.0)
        assert queue.cancel(f"q{number}")
    assert len(queue._unseen) < 100 and queue._table.num_rows < 100
