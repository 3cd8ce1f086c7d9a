"""An engine's running cost: measured at start, refreshed by every prefill that went as planned."""

from planner.cost_model import CostModel, PrefillShape, prefill_work
from planner.types import PrefillResult, RequestPlan, Ticket

OBSERVATION_WEIGHT = 0.2  # of one batch


class CostTracker:
    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    def observe(self, ticket: Ticket, result: PrefillResult, first_ms: float) -> None:
        """Let the cost follow a prefill that went as it was planned."""
        plan, num_hit = ticket.plan, result.num_context_tokens - result.num_miss_tokens
        waited = result.parked or result.num_filled_tokens > 0 or result.timings.stall_ms > 0
        if (
            not (waited or result.recovered)
            and result.batch_size == ticket.batch_size
            and num_hit == plan.num_cached
        ):
            self.cost = self.cost.observed(
                plan.expected_ms * self._solved_share(plan, result),
                first_ms,
                plan_scale=plan.cost_scale,
                weight=OBSERVATION_WEIGHT / ticket.batch_size,
            )

    def _solved_share(self, plan: RequestPlan, result: PrefillResult) -> float:
        """What the request was to take with the coverage that it got, over what was planned."""
        if plan.band is None or plan.num_cached == 0:
            return 1.0
        num_selected = result.num_recomputed_tokens - (
            result.num_prompt_tokens - sum(result.cached_tokens.values())
        )
        shape = PrefillShape(
            num_cached=plan.num_cached, num_always=result.num_prompt_tokens - plan.num_cached
        )
        planned_ms, solved_ms = (
            self.cost.work_ms(
                prefill_work(
                    [shape],
                    [coverage],
                    signal=plan.signal,
                    warmup_depth=result.warmup_depth,
                    probe_len=result.probe_len,
                    num_layers=self.cost.num_layers,
                )
            )
            for coverage in (plan.coverage, min(1.0, num_selected / plan.num_cached))
        )
        return solved_ms / planned_ms if planned_ms > 0 else 1.0
