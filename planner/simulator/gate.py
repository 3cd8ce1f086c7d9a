"""Whether what a request got was enough for it."""

from collections.abc import Sequence

from planner.simulator.replica import SimRequest
from planner.types import RequestPlan, Signal

TINY = 1e-9


def late_choice(members: Sequence[SimRequest], accuracy: float) -> Signal:
    """What the entropies' majority chooses; each shows what suits its request that often."""
    votes = sum(
        request.truth.prefers_qci(request.taste) == (request.vote < accuracy) for request in members
    )
    return Signal.QCI if 2 * votes > len(members) else Signal.KV_DEV


def is_enough(
    request: SimRequest,
    plan: RequestPlan,
    *,
    signal: Signal,
    coverage: float,
    num_cached: int,
    num_layers: int,
) -> bool:
    """plan: its own; signal: that ranked in the end; num_cached: tokens with stored KV

    The coverage is of the tokens with stored KV, as the engine's is; those without are exact
    anyway. Full prefill is always enough, and so is what has no stored KV.
    """
    if plan.warmup_depth >= num_layers or coverage >= 1.0 or num_cached == 0:
        return True
    depth = plan.warmup_depth
    if signal in (Signal.KV_DEV, Signal.QCI) and coverage > 0.0:
        depth += plan.probe_len
    needed = request.truth.needed(
        signal,
        depth,
        difficulty=request.difficulty,
        taste=request.taste,
        num_context=request.profile.num_context_tokens,
    )
    return coverage >= needed - TINY
