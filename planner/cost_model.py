"""What a prefill costs: a linear model of one layer, fitted on measured prefills.

One layer over n packed rows, each attending m keys on average, takes
`c0 + c1·n + c2·n·m` (projections and MLP are linear in rows, attention in row-key pairs). Reusing
one stored token in one layer (read, rotate, scatter) takes `c_reuse`. A prefill also pays a fixed
`c_fixed` (admission, engine steps, the last token).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.types import Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillShape:
    """The token counts of one request that decide its cost.

    num_cached: context tokens whose KV is stored, the candidates of the coverage.
    num_always: tokens that every plan computes (prefix, misses, suffix).
    """

    num_cached: int
    num_always: int

    @property
    def num_tokens(self) -> int:
        return self.num_cached + self.num_always


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Arithmetic of a prefill, counted in units that the cost model prices."""

    layers: float  # layer launches
    rows: float  # token-layers computed
    pairs: float  # row-key pairs attended
    reused: float  # token-layers of stored KV stitched

    def __add__(self, other: "Work") -> "Work":
        return Work(
            layers=self.layers + other.layers,
            rows=self.rows + other.rows,
            pairs=self.pairs + other.pairs,
            reused=self.reused + other.reused,
        )


def prefill_work(
    shapes: Sequence[PrefillShape],
    coverages: Sequence[float],
    *,
    signal: Signal,
    warmup_depth: int,
    probe_len: int,
    num_layers: int,
) -> Work:
    """Count the work of one batch under a plan.

    A causal row attends half of its request's tokens on average, a suffix row of the QCI probe
    all of them. A probe that cannot change the selection (coverage 0 or 1) is skipped, as the
    engine does.
    """
    rest = num_layers - warmup_depth
    total = Work(layers=0.0, rows=0.0, pairs=0.0, reused=0.0)
    probes = probe_len if any(0.0 < r < 1.0 for r in coverages) else 0
    for shape, coverage in zip(shapes, coverages, strict=True):
        n = shape.num_tokens
        warm = Work(layers=0.0, rows=n * warmup_depth, pairs=n * n / 2 * warmup_depth, reused=0.0)
        active = shape.num_always + coverage * shape.num_cached
        patch = Work(
            layers=0.0,
            rows=active * rest,
            pairs=active * n / 2 * rest,
            reused=shape.num_cached * rest,
        )
        if signal is Signal.QCI:
            rows = float(shape.num_always * probes)
            probe = Work(layers=0.0, rows=rows, pairs=rows * n, reused=0.0)
        else:  # only keys and values of all tokens at layer w: about a quarter of a layer
            rows = 0.25 * n * min(probes, 1) + active * max(probes - 1, 0)
            probe = Work(layers=0.0, rows=rows, pairs=0.0, reused=0.0)
        total = total + warm + patch + probe
    return total + Work(layers=num_layers + probes, rows=0.0, pairs=0.0, reused=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Prices of `Work`, in milliseconds; `scale` follows the observed ratio of real to expected."""

    num_layers: int
    fixed_ms: float
    layer_ms: float
    row_ms: float
    pair_ms: float
    reuse_ms: float
    scale: float = 1.0
    relative_error: float = 0.0  # worst, on the fitted samples

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"num_layers must be 1 or more, got {self.num_layers}")
        for name in ("fixed_ms", "layer_ms", "row_ms", "pair_ms", "reuse_ms", "scale"):
            value = getattr(self, name)
            if not np.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be finite and not negative, got {value}")

    def work_ms(self, work: Work) -> float:
        return self.scale * (
            self.fixed_ms
            + self.layer_ms * work.layers
            + self.row_ms * work.rows
            + self.pair_ms * work.pairs
            + self.reuse_ms * work.reused
        )

    def observed(self, expected_ms: float, actual_ms: float, *, weight: float = 0.2) -> "CostModel":
        """Follow the machine: move `scale` towards actual / expected, bounded to a factor of 4."""
        if expected_ms <= 0 or actual_ms <= 0:
            return self
        target = self.scale * min(4.0, max(0.25, actual_ms / expected_ms))
        return replace(self, scale=(1 - weight) * self.scale + weight * target)


def fit_cost_model(
    works: Sequence[Work], measured_ms: Sequence[float], *, num_layers: int
) -> CostModel:
    """Least squares with non-negative prices on measured prefills, weighted to relative error.

    Columns that would get a negative price are dropped one at a time, the most negative first.
    Raises ValueError without at least two positive finite samples.
    """
    times = np.asarray(measured_ms, dtype=np.float64)
    if len(works) != len(times) or len(times) < 2:
        raise ValueError(f"need at least 2 samples with their times, got {len(works)}")
    if not np.all(np.isfinite(times)) or np.any(times <= 0):
        raise ValueError(f"measured times must be finite and positive, got {list(measured_ms)}")
    columns = np.array([[1.0, w.layers, w.rows, w.pairs, w.reused] for w in works])
    # every sample of one model walks nearly the same number of layers: not apart from the constant
    active = [0, 2, 3, 4]
    weighted = columns / times[:, None]
    prices = np.zeros(columns.shape[1])
    while active:
        scales = np.maximum(np.abs(weighted[:, active]).max(axis=0), 1e-30)
        solution = np.linalg.lstsq(weighted[:, active] / scales, np.ones(len(times)), rcond=None)[0]
        solution = solution / scales
        if np.all(solution >= 0):
            prices[active] = solution
            break
        active.pop(int(np.argmin(solution * scales)))
    predicted = columns @ prices
    error = float(np.max(np.abs(predicted - times) / times))
    fixed, layer, row, pair, reuse = (float(x) for x in prices)
    return CostModel(
        num_layers=num_layers,
        fixed_ms=fixed,
        layer_ms=layer,
        row_ms=row,
        pair_ms=pair,
        reuse_ms=reuse,
        relative_error=error,
    )
