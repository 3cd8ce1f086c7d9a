"""What a profile says, as text and as pictures."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import print_table
from planner.cost_model import PRICES
from planner.demand_profile import DemandAnchor, DemandBucket, DemandProfile
from planner.serving_profile import CostProfile, ServingProfile

ROUNDING = 1e-9  # shares of requests add up to just below a quantile that they equal


def print_report(profile: ServingProfile) -> None:
    print(
        f"profile of {profile.model}: {profile.num_layers} layers, "
        f"fingerprint {profile.fingerprint[:16]}"
    )
    print()
    if profile.costs is None:
        print("costs: not measured; a server measures some at its start")
    else:
        _print_costs(profile.costs)
    print()
    if profile.demand is None:
        print(f"demand: none, a server assumes it ({profile.demand_note or 'not measured'})")
    else:
        _print_demand(profile.demand)


def _print_costs(costs: CostProfile) -> None:
    threads = "" if costs.num_threads is None else f"{costs.num_threads} threads a rank, "
    print(
        f"costs on {costs.device}: {threads}tensor parallelism {costs.tensor_parallel_size}, "
        f"{costs.dtype}"
    )
    print_table(
        ["phase", "batches", "median error", "worst error"],
        [
            [fit.phase, fit.num_samples, _percent(fit.median_error), _percent(fit.worst_error)]
            for fit in costs.fits
        ],
    )
    print()
    print_table(
        ["price", "µs"],
        [[name.removesuffix("_ms"), f"{getattr(costs.cost, name) * 1e3:.4g}"] for name in PRICES],
    )
    print(f"stored KV comes from the host tier at {costs.host_bytes_per_ms / 1e6:.2f} GB/s")


def _print_demand(demand: DemandProfile) -> None:
    print(f"demand on {demand.task}, as the smallest sufficient coverage")
    print(f"gate: {demand.gate}")
    rows = []
    for anchor in demand.anchors:
        for tokens, bucket in _buckets(anchor):
            rows.append(
                [
                    anchor_name(anchor),
                    tokens,
                    bucket.num_requests,
                    f"{bucket.enough[0]:.2f}",
                    f"{quantile(bucket, 0.5):.2f}",
                    f"{quantile(bucket, 0.9):.2f}",
                ]
            )
    print_table(["anchor", "context tokens", "requests", "need none", "median", "P90"], rows)


def anchor_name(anchor: DemandAnchor) -> str:
    return f"{anchor.signal} w={anchor.warmup_depth} p={anchor.probe_len}"


def quantile(bucket: DemandBucket, share: float) -> float:
    """The smallest coverage of the grid that is enough for such a share of the requests."""
    pairs = zip(bucket.coverages, bucket.enough, strict=True)
    return next(r for r, enough in pairs if enough >= share - ROUNDING)


def _buckets(anchor: DemandAnchor) -> Iterator[tuple[str, DemandBucket]]:
    """With the context lengths in words."""
    low = 0
    for bucket in anchor.buckets:
        high = bucket.max_context_tokens
        if high is None:
            yield "any" if low == 0 else f"over {low}", bucket
        else:
            yield f"{low + 1}–{high}", bucket
            low = high


def _percent(share: float) -> str:
    return f"{share:.1%}"


# --- pictures ------------------------------------------------------------------------------------


def plot(profile: ServingProfile, folder: Path) -> list[Path]:
    """What the profile has: `costs.png`, `demand.png`.

    Needs matplotlib; raises ImportError without it.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figures = []
    if profile.costs is not None and profile.costs.samples:
        figures.append(("costs.png", _costs_figure(plt, profile.model, profile.costs)))
    if profile.demand is not None:
        figures.append(("demand.png", _demand_figure(plt, profile.model, profile.demand)))
    written = []
    for name, figure in figures:
        figure.tight_layout()
        figure.savefig(folder / name, dpi=110)
        plt.close(figure)
        written.append(folder / name)
    return written


def _costs_figure(plt: Any, model: str, costs: CostProfile) -> Any:
    """Expected over measured times, and by how much they are off."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5))
    for phase in dict.fromkeys(sample.phase for sample in costs.samples):
        own = [s for s in costs.samples if s.phase == phase and s.measured_ms > 0]
        measured = [s.measured_ms for s in own]
        left.plot(measured, [s.expected_ms for s in own], "o", markersize=3, label=phase)
        off = [s.expected_ms / s.measured_ms - 1 for s in own]
        right.plot(measured, off, "o", markersize=3, label=phase)
    ends = [s.measured_ms for s in costs.samples if s.measured_ms > 0]
    left.plot([min(ends), max(ends)], [min(ends), max(ends)], color="grey", linewidth=0.8)
    left.set(xlabel="measured ms", ylabel="expected ms", xscale="log", yscale="log")
    right.axhline(0.0, color="grey", linewidth=0.8)
    right.set(xlabel="measured ms", ylabel="expected / measured − 1", xscale="log")
    left.legend(fontsize=8)
    figure.suptitle(f"{model} on {costs.device}: what the prices say of measured phases")
    return figure


def _demand_figure(plt: Any, model: str, demand: DemandProfile) -> Any:
    """F_d(r): a row for each bucket of the first anchor, a column for each signal."""
    signals = list(dict.fromkeys(anchor.signal for anchor in demand.anchors))
    num_rows = max(len(anchor.buckets) for anchor in demand.anchors)
    size = (5.5 * len(signals), 3.6 * num_rows)
    figure, axes = plt.subplots(
        num_rows, len(signals), figsize=size, sharex=True, sharey=True, squeeze=False
    )
    for anchor in demand.anchors:
        column = axes[:, signals.index(anchor.signal)]
        for axis, (tokens, bucket) in zip(column, _buckets(anchor), strict=False):
            axis.plot(
                bucket.coverages, bucket.enough, marker="o", markersize=3, label=anchor_name(anchor)
            )
            axis.set_title(f"{anchor.signal}, {tokens} context tokens", fontsize=9)
    _label(axes)
    figure.suptitle(f"{model} on {demand.task}: for how many requests a coverage is enough")
    return figure


def _label(axes: Sequence[Sequence[Any]]) -> None:
    for row in axes:
        row[0].set_ylabel("share of requests")
        for axis in row:
            axis.legend(fontsize=8, loc="lower right")
    for axis in axes[-1]:
        axis.set_xlabel("coverage")
