"""From outcomes to accuracies with intervals, and to the coverage that each request needs."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.quality.curves import FULL_PREFILL
from benchmarks.quality.outcomes import Outcome
from benchmarks.quality.scoring import passes

CONFIDENCE_Z = 1.96  # two-sided 95%
NEVER = math.inf  # no measured coverage below all of it is enough


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Mean score of one configuration over requests."""

    gold: float  # against the gold answers
    kept: float  # share of the requests that score no worse than under full prefill
    low: float  # 95% interval of `gold`
    high: float
    num_requests: int
    coverage: float  # means over the requests
    share: float


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that are looked at together."""

    task: str
    num_documents: int

    def __str__(self) -> str:
        return f"{self.task}, {self.num_documents} documents"


def grouped(outcomes: Iterable[Outcome]) -> dict[Group, list[Outcome]]:
    """By task and number of documents, in order."""
    groups: dict[Group, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[Group(outcome.task, outcome.num_documents)].append(outcome)
    return dict(sorted(groups.items(), key=lambda item: (item[0].task, item[0].num_documents)))


def accuracies(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], Accuracy]:
    """By curve and point, of the questions that full prefill was measured on too."""
    full = full_scores(outcomes)
    by_point: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.question_id in full:
            by_point[outcome.curve, outcome.point].append(outcome)
    found = {}
    for key, some in by_point.items():
        count = len(some)
        gold = sum(outcome.gold for outcome in some) / count
        low, high = wilson_interval(gold, count)
        found[key] = Accuracy(
            gold=gold,
            kept=sum(is_kept(outcome, full) for outcome in some) / count,
            low=low,
            high=high,
            num_requests=count,
            coverage=sum(outcome.coverage for outcome in some) / count,
            share=sum(outcome.share for outcome in some) / count,
        )
    return found


def full_scores(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """What full prefill scores on each question."""
    return {o.question_id: o.gold for o in outcomes if o.curve == FULL_PREFILL}


def is_kept(outcome: Outcome, full: Mapping[str, float]) -> bool:
    """The relative gate: no worse than full prefill on the same request."""
    return passes(outcome.gold, full[outcome.question_id])


def sufficient_coverages(outcomes: Sequence[Outcome], curve: str) -> dict[str, float]:
    """By question: the smallest measured coverage from which on every larger one passes.

    1.0 where only all of the context is known to be enough (coverage 1 equals full prefill).
    """
    full = full_scores(outcomes)
    by_question: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.curve == curve and outcome.question_id in full:
            by_question[outcome.question_id].append(outcome)
    demands = {}
    for question_id, some in by_question.items():
        demand = 1.0
        for outcome in sorted(some, key=lambda o: -o.coverage):
            if not is_kept(outcome, full):
                break
            demand = outcome.coverage
        demands[question_id] = demand
    return demands


def least_share(curve: Mapping[str, Accuracy], full_gold: float, keep: float) -> float:
    """The smallest share of token-layers at which a curve keeps so much of full prefill's accuracy.

    curve: by point. NEVER where none does.
    """
    enough = [a.share for a in curve.values() if a.gold >= keep * full_gold]
    return min(enough, default=NEVER)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """95% interval of a proportion (Wilson 1927); for mean scores between 0 and 1 it is wider than
    need be."""
    z2 = CONFIDENCE_Z**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    spread = math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    half = CONFIDENCE_Z * spread / (1 + z2 / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
