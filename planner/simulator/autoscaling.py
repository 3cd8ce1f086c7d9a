"""How many replicas there should be: a function from what waits to a number."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from planner.simulator.part import Count, NotNegative, Part, Positive


class FixedSize(Part):
    kind: Literal["fixed"] = "fixed"


class QueueWork(Part):
    """As many replicas as the waiting work needs to be in time, and as what arrives keeps busy.

    utilisation: of the replicas by floor-cost work; calm_s: how long fewer have to be enough
    """

    kind: Literal["queue_work"]
    min_replicas: Count = 1
    max_replicas: Count = 16
    period_s: Positive = 5.0
    utilisation: Positive = 0.6
    calm_s: NotNegative = 60.0

    @model_validator(mode="after")
    def _is_a_range(self) -> "QueueWork":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas must be {self.max_replicas} or less, as max_replicas")
        return self


Sizing = Annotated[FixedSize | QueueWork, Field(discriminator="kind")]


def replicas_for_queue(waiting: Sequence[tuple[float, float]]) -> float:
    """The least number of replicas that could have every deadline met at the floor.

    waiting: (slack ms, floor ms). The work that is due by a moment, over the time until then, at
    its worst; who is late anyway is left out. Work is taken for divisible.
    """
    worst = due_ms = 0.0
    for slack_ms, floor_ms in sorted(waiting):
        if floor_ms <= slack_ms:
            due_ms += floor_ms
            worst = max(worst, due_ms / slack_ms)
    return worst


def wanted_replicas(
    sizing: QueueWork, *, waiting: Sequence[tuple[float, float]], arriving_share: float
) -> int:
    """arriving_share: floor-cost milliseconds that arrive in a millisecond"""
    needed = max(replicas_for_queue(waiting), arriving_share / sizing.utilisation)
    return min(sizing.max_replicas, max(sizing.min_replicas, math.ceil(needed - 1e-9)))
