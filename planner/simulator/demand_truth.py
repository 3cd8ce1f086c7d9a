"""How much coverage simulated requests really need.

Every request draws one difficulty u, its place among the requests of its task: at any signal and
rank depth d it needs the u-quantile of that distribution. A second draw says which of the two
rankings suits it. What a planner believes is another matter (`belief.py`).

`AssumedDemand` is stated, not measured. Its shape follows what the CacheSmith paper's summary says
(arXiv 2610.18925): at 40 passages the minimum sufficient coverage spans near 0 to over 80%, and
five WarmUp layers cut its median from 20% to 10% and its 90th percentile from 65% to 30%. The
logit of the coverage is normal; its mean and deviation fall with the depth, ever more slowly, and
go through these four numbers. `MeasuredDemand` has the curves of a profile.
"""

from functools import lru_cache
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planner.demand import DemandCurves
from planner.demand_profile import DemandProfile
from planner.simulator.part import NotNegative, Part, Positive, Share
from planner.types import Signal

Floats = NDArray[np.float64]

NUM_QUANTILES = 1_000
DIFFICULTIES: Floats = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES

# the published numbers: (depth, median, 90th percentile), a Probe layer without and behind 5 others
SHALLOW = (1, 0.20, 0.65)
DEEP = (6, 0.10, 0.30)
DECAY_LAYERS = 8.0  # assumed: the depth's benefit falls to 1/e of what is left over so many layers
DEEPEST = 0.4  # assumed: of the layers; a ranking still deeper is no better
ALL_FINE = 0.02  # assumed: who needs less than this needs nothing; 3-6% as on our small models


class DemandTruth(Protocol):
    def needed(
        self, signal: Signal, depth: int, *, difficulty: float, taste: float, num_context: int
    ) -> float:
        """The minimum sufficient coverage of one request.

        difficulty, taste: its two draws, 0-1; num_context: its context tokens
        """
        ...

    def prefers_qci(self, taste: float) -> bool: ...

    def enough(self, signal: Signal, depth: int, coverages: Floats, num_context: int) -> Floats:
        """F_d: the share of requests for which each coverage is enough."""
        ...


class AssumedDemand(Part):
    """Of one task; all of it assumed. Shifts are of the logit of the coverage.

    hardness: of this task against the published numbers; gap: what the ranking that does not suit
    a request costs it; qci_share: of requests that `qci` suits better than `kv_dev`.
    """

    hardness: float = 0.0
    qci_share: Share = 0.5
    gap: NotNegative = 1.0
    spread_scale: Positive = 1.0  # 1: as published
    depth_scale: NotNegative = 1.0  # of what depth brings; 1: as published
    position_gap: NotNegative = 2.0  # EPIC's choice knows neither deviation nor question
    qci_final_gap: NotNegative = 0.5  # a question that has not seen the context


class AssumedTruth:
    def __init__(
        self, demand: AssumedDemand, num_layers: int, *, entropy_accuracy: float = 1.0
    ) -> None:
        """entropy_accuracy: how often `auto` takes the ranking that suits"""
        self._demand = demand
        self._entropy_accuracy = entropy_accuracy
        # [depth, NUM_QUANTILES] by shift, ascending in the last
        self._tables = {
            shift: _quantiles(demand, shift, num_layers)
            for shift in {
                0.0,
                demand.gap,
                demand.position_gap,
                demand.gap + demand.qci_final_gap,
                demand.qci_final_gap,
            }
        }

    def prefers_qci(self, taste: float) -> bool:
        return taste < self._demand.qci_share

    def needed(
        self, signal: Signal, depth: int, *, difficulty: float, taste: float, num_context: int
    ) -> float:
        table = self._tables[self._shift(signal, self.prefers_qci(taste))]
        return float(table[depth, int(difficulty * NUM_QUANTILES)])

    def enough(self, signal: Signal, depth: int, coverages: Floats, num_context: int) -> Floats:
        total: Floats = np.zeros(len(coverages))
        share = self._demand.qci_share
        weights = [(share, self._shift(signal, True)), (1.0 - share, self._shift(signal, False))]
        if signal is Signal.AUTO:
            right = self._entropy_accuracy
            weights = [(right, 0.0), (1.0 - right, self._demand.gap)]
        for weight, shift in weights:
            row = self._tables[shift][depth]
            total += weight * np.searchsorted(row, coverages + 1e-9, side="right") / NUM_QUANTILES
        return total

    def _shift(self, signal: Signal, prefers_qci: bool) -> float:
        demand = self._demand
        if signal is Signal.POSITION:
            return demand.position_gap
        if signal is Signal.QCI_FINAL:
            return demand.qci_final_gap + (0.0 if prefers_qci else demand.gap)
        return 0.0 if (signal is Signal.QCI) == prefers_qci else demand.gap


@lru_cache(maxsize=256)
def _quantiles(demand: AssumedDemand, shift: float, num_layers: int) -> Floats:
    """The coverage that each difficulty needs, [num_layers + 1, NUM_QUANTILES].

    A deeper ranking never needs more: the deviation falls with the depth, which would let the
    easiest requests need more, and is kept from it.
    """
    z = np.array([NormalDist().inv_cdf(u) for u in DIFFICULTIES])
    z90 = NormalDist().inv_cdf(0.9)
    (first, median, high), (second, deep_median, deep_high) = SHALLOW, DEEP
    means = [_logit(median), _logit(deep_median)]
    deviations = [(_logit(high) - means[0]) / z90, (_logit(deep_high) - means[1]) / z90]
    reached = 1.0 - np.exp(-(second - first) / DECAY_LAYERS)
    depths = np.minimum(np.arange(num_layers + 1), max(second, DEEPEST * num_layers))
    gain = (1.0 - np.exp(-np.maximum(depths - first, 0) / DECAY_LAYERS)) / reached
    gain = demand.depth_scale * gain[:, None]
    mean = means[0] + gain * (means[1] - means[0])
    deviation = np.maximum(0.1, deviations[0] + gain * (deviations[1] - deviations[0]))
    logits = mean + demand.hardness + shift + demand.spread_scale * deviation * z
    needed = 1.0 / (1.0 + np.exp(-logits))
    needed[needed < ALL_FINE] = 0.0
    return np.asarray(np.minimum.accumulate(needed, axis=0), np.float64)


def _logit(share: float) -> float:
    return float(np.log(share / (1.0 - share)))


class MeasuredTruth:
    """The curves of a profile; what has not been measured is what the least of the others is.

    All signals go by the same difficulty. Where curves fall with the depth, so they do here.
    """

    def __init__(self, profile: DemandProfile, num_layers: int) -> None:
        self._curves = DemandCurves(profile)
        self._num_layers = num_layers
        self._known: dict[tuple[Signal, int, int], Floats] = {}

    def prefers_qci(self, taste: float) -> bool:
        return Signal.QCI in self._curves.signals

    def needed(
        self, signal: Signal, depth: int, *, difficulty: float, taste: float, num_context: int
    ) -> float:
        if depth >= self._num_layers:
            return 0.0
        key = (signal, depth, self._curves.bucket(num_context))
        if key not in self._known:
            curve = self._curve(*key)
            rising = np.concatenate([[True], curve[1:] > curve[:-1]])
            grid = self._curves.grid
            self._known[key] = np.interp(DIFFICULTIES, curve[rising], grid[rising])
            self._known[key][curve[0] >= DIFFICULTIES] = 0.0
        return float(self._known[key][int(difficulty * NUM_QUANTILES)])

    def enough(self, signal: Signal, depth: int, coverages: Floats, num_context: int) -> Floats:
        curve = self._curve(signal, depth, self._curves.bucket(num_context))
        return np.asarray(np.interp(coverages, self._curves.grid, curve), np.float64)

    def _curve(self, signal: Signal, depth: int, bucket: int) -> Floats:
        known = self._curves.signals
        signals = (signal,) if signal in known else known
        lowest: Floats = np.min([self._curves.curve(s, depth, bucket) for s in signals], axis=0)
        return lowest
