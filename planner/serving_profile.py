"""What was measured of one served model, as a file: what prefills cost, and how much they need.

`cachesmith profile` writes one. Costs are of one machine and one degree of tensor parallelism, the
demand is of the model.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from planner.cost_model import CostModel
from planner.demand_profile import DemandProfile
from planner.types import Signal

Phase = Literal["warmup", "probe", "patch", "fixed"]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MeasuredPhase(_Part):
    """One phase of one measured batch beside what the fitted prices say."""

    phase: Phase
    signal: Signal
    warmup_depth: Annotated[int, Field(ge=0)]
    probe_len: Annotated[int, Field(ge=0)]
    coverage: Annotated[float, Field(ge=0.0, le=1.0)]
    num_requests: Annotated[int, Field(ge=1)]
    num_cached: Annotated[int, Field(ge=0)]  # tokens of all requests with stored KV
    num_always: Annotated[int, Field(ge=0)]
    measured_ms: NotNegative
    expected_ms: NotNegative


class PhaseFit(_Part):
    """How well the prices explain a phase; errors are relative."""

    phase: Phase
    num_samples: Annotated[int, Field(ge=1)]
    median_error: NotNegative
    worst_error: NotNegative


class CostProfile(_Part):
    """Of one machine.

    host_bytes_per_ms: at which stored KV came out of the host tier's memory
    """

    device: Annotated[str, Field(min_length=1)]  # processor or GPU, by its name
    num_threads: Annotated[int, Field(ge=1)] | None = None  # of each rank, without a GPU
    tensor_parallel_size: Annotated[int, Field(ge=1)]
    dtype: str
    cost: CostModel
    host_bytes_per_ms: Positive
    fits: Annotated[tuple[PhaseFit, ...], Field(min_length=1)]
    samples: tuple[MeasuredPhase, ...] = ()

    @model_validator(mode="after")
    def _is_unscaled(self) -> "CostProfile":
        if self.cost.scale != 1.0:
            raise ValueError(f"cost.scale must be 1, got {self.cost.scale}")
        return self

    @property
    def machine(self) -> tuple[str, int | None, int, str]:
        """What costs depend on, besides the model."""
        return (self.device, self.num_threads, self.tensor_parallel_size, self.dtype)


class ServingProfile(_Part):
    """Of one model, recognised by its fingerprint."""

    version: Literal[1] = 1
    model: str
    fingerprint: Annotated[str, Field(min_length=1)]
    num_layers: Annotated[int, Field(ge=1)]
    kv_token_bytes: NotNegative = 0.0  # stored KV of one token in one layer; 0: unknown
    costs: CostProfile | None
    demand: DemandProfile | None
    demand_note: str = ""  # why there is none

    @model_validator(mode="after")
    def _fits_the_model(self) -> "ServingProfile":
        if self.costs is None and self.demand is None:
            raise ValueError("holds neither costs nor demand")
        if self.costs is not None and self.costs.cost.num_layers != self.num_layers:
            raise ValueError(
                f"costs.cost.num_layers is {self.costs.cost.num_layers}, the model has "
                f"{self.num_layers} layers"
            )
        if self.demand is not None:
            for idx, anchor in enumerate(self.demand.anchors):
                if anchor.rank_depth > self.num_layers:
                    raise ValueError(
                        f"demand.anchors.{idx}: rank depth {anchor.rank_depth} is more than the "
                        f"model's {self.num_layers} layers"
                    )
        return self

    def check_model(self, fingerprint: str) -> None:
        """Raises ValueError if the profile is of another model."""
        if fingerprint != self.fingerprint:
            raise ValueError(
                f"the profile is of {self.model} with the fingerprint {self.fingerprint[:16]}, the "
                f"served model has {fingerprint[:16]}; make one with `cachesmith profile`"
            )

    @classmethod
    def load(cls, path: Path) -> "ServingProfile":
        """Raises ValueError, with the field, for a file that is not a profile of this version."""
        try:
            return cls.model_validate_json(path.read_text())
        except ValidationError as exc:
            lines = [
                f"{'.'.join(map(str, error['loc'])) or 'the profile'}: "
                f"{error['msg'].removeprefix('Value error, ')}"
                for error in exc.errors()
            ]
            raise ValueError(f"{path} is not a profile: " + "; ".join(lines)) from None

    def without_samples(self) -> "ServingProfile":
        """What a server needs of it."""
        if self.costs is None:
            return self
        return self.model_copy(update={"costs": self.costs.model_copy(update={"samples": ()})})

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=1) + "\n")
