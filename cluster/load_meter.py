"""What the autoscaling rule goes by, kept as requests come: how many, and what they take."""

import logging
from collections import deque
from collections.abc import Sequence

from planner import (
    Arrivals,
    BudgetPlanner,
    ReplicaState,
    RequestProfile,
    ServiceTimes,
    plan_input,
)

log = logging.getLogger(__name__)

_MOST_UNSIZED = 4_096


class LoadMeter:
    """Counts arrivals, each with its work at the floor and at the saturation.

    Requests that come before any replica has told its costs are sized once one has.
    """

    def __init__(self, planner: BudgetPlanner) -> None:
        self._times = ServiceTimes(planner)
        self._states: list[ReplicaState] = []
        self._unsized: deque[RequestProfile] = deque(maxlen=_MOST_UNSIZED)
        self.arrived = Arrivals()

    def plan_with(self, planner: BudgetPlanner) -> None:
        """Size what comes from now on by another planner."""
        self._times = ServiceTimes(planner)

    def saw(self, states: Sequence[ReplicaState]) -> None:
        """The replicas that run, one of each node is enough. The latest ones outlive their end."""
        self._states = list(states) or self._states
        while self._states and self._unsized:
            profile = self._unsized.popleft()
            self.arrived = self.arrived.sized(*self._service_ms(profile), profile.ttft_slo_ms)

    def came(self, profile: RequestProfile) -> None:
        """A request, whether there is room for it or not."""
        self.arrived = self.arrived.counted()
        self._unsized.append(profile)
        self.saw(())

    def floor_ms(self, profile: RequestProfile) -> float | None:
        """Work at the floor, where most of its chunks are stored; None: no replica is known."""
        return self._service_ms(profile)[0] if self._states else None

    def _service_ms(self, profile: RequestProfile) -> tuple[float, float]:
        try:
            state, asked = max(
                ((state, plan_input(profile, state)) for state in self._states),
                key=lambda pair: pair[1].shape.num_cached,
            )
            return self._times.of(asked, state.cost)
        except Exception:  # no request may fail because it is counted
            log.exception("sizing_failed request_id=%s", profile.request_id)
            return 0.0, 0.0
