"""How much to recompute: from the time that is left to a coverage for each request of a batch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from planner.cost_model import CostModel, PrefillShape, prefill_work
from planner.policies import ADAPTIVE
from planner.timeline import Link
from planner.types import BatchPlan, Deviation, RecomputeConfig, RequestPlan, Signal

EDGE = 1e-6  # a coverage next to 0 or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetBand:
    """The coverages between which planning makes sense."""

    floor: float = 0.05  # coverage below which planning cannot help
    saturation: float = 0.50  # coverage past which budget is wasted

    def __post_init__(self) -> None:
        if not 0.0 <= self.floor < self.saturation <= 1.0:
            raise ValueError(f"need 0 <= floor < saturation <= 1, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """One request of a batch as the planner sees it; `config` is None for adaptive requests.

    num_context_tokens: stored or not; None: those that are stored
    layer_bytes: of its stored KV in one layer, as far as a link has to bring it
    """

    shape: PrefillShape
    policy: str = ADAPTIVE
    config: RecomputeConfig | None = None
    num_context_tokens: int | None = None
    layer_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.layer_bytes) or self.layer_bytes < 0:
            raise ValueError(f"layer_bytes must be finite and not negative, got {self.layer_bytes}")


class RecomputePlanner(Protocol):
    """Chooses (S, w, p) for a batch and the coverage of each of its requests.

    Pure arithmetic on its arguments. Every request of the batch agrees on (S, w, p): requests with
    a config of their own come in batches of the same (S, w, p).
    """

    def plan(
        self,
        requests: Sequence[PlanInput],
        *,
        budget_ms: float,
        cost: CostModel,
        link: Link | None = None,
    ) -> BatchPlan:
        """link: what the requests' `layer_bytes` come over; None: all KV is in host memory."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SlackPlannerConfig:
    signal: Signal = Signal.KV_DEV
    warmup_depth: int | None = 1  # None: all layers of the model, as in `RecomputeConfig`
    probe_len: int | None = 1
    deviation: Deviation = Deviation.KV
    resolve: bool = True  # let the engine solve the coverage again while the batch runs
    band: BudgetBand = field(default_factory=BudgetBand)
    reserve: float = 0.15  # share of the slack kept for the cost model's error and the way back

    def __post_init__(self) -> None:
        if not 0.0 <= self.reserve < 1.0:
            raise ValueError(f"reserve must be within 0 and 1, got {self.reserve}")

    @property
    def floor(self) -> RecomputeConfig:
        """The least work that is sensible."""
        return RecomputeConfig(
            signal=self.signal,
            warmup_depth=self.warmup_depth,
            probe_len=self.probe_len,
            coverage=self.band.floor,
            deviation=self.deviation,
        )


class SlackPlanner:
    """A fixed (S, w, p); one coverage for the batch, as large as the budget allows.

    The cost is linear in the coverage, so the coverage that meets the budget, less a reserve, is a
    division. Below the floor's cost it runs the floor, above the saturation's the saturation.
    Waiting for stored KV is left to the engine, which solves the coverage again.
    """

    def __init__(self, config: SlackPlannerConfig) -> None:
        self._config = config

    def plan(
        self,
        requests: Sequence[PlanInput],
        *,
        budget_ms: float,
        cost: CostModel,
        link: Link | None = None,
    ) -> BatchPlan:
        if not requests:
            raise ValueError("a batch needs at least one request")
        own = (r.config for r in requests if r.config is not None)
        config = next(own, self._config.floor)
        w, p = config.depths(cost.num_layers)
        shapes = [r.shape for r in requests]

        def batch_ms(adaptive_coverage: float) -> float:
            coverages = [
                adaptive_coverage if r.config is None else r.config.coverage for r in requests
            ]
            work = prefill_work(
                shapes,
                coverages,
                signal=config.signal,
                warmup_depth=w,
                probe_len=p,
                num_layers=cost.num_layers,
            )
            return cost.work_ms(work)

        target_ms = (1.0 - self._config.reserve) * budget_ms
        coverage = self._coverage(batch_ms, target_ms)
        expected_ms = batch_ms(coverage)
        band = self._config.band
        open_band = (band.floor, band.saturation) if self._config.resolve else None
        return BatchPlan(
            requests=tuple(
                RequestPlan(
                    policy=r.policy,
                    signal=config.signal,
                    warmup_depth=w,
                    probe_len=p,
                    coverage=coverage if r.config is None else r.config.coverage,
                    expected_ms=expected_ms,
                    budget_ms=budget_ms,
                    deviation=config.deviation,
                    band=open_band if r.config is None else None,
                    target_ms=target_ms,
                    num_cached=r.shape.num_cached,
                    cost_scale=cost.scale,
                )
                for r in requests
            ),
            budget_ms=budget_ms,
            expected_ms=expected_ms,
        )

    def _coverage(self, batch_ms: Callable[[float], float], budget_ms: float) -> float:
        band = self._config.band
        if batch_ms(band.saturation) <= budget_ms:
            return band.saturation
        if batch_ms(band.floor) >= budget_ms:
            return band.floor
        # linear between 0 and 1, but not at them: there the Probe is skipped
        low, high = max(band.floor, EDGE), min(band.saturation, 1.0 - EDGE)
        low_ms, high_ms = batch_ms(low), batch_ms(high)
        if budget_ms <= low_ms or high_ms <= low_ms:
            return band.floor
        share = min(1.0, (budget_ms - low_ms) / (high_ms - low_ms))
        return low + share * (high - low)
