"""How long each fault took to be seen, and to be mended, from what was sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from deploy.testbed.accounting import is_answered
from deploy.testbed.client import Answer
from deploy.testbed.fault_plan import REPAIRS, FaultKind
from deploy.testbed.faults import Struck
from deploy.testbed.watch import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """What the cluster has when nothing is broken."""

    num_nodes: int
    num_replicas: int
    num_ingresses: int
    max_waiting: float = 20.0  # requests: what was held up is worked off

    def is_met(self, sample: Sample) -> bool:
        return (
            _count(sample.nodes) == self.num_nodes
            and self.serves(sample)
            and bool(sample.scheduler)
            and not sample.breakers_open
            and sample.num_waiting is not None
            and sample.num_waiting <= self.max_waiting
        )

    def serves(self, sample: Sample) -> bool:
        """Whether all replicas and ingresses are there, by Serve and by the scheduler."""
        return (
            _count(sample.replicas) == self.num_replicas
            and _count(sample.ready) == self.num_replicas
            and _count(sample.ingresses) == self.num_ingresses
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultResult:
    """One fault. Its requests are those sent from it to the next fault.

    detected_s: until Ray, Serve or the scheduler showed that something was lost
    recovered_s: until all replicas were ready again, all ingresses there, what was held up answered
    None: not seen before the run's end, or, for a detection, before the recovery.
    """

    kind: FaultKind
    host: str
    at_s: float
    detected_s: float | None
    recovered_s: float | None
    num_requests: int
    num_errors: int
    worst_ttft_ms: float


def fault_results(
    struck: Sequence[Struck],
    samples: Sequence[Sample],
    answers: Sequence[Answer],
    whole: Whole,
) -> list[FaultResult]:
    results = []
    for index, hit in enumerate(struck):
        until_s = struck[index + 1].at_s if index + 1 < len(struck) else float("inf")
        sent = [a for a in answers if hit.at_s <= a.started_s < until_s]
        before = [s for s in samples if s.at_s < hit.at_s]
        after = [s for s in samples if s.at_s >= hit.at_s]
        detected_s = _first(after, _shows_loss(hit.fault.kind, before[-1])) if before else None
        mended_from_s = detected_s if detected_s is not None else hit.at_s
        recovered_s = _first([s for s in after if s.at_s >= mended_from_s], whole.is_met)
        results.append(
            FaultResult(
                kind=hit.fault.kind,
                host=hit.host,
                at_s=hit.at_s,
                detected_s=None if detected_s is None else detected_s - hit.at_s,
                recovered_s=None if recovered_s is None else recovered_s - hit.at_s,
                num_requests=len(sent),
                num_errors=sum(not is_answered(a) for a in sent),
                worst_ttft_ms=max((a.ttft_ms or 0.0 for a in sent), default=0.0),
            )
        )
    return results


def num_served(samples: Sequence[Sample]) -> int:
    """How far the outcome counter went, over all of the scheduler's lives.

    What was counted after the last look of a life is missing.
    """
    counts = [sample.num_ok for sample in samples if sample.num_ok is not None]
    return sum(now - last if now >= last else now for last, now in pairwise(counts))


def _shows_loss(kind: FaultKind, before: Sample) -> Callable[[Sample], bool]:
    """What tells that a fault of this kind was noticed."""
    match kind:
        case FaultKind.KILL_SCHEDULER:
            return lambda s: s.scheduler is not None and s.scheduler != before.scheduler
        case FaultKind.KILL_INGRESS:
            return lambda s: _lacks(s.ingresses, before.ingresses)
        case FaultKind.STOP_REDIS:
            return lambda s: bool(s.breakers_open)
        case FaultKind.RESTART_HEAD:
            return lambda s: s.nodes is None or _lacks(s.nodes, before.nodes)
        case _ if kind in REPAIRS:
            return lambda _: False
        case _:
            return lambda s: (
                _lacks(s.ready, before.ready)
                or _lacks(s.replicas, before.replicas)
                or _lacks(s.nodes, before.nodes)
            )


def _lacks(now: frozenset[str] | None, before: frozenset[str] | None) -> bool:
    return now is not None and before is not None and not before <= now


def _count(ids: frozenset[str] | None) -> int | None:
    return None if ids is None else len(ids)


def _first(samples: Sequence[Sample], is_so: Callable[[Sample], bool]) -> float | None:
    return next((sample.at_s for sample in samples if is_so(sample)), None)
