"""What requests take alone, without planning each of them: their lengths go in steps."""

from dataclasses import replace

from planner.budget_planner import BudgetPlanner
from planner.cost_model import CostModel, PrefillShape
from planner.recompute_planner import PlanInput

# (up to so many tokens, steps of so many)
STEPS = ((1_024, 64), (8_192, 256))
LARGEST_STEP = 1_024
MOST_KNOWN = 4_096
PLENTY_MS = 1e9  # a budget that the saturation fits into, whatever it takes


class ServiceTimes:
    """Of one machine's prices at a time; others make it start over. The scale may move freely."""

    def __init__(self, planner: BudgetPlanner) -> None:
        self._planner = planner
        self._prices: tuple[float, ...] = ()
        self._known: dict[tuple[object, ...], tuple[float, float]] = {}

    def of(self, asked: PlanInput, cost: CostModel) -> tuple[float, float]:
        """(floor, saturation) in ms, with all stored KV in memory."""
        if cost.prices != self._prices or len(self._known) >= MOST_KNOWN:
            self._known.clear()
            self._prices = cost.prices
        shape = PrefillShape(
            num_cached=_step(asked.shape.num_cached), num_always=_step(asked.shape.num_always)
        )
        key = (shape, asked.policy, asked.config)
        if key not in self._known:
            rounded = replace(asked, shape=shape, num_context_tokens=None, layer_bytes=0.0)
            self._known[key] = self._plan(rounded, replace(cost, scale=1.0))
        floor_ms, saturation_ms = self._known[key]
        return cost.scale * floor_ms, cost.scale * saturation_ms

    def _plan(self, asked: PlanInput, cost: CostModel) -> tuple[float, float]:
        floor_ms = self._planner.floor_ms([asked], cost)
        plan = self._planner.plan([asked], budget_ms=PLENTY_MS, cost=cost)
        return floor_ms, plan.expected_ms


def _step(num_tokens: int) -> int:
    step = next((step for most, step in STEPS if num_tokens <= most), LARGEST_STEP)
    return -(-num_tokens // step) * step
