"""What a planner believes about demand: a profile, as `cachesmith profile` would have made it."""

from collections.abc import Sequence

import numpy as np

from planner.demand_profile import DemandAnchor, DemandBucket, DemandProfile
from planner.simulator.demand_truth import DemandTruth
from planner.types import Signal

COVERAGES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 0.85, 1.0)
NUM_CONTEXT = 8_000  # tokens; the truths that this is for look at no length


def believed_profile(
    truths: Sequence[tuple[float, DemandTruth]], *, num_layers: int, task: str
) -> DemandProfile:
    """The distributions themselves, without a sample's error, at three rank depths a signal.

    truths: with their weights

    `kv_dev`, and `auto` that may turn to it, need a WarmUp layer before them, for nothing deviates
    in the first one; `qci` does not.
    """
    total = sum(weight for weight, _ in truths)
    depths = sorted({2, max(2, num_layers // 6), max(2, num_layers * 2 // 5)})
    grid = np.array(COVERAGES)
    anchors = []
    for signal, w in ((Signal.KV_DEV, 1), (Signal.QCI, 0), (Signal.AUTO, 1)):
        for depth in depths:
            enough = sum(
                weight / total * truth.enough(signal, depth, grid, NUM_CONTEXT)
                for weight, truth in truths
            )
            rising = np.maximum.accumulate(np.minimum(np.asarray(enough), 1.0))
            rising[-1] = 1.0
            bucket = DemandBucket(
                max_context_tokens=None,
                num_requests=1,
                coverages=COVERAGES,
                enough=tuple(rising.tolist()),
            )
            anchors.append(
                DemandAnchor(signal=signal, warmup_depth=w, probe_len=depth - w, buckets=(bucket,))
            )
    return DemandProfile(model="simulated", task=task, gate="simulated", anchors=tuple(anchors))
