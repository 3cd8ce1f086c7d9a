"""How much coverage requests need: measured distributions, as a file.

F_d(r) is the share of requests for which coverage r is enough, once tokens are ranked at depth
d = warmup_depth + probe_len. `cachesmith bench quality --demand FILE` writes one.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from planner.types import Signal

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DemandBucket(_Part):
    """Requests of similar context length."""

    max_context_tokens: Annotated[int, Field(ge=1)] | None  # closed; None: any longer one
    num_requests: Annotated[int, Field(ge=1)]
    coverages: tuple[Share, ...]  # ascending, from 0 to 1
    enough: tuple[Share, ...]  # share of the requests for which each coverage is enough

    @model_validator(mode="after")
    def _is_a_distribution(self) -> "DemandBucket":
        if len(self.coverages) != len(self.enough) or len(self.coverages) < 2:
            raise ValueError("coverages and enough need the same length, at least 2")
        if self.coverages[0] != 0.0 or self.coverages[-1] != 1.0 or self.enough[-1] != 1.0:
            raise ValueError("coverages run from 0 to 1, and all of the context is enough for all")
        for name in ("coverages", "enough"):
            values = getattr(self, name)
            if list(values) != sorted(values):
                raise ValueError(f"{name} must not fall")
        return self


class DemandAnchor(_Part):
    """One way to rank, and what it leaves to recompute."""

    signal: Signal
    warmup_depth: Annotated[int, Field(ge=0)]
    probe_len: Annotated[int, Field(ge=0)]
    buckets: Annotated[tuple[DemandBucket, ...], Field(min_length=1)]

    @property
    def rank_depth(self) -> int:
        return self.warmup_depth + self.probe_len

    @model_validator(mode="after")
    def _buckets_ascend(self) -> "DemandAnchor":
        bounds = [bucket.max_context_tokens for bucket in self.buckets]
        if bounds[-1] is not None or None in bounds[:-1]:
            raise ValueError("the last bucket, and no other, is without max_context_tokens")
        limits = [bound for bound in bounds if bound is not None]
        if limits != sorted(set(limits)):
            raise ValueError("max_context_tokens must rise from bucket to bucket")
        return self


class DemandProfile(_Part):
    """Of one model on one kind of requests."""

    version: Literal[1] = 1
    model: str
    task: str
    gate: str  # what "enough" means, in words
    anchors: Annotated[tuple[DemandAnchor, ...], Field(min_length=1)]

    @classmethod
    def load(cls, path: Path) -> "DemandProfile":
        """Raises ValueError, with the field, for a file that is not a profile of this version."""
        return cls.model_validate_json(path.read_text())

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=1) + "\n")
