import random
from dataclasses import replace

import numpy as np
import pytest

from planner.pass_curves import Pace
from planner.replica_table import ReplicaTable, node_of
from tests.planner.scheduler_worlds import COST, replica


def pace_of(state):
    return Pace(state.cost.scale, state.kv_token_bytes / 1e3, 0.0)


def random_state(rng, name):
    return replica(
        name,
        cost=replace(COST, scale=rng.choice([0.5, 1.0, 2.0])),
        free_seqs=rng.choice([0, 3]),
        busy_until_ms=rng.choice([None, rng.uniform(0.0, 500.0)]),
        max_kv_tokens=rng.choice([None, 5_000, 5_000]),
        node_id=rng.choice(["", "x", "y"]) if rng.random() < 0.1 else "x",
        kv_token_bytes=rng.uniform(0.0, 9.0),
    )


def compare(table, states, now_ms):
    """With what all replicas say, one by one."""
    assert table.states == states
    assert table.free() == [r for r in states if r.is_free]
    assert table.num_free == len(table.free())
    assert table.all_tell == all(r.max_kv_tokens is not None for r in states)
    paces = [pace_of(r) for r in states]
    for name in ("speed", "token_ms", "latency_ms"):
        values = [getattr(pace, name) for pace in paces]
        assert getattr(table.fastest, name) == min(values)
        assert getattr(table.slowest, name) == max(values)
    assert set(table.nodes) == {node_of(r) for r in states}
    for r in states:
        if not r.is_free:
            continue
        others = [
            0.0 if other.busy_until_ms is None else max(0.0, other.busy_until_ms - now_ms)
            for other in states
            if other is not r and (other.is_free or other.busy_until_ms is not None)
        ]
        assert table.others_ms(r, now_ms=now_ms).tolist() == sorted(others)


@pytest.mark.parametrize("seed", range(30))
def test_it_follows_what_changes(seed):
    rng = random.Random(seed)
    table = ReplicaTable()
    states = [random_state(rng, f"r{i}") for i in range(rng.randint(1, 12))]
    for _ in range(20):
        event = rng.random()
        if event < 0.1:
            states.append(random_state(rng, f"new{rng.random()}"))
        elif event < 0.2 and len(states) > 1:
            states.pop(rng.randrange(len(states)))
        elif event < 0.3:
            states[rng.randrange(len(states))] = random_state(rng, f"other{rng.random()}")
        else:
            for i in rng.sample(range(len(states)), rng.randint(0, len(states))):
                states[i] = random_state(rng, states[i].replica_id)
        known = {id(r) for r in table.states}
        changed = table.take(states, pace_of)
        assert {id(r) for r in states} - known <= {id(r) for r in changed}
        compare(table, states, rng.uniform(0.0, 600.0))
        states = list(states)


def test_the_same_states_are_looked_at_once():
    table, seen = ReplicaTable(), []

    def counted(state):
        seen.append(state.replica_id)
        return Pace()

    states = [replica(f"r{i}") for i in range(4)]
    assert list(table.take(states, counted)) == states
    assert list(table.take(states, counted)) == []
    states[2] = replica("r2", busy_until_ms=7.0)
    assert list(table.take(states, counted)) == [states[2]]
    assert seen == ["r0", "r1", "r2", "r3", "r2"]
    assert np.array_equal(table.others_ms(states[0], now_ms=5.0), [0.0, 0.0, 2.0])
