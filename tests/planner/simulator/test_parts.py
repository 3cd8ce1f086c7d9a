"""Event queue, stores, links, sizes of fleets, hardware arithmetic."""

import math

import pytest

from planner import ChunkRef
from planner.simulator import MACHINES
from planner.simulator.autoscaling import QueueWork, replicas_for_queue, wanted_replicas
from planner.simulator.chunk_store import LruTier, Node, NodeLink
from planner.simulator.event_queue import EventQueue


def chunk(name, num_tokens=10):
    return ChunkRef(chunk_id=name, num_tokens=num_tokens)


def test_events_run_in_order_of_time_then_of_planning():
    events, seen = EventQueue(), []
    for name, at in (("b", 5.0), ("a", 1.0), ("c", 5.0)):
        events.at(at, lambda name=name: seen.append((name, events.now_ms())))
    events.run(lambda: False)
    assert seen == [("a", 1.0), ("b", 5.0), ("c", 5.0)]
    for moment in (4.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="cannot plan"):
            events.at(moment, lambda: None)


def test_the_least_recently_used_chunk_leaves_first():
    tier = LruTier(30)
    for name in "abc":
        tier.insert(chunk(name))
    assert tier.use("a") and not tier.use("x")
    tier.insert(chunk("d"))
    assert tier.ids == {"a", "c", "d"} and tier.num_tokens == 30
    tier.insert(chunk("too long", 31))
    assert "too long" not in tier.ids
    filled = LruTier(25)
    filled.fill(chunk(name) for name in "abc")
    assert filled.ids == {"a", "b"}


def test_a_node_knows_which_tier_a_chunk_is_in():
    redis = LruTier(100)
    redis.fill([chunk("a"), chunk("b")])
    link = NodeLink(((0.0, 1.0),))
    node = Node("n", host=LruTier(20), redis=redis, link=link)
    assert node.split([chunk("a"), chunk("x")]) == (0, 10)
    node.keep([chunk("a"), chunk("x")])
    assert node.split([chunk("a"), chunk("b"), chunk("x")]) == (20, 10)
    alone = Node("n", host=LruTier(20), redis=None, link=link)
    assert alone.store_id == "n" and node.store_id == "redis"


def test_a_link_is_shared_by_those_that_load_and_changes_over_time():
    link = NodeLink(((0.0, 100.0), (50.0, 10.0)))
    assert link.begin(100.0, 10, now_ms=0.0) == 100.0  # until 10 ms
    assert link.begin(100.0, 10, now_ms=5.0) == 50.0  # until 25 ms
    assert link.begin(100.0, 10, now_ms=12.0) == 50.0
    assert link.begin(1.0, 1, now_ms=60.0) == 10.0


def test_the_queue_asks_for_what_its_deadlines_need():
    assert replicas_for_queue([]) == 0.0
    assert replicas_for_queue([(100.0, 50.0), (100.0, 100.0), (30.0, 31.0)]) == 1.5
    assert replicas_for_queue([(1_000.0, 10.0), (20.0, 20.0)]) == 1.0
    sizing = QueueWork(kind="queue_work", min_replicas=2, max_replicas=5, utilisation=0.5)
    assert wanted_replicas(sizing, waiting=[], arriving_share=0.1) == 2
    assert wanted_replicas(sizing, waiting=[], arriving_share=1.5) == 3
    assert wanted_replicas(sizing, waiting=[(10.0, 10.0)] * 9, arriving_share=0.0) == 5


@pytest.mark.parametrize(
    ("name", "tokens_per_s", "kv_kib"),
    [("qwen3-8b-h200", 31e3, 144), ("qwen3-32b-2xh200", 13e3, 256)],
)
def test_hardware_by_arithmetic_has_the_right_size(name, tokens_per_s, kv_kib):
    machine = MACHINES[name]
    assert 8_000 / machine.full_prefill_ms(8_000) * 1e3 == pytest.approx(tokens_per_s, rel=0.1)
    assert machine.kv_token_bytes * machine.cost.num_layers == kv_kib * 1024
    assert 500_000 < machine.kv_capacity_tokens < 800_000
