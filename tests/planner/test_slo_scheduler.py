import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.batch_choice import CacheSmithConfig
from planner.candidate_batches import BatchLimits, candidate_batches
from planner.pass_curves import one_each
from planner.policies import FULL_PREFILL, STATIC_POLICIES
from planner.recompute_planner import SlackPlannerConfig
from planner.scheduler import (
    EdfScheduler,
    FcfsScheduler,
    QueueFullError,
    QueueLimits,
    RefusalReason,
    plan_input,
)
from planner.scheduler_policies import (
    CACHESMITH,
    CACHESMITH_STATIC,
    EDF,
    FCFS,
    SCHEDULER_POLICIES,
    PolicyConfig,
    StaticPlanner,
    build_scheduler,
)
from planner.slo_scheduler import CacheSmithScheduler
from planner.types import ChunkRef
from tests.planner.scheduler_worlds import (
    COST,
    ConcavePlanner,
    linked,
    profile,
    replica,
    run_to_the_end,
    slack_planner,
)

PLANNER = ConcavePlanner()


def scheduler(*, planner=PLANNER, limits=None, **rules):
    config = CacheSmithConfig(limits=QueueLimits(**(limits or {})), **rules)
    return CacheSmithScheduler(config, planner)


def queue_of(*profiles, now_ms=0.0, **fields):
    made = scheduler(**fields)
    for waiting in profiles:
        made.submit(waiting, now_ms=now_ms)
    return made


def ids(decision):
    return [p.request_id for p in decision.requests]


def static(name, policy, **fields):
    return profile(name, policy=policy, config=STATIC_POLICIES[policy], **fields)


def floor_ms(tokens):
    shape = [plan_input(profile("x", tokens=tokens), replica())]
    return PLANNER.plan(shape, budget_ms=0.0, cost=COST).expected_ms


# --- what a batch is worth ---------------------------------------------------------------------


def test_a_request_alone_gets_all_its_slack():
    queue = queue_of(profile("a", tokens=3000, slo=900.0, elapsed_ms=100.0))
    decision = queue.next_batch([replica()], now_ms=50.0)
    assert ids(decision) == ["a"]
    assert decision.plan.budget_ms == pytest.approx(750.0)
    assert decision.queue_ms == (50.0,)
    assert queue.num_waiting == 0
    assert queue.next_batch([replica()], now_ms=60.0) is None


def test_an_urgent_request_does_not_cost_a_patient_one_its_passes():
    """Together both would have the urgent one's slack; one after the other, each has its own."""
    queue = queue_of(
        profile("patient", tokens=3000, slo=3000.0), profile("urgent", tokens=600, slo=200.0)
    )
    first = queue.next_batch([replica()], now_ms=0.0)
    assert ids(first) == ["urgent"]
    assert first.plan.budget_ms == pytest.approx(200.0, rel=0.02)
    second = queue.next_batch([replica()], now_ms=first.plan.expected_ms)
    assert ids(second) == ["patient"]


def test_equal_deadlines_share_a_batch():
    queue = queue_of(*(profile(f"q{i}", tokens=600, slo=500.0) for i in range(3)))
    assert sorted(ids(queue.next_batch([replica()], now_ms=0.0))) == ["q0", "q1", "q2"]


def test_requests_spread_over_free_replicas():
    queue = queue_of(*(profile(f"q{i}", tokens=3000, slo=1200.0) for i in range(2)))
    states = [replica("r0"), replica("r1")]
    first = queue.next_batch(states, now_ms=0.0)
    busy = replace(states[0], busy_until_ms=first.plan.expected_ms)
    second = queue.next_batch([busy, states[1]], now_ms=0.0)
    assert len(ids(first)) == len(ids(second)) == 1
    assert {first.replica_id, second.replica_id} == {"r0", "r1"}


def test_a_replica_that_will_soon_be_free_is_counted_on():
    """Alone, one replica has to hurry for the second request; with help it need not."""
    waiting = [profile("a", tokens=3000, slo=1100.0), profile("b", tokens=3000, slo=1200.0)]
    alone = queue_of(*waiting).next_batch([replica("r0")], now_ms=0.0)
    helper = replica("r1", busy_until_ms=60.0)
    helped = queue_of(*waiting).next_batch([replica("r0"), helper], now_ms=0.0)
    assert ids(helped) == ["a"]
    assert helped.plan.budget_ms == pytest.approx(1100.0)
    assert alone.plan.requests[0].coverage < helped.plan.requests[0].coverage
    assert queue_of(*waiting).next_batch([helper], now_ms=0.0) is None


def test_hopeless_requests_run_after_those_that_can_be_on_time():
    slo = floor_ms(3000) / 2
    queue = queue_of(
        profile("late", tokens=3000, slo=slo),
        profile("late2", tokens=3000, slo=slo),
        profile("fine", slo=1000.0),
    )
    assert ids(queue.next_batch([replica()], now_ms=0.0)) == ["fine"]
    decision = queue.next_batch([replica()], now_ms=0.0)
    assert ids(decision) == ["late"]  # alone, so that nobody waits for two of them
    assert decision.plan.requests[0].coverage == pytest.approx(0.05)


def test_hopeless_requests_are_refused_where_the_rules_say_so():
    late = profile("late", tokens=3000, slo=100.0)
    keeping = queue_of(late, profile("fine"))
    assert keeping.take_refused(now_ms=0.0) == ()  # no replica seen yet
    keeping.next_batch([replica()], now_ms=0.0)
    assert list(keeping.take_refused(now_ms=1.0)) == []
    refusing = queue_of(late, profile("fine"), profile("fine2"), refuse_hopeless=True)
    refusing.next_batch([replica(free_seqs=1)], now_ms=0.0)
    (refused,) = refusing.take_refused(now_ms=1.0)
    assert refused.request_id == "late"
    assert refused.reason is RefusalReason.HOPELESS
    assert refused.slack_ms == pytest.approx(99.0)
    assert refused.needed_ms > 99.0
    assert list(refusing.take_refused(now_ms=1.0)) == []
    assert refusing.num_waiting == 1


def test_the_judged_candidates_are_told():
    queue = queue_of(*(profile(f"q{i}", slo=600.0 + i) for i in range(3)), num_planned=3)
    decision = queue.next_batch([replica()], now_ms=0.0)
    assert 1 < len(decision.judged) <= 3
    assert decision.judged[0].request_ids == tuple(ids(decision))
    assert decision.judged[0].value == max(judged.value for judged in decision.judged)


# --- who may be in a batch ---------------------------------------------------------------------


def test_only_requests_of_the_same_phases_share_a_batch():
    kinds = ["adaptive", FULL_PREFILL, "cacheblend", "adaptive", FULL_PREFILL]
    queue = queue_of(
        *(
            profile(f"q{i}") if kind == "adaptive" else static(f"q{i}", kind)
            for i, kind in enumerate(kinds)
        )
    )
    batches = []
    while decision := queue.next_batch([replica()], now_ms=0.0):
        assert len({kinds[int(name[1:])] for name in ids(decision)}) == 1
        batches.extend(ids(decision))
    assert sorted(batches) == [f"q{i}" for i in range(5)]


def test_batches_stay_within_blocks_sequences_and_limits():
    def most(**fields):
        queue = queue_of(
            *(profile(f"q{i}", tokens=950, slo=5000.0) for i in range(12)),
            limits={"max_batch_requests": 8, "max_batch_tokens": 16_384},
        )
        return len(queue.next_batch([replica(**fields)], now_ms=0.0).requests)

    assert most(free_kv_tokens=2500) <= 2
    assert most(free_seqs=3) <= 3
    assert most() <= 8


def test_a_burst_uses_the_room_that_parking_gives():
    burst = [profile(f"q{i}", tokens=550, slo=700.0) for i in range(6)]  # of 600 tokens each
    full = replica(free_kv_tokens=1300)
    parking = replica(free_kv_tokens=1300, parking_tokens=2400)
    assert len(queue_of(*burst).next_batch([full], now_ms=0.0).requests) == 2
    parked = queue_of(*burst).next_batch([parking], now_ms=0.0)
    assert 2 < len(parked.requests) <= 6
    assert parked.judged[0].parked
    own = [static(f"q{i}", FULL_PREFILL, tokens=550, slo=9e3) for i in range(6)]
    assert len(queue_of(*own).next_batch([parking], now_ms=0.0).requests) <= 2
    calm = queue_of(profile("a", tokens=550)).next_batch([parking], now_ms=0.0)
    assert not calm.judged[0].parked
    no_blocks = replica(free_kv_tokens=-600, parking_tokens=1300)
    assert ids(queue_of(profile("a", tokens=550)).next_batch([no_blocks], now_ms=0.0)) == ["a"]


def test_the_replica_with_the_hot_chunks_is_preferred():
    queue = queue_of(profile("q", chunks=tuple(ChunkRef(chunk_id=c, num_tokens=300) for c in "xy")))
    states = [
        replica("cold", node_id="n0", resident=frozenset("a")),
        replica("hot", node_id="n1", resident=frozenset("xy")),
    ]
    assert queue.next_batch(states, now_ms=0.0).replica_id == "hot"


def test_each_node_gets_the_requests_that_are_hot_there():
    def asks(name, chunk):
        chunks = (ChunkRef(chunk_id=chunk, num_tokens=3000),)
        return profile(name, chunks=chunks, slo=4000.0)

    queue = queue_of(*(asks(f"{chunk}{i}", chunk) for i in range(4) for chunk in "xy"))
    states = {
        name: replica(name, node_id=name, resident=frozenset(chunk))
        for name, chunk in (("nx", "x"), ("ny", "y"))
    }
    first = queue.next_batch(list(states.values()), now_ms=0.0)
    other = "ny" if first.replica_id == "nx" else "nx"
    busy = replace(states[first.replica_id], busy_until_ms=first.plan.expected_ms)
    second = queue.next_batch([busy, states[other]], now_ms=0.0)
    for decision in (first, second):
        assert {name[0] for name in ids(decision)} == {decision.replica_id[1]}


def test_chunks_that_are_hot_on_several_nodes_have_several_homes():
    chunks = (ChunkRef(chunk_id="x", num_tokens=3000),)
    hot = {"resident": frozenset("x")}
    away = replica("c", node_id="c", resident=frozenset())
    for idle in ("a", "b"):
        queue = queue_of(profile("q", chunks=chunks, slo=600.0))
        states = [
            replica(name, node_id=name, busy_until_ms=None if name == idle else 900.0, **hot)
            for name in "ab"
        ]
        assert queue.next_batch([*states, away], now_ms=0.0).replica_id == idle
    busy = [replica("a", node_id="a", busy_until_ms=50.0, **hot), away]
    waiting = queue_of(profile("q", chunks=chunks, slo=600.0))
    assert waiting.next_batch(busy, now_ms=0.0) is None  # late there, in time at home
    lost = queue_of(profile("q", chunks=chunks, slo=600.0))
    assert ids(lost.next_batch([away], now_ms=0.0)) == ["q"]


# --- everybody's turn --------------------------------------------------------------------------


def test_nobody_is_passed_over_for_ever():
    """The bound that the rules state, under a stream of requests that always look better."""
    rules = {"max_rounds": 3, "late_every": 4}
    queue = scheduler(limits={"max_waiting": 1000}, **rules)
    patient = profile("patient", tokens=6000, slo=60_000.0)
    late = [profile(f"late{i}", tokens=3000, slo=1.0) for i in range(3)]
    for waiting in (patient, *late):
        queue.submit(waiting, now_ms=0.0)
    served, number = {}, 0
    for batch in range(60):
        now = float(batch)
        for _ in range(8):
            queue.submit(profile(f"young{number}", tokens=300, slo=200.0), now_ms=now)
            number += 1
        for name in ids(queue.next_batch([replica()], now_ms=now)):
            served.setdefault(name, batch + 1)
    assert served["patient"] <= 3 + 1
    for ahead, waiting in enumerate(late, start=1):
        assert served[waiting.request_id] <= 3 + 4 * (ahead + 1)
    assert served["late0"] < served["late1"] < served["late2"]


def test_an_overdue_request_is_kept_room_for():
    queue = scheduler(max_rounds=2)
    queue.submit(profile("long", tokens=5000, slo=60_000.0), now_ms=0.0)
    number = 0

    def step(free_kv_tokens):
        nonlocal number
        queue.submit(profile(f"q{number}", tokens=300, slo=900.0), now_ms=0.0)
        number += 1
        state = replica(free_kv_tokens=free_kv_tokens, max_kv_tokens=8000)
        return queue.next_batch([state], now_ms=0.0)

    assert [step(4000) is not None for _ in range(4)] == [True, True, False, False]
    assert "long" in ids(step(6000))
    assert "long" not in ids(step(4000))


def test_requests_longer_than_any_capacity_do_not_block_and_are_reported():
    long = profile("long", tokens=9000, slo=60_000.0)
    unknown = queue_of(long, max_rounds=1)
    told = queue_of(long, max_rounds=1)
    kept = queue_of(long, max_rounds=1, refuse_impossible=False)
    for queue, capacity in ((unknown, None), (told, 8000), (kept, 8000)):
        for i in range(5):
            queue.submit(profile(f"q{i}", slo=900.0), now_ms=0.0)
            state = replica(free_kv_tokens=8000, max_kv_tokens=capacity)
            assert ids(queue.next_batch([state], now_ms=0.0)) == [f"q{i}"]
    assert list(unknown.take_refused(now_ms=0.0)) == list(kept.take_refused(now_ms=0.0)) == []
    (refused,) = told.take_refused(now_ms=0.0)
    assert (refused.request_id, refused.reason) == ("long", RefusalReason.IMPOSSIBLE)
    assert told.num_waiting == 0 and kept.num_waiting == 1


def test_the_queue_is_bounded_and_knows_its_requests():
    queue = queue_of(profile("a"), limits={"max_waiting": 2})
    with pytest.raises(ValueError, match="already waiting"):
        queue.submit(profile("a"), now_ms=0.0)
    queue.submit(profile("b"), now_ms=0.0)
    with pytest.raises(QueueFullError, match="2 requests"):
        queue.submit(profile("c"), now_ms=0.0)
    assert queue.cancel("a")
    assert not queue.cancel("a")
    queue.submit(profile("c"), now_ms=0.0)
    assert queue.num_waiting == 2


# --- bad input ---------------------------------------------------------------------------------


def test_clocks_that_jump_back_or_say_nonsense():
    queue = scheduler()
    queue.submit(profile("a", slo=500.0), now_ms=1e6)
    decision = queue.next_batch([replica()], now_ms=0.0)
    assert decision.queue_ms == (0.0,)
    assert decision.plan.budget_ms == pytest.approx(500.0)  # no more than it ever had
    queue.submit(profile("b"), now_ms=float("nan"))
    assert ids(queue.next_batch([replica()], now_ms=float("inf"))) == ["b"]


@pytest.mark.parametrize("slo", [-1e6, 0.0, float("nan"), float("inf"), 1e300])
def test_objectives_that_are_past_or_without_end(slo):
    queue = queue_of(profile("odd", slo=slo), profile("fine", slo=900.0))
    served = []
    while decision := queue.next_batch([replica()], now_ms=10.0):
        served += ids(decision)
    assert sorted(served) == ["fine", "odd"]


def test_nothing_to_do():
    queue = scheduler()
    assert queue.next_batch([replica()], now_ms=0.0) is None
    queue.submit(profile("a"), now_ms=0.0)
    assert queue.next_batch([], now_ms=0.0) is None
    assert queue.next_batch([replica(free_seqs=0)], now_ms=0.0) is None
    assert queue.next_batch([replica(free_kv_tokens=10)], now_ms=0.0) is None
    assert queue.num_waiting == 1


def test_requests_without_any_tokens_to_choose():
    queue = queue_of(profile("a", chunks=()), profile("b", num_suffix_tokens=0, tokens=1))
    served = []
    while decision := queue.next_batch([replica(resident=frozenset())], now_ms=0.0):
        served += ids(decision)
    assert sorted(served) == ["a", "b"]


def test_other_machines_and_new_prices():
    """Replicas measure their own costs; a request is late by the one that would run it."""
    slow = replace(COST, row_ms=COST.row_ms * 5, pair_ms=COST.pair_ms * 5)
    queue = queue_of(profile("a", tokens=3000, slo=900.0))
    assert queue.next_batch([replica("r", cost=slow)], now_ms=0.0).plan.requests[0].coverage == (
        pytest.approx(0.05)
    )
    queue.submit(profile("b", tokens=3000, slo=900.0), now_ms=0.0)
    queue.submit(profile("c", tokens=3000, slo=900.0), now_ms=0.0)
    states = [replica("slow", cost=slow, free_seqs=0), replica("fast")]
    assert queue.next_batch(states, now_ms=0.0).plan.expected_ms <= 900.0


@pytest.mark.parametrize(
    "bad",
    [
        {"max_rounds": 0},
        {"late_every": 0},
        {"num_planned": 0},
        {"effort": 0},
        {"reserve": 1.0},
        {"max_exhaustive": 9},
        {"bucket_tokens": (4, 2)},
    ],
)
def test_impossible_rules_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        CacheSmithConfig(**bad)


# --- stored KV that comes over a link ----------------------------------------------------------


def test_a_slow_link_makes_a_request_late_that_is_timely_over_a_fast_one():
    slo = floor_ms(3000) + 100.0
    refused = {}
    for ms in (1.0, 400.0):
        queue = queue_of(
            profile("q", tokens=3000, slo=slo),
            profile("patient", tokens=300, slo=9e3),
            refuse_hopeless=True,
        )
        decision = queue.next_batch([linked(ms_per_kilotoken=ms, free_seqs=1)], now_ms=0.0)
        assert ids(decision) == (["q"] if ms == 1.0 else ["patient"])
        refused[ms] = [r.request_id for r in queue.take_refused(now_ms=0.0)]
    assert refused == {1.0: [], 400.0: ["q"]}


def test_the_link_counts_as_it_is_now_and_makes_no_new_curves():
    queue = queue_of(*(profile(f"q{i}", tokens=3000, slo=5e3) for i in range(4)))
    queue.next_batch([linked(ms_per_kilotoken=50.0, free_seqs=1)], now_ms=0.0)
    before = PLANNER.num_plans
    queue.next_batch([linked(ms_per_kilotoken=150.0, free_seqs=1)], now_ms=0.0)
    assert PLANNER.num_plans == before + 1  # of the batch


def test_a_request_is_hopeless_only_if_it_is_on_every_replica():
    queue = queue_of(profile("q", tokens=3000, slo=floor_ms(3000) + 100.0), refuse_hopeless=True)
    states = [
        linked("slow", ms_per_kilotoken=400.0),
        linked("fast", ms_per_kilotoken=1.0, busy_until_ms=10.0),
    ]
    queue.next_batch([replace(states[0], free_seqs=0), states[1]], now_ms=0.0)
    assert list(queue.take_refused(now_ms=0.0)) == []


def test_batches_over_a_link_meet_their_deadlines():
    rng = random.Random(0)
    profiles = [
        profile(f"q{i}", tokens=rng.choice([600, 1500, 3000]), slo=rng.uniform(300.0, 4e3))
        for i in range(12)
    ]
    queue = queue_of(*profiles)
    states = [linked(name, ms_per_kilotoken=60.0) for name in ("a", "b")]
    _, decisions = run_to_the_end(queue, states)
    assert sum(len(d.requests) for _, d in decisions) == 12
    timely = 0
    for start, decision in decisions:
        end = start + decision.plan.expected_ms
        if decision.judged:  # of requests that could be on time
            assert all(end <= p.ttft_slo_ms + 1e-6 for p in decision.requests)
            timely += len(decision.requests)
    assert timely >= 6


# --- properties --------------------------------------------------------------------------------


def random_run(seed, *, planner=PLANNER):
    """A life of a scheduler: what went in, what came out."""
    rng = random.Random(seed)
    limits = {"max_batch_requests": rng.randint(1, 8), "max_waiting": 40}
    rules = {
        "refuse_hopeless": rng.random() < 0.5,
        "max_rounds": rng.randint(1, 8),
        "num_planned": rng.randint(1, 3),
        "max_exhaustive": rng.choice([0, 5]),
    }
    queue = scheduler(planner=planner, limits=limits, **rules)
    log, waiting, number, now = [], set(), 0, 0.0
    free_at = {f"r{i}": 0.0 for i in range(rng.randint(1, 3))}
    for _ in range(60):
        now += rng.choice([0.0, 5.0, 100.0, 400.0, -50.0])
        action = rng.random()
        if action < 0.5:
            name, number = f"q{number}", number + 1
            kind = rng.choice(["adaptive", "adaptive", "cacheblend", FULL_PREFILL])
            fields = {"tokens": rng.choice([300, 900, 3000, 20_000]), "slo": rng.choice([50, 2e3])}
            made = profile(name, **fields) if kind == "adaptive" else static(name, kind, **fields)
            try:
                queue.submit(made, now_ms=now)
            except QueueFullError:
                log.append(("full", name))
            else:
                waiting.add(name)
        elif action < 0.55 and waiting:
            name = rng.choice(sorted(waiting))
            assert queue.cancel(name)
            waiting.remove(name)
            log.append(("cancelled", name))
        elif action < 0.6:
            for refused in queue.take_refused(now_ms=now):
                waiting.remove(refused.request_id)
                log.append(("refused", refused.request_id))
        else:
            states = [
                replica(
                    name,
                    busy_until_ms=until if until > now else None,
                    free_seqs=rng.randint(0, 6),
                    free_kv_tokens=rng.choice([-500, 1000, 5000, 16_000]),
                    parking_tokens=rng.choice([0, 4000]),
                    max_kv_tokens=rng.choice([None, 16_000]),
                )
                for name, until in free_at.items()
            ]
            decision = queue.next_batch(states, now_ms=now)
            if decision is not None:
                state = next(s for s in states if s.replica_id == decision.replica_id)
                check(decision, state, limits)
                free_at[state.replica_id] = now + decision.plan.expected_ms
                waiting -= set(ids(decision))
                log.append(("served", *ids(decision)))
        assert queue.num_waiting == len(waiting)
    while decision := queue.next_batch([replica("z", free_kv_tokens=100_000)], now_ms=now):
        log.append(("served", *ids(decision)))
    assert queue.num_waiting == 0
    ended = [name for _, *names in log for name in names]
    assert sorted(ended) == sorted(f"q{i}" for i in range(number))  # each once
    return log


def check(decision, state, limits):
    assert state.is_free
    assert 1 <= len(decision.requests) <= min(limits["max_batch_requests"], state.free_seqs)
    assert len(decision.requests) == len(decision.plan.requests) == len(decision.queue_ms)
    plain = decision.requests[0].policy == FULL_PREFILL
    room = state.free_kv_tokens + (0 if plain else state.parking_tokens)
    assert sum(p.num_prompt_tokens for p in decision.requests) <= room
    assert len({p.policy for p in decision.requests}) == 1
    assert min(decision.queue_ms) >= 0.0


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_every_request_is_served_refused_or_cancelled_once_and_decisions_repeat(seed):
    assert random_run(seed) == random_run(seed)


def test_the_same_holds_for_a_planner_that_promises_nothing():
    random_run(7, planner=slack_planner())


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_permuting_equal_arrivals_changes_only_ties(seed):
    """Requests that came at the same time: their order changes no batch but for equal ones."""
    rng = random.Random(seed)
    waiting = [
        profile(f"q{i}", tokens=rng.choice([300, 900, 3000]), slo=rng.choice([400.0, 900.0, 3e3]))
        for i in range(rng.randint(2, 9))
    ]
    shuffled = rng.sample(waiting, len(waiting))

    def outcome(profiles):
        decision = queue_of(*profiles).next_batch([replica("a"), replica("b")], now_ms=0.0)
        kinds = sorted((p.num_context_tokens, p.ttft_slo_ms) for p in decision.requests)
        return decision.replica_id, kinds, round(decision.plan.budget_ms, 3)

    assert outcome(waiting) == outcome(shuffled)


# --- the parts ---------------------------------------------------------------------------------


def test_candidates_are_prefixes_of_buckets_and_neighbours():
    tokens = np.full(12, 100)
    buckets = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2])
    order = np.arange(12)
    limits = BatchLimits(max_requests=4, max_tokens=10_000, room_tokens=10_000)
    found = candidate_batches(order, tokens=tokens, buckets=buckets, at_home=None, limits=limits)
    assert {(0, 1, 2, 3), (0, 3, 6, 9), (0, 1, 3, 4), (1, 2, 4, 5), (2,)} <= set(found)
    assert len(found) == len(set(found))
    tight = replace(limits, max_tokens=250)
    found = candidate_batches(order, tokens=tokens, buckets=buckets, at_home=None, limits=tight)
    assert max(map(len, found)) == 2
    lonely = replace(limits, max_tokens=50)
    found = candidate_batches(order, tokens=tokens, buckets=buckets, at_home=None, limits=lonely)
    assert set(map(len, found)) == {1}
    forced = candidate_batches(
        order[1:], tokens=tokens, buckets=buckets, at_home=None, limits=limits, forced=0
    )
    assert all(batch[0] == 0 and len(batch) <= 4 for batch in forced) and (0,) in forced


# --- policies by name --------------------------------------------------------------------------


def test_policies_by_name():
    made = {name: build_scheduler(PolicyConfig(name=name), PLANNER) for name in SCHEDULER_POLICIES}
    assert set(made) == {CACHESMITH, CACHESMITH_STATIC, EDF, FCFS}
    assert isinstance(made[EDF], EdfScheduler) and type(made[FCFS]) is FcfsScheduler
    for queue in made.values():
        queue.submit(profile("soft", slo=3000.0), now_ms=0.0)
        queue.submit(profile("hard", slo=600.0), now_ms=0.0)
        assert queue.take_refused(now_ms=0.0) == ()
        decision = queue.next_batch([replica(free_seqs=1)], now_ms=0.0)
        assert ids(decision) == (["soft"] if queue is made[FCFS] else ["hard"])
    with pytest.raises(ValueError, match="cachesmith-static"):
        PolicyConfig(name="lifo")


def test_the_static_policies_do_not_look_at_the_budget():
    for name in (FCFS, EDF):
        queue = build_scheduler(PolicyConfig(name=name), PLANNER)
        queue.submit(profile("a", slo=1.0), now_ms=0.0)
        (plan,) = queue.next_batch([replica()], now_ms=0.0).plan.requests
        assert plan.coverage == STATIC_POLICIES["cacheblend"].coverage
        assert plan.band is None and plan.policy == "adaptive"
    with pytest.raises(ValueError, match="tokens_per_chunk"):
        StaticPlanner(STATIC_POLICIES["epic"])


def test_the_ablation_sets_its_coverage_to_meet_the_budget():
    config = PolicyConfig(name=CACHESMITH_STATIC, slack=SlackPlannerConfig(reserve=0.0))
    queue = build_scheduler(config, PLANNER)
    queue.submit(profile("a", tokens=3000, slo=700.0), now_ms=0.0)
    decision = queue.next_batch([replica()], now_ms=0.0)
    assert decision.plan.expected_ms == pytest.approx(700.0, rel=1e-6)
    for i in range(2):  # the second may not lose its deadline to the first one's coverage
        queue.submit(profile(f"q{i}", tokens=3000, slo=700.0 + 600.0 * i), now_ms=0.0)
    first = queue.next_batch([replica()], now_ms=0.0)
    assert first.plan.budget_ms <= 700.0
    assert len(one_each(first.plan).__str__()) > 0


def test_edf_runs_the_whole_queue_in_order_of_deadline():
    queue = EdfScheduler(QueueLimits(max_batch_requests=1), slack_planner())
    for i, slo in enumerate([900.0, 300.0, 600.0]):
        queue.submit(profile(f"q{i}", slo=slo), now_ms=0.0)
    _, decisions = run_to_the_end(queue, [replica()])
    assert [ids(d) for _, d in decisions] == [["q1"], ["q2"], ["q0"]]


def test_shared_chunks_are_planned_as_stored_on_every_node():
    chunks = (ChunkRef(chunk_id="x", num_tokens=3000, is_shared=True),)
    cold = replica("cold", node_id="n0", resident=frozenset())
    missing = (ChunkRef(chunk_id="x", num_tokens=3000),)
    loaded, computed = (
        queue_of(profile("q", chunks=c, slo=900.0)).next_batch([cold], now_ms=0.0)
        for c in (chunks, missing)
    )
    assert loaded.plan.expected_ms < computed.plan.expected_ms
    hot = replica("hot", node_id="n1", resident=frozenset("x"))
    queue = queue_of(profile("q", chunks=chunks, slo=900.0))
    assert queue.next_batch([cold, hot], now_ms=0.0).replica_id == "hot"
