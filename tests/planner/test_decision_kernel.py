"""The compiled loops against their plain references, on random ragged queues and candidates."""

import numba
import numpy as np
import pytest
from numba.core import caching

from planner import decision_kernel as kernel
from planner import decision_reference as reference
from planner.compiled import compiled

EXACT = 1e-9  # relative: sums in another order


def random_queue(rng, num):
    """Arguments of `project`; steep curves and flat ones, some without segments, ties in between"""
    slack_ms = np.sort(rng.uniform(0.0, rng.choice([300.0, 5_000.0, 60_000.0]), num))
    if rng.random() < 0.3:
        slack_ms = slack_ms.round(-2)
    segment_ms = rng.uniform(0.0, 300.0, (3, num)) * (rng.random((3, num)) < 0.8)
    slopes = np.sort(rng.uniform(0.0, 2e-3, (3, num)), axis=0)[::-1] * (rng.random(num) < 0.8)
    return {
        "timely": rng.random(num) < 0.9,
        "slack_ms": slack_ms,
        "floor_ms": rng.uniform(5.0, 200.0, num),
        "floor_passes": rng.uniform(0.0, 1.0, num),
        "segment_ms": segment_ms,
        "segment_passes": segment_ms * slopes,
        "others_ms": np.sort(np.maximum(rng.uniform(-200.0, 900.0, rng.integers(0, 9)), 0.0)),
        "share": 0.0,
    }


def random_members(rng, num, num_candidates, width):
    members = np.full((num_candidates, width), -1)
    for row in members:
        size = rng.integers(1, min(width, num) + 1)
        row[:size] = rng.choice(num, size, replace=False)
    return members


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("seed", range(60))
def test_the_kernels_are_their_references(seed):
    rng = np.random.default_rng(seed)
    num = int(rng.choice([1, 2, 5, 12, 40, 150]))
    queue = random_queue(rng, num)
    projected, other = (), ()
    for share in (0.3, 0.0):
        queue["share"] = share
        projected, other = kernel.project(*queue.values()), projected
        close(projected, reference.project_ref(*queue.values()))

    members = random_members(rng, num, int(rng.integers(1, 12)), int(rng.integers(1, 9)))
    occupied_ms = rng.uniform(0.0, 2_000.0, len(members))
    passes = kernel.queue_passes(*projected, members, occupied_ms)
    close([passes], [reference.queue_passes_ref(*projected, members, occupied_ms)])

    usable = float(rng.choice([1.0, 0.85]))
    given = [
        members,
        queue["timely"],
        rng.random(num) < rng.choice([0.5, 1.0]),
        queue["slack_ms"],
        queue["floor_ms"],
        rng.uniform(50.0, 400.0, num),
        queue["floor_passes"],
        queue["segment_ms"],
        queue["segment_passes"],
        float(rng.uniform(0.0, 20.0)),
        usable,
    ]
    rows, limits, curves = kernel.candidate_curves(*given)
    expected = reference.candidate_curves_ref(*given)
    close((rows, limits), expected[:2])
    compare_curves(curves, expected[2])
    if not len(rows):
        return
    given = [
        members[rows],
        rng.random(len(rows)) < 0.3,
        (members[rows] >= 0).sum(axis=1) * int(rng.choice([-1, 1])),
        limits,
        curves,
        *projected,
        *other,
        float(queue["others_ms"][0]) if len(queue["others_ms"]) else np.inf,
        usable,
        int(rng.integers(1, 7)),
        bool(rng.random() < 0.5),
        int(rng.integers(1, 3)),
    ]
    close(kernel.search(*given), reference.search_ref(*given))


@pytest.mark.parametrize("seed", range(40))
def test_loaded_times_are_their_reference(seed):
    rng = np.random.default_rng(seed)
    num = int(rng.choice([1, 3, 40]))
    queue = random_queue(rng, num)
    floor_ms, shown = queue["floor_ms"], rng.random(num) < 0.7
    deepest = np.where(shown, rng.choice([0.0, 0.3, 1.0], num), 0.0)
    given = [
        floor_ms,
        queue["floor_passes"],
        queue["segment_ms"],
        queue["segment_passes"],
        np.where(shown, floor_ms * rng.uniform(0.9, 6.0, num), np.inf),
        rng.uniform(0.0, 30.0, num),
        rng.uniform(0.0, 5e3, num) * (rng.random(num) < 0.8),
        rng.uniform(0.0, 3e5, num) * (rng.random(num) < 0.8),
        deepest,
        float(rng.choice([0.4, 1.0, 2.5])),
        float(rng.choice([0.0, 1e-4, 1e-3, 1e-2])),
        float(rng.choice([0.0, 3.0])),
    ]
    found = kernel.loaded_times(*given)
    close([found], [reference.loaded_times_ref(*given)])
    bare = kernel.loaded_times(*given[:-2], 0.0, 0.0)
    assert (found[0] >= np.minimum(bare[0], given[4] * given[-3]) - 1e-9).all()


def compare_curves(found, expected):
    """As functions: where segments are empty or equally steep their order is free."""
    assert found.shape == expected.shape
    ends = [curve[:, 0] + curve[:, 1] for curve in (found, expected)]
    np.testing.assert_allclose(ends[0][:, -1], ends[1][:, -1], rtol=EXACT)
    for mine, other in zip(found, expected, strict=True):
        for ms in np.linspace(mine[0, 0] - 1.0, mine[0, -1] + 100.0, 17):
            passes = [
                (np.clip(ms - start, 0.0, length) * slope).sum()
                for start, length, slope in (mine, other)
            ]
            assert passes[0] == pytest.approx(passes[1], rel=EXACT, abs=EXACT)


def test_the_best_choice_is_moores_and_hodgsons():
    rng = np.random.default_rng(1)
    for _ in range(200):
        num = int(rng.integers(0, 60))
        slack_ms = np.sort(rng.uniform(0.0, 1_000.0, num))
        cost_ms = rng.integers(1, 12, num) * 10.0  # ties
        free_ms = np.sort(rng.uniform(0.0, 500.0, rng.integers(0, 4)))
        close(
            [kernel.most_on_time(slack_ms, cost_ms, free_ms)],
            [reference.most_on_time_ref(slack_ms, cost_ms, free_ms)],
        )


def test_it_compiles_where_nothing_can_be_kept(monkeypatch):
    """Numba refuses to keep what it compiles where it may write nowhere."""
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])

    def twice(value):
        return 2.0 * value

    with pytest.raises(RuntimeError, match="locator"):
        numba.njit("f8(f8)", cache=True)(twice)
    assert compiled("f8(f8)")(twice)(3.0) == 6.0
