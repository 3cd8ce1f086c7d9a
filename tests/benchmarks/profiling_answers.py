"""A model that answers as it is told, for the tests of `cachesmith profile`."""

from collections.abc import Callable, Iterator, Sequence

from benchmarks.quality.coverage_search import CoverageSearch
from benchmarks.quality.curves import FULL_REUSE, Curve, Point
from benchmarks.quality.outcomes import Outcome
from benchmarks.quality.types import Question

NUM_LAYERS = 16


class FakeAnswers:
    """is_right, is_reused: under full prefill and full reuse; demand: the smallest coverage that is
    enough for a question under a curve; patience: questions until Ctrl-C"""

    def __init__(
        self,
        *,
        is_right: Callable[[Question], bool] = lambda question: True,
        is_reused: Callable[[Question], bool] = lambda question: False,
        demand: Callable[[Question, Curve], float] = lambda question, curve: 0.1,
        patience: int | None = None,
    ) -> None:
        self.num_layers = NUM_LAYERS
        self.asked: list[str] = []
        self._is_right, self._is_reused, self._demand = is_right, is_reused, demand
        self._patience = patience

    def outcomes(self, question: Question, curves: Sequence[Curve]) -> Iterator[Outcome]:
        self._ask(question)
        for curve in curves:
            is_right = self._is_reused if curve.name == FULL_REUSE else self._is_right
            for point in curve.points():
                yield _outcome(question, curve, point, is_right(question))

    def searched(
        self, question: Question, curves: Sequence[Curve], *, gate: float
    ) -> Iterator[Outcome]:
        assert gate == 1.0
        self._ask(question)
        for curve in curves:
            search = CoverageSearch(curve)
            while search.point is not None:
                point = search.point
                passed = point.config.coverage >= self._demand(question, curve)
                search.saw(passed=passed)
                yield _outcome(question, curve, point, passed)

    def _ask(self, question: Question) -> None:
        if self._patience is not None and len(self.asked) >= self._patience:
            raise KeyboardInterrupt
        self.asked.append(question.question_id)


def _outcome(question: Question, curve: Curve, point: Point, is_right: bool) -> Outcome:
    return Outcome(
        question_id=question.question_id,
        task=question.task,
        curve=curve.name,
        point=point.label,
        text="",
        gold=float(is_right),
        coverage=point.config.coverage,
        share=0.5,
        num_context_tokens=30 * len(question.documents),
        num_documents=len(question.documents),
    )
