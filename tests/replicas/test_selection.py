import random

import pytest
import torch

from replicas.selection import kept_candidates, selection_size, top_rows


@pytest.mark.parametrize(
    ("coverage", "num", "size"),
    [
        (0.0, 10, 0),
        (0.15, 20, 3),
        (0.15, 21, 4),
        (1.0, 7, 7),
        (0.05, 1, 1),
        (0.1, 30, 3),
        (0.5, 0, 0),
    ],
)
def test_selection_size_rounds_up(coverage, num, size):
    assert selection_size(coverage, num) == size


def test_gradual_filtering_ends_at_the_coverage_and_never_grows():
    rng = random.Random(0)
    for _ in range(200):
        coverage, num, steps = rng.random(), rng.randint(0, 5000), rng.randint(1, 32)
        sizes = [kept_candidates(coverage, num, step, steps) for step in range(1, steps + 1)]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[-1] == selection_size(coverage, num)


def test_ties_go_to_the_earlier_row():
    rows = torch.tensor([2, 5, 9, 11, 30])
    assert top_rows(rows, torch.tensor([1.0, 3.0, 1.0, 3.0, 1.0]), 3).tolist() == [2, 5, 11]
    assert top_rows(rows, torch.zeros(5), 2).tolist() == [2, 5]


def test_scores_that_are_not_finite_come_first():
    rows = torch.arange(4)
    scores = torch.tensor([9.0, float("nan"), 8.0, float("-inf")])
    assert top_rows(rows, scores, 2).tolist() == [1, 3]
