"""What a run prints, draws and writes down: accuracy against coverage and against work."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.curves import FULL_PREFILL, FULL_REUSE
from benchmarks.quality.outcomes import Outcome
from benchmarks.quality.stats import (
    NEVER,
    Accuracy,
    Group,
    accuracies,
    grouped,
    least_share,
    quantile,
    sufficient_coverages,
)
from benchmarks.report import print_table

KEEP = 0.95  # of full prefill's accuracy: what counts as kept
QUALIFIED = 0.9  # full prefill's accuracy on a task that a model can be measured with
WORKS = (0.15, 0.25, 0.35, 0.5, 0.65)  # of full prefill's token-layers
PLOT_CURVES = 8  # on one picture, more can not be told apart

Curves = dict[str, dict[str, Accuracy]]  # by curve and point


def by_curve(outcomes: Sequence[Outcome]) -> Curves:
    curves: Curves = defaultdict(dict)
    for (curve, point), accuracy in accuracies(outcomes).items():
        curves[curve][point] = accuracy
    return dict(curves)


def print_report(outcomes: Sequence[Outcome]) -> None:
    """For each task and size: accuracy by coverage, the work it takes, and what requests need."""
    for group, some in grouped(outcomes).items():
        curves = by_curve(some)
        if FULL_PREFILL not in curves:
            continue
        full = curves[FULL_PREFILL].popitem()[1]
        tokens = statistics.median(outcome.num_context_tokens for outcome in some)
        widest = max((a.high - a.low) / 2 for c in curves.values() for a in c.values())
        print(
            f"\n{group}, about {tokens:.0f} context tokens, {full.num_requests} requests: "
            f"full prefill {full.gold:.2f}; 95% intervals within ±{widest:.2f}"
        )
        _print_accuracies(curves)
        _print_needs(some, curves, full)
        _print_frontier(curves)


def _print_accuracies(curves: Curves) -> None:
    """One table for each grid of points, since EPIC counts tokens of a chunk."""
    grids: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, points in curves.items():
        grids[tuple(points)].append(name)
    for grid, names in grids.items():
        if not grid:
            continue
        print()
        rows = [[name, *(f"{curves[name][point].gold:.2f}" for point in grid)] for name in names]
        print_table(["accuracy", *grid], rows)


def _print_needs(outcomes: Sequence[Outcome], curves: Curves, full: Accuracy) -> None:
    rows = []
    for name, points in curves.items():
        if len(points) < 2:
            continue
        needs = list(sufficient_coverages(outcomes, name).values())
        share = least_share(points, full.gold, KEEP)
        rows.append(
            [
                name,
                "-" if share == NEVER else f"{share:.2f}",
                *(f"{quantile(needs, q):.2f}" for q in (0.1, 0.5, 0.9)),
            ]
        )
    if rows:
        print()
        header = ["sufficient coverage", f"work for {KEEP:g} of full", "p10", "median", "p90"]
        print_table(header, rows)


def _print_frontier(curves: Curves) -> None:
    """The best that each kind of configuration reaches within so much work, and where."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in curves:
        kinds[kind_of(name)].append(name)
    rows = []
    for kind, names in kinds.items():
        row = [kind]
        for work in WORKS:
            found = [
                (accuracy.gold, -accuracy.share, name, point)
                for name in names
                for point, accuracy in curves[name].items()
                if accuracy.share <= work
            ]
            if not found:
                row.append("-")
                continue
            gold, _, name, point = max(found)
            row.append(f"{gold:.2f} ({name.removeprefix(f'{kind} ')} {point})")
        rows.append(row)
    print()
    print_table(["best within work", *(f"{work:g}" for work in WORKS)], rows)


def kind_of(curve: str) -> str:
    """Configurations that use the same phases: a published method by its name, or `kv_dev` after
    WarmUp, `qci` from the first layer on, `qci` after WarmUp."""
    if curve.startswith("kv_dev"):
        return "kv_dev"
    if curve.startswith("qci w=0"):
        return "qci w=0"
    return "qci" if curve.startswith("qci") else curve


def print_qualification(outcomes: Sequence[Outcome]) -> None:
    """Whether a model can be measured with each task: see docs/evaluation.md."""
    found: dict[Group, dict[str, Accuracy]] = defaultdict(dict)
    for group, some in grouped(outcomes).items():
        base = Group(group.task.removesuffix(PERMUTED), group.num_documents)
        for name, points in by_curve(some).items():
            if name in (FULL_PREFILL, FULL_REUSE):
                is_permuted = group.task.endswith(PERMUTED)
                found[base][name + PERMUTED * is_permuted] = points.popitem()[1]
    rows = []
    for group, by_name in found.items():
        full, reuse = by_name[FULL_PREFILL], by_name[FULL_REUSE]
        permuted = by_name.get(FULL_PREFILL + PERMUTED)
        rows.append(
            [
                group.task,
                group.num_documents,
                full.num_requests,
                f"{full.gold:.2f} ({full.low:.2f}–{full.high:.2f})",
                f"{reuse.gold:.2f} ({reuse.low:.2f}–{reuse.high:.2f})",
                "-" if permuted is None else f"{permuted.gold:.2f}",
                "yes" if full.gold >= QUALIFIED and reuse.high < full.low else "no",
            ]
        )
    header = ["task", "documents", "requests", "full prefill", "full reuse", "permuted", "usable"]
    print_table(header, rows)


PERMUTED = " permuted"  # after the name of a task whose documents stand in another order


def as_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One object for each task, size, curve and point."""
    found = []
    for group, some in grouped(outcomes).items():
        for name, points in by_curve(some).items():
            for point, accuracy in points.items():
                found.append(
                    {
                        "task": group.task,
                        "num_documents": group.num_documents,
                        "curve": name,
                        "point": point,
                        "accuracy": round(accuracy.gold, 4),
                        "low": round(accuracy.low, 4),
                        "high": round(accuracy.high, 4),
                        "no_worse_than_full": round(accuracy.kept, 4),
                        "coverage": round(accuracy.coverage, 4),
                        "share_of_token_layers": round(accuracy.share, 4),
                        "num_requests": accuracy.num_requests,
                    }
                )
    return found


def plot(outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """One picture for each task and size: accuracy over coverage, and over token-layers.

    Needs matplotlib; raises ImportError without it.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for group, some in grouped(outcomes).items():
        curves = {name: points for name, points in by_curve(some).items() if len(points) > 1}
        if not curves:
            continue
        figure, axes = plt.subplots(1, 2, figsize=(12, 5), sharey=True)
        for name in _telling(curves):
            points = sorted(curves[name].values(), key=lambda a: a.share)
            for axis, x in zip(axes, ("coverage", "share"), strict=True):
                xs = [getattr(accuracy, x) for accuracy in points]
                axis.plot(xs, [a.gold for a in points], marker="o", markersize=3, label=name)
                lows, highs = [a.low for a in points], [a.high for a in points]
                axis.fill_between(xs, lows, highs, alpha=0.08)
        axes[0].set(xlabel="coverage: share of context tokens recomputed", ylabel="accuracy")
        axes[1].set(xlabel="token-layers computed, of full prefill's (Probe included)")
        axes[1].legend(fontsize=8)
        figure.suptitle(str(group))
        figure.tight_layout()
        path = folder / f"{group.task.replace(' ', '-')}-{group.num_documents}.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
        written.append(path)
    return written


def _telling(curves: Mapping[str, Mapping[str, Accuracy]]) -> list[str]:
    """The baselines, and of the rest those that keep most with half of the work."""

    def best_cheap(name: str) -> float:
        return max((a.gold for a in curves[name].values() if a.share <= 0.5), default=0.0)

    methods = [name for name in curves if not name.startswith(("kv_dev", "qci"))]
    rest = sorted((n for n in curves if n not in methods), key=best_cheap, reverse=True)
    return [*methods, *rest[: max(0, PLOT_CURVES - len(methods))]]
