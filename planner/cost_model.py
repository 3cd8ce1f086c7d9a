"""What a prefill costs: a linear model of its layers.

One layer over n packed rows, each attending m keys on average, takes `c1·n + c2·n·m`: projections
and MLP are linear in rows, attention in row-key pairs. Pairs of selected rows cost more than those
of the dense causal kernel, so they have a price of their own. So have rows that a filtering Probe
only projects and compares, and one stored token reused in one layer (read, rotate, scatter). Every
layer that a batch walks costs something whatever its size; over stored KV it also does for each of
the requests, which are read, and whose selected rows attend, one by one; and where rows are left
out between two Probe layers, attention is planned anew. Every prefill pays a fixed time (admission,
engine steps, the last token), and a little more for each request.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul

from planner.types import Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillShape:
    """The token counts of one request that decide its cost.

    num_cached: context tokens whose KV is stored, the candidates of the coverage.
    num_always: tokens that every plan computes (prefix, misses, suffix).
    """

    num_cached: int
    num_always: int

    @property
    def num_tokens(self) -> int:
        return self.num_cached + self.num_always


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Arithmetic of a prefill or a part of it, counted in units that the cost model prices."""

    prefills: float = 0.0  # each pays the fixed time
    requests: float = 0.0  # of them
    layers: float = 0.0  # walked by a batch, those of the Probe among them
    members: float = 0.0  # requests in layers that stitch stored KV
    filters: float = 0.0  # Probe layers after which only the best rows go on
    rows: float = 0.0  # token-layers computed
    compared: float = 0.0  # token-layers projected and compared by a filtering Probe
    pairs: float = 0.0  # row-key pairs attended by all rows of a prompt
    selected_pairs: float = 0.0  # row-key pairs attended by selected rows
    reused: float = 0.0  # token-layers of stored KV stitched

    @property
    def counts(self) -> tuple[float, ...]:
        """In the order of `PRICES`."""
        return (
            self.prefills,
            self.requests,
            self.layers,
            self.members,
            self.filters,
            self.rows,
            self.compared,
            self.pairs,
            self.selected_pairs,
            self.reused,
        )

    def __add__(self, other: "Work") -> "Work":
        return Work(
            prefills=self.prefills + other.prefills,
            requests=self.requests + other.requests,
            layers=self.layers + other.layers,
            members=self.members + other.members,
            filters=self.filters + other.filters,
            rows=self.rows + other.rows,
            compared=self.compared + other.compared,
            pairs=self.pairs + other.pairs,
            selected_pairs=self.selected_pairs + other.selected_pairs,
            reused=self.reused + other.reused,
        )

    def __mul__(self, times: float) -> "Work":
        return Work(
            prefills=times * self.prefills,
            requests=times * self.requests,
            layers=times * self.layers,
            members=times * self.members,
            filters=times * self.filters,
            rows=times * self.rows,
            compared=times * self.compared,
            pairs=times * self.pairs,
            selected_pairs=times * self.selected_pairs,
            reused=times * self.reused,
        )


# price -> what of `Work` it is the price of
PRICES = {
    "fixed_ms": "prefills",
    "request_ms": "requests",
    "layer_ms": "layers",
    "member_ms": "members",
    "filter_ms": "filters",
    "row_ms": "rows",
    "compare_ms": "compared",
    "pair_ms": "pairs",
    "selected_pair_ms": "selected_pairs",
    "reuse_ms": "reused",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWorks:
    """The work of one batch under a plan, layer by layer in the order of the phases."""

    warmup_depth: int
    num_patched: int  # layers
    fixed: Work  # outside of all layers
    warmup: Work  # of each layer
    alone: tuple[Work, ...]  # Probe layers before those that need stored KV
    probe: tuple[Work, ...]
    patch: Work  # of each layer

    @property
    def phases(self) -> dict[str, Work]:
        """Whole phases, by their names in a serving profile."""
        return {
            "warmup": self.warmup * self.warmup_depth,
            "probe": sum((*self.alone, *self.probe), Work()),
            "patch": self.patch * self.num_patched,
            "fixed": self.fixed,
        }


def layer_works(
    shapes: Sequence[PrefillShape],
    coverages: Sequence[float],
    *,
    signal: Signal,
    warmup_depth: int,
    probe_len: int,
    num_layers: int,
) -> LayerWorks:
    """Count the work of one batch under a plan.

    A causal row attends half of its request's tokens on average, a suffix row of the QCI probe
    all of them. A Probe that cannot change the selection (coverage 0 or 1) is skipped, as the
    engine does.
    """
    requests = list(zip(shapes, coverages, strict=True))
    num_requests = float(len(shapes))
    rows = pairs = patch_rows = patch_pairs = selected_pairs = 0.0
    for shape, coverage in requests:
        n = shape.num_tokens
        active = shape.num_always + coverage * shape.num_cached
        rows += n
        pairs += n * n / 2
        patch_rows += active
        if active == n:  # nothing is left out
            patch_pairs += n * n / 2
        else:
            selected_pairs += active * n / 2
    reused = float(sum(shape.num_cached for shape in shapes))
    alone, probe = _probe_works(
        requests, signal=signal, probe_len=probe_len, num_layers=num_layers, reused=reused
    )
    return LayerWorks(
        warmup_depth=warmup_depth,
        num_patched=num_layers - warmup_depth,
        fixed=Work(prefills=1.0, requests=num_requests),
        warmup=Work(layers=1.0, rows=rows, pairs=pairs),
        alone=alone,
        probe=probe,
        patch=Work(
            layers=1.0,
            members=num_requests,
            rows=patch_rows,
            pairs=patch_pairs,
            selected_pairs=selected_pairs,
            reused=reused,
        ),
    )


def _probe_works(
    requests: Sequence[tuple[PrefillShape, float]],
    *,
    signal: Signal,
    probe_len: int,
    num_layers: int,
    reused: float,
) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Probe layers before those that need stored KV, and those that do.

    requests: with their coverages

    A layer of `kv_dev` projects and compares the rows that the one before kept, and walks those
    that it keeps itself; the last one walks none. `auto` is counted as one layer of `qci`, then
    `kv_dev`: the dearer of its two ways.
    """
    ranked = [shape for shape, coverage in requests if 0.0 < coverage < 1.0]
    if not ranked or signal is Signal.POSITION:
        return (), ()
    if signal is Signal.QCI_FINAL:  # the suffix alone through all layers; the last one reads KV
        always = float(sum(shape.num_always for shape in ranked))
        walk = Work(layers=1.0, rows=always)
        cached = float(sum(shape.num_cached for shape in ranked))
        stitch = Work(members=float(len(ranked)), reused=cached)
        return (walk,) * (num_layers - 1), (walk + stitch,)
    shapes = [shape for shape, _ in requests]
    num_requests = float(len(shapes))
    stitched = Work(members=num_requests, reused=reused)
    question = Work(
        layers=1.0,
        rows=float(sum(shape.num_always for shape in shapes)),
        selected_pairs=float(sum(shape.num_always * shape.num_tokens for shape in shapes)),
    )
    if signal is Signal.QCI:
        return (), (stitched + question,) * probe_len
    layers = []
    compared = float(sum(shape.num_tokens for shape in shapes))
    for step in range(1, probe_len):
        share = step / probe_len
        kept = [shape.num_always + r**share * shape.num_cached for shape, r in requests]
        pairs = sum(k * shape.num_tokens / 2 for k, shape in zip(kept, shapes, strict=True))
        walk = Work(
            layers=1.0,
            members=num_requests,
            filters=1.0,
            rows=sum(kept),
            compared=compared,
            selected_pairs=pairs,
            reused=reused,
        )
        layers.append(walk)
        compared = sum(kept)
    if probe_len > 0:
        layers.append(stitched + Work(compared=compared))
    if signal is Signal.AUTO and layers:
        layers[0] += question
    return (), tuple(layers)


def phase_works(
    shapes: Sequence[PrefillShape],
    coverages: Sequence[float],
    *,
    signal: Signal,
    warmup_depth: int,
    probe_len: int,
    num_layers: int,
) -> dict[str, Work]:
    """The work of one batch under a plan by phase: warmup, probe, patch, and what is fixed."""
    works = layer_works(
        shapes,
        coverages,
        signal=signal,
        warmup_depth=warmup_depth,
        probe_len=probe_len,
        num_layers=num_layers,
    )
    return works.phases


def prefill_work(
    shapes: Sequence[PrefillShape],
    coverages: Sequence[float],
    *,
    signal: Signal,
    warmup_depth: int,
    probe_len: int,
    num_layers: int,
) -> Work:
    """The sum of `phase_works`."""
    works = phase_works(
        shapes,
        coverages,
        signal=signal,
        warmup_depth=warmup_depth,
        probe_len=probe_len,
        num_layers=num_layers,
    )
    return sum(works.values(), Work())


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Prices of `Work`, in milliseconds; `scale` follows the observed ratio of real to expected."""

    num_layers: int
    fixed_ms: float
    row_ms: float
    pair_ms: float
    selected_pair_ms: float
    reuse_ms: float
    request_ms: float = 0.0
    layer_ms: float = 0.0
    member_ms: float = 0.0
    filter_ms: float = 0.0
    compare_ms: float = 0.0
    scale: float = 1.0
    relative_error: float = 0.0  # median, on the fitted samples

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"num_layers must be 1 or more, got {self.num_layers}")
        for name in (*PRICES, "scale"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be finite and not negative, got {value}")

    @property
    def prices(self) -> tuple[float, ...]:
        """In the order of `PRICES`, without the scale."""
        return (
            self.fixed_ms,
            self.request_ms,
            self.layer_ms,
            self.member_ms,
            self.filter_ms,
            self.row_ms,
            self.compare_ms,
            self.pair_ms,
            self.selected_pair_ms,
            self.reuse_ms,
        )

    def work_ms(self, work: Work) -> float:
        ms: float = sum(map(mul, self.prices, work.counts))
        return self.scale * ms

    @property
    def shared_ms(self) -> float:
        """What a batch of any size takes at the least, at the scale: its members share it."""
        return self.scale * (self.fixed_ms + self.layer_ms * self.num_layers)

    def batch_fixed_ms(self, num_requests: int) -> float:
        """What a prefill takes outside of all layers, at the scale."""
        return self.scale * (self.fixed_ms + self.request_ms * num_requests)

    def stitched_layer_ms(self, num_requests: int) -> float:
        """What a layer over stored KV takes whatever the number of tokens, at the scale."""
        return self.scale * (self.layer_ms + self.member_ms * num_requests)

    def observed(
        self, expected_ms: float, actual_ms: float, *, plan_scale: float, weight: float
    ) -> "CostModel":
        """Follow the machine: move `scale` towards what would have made the plan right.

        plan_scale: the scale that `expected_ms` was made with; several plans may be on their way
        while the scale moves.
        weight: of this observation, 0-1; members of a batch share one.
        """
        if expected_ms <= 0 or actual_ms <= 0:
            return self
        target = plan_scale * observed_ratio(expected_ms, actual_ms)
        return replace(self, scale=(1 - weight) * self.scale + weight * target)


def observed_ratio(expected_ms: float, actual_ms: float) -> float:
    """By how much an expectation was off; one observation counts for a factor of 4 at the most."""
    return min(4.0, max(0.25, actual_ms / expected_ms))
