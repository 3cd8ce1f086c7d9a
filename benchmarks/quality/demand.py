"""From outcomes to the planner's demand profile."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from benchmarks.quality.curves import Curve
from benchmarks.quality.outcomes import Outcome
from benchmarks.quality.stats import quantile, sufficient_coverages
from planner.demand_profile import DemandAnchor, DemandBucket, DemandProfile

GATE = "the score against the gold answers is no worse than full prefill's on the same request"
MIN_BUCKET_REQUESTS = 16  # fewer say little; they join the bucket before


def demand_profile(
    outcomes: Sequence[Outcome],
    curves: Sequence[Curve],
    *,
    model: str,
    task: str,
    num_layers: int,
    gate: str = GATE,
) -> DemandProfile:
    """One anchor for each curve with a coverage grid that was measured.

    gate: in words, where the outcomes are of requests for which the usual one means more
    Raises ValueError if none was.
    """
    anchors = []
    for curve in curves:
        demands = sufficient_coverages(outcomes, curve.name)
        if not demands or not curve.coverages:
            continue
        w, p = curve.config.depths(num_layers)
        anchors.append(
            DemandAnchor(
                signal=curve.config.signal,
                warmup_depth=w,
                probe_len=p,
                buckets=tuple(_buckets(outcomes, demands, curve.coverages)),
            )
        )
    if not anchors:
        raise ValueError("no curve with a grid of coverages was measured")
    return DemandProfile(model=model, task=task, gate=gate, anchors=tuple(anchors))


def _buckets(
    outcomes: Sequence[Outcome], demands: Mapping[str, float], grid: Sequence[float]
) -> list[DemandBucket]:
    """Bounded half way between the medians of the sizes that were measured."""
    lengths = {o.question_id: o.num_context_tokens for o in outcomes if o.question_id in demands}
    by_size: dict[int, list[str]] = {}
    for outcome in outcomes:
        if outcome.question_id in demands:
            same = by_size.setdefault(outcome.num_documents, [])
            if outcome.question_id not in same:
                same.append(outcome.question_id)
    groups: list[list[str]] = []
    for _, ids in sorted(by_size.items()):
        if groups and len(ids) < MIN_BUCKET_REQUESTS:
            groups[-1] += ids
        else:
            groups.append(ids)
    medians = [quantile([lengths[i] for i in ids], 0.5) for ids in groups]
    limits: list[int | None] = [int(low + high) // 2 for low, high in pairwise(medians)]
    coverages = tuple(sorted({0.0, *grid, 1.0}))
    buckets = []
    for ids, limit in zip(groups, [*limits, None], strict=True):
        own = [demands[i] for i in ids]
        enough = tuple(sum(d <= r + 1e-9 for d in own) / len(own) for r in coverages)
        buckets.append(
            DemandBucket(
                max_context_tokens=limit,
                num_requests=len(own),
                coverages=coverages,
                enough=enough,
            )
        )
    return buckets
