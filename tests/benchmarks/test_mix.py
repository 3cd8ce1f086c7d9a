"""Mixtures of tasks: exact proportions in a seeded order."""

from collections import Counter
from fractions import Fraction
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.quality.mix import MIX, MIXTURES, PR_VT, Mix, mixed
from benchmarks.quality.types import Question, RetrievedDocument, Scorer

WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 1000), min_size=1, max_size=6)


def endless(task):
    return (make_question(task, index) for index in count())


def make_question(task, index):
    return Question(
        question_id=f"{task}/{index}",
        task=task,
        documents=(RetrievedDocument(text="some words"),),
        question="which?",
        answers=("this",),
        scorer=Scorer.EXACT,
        max_new_tokens=1,
    )


def ids(mix, seed, num):
    return [q.question_id for q in mixed({t: endless(t) for t in mix.weights}, mix, seed, num)]


@given(weights=WEIGHTS, total=st.integers(0, 500))
def test_counts_are_the_shares_within_one_question(weights, total):
    counts = Mix(weights).counts(total)
    assert sum(counts.values()) == total
    for task, weight in weights.items():
        exact = Fraction(weight * total, sum(weights.values()))
        assert abs(counts[task] - exact) < 1


@pytest.mark.parametrize(
    ("weights", "total", "expected"),
    [
        ({"a": 0.5, "b": 0.5}, 3, {"a": 2, "b": 1}),  # a tie goes to the earlier task
        ({"a": 0.5, "b": 0.3, "c": 0.2}, 11, {"a": 6, "b": 3, "c": 2}),  # 5.5, 3.3, 2.2
        ({"a": 47, "b": 16, "c": 15.8, "d": 12, "e": 6.1, "f": 3.1}, 10, [5, 2, 1, 1, 1, 0]),
        ({"a": 0.7, "b": 0.1, "c": 0.2}, 10, {"a": 7, "b": 1, "c": 2}),
    ],
)
def test_the_largest_remainders_get_the_rest(weights, total, expected):
    counts = Mix(weights).counts(total)
    assert counts == expected if isinstance(expected, dict) else [*counts.values()] == expected


def test_a_mixture_has_its_counts_and_each_task_its_own_order():
    found = ids(MIX, seed=3, num=42)
    tasks = Counter(question_id.split("/")[0] for question_id in found)
    assert tasks == MIX.counts(42)
    for task, num in tasks.items():
        assert [i for i in found if i.startswith(task)] == [f"{task}/{n}" for n in range(num)]


def test_the_seed_settles_the_order():
    assert ids(PR_VT, 1, 40) == ids(PR_VT, 1, 40)
    assert ids(PR_VT, 1, 40) != ids(PR_VT, 2, 40)
    assert ids(PR_VT, 1, 40) != sorted(ids(PR_VT, 1, 40))


def test_no_more_is_read_than_needed():
    sources = {task: endless(task) for task in PR_VT.weights}
    assert len(list(mixed(sources, PR_VT, 0, 6))) == 6
    assert [next(source).question_id for source in sources.values()] == ["pr/3", "vt/3"]


def test_named_mixtures_add_up():
    for mix in MIXTURES.values():
        assert sum(mix.weights.values()) == pytest.approx(1.0)
        assert sum(mix.shares().values()) == pytest.approx(1.0)


def test_tasks_left_out_leave_the_others_proportions():
    mix = Mix({"a": 0.5, "b": 0.3, "c": 0.2}).over({"b", "c", "unknown"})
    assert mix.shares() == pytest.approx({"b": 0.6, "c": 0.4})
    assert MIX.over(["pr", "vt"]).shares() == PR_VT.shares()
    with pytest.raises(ValueError, match="at least one"):
        MIX.over([])


def test_a_source_that_ends_early_is_named():
    sources = {"pr": endless("pr"), "vt": iter([make_question("vt", 0)])}
    with pytest.raises(ValueError, match="vt has 1 questions, the mixture needs 2"):
        list(mixed(sources, PR_VT, 0, 4))
    with pytest.raises(KeyError, match="vt"):
        list(mixed({"pr": endless("pr")}, PR_VT, 0, 4))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_are_above_0(weight):
    with pytest.raises(ValueError, match="weight of b"):
        Mix({"a": 1.0, "b": weight})
