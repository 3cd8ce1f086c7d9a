"""Prices of the cost model from measured times."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cost_model import PRICES, CostModel, Work

Floats = NDArray[np.float64]

HUBER_ERROR = 0.05  # relative; samples that are further off count less, in proportion
HUBER_ROUNDS = 12
LEAST_SHARE = 0.1  # of a batch's time: a phase's error is relative to so much at least


def fit_phases(batches: Sequence[Sequence[tuple[Work, float]]], *, num_layers: int) -> CostModel:
    """Prices from the phases of measured batches: what each phase did, and the time it took.

    A phase that is next to nothing of its batch need not be explained as well as the others.
    Raises ValueError as `fit_cost_model` does.
    """
    works, times, bases = [], [], []
    for phases in batches:
        least_ms = LEAST_SHARE * sum(ms for _, ms in phases)
        for work, ms in phases:
            works.append(work)
            times.append(ms)
            bases.append(max(ms, least_ms))
    return fit_cost_model(works, times, num_layers=num_layers, error_base_ms=bases)


def fit_cost_model(
    works: Sequence[Work],
    measured_ms: Sequence[float],
    *,
    num_layers: int,
    error_base_ms: Sequence[float] | None = None,
) -> CostModel:
    """Least squares with non-negative prices on measured prefills or phases of them.

    Errors are relative, and those that stand out count less than by their squares: what a busy
    machine did meanwhile is not the prefill's cost. Columns that would get a negative price are
    dropped one at a time, the most negative first.

    error_base_ms: what errors are relative to; None: the measured times
    Raises ValueError without at least two positive finite samples.
    """
    times = np.asarray(measured_ms, dtype=np.float64)
    if len(works) != len(times) or len(times) < 2:
        raise ValueError(f"need at least 2 samples with their times, got {len(works)}")
    if not np.all(np.isfinite(times)) or np.any(times <= 0):
        raise ValueError(f"measured times must be finite and positive, got {list(measured_ms)}")
    base = times if error_base_ms is None else np.asarray(error_base_ms, dtype=np.float64)
    if base.shape != times.shape or not np.all(np.isfinite(base)) or np.any(base <= 0):
        raise ValueError("error_base_ms must be as many positive finite numbers as the times")
    columns = np.array([work.counts for work in works])
    weights = np.ones(len(times))
    for _ in range(HUBER_ROUNDS):
        prices = _least_squares(columns * (weights / base)[:, None], times * weights / base)
        errors = np.abs(columns @ prices - times) / base
        weights = np.sqrt(np.minimum(1.0, HUBER_ERROR / np.maximum(errors, 1e-12)))
    priced = dict(zip(PRICES, map(float, prices), strict=True))
    return CostModel(num_layers=num_layers, relative_error=float(np.median(errors)), **priced)


def _least_squares(columns: Floats, targets: Floats) -> Floats:
    """Non-negative; columns: [num_samples, num_prices]"""
    active = np.flatnonzero(columns.any(axis=0)).tolist()  # what no sample has is free
    prices = np.zeros(columns.shape[1])
    while active:
        scales = np.abs(columns[:, active]).max(axis=0)
        solution = np.linalg.lstsq(columns[:, active] / scales, targets, rcond=None)[0]
        if np.all(solution >= 0):
            prices[active] = solution / scales
            break
        active.pop(int(np.argmin(solution)))
    return prices
