"""The batches that costs are measured on, and what was measured: values that are JSON."""

import itertools
import random
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field

from planner import PrefillShape, Signal, Work, phase_works
from planner.serving_profile import Phase

LONGEST_TOKENS = 2048  # of a batch
MIN_TOKENS = 32
CHUNK_TOKENS = 256
POINTS_PER_SIGNAL = 24
COVERAGES = (0.05, 0.2, 0.5, 0.05, 0.2, 0.5, 0.0, 1.0)
LENGTH_SHARES = (0.125, 0.25, 0.5, 1.0)  # of the longest
BATCH_SIZES = (1, 1, 2, 4)
ALWAYS_TOKENS = (8, 32, 32, 128, 300)

Count = Annotated[int, Field(ge=0)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GridRequest(_Part):
    """One member of a batch."""

    chunks: tuple[Annotated[int, Field(ge=1)], ...]  # tokens of each, all of them stored
    num_always: Annotated[int, Field(ge=1)]

    @property
    def shape(self) -> PrefillShape:
        return PrefillShape(num_cached=sum(self.chunks), num_always=self.num_always)


class GridPoint(_Part):
    """One batch to measure."""

    signal: Signal
    warmup_depth: Count
    probe_len: Count
    coverage: Annotated[float, Field(ge=0.0, le=1.0)]
    requests: Annotated[tuple[GridRequest, ...], Field(min_length=1)]

    def works(self, num_layers: int) -> dict[Phase, Work]:
        """By phase; those that do not run are left out."""
        works = phase_works(
            [member.shape for member in self.requests],
            [self.coverage] * len(self.requests),
            signal=self.signal,
            warmup_depth=self.warmup_depth,
            probe_len=self.probe_len,
            num_layers=num_layers,
        )
        return {phase: works[phase] for phase in get_args(Phase) if any(works[phase].counts)}

    @property
    def key(self) -> str:
        """The same for the same batch, in every run."""
        return self.model_dump_json()


class PointTimes(_Part):
    """Where the time of one run went. What loading and writing take is in the phase that does it.

    stall_ms: waits for stored KV, whether or not they were used
    fixed_ms: from the first request's queue to the last one's first token, outside of the phases
    load_ms: of the phases, reading and rotating stored KV
    """

    warmup_ms: NotNegative = 0.0
    probe_ms: NotNegative = 0.0
    patch_ms: NotNegative = 0.0
    stall_ms: NotNegative = 0.0
    fixed_ms: NotNegative = 0.0
    load_ms: NotNegative = 0.0
    loaded_bytes: NotNegative = 0.0

    @property
    def phases(self) -> dict[Phase, float]:
        return {
            "warmup": self.warmup_ms,
            "probe": self.probe_ms,
            "patch": self.patch_ms,
            "fixed": self.fixed_ms,
        }

    @property
    def total_ms(self) -> float:
        return sum(self.phases.values()) + self.stall_ms


class MeasuredPoint(_Part):
    """A point with its runs, in the order in which they ran."""

    point: GridPoint
    num_layers: Annotated[int, Field(ge=1)]
    runs: Annotated[tuple[PointTimes, ...], Field(min_length=1)]

    @property
    def median_ms(self) -> dict[Phase, float]:
        """Of each phase by itself."""
        return {phase: median(run.phases[phase] for run in self.runs) for phase in get_args(Phase)}


def grid(num_layers: int, max_model_len: int) -> list[GridPoint]:
    """About 50 batches, in an order that mixes long and short ones; the same in every run.

    Full prefills, and for each of two signals a Latin hypercube: every depth, Probe length,
    coverage, prompt length and batch size, each equally often, in combinations by chance.
    """
    longest = min(LONGEST_TOKENS, max_model_len - 2)  # of a batch in all; one token is generated
    if num_layers < 2 or longest < MIN_TOKENS:
        raise ValueError(
            f"need 2 layers and a model length of {MIN_TOKENS + 2} tokens, got {num_layers} and "
            f"{max_model_len}"
        )
    rng = random.Random(0)
    points = []
    for num_requests, share in itertools.product((1, 2, 4), (0.25, 1.0)):
        points.append(
            GridPoint(
                signal=Signal.KV_DEV,
                warmup_depth=num_layers,
                probe_len=0,
                coverage=1.0,
                requests=_members(rng, int(share * longest), num_requests),
            )
        )
    probe_lens = {Signal.KV_DEV: (1, 1, 2, 4), Signal.QCI: (1, 1, num_layers // 4, num_layers)}
    for signal, lens in probe_lens.items():
        columns = [
            _shuffled(rng, sorted({0, 1, num_layers // 4, num_layers // 2})),
            _shuffled(rng, lens),
            _shuffled(rng, COVERAGES),
            _shuffled(rng, LENGTH_SHARES),
            _shuffled(rng, BATCH_SIZES),
        ]
        for w, p, coverage, share, num_requests in zip(*columns, strict=True):
            points.append(
                GridPoint(
                    signal=signal,
                    warmup_depth=w,
                    probe_len=max(1, min(p, num_layers - w)),
                    coverage=coverage,
                    requests=_members(rng, int(share * longest), num_requests),
                )
            )
    rng.shuffle(points)
    return list({point.key: point for point in points}.values())


def _shuffled(rng: random.Random, levels: Sequence[Any]) -> list[Any]:
    """Each level equally often, in any order."""
    repeated = list(itertools.islice(itertools.cycle(levels), POINTS_PER_SIGNAL))
    rng.shuffle(repeated)
    return repeated


def _members(rng: random.Random, num_tokens: int, num_requests: int) -> tuple[GridRequest, ...]:
    """Requests of ragged lengths, so many tokens in all or a few less."""
    num_tokens = max(num_tokens, MIN_TOKENS)
    weights = [rng.uniform(0.5, 1.5) for _ in range(num_requests)]
    members = []
    for weight in weights:
        mine = int(num_tokens * weight / sum(weights))
        num_always = min(rng.choice(ALWAYS_TOKENS), mine // 2)
        members.append(GridRequest(chunks=chunks_of(mine - num_always), num_always=num_always))
    return tuple(members)


def chunks_of(num_tokens: int) -> tuple[int, ...]:
    whole, rest = divmod(num_tokens, CHUNK_TOKENS)
    return (CHUNK_TOKENS,) * whole + ((rest,) if rest else ())


def merged(measured: Iterable[MeasuredPoint]) -> list[MeasuredPoint]:
    """Each point once, with all of its runs."""
    by_key: dict[str, MeasuredPoint] = {}
    for one in measured:
        known = by_key.get(one.point.key)
        runs = (*known.runs, *one.runs) if known is not None else one.runs
        by_key[one.point.key] = one.model_copy(update={"runs": runs})
    return list(by_key.values())
