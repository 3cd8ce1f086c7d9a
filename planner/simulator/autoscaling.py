"""How a fleet's number of replicas is set: fixed, by the production rule, or as Ray Serve does."""

import math
from collections import deque
from typing import Annotated, Literal, Protocol

from pydantic import Field, model_validator

from planner.autoscaling import Autoscaler, LoadSignal, ScalingConfig
from planner.simulator.part import Count, NotNegative, Part, Positive


class Sizer(Protocol):
    def wanted(self, signal: LoadSignal, *, num_target: int, now_s: float) -> int: ...


class FixedSize(Part):
    kind: Literal["fixed"] = "fixed"


class _Range(Part):
    """A rule that is asked every `period_s`."""

    min_replicas: Count = 1
    max_replicas: Count = 16
    period_s: Positive = 0.5

    @model_validator(mode="after")
    def _is_a_range(self) -> "_Range":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas must be {self.max_replicas} or less, as max_replicas")
        return self


class SloSizing(_Range):
    """The rule of `planner.autoscaling`. A model's load is `startup_s`."""

    kind: Literal["slo"]
    target_utilisation: float = Field(default=0.7, gt=0.0, le=1.0)
    down_after_s: NotNegative = 60.0

    @property
    def config(self) -> ScalingConfig:
        return ScalingConfig(
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            target_utilisation=self.target_utilisation,
            down_after_s=self.down_after_s,
        )

    def sizer(self) -> Sizer:
        return _SloSizer(self.config)


class OngoingSizing(_Range):
    """Ray Serve's default rule with its defaults: requests at the replicas over a target for each.

    As in a server of ours, requests that wait in the scheduler are not seen.
    """

    kind: Literal["ongoing"]
    target_ongoing_requests: Positive = 2.0
    look_back_s: Positive = 30.0
    upscale_delay_s: NotNegative = 30.0
    downscale_delay_s: NotNegative = 600.0

    def sizer(self) -> Sizer:
        return _OngoingSizer(self)


Sizing = Annotated[FixedSize | SloSizing | OngoingSizing, Field(discriminator="kind")]


class _SloSizer:
    def __init__(self, config: ScalingConfig) -> None:
        self._autoscaler = Autoscaler(config)

    def wanted(self, signal: LoadSignal, *, num_target: int, now_s: float) -> int:
        return self._autoscaler.decide(signal, num_target=num_target, now_s=now_s).wanted


class _OngoingSizer:
    """As `replica_queue_length_autoscaling_policy` of Ray Serve 2.60, with its delays around it."""

    def __init__(self, config: OngoingSizing) -> None:
        self._config = config
        self._seen: deque[tuple[float, int]] = deque()  # when, and how many requests
        self._since_s: float | None = None  # when it began to want more, or fewer
        self._direction = 0

    def wanted(self, signal: LoadSignal, *, num_target: int, now_s: float) -> int:
        config, seen = self._config, self._seen
        seen.append((now_s, signal.num_active))
        while seen[0][0] < now_s - config.look_back_s:
            seen.popleft()
        if not signal.num_ready:
            return num_target
        mean = sum(count for _, count in seen) / len(seen)
        desired = math.ceil(mean / config.target_ongoing_requests)
        direction = (desired > num_target) - (desired < num_target)
        if direction != self._direction:
            self._direction, self._since_s = direction, now_s
        delay_s = config.upscale_delay_s if direction > 0 else config.downscale_delay_s
        if direction == 0 or self._since_s is None or now_s - self._since_s < delay_s:
            return num_target
        self._direction, self._since_s = 0, None
        return min(config.max_replicas, max(config.min_replicas, desired))
