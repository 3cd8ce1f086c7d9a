"""Which signal serves a request better, and whether the entropy of its QCI scores tells."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.quality.outcomes import Outcome
from benchmarks.quality.stats import full_scores, is_kept
from planner import Signal
from planner.auto_signal import AutoRule

THRESHOLDS = tuple(i / 100 for i in range(20, 100, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One request under both signals, over the same coverages at the same WarmUp."""

    question_id: str
    task: str
    entropy: float
    kv_dev: tuple[bool, ...]  # by coverage: does it pass?
    qci: tuple[bool, ...]

    def passed(self, signal: Signal) -> int:
        return sum(self.qci if signal is Signal.QCI else self.kv_dev)


def contests(outcomes: Sequence[Outcome], kv_dev: str, qci: str) -> list[Contest]:
    """Requests that were asked under both curves; the `qci` curve has one Probe layer."""
    full = full_scores(outcomes)
    found: dict[str, dict[str, dict[str, Outcome]]] = {}
    for outcome in outcomes:
        if outcome.curve in (kv_dev, qci) and outcome.question_id in full:
            by_curve = found.setdefault(outcome.question_id, {kv_dev: {}, qci: {}})
            by_curve[outcome.curve][outcome.point] = outcome
    made = []
    for question_id, by_curve in found.items():
        points = [p for p in by_curve[kv_dev] if p in by_curve[qci] and p != "r=0"]
        if not points:
            continue
        some = by_curve[qci][points[0]]
        if some.entropy is None:
            raise ValueError(f"{qci} has no entropy: it needs one Probe layer")
        made.append(
            Contest(
                question_id=question_id,
                task=some.task,
                entropy=some.entropy,
                kv_dev=tuple(is_kept(by_curve[kv_dev][p], full) for p in points),
                qci=tuple(is_kept(by_curve[qci][p], full) for p in points),
            )
        )
    return made


def pass_rate(some: Sequence[Contest], signals: Sequence[Signal]) -> float:
    """Mean share of (request, coverage) that pass, each request under its signal."""
    passed = sum(c.passed(signal) for c, signal in zip(some, signals, strict=True))
    return passed / sum(len(c.qci) for c in some)


def chosen(some: Sequence[Contest], rule: AutoRule, batch_size: int, seed: int) -> list[Signal]:
    """What the rule picks when the requests come in batches, drawn at random."""
    order = list(range(len(some)))
    random.Random(seed).shuffle(order)
    signals = [Signal.KV_DEV] * len(some)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        signal = rule.choose([some[i].entropy for i in batch])
        for i in batch:
            signals[i] = signal
    return signals


def best_rule(some: Sequence[Contest], batch_size: int, seeds: Sequence[int]) -> AutoRule:
    """The threshold and direction with the largest mean pass rate."""

    def rate(rule: AutoRule) -> float:
        return sum(pass_rate(some, chosen(some, rule, batch_size, seed)) for seed in seeds)

    rules = [
        AutoRule(threshold=threshold, qci_when_peaked=peaked)
        for threshold in THRESHOLDS
        for peaked in (True, False)
    ]
    return max(rules, key=rate)


def picked_better(some: Sequence[Contest], signals: Sequence[Signal]) -> float:
    """Of the requests that one signal serves better than the other: how often it was picked."""
    right = total = 0
    for contest, signal in zip(some, signals, strict=True):
        qci, kv_dev = contest.passed(Signal.QCI), contest.passed(Signal.KV_DEV)
        if qci != kv_dev:
            total += 1
            right += (signal is Signal.QCI) is (qci > kv_dev)
    return right / total if total else float("nan")
