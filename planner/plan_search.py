"""The search for the plan of one batch: over splits (w, p), and over coverages at each."""

from dataclasses import dataclass

import numpy as np

from planner.batch_times import BatchTimes, Ends, Floats, Ints
from planner.coverage_shift import make_paths
from planner.leftover import TINY, Spending, spend, spend_on_next
from planner.plan_candidates import PlanCandidates
from planner.types import Signal

EXACT = "full prefill passes all, and takes no longer than the band allows"
FLOOR = "less than the cheapest floor takes, so that floor runs"
SATURATION = "time for the saturation at every depth, so the one that is worth most runs"
SHIFT = "the most expected passes within it"


@dataclass(frozen=True, slots=True)
class PlanCase:
    """One batch, and what its plans cost where all its requests have the same coverage."""

    candidates: PlanCandidates
    times: BatchTimes
    ends: Ends  # [num_splits]
    buckets: Ints  # [batch]
    floor_ms: Floats  # [num_splits]
    uniform_ms: Floats  # [some, num_splits], from the floor to the saturation
    target_ms: float

    @property
    def least_ms(self) -> float:
        """What the cheapest plan takes."""
        return min(float(self.floor_ms.min()), self.times.exact_ms)

    def uniform_passes(self) -> Floats:
        """What the coverages of `uniform_ms` are worth, [some, num_groups]."""
        chances = self.candidates.uniform_chances[:, :, self.buckets]
        passes: Floats = np.where(self.times.reuses, chances, 1.0).sum(axis=2)
        return passes

    def point(self, choice: "Choice") -> tuple[Signal, int, int]:
        """(S, w, p)"""
        if choice.split is None:
            return self.candidates.points[0][0], self.times.num_layers, 0
        return self.candidates.points[choice.split]

    def expected_ms(self, choice: "Choice", coverages: Floats) -> float:
        """coverages: of the choice, rounded"""
        if choice.split is None:
            return self.times.exact_ms
        return self.times.planned_ms(self.candidates.splits, self.ends, choice.split, coverages)

    def ends_ms(self, choice: "Choice") -> tuple[float, float]:
        """The time at the floor and at the saturation."""
        if choice.split is None:
            return self.times.exact_ms, self.times.exact_ms
        return float(self.floor_ms[choice.split]), float(self.uniform_ms[-1, choice.split])

    def chances(self, choice: "Choice") -> Floats:
        """That each request's coverage is enough, [batch]; what reuses nothing is exact."""
        if choice.split is None:
            return np.ones(len(self.buckets))
        return self.reuse_chances(choice.split, choice.coverages)

    def reuse_chances(self, split: int, coverages: Floats) -> Floats:
        """As `chances`, of a split at some coverages."""
        group = int(self.candidates.group_of[split])
        chances = self.candidates.chance(group, self.buckets, coverages)
        return np.where(self.times.reuses, chances, 1.0)

    def enough(self, split: int) -> Floats:
        """The coverage of each request from which on more is worth nothing, [batch]."""
        enough: Floats = self.candidates.enough[self.candidates.group_of[split], self.buckets]
        return enough


@dataclass(frozen=True, slots=True)
class Choice:
    """A split, by its index, and coverages, [batch]."""

    split: int | None  # None: full prefill
    coverages: Floats
    passes: float
    rule: str


def choose(case: PlanCase) -> Choice:
    """The most expected passes within the target; of equals, the fastest.

    Full prefill is a choice where it takes no longer than what else may run: with prompts so short
    that reusing stored KV gains little, or over a slow link.
    """
    exact_ms = case.times.exact_ms
    if exact_ms <= case.floor_ms.min():
        return exact(case)
    if case.target_ms < case.floor_ms.min():
        return floor_at(case, np.arange(len(case.floor_ms)))
    saturated = case.candidates.cheapest(case.uniform_ms[-1])  # the splits of the depths
    best = _choose_reuse(case, saturated)
    may_be_exact = exact_ms <= min(case.target_ms, case.uniform_ms[-1, saturated].max())
    return exact(case) if may_be_exact and best.passes < len(best.coverages) - TINY else best


def exact(case: PlanCase) -> Choice:
    """Full prefill."""
    num_requests = len(case.buckets)
    return Choice(None, np.ones(num_requests), float(num_requests), EXACT)


def _choose_reuse(case: PlanCase, saturated: Ints) -> Choice:
    """saturated: the split of each depth that is cheapest at the saturation"""
    passes = case.uniform_passes()
    times_ms = case.uniform_ms[-1, saturated]
    if case.target_ms >= times_ms.max():
        is_best = passes[-1] >= passes[-1].max() - TINY
        best = int(np.where(is_best, times_ms, np.inf).argmin())
        return _uniform(case, int(saturated[best]), -1, SATURATION)
    # no split is worth more than its saturation, and none less than one coverage for all gives
    splits = splits_of_interest(case)
    passes = passes[:, case.candidates.group_of[splits]]
    known = np.where(case.uniform_ms[:, splits] <= case.target_ms, passes, -np.inf)
    row, at = np.unravel_index(int(known.argmax()), known.shape)
    kept = (passes[-1] >= known[row, at]) & (case.floor_ms[splits] <= case.target_ms)
    best_one = best_at(case, splits[kept])
    if best_one is None or best_one.passes < known[row, at]:
        return _uniform(case, int(splits[at]), int(row), SHIFT)
    return best_one


def splits_of_interest(case: PlanCase) -> Ints:
    """The cheapest splits of each depth, from the floor to the saturation.

    None of this depends on the target, so that more time never takes a plan away.
    """
    cheapest = case.candidates.cheapest(np.vstack((case.floor_ms, case.uniform_ms)))
    return np.array(sorted(set(cheapest.ravel().tolist())))


def best_at(case: PlanCase, splits: Ints) -> Choice | None:
    """The best choice at some splits; None if even their floors take longer than the target."""
    paths = make_paths(
        case.candidates,
        case.times,
        splits,
        case.buckets,
        ends=case.ends,
        floor_ms=case.floor_ms,
        target_ms=case.target_ms,
    )
    bounds = paths.bounds.tolist()
    best = Spending(-1, paths.bounds[:0], -np.inf)
    open_paths = []
    # the most promising first; of paths that are equal at their ends, the fastest
    for path in sorted(range(len(bounds)), key=lambda i: (-bounds[i], paths.total_ms[i, -1])):
        if bounds[path] <= best.passes + TINY:
            break
        found, is_best = spend_on_next(case.candidates, case.times, paths, path, case.target_ms)
        if found.passes > best.passes + TINY:
            best = found
        if not is_best:
            open_paths.append(path)
    some = [path for path in open_paths if bounds[path] > best.passes + TINY]
    if some:
        found = spend(case.candidates, case.times, paths, np.array(some), case.target_ms)
        if found.passes > best.passes + TINY:
            best = found
    if best.path < 0:
        return None
    return Choice(int(splits[best.path]), best.coverages, best.passes, SHIFT)


def floor_at(case: PlanCase, splits: Ints) -> Choice:
    """The floor of the cheapest of some splits, whatever it takes."""
    cheapest = int(splits[case.floor_ms[splits].argmin()])
    return _uniform(case, cheapest, 0, FLOOR)


def _uniform(case: PlanCase, split: int, row: int, rule: str) -> Choice:
    """All requests at the coverage of a row of `uniform_ms`."""
    coverages = np.full(len(case.buckets), case.candidates.uniform[row])
    return Choice(split, coverages, float(case.reuse_chances(split, coverages).sum()), rule)
