"""An engine's running cost: measured at start, refreshed by every prefill that went as planned."""

from planner.cost_model import CostModel, PrefillShape, prefill_work
from planner.types import PrefillResult, RequestPlan, Ticket

OBSERVATION_WEIGHT = 0.2  # of one batch


class CostTracker:
    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    def observe(
        self, ticket: Ticket, result: PrefillResult, first_ms: float, *, has_link: bool = False
    ) -> None:
        """Let the cost follow a prefill that went as it was planned.

        has_link: plans count waits for stored KV, and what did not wait would look too fast: then
        only lone requests are compared, with what they compute
        """
        plan, num_hit = ticket.plan, result.num_context_tokens - result.num_miss_tokens
        waited = result.parked or result.num_filled_tokens > 0 or result.timings.stall_ms > 0
        if (
            not (waited or result.recovered)
            and result.batch_size == ticket.batch_size
            and num_hit == plan.num_cached
        ):
            if not has_link:
                self.cost = self.cost.observed(
                    plan.expected_ms * self._solved_share(plan, result),
                    first_ms,
                    plan_scale=plan.cost_scale,
                    weight=OBSERVATION_WEIGHT / ticket.batch_size,
                )
            elif ticket.batch_size == 1:
                self.cost = self.cost.observed(
                    self._compute_ms(plan, result, _coverage(plan, result)),
                    first_ms,
                    plan_scale=self.cost.scale,
                    weight=OBSERVATION_WEIGHT,
                )

    def _solved_share(self, plan: RequestPlan, result: PrefillResult) -> float:
        """What the request was to take with the coverage that it got, over what was planned."""
        if plan.band is None or plan.num_cached == 0:
            return 1.0
        planned_ms = self._compute_ms(plan, result, plan.coverage)
        solved_ms = self._compute_ms(plan, result, _coverage(plan, result))
        return solved_ms / planned_ms if planned_ms > 0 else 1.0

    def _compute_ms(self, plan: RequestPlan, result: PrefillResult, coverage: float) -> float:
        """Of the request alone, where nothing is waited for."""
        shape = PrefillShape(
            num_cached=plan.num_cached, num_always=result.num_prompt_tokens - plan.num_cached
        )
        return self.cost.work_ms(
            prefill_work(
                [shape],
                [coverage],
                signal=plan.signal,
                warmup_depth=result.warmup_depth,
                probe_len=result.probe_len,
                num_layers=self.cost.num_layers,
            )
        )


def _coverage(plan: RequestPlan, result: PrefillResult) -> float:
    """That the request got, of the stored tokens that its plan counts on."""
    if plan.num_cached == 0:
        return plan.coverage
    num_selected = result.num_recomputed_tokens - (
        result.num_prompt_tokens - sum(result.cached_tokens.values())
    )
    return min(1.0, num_selected / plan.num_cached)
