"""Questions of several tasks in one sequence, in stated proportions."""

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.quality.types import Question


@dataclass(frozen=True, slots=True)
class Mix:
    """Tasks and their weights, which need not add up to 1."""

    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        if not self.weights:
            raise ValueError("a mixture needs at least one task")
        for task, weight in self.weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"the weight of {task} must be above 0, got {weight}")

    def shares(self) -> dict[str, float]:
        """Each task's share of the questions; together 1."""
        total = math.fsum(self.weights.values())
        return {task: weight / total for task, weight in self.weights.items()}

    def over(self, tasks: Iterable[str]) -> "Mix":
        """The mixture without the tasks that are not among these, such as those a model can not
        do; the others keep their proportions. ValueError if none is left."""
        kept = set(tasks)
        return Mix({task: weight for task, weight in self.weights.items() if task in kept})

    def counts(self, total: int) -> dict[str, int]:
        """How many of `total` questions each task gets, by the largest remainder: each share is
        rounded down, and the questions left go where most was cut off (the earlier task first)."""
        if total < 0:
            raise ValueError(f"total must be 0 or more, got {total}")
        exact = {task: share * total for task, share in self.shares().items()}
        # a share such as 0.7 * 10 may end just below the whole number that it is
        counts = {task: math.floor(share + 1e-9) for task, share in exact.items()}
        by_remainder = sorted(exact, key=lambda task: counts[task] - exact[task])
        for task in by_remainder[: total - sum(counts.values())]:
            counts[task] += 1
        return counts


# pr: passage retrieval, vt: variable tracking, single and mhqa: questions whose answer needs one
# passage or several
MIX = Mix({"pr": 0.25, "vt": 0.25, "single": 0.25, "mhqa": 0.25})
PR_VT = Mix({"pr": 0.5, "vt": 0.5})
MIXTURES: Mapping[str, Mix] = {"MIX": MIX, "PR+VT": PR_VT}


def mixed(
    sources: Mapping[str, Iterator[Question]], mix: Mix, seed: int, count: int
) -> Iterator[Question]:
    """`count` questions in the proportions of a mixture, the tasks in a shuffled order.

    sources: the questions of each task in the mixture, at least as many as its part of `count`;
        each is read in its own order, and only as far as needed
    seed: settles which task comes when
    raises: KeyError without a source for a task, ValueError where a source ends too early
    """
    counts = mix.counts(count)
    order = [task for task, num in counts.items() for _ in range(num)]
    random.Random(f"mixture {seed}").shuffle(order)
    taken = dict.fromkeys(counts, 0)
    readers = {task: iter(sources[task]) for task in counts}
    for task in order:
        question = next(readers[task], None)
        if question is None:
            raise ValueError(
                f"{task} has {taken[task]} questions, the mixture needs {counts[task]}"
            )
        taken[task] += 1
        yield question
