"""Event queue, stores, links, sizes of fleets, hardware arithmetic."""

import math

import pytest

from planner import ChunkRef
from planner.autoscaling import LoadSignal
from planner.simulator import MACHINES
from planner.simulator.autoscaling import OngoingSizing
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


@pytest.mark.parametrize(
    ("name", "tokens_per_s", "kv_kib"),
    [("qwen3-8b-h200", 31e3, 144), ("qwen3-32b-2xh200", 13e3, 256)],
)
def test_hardware_by_arithmetic_has_the_right_size(name, tokens_per_s, kv_kib):
    machine = MACHINES[name]
    assert 8_000 / machine.full_prefill_ms(8_000) * 1e3 == pytest.approx(tokens_per_s, rel=0.1)
    assert machine.kv_token_bytes * machine.cost.num_layers == kv_kib * 1024
    assert 500_000 < machine.kv_capacity_tokens < 800_000


class Ongoing:
    """Serve's rule on a clock that the test moves."""

    def __init__(self, **changes):
        fields = {"max_replicas": 6, "upscale_delay_s": 3, "downscale_delay_s": 6, "look_back_s": 2}
        self.sizer = OngoingSizing(kind="ongoing", **{**fields, **changes}).sizer()
        self.now_s, self.num = 0.0, 1

    def run(self, seconds, num_active, *, num_ready=None):
        for _ in range(seconds):
            self.now_s += 1.0
            ready = self.num if num_ready is None else num_ready
            signal = LoadSignal(
                epoch="e", at_ms=self.now_s * 1e3, num_active=num_active, num_ready=ready
            )
            self.num = self.sizer.wanted(signal, num_target=self.num, now_s=self.now_s)
        return self.num


def test_serves_rule_wants_two_requests_a_replica_after_its_delays():
    rule = Ongoing()
    assert rule.run(3, 6) == 1  # not yet
    assert rule.run(1, 6) == 3
    assert rule.run(30, 6) == 3
    assert rule.run(5, 2) == 3
    assert rule.run(6, 2) == 1
    assert Ongoing().run(60, 100) == 6  # the bound
    assert Ongoing(min_replicas=1).run(60, 0) == 1
    assert Ongoing().run(60, 100, num_ready=0) == 1  # nobody reports


def test_serves_rule_forgets_a_wish_that_did_not_last():
    rule = Ongoing(look_back_s=0.5)
    for _ in range(5):
        rule.run(2, 6)
        assert rule.run(2, 2) == 1


def test_a_range_of_replicas_is_one():
    with pytest.raises(ValueError, match="max_replicas"):
        OngoingSizing(kind="ongoing", min_replicas=4, max_replicas=3)
