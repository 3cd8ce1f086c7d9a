"""What a prefill costs: a linear model of one layer, fitted on measured prefills.

One layer over n packed rows, each attending m keys on average, takes `c1·n + c2·n·m`: projections
and MLP are linear in rows, attention in row-key pairs. Pairs of selected rows cost more than those
of the dense causal kernel, so they have a price of their own. Reusing one stored token in one layer
(read, rotate, scatter) has one too, as has every layer that a batch walks, whatever its size. Every
prefill pays a fixed time (admission, engine steps, the last token).
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

    layers: float  # walked by the batch, those of the Probe among them
    rows: float  # token-layers computed
    pairs: float  # row-key pairs attended by all rows of a prompt
    selected_pairs: float  # row-key pairs attended by selected rows
    reused: float  # token-layers of stored KV stitched


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
    walks_layers = signal in (Signal.KV_DEV, Signal.QCI, Signal.AUTO)
    is_probed = walks_layers and any(0.0 < r < 1.0 for r in coverages)
    probes = probe_len if is_probed else 0
    rows = pairs = selected_pairs = reused = 0.0
    layers = float(num_layers + probes)
    if signal is Signal.QCI_FINAL and any(0.0 < r < 1.0 for r in coverages):
        layers += num_layers
    for shape, coverage in zip(shapes, coverages, strict=True):
        n = shape.num_tokens
        active = shape.num_always + coverage * shape.num_cached
        rows += n * warmup_depth + active * rest
        pairs += n * n / 2 * warmup_depth
        if active == n:  # nothing is left out
            pairs += n * n / 2 * rest
        else:
            selected_pairs += active * n / 2 * rest
        reused += shape.num_cached * (rest + probes)
        # `auto` is counted as one layer of `qci`, then `kv_dev`: the dearer of its two ways
        questions = {Signal.QCI: probes, Signal.AUTO: min(1, probes)}.get(signal, 0)
        rows += shape.num_always * questions
        selected_pairs += shape.num_always * n * questions
        if signal is Signal.QCI_FINAL and 0.0 < coverage < 1.0:  # the suffix through all layers
            rows += shape.num_always * num_layers
            reused += shape.num_cached
        elif signal in (Signal.KV_DEV, Signal.AUTO) and probes:
            # only keys and values of all tokens at layer w: about a quarter of a layer; then the
            # candidates that gradual filtering leaves
            rows += 0.25 * n + sum(
                shape.num_always + coverage ** (step / probes) * shape.num_cached
                for step in range(1, probes)
            )
    return Work(
        layers=layers,
        rows=rows,
        pairs=pairs,
        selected_pairs=selected_pairs,
        reused=reused,
    )


PRICES = ("fixed_ms", "layer_ms", "row_ms", "pair_ms", "selected_pair_ms", "reuse_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Prices of `Work`, in milliseconds; `scale` follows the observed ratio of real to expected."""

    num_layers: int
    fixed_ms: float
    row_ms: float
    pair_ms: float
    selected_pair_ms: float
    reuse_ms: float
    layer_ms: float = 0.0
    scale: float = 1.0
    relative_error: float = 0.0  # worst, on the fitted samples

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"num_layers must be 1 or more, got {self.num_layers}")
        for name in (*PRICES, "scale"):
            value = getattr(self, name)
            if not np.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be finite and not negative, got {value}")

    def work_ms(self, work: Work) -> float:
        return self.scale * (
            self.fixed_ms
            + self.layer_ms * work.layers
            + self.row_ms * work.rows
            + self.pair_ms * work.pairs
            + self.selected_pair_ms * work.selected_pairs
            + self.reuse_ms * work.reused
        )

    def observed(
        self, expected_ms: float, actual_ms: float, *, plan_scale: float, weight: float
    ) -> "CostModel":
        """Follow the machine: move `scale` towards what would have made the plan right.

        plan_scale: the scale that `expected_ms` was made with; several plans may be on their way
        while the scale moves. One observation counts for at most a factor of 4.
        weight: of this observation, 0-1; members of a batch share one.
        """
        if expected_ms <= 0 or actual_ms <= 0:
            return self
        target = plan_scale * min(4.0, max(0.25, actual_ms / expected_ms))
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
    columns = np.array(
        [[1.0, w.layers, w.rows, w.pairs, w.selected_pairs, w.reused] for w in works]
    )
    active = list(range(columns.shape[1]))
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
    priced = dict(zip(PRICES, map(float, prices), strict=True))
    return CostModel(num_layers=num_layers, relative_error=error, **priced)
