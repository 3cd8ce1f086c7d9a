"""Pictures of a simulated experiment: QSA of every policy, in all and over each axis."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib import pyplot

from planner.simulator import Axis, Experiment, Row, Setting, with_label

matplotlib.use("Agg")
_FIELDS = {"qsa": "QSA", "stall_share": "stall share"}


def draw(
    experiment: Experiment, settings: Sequence[Setting], rows: Sequence[list[Row]], *, folder: Path
) -> list[Path]:
    """Means: over all settings, and over each axis with several values."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for axis in experiment.sweep:
        if len(axis.values) > 1:
            for field, name in _FIELDS.items():
                path = folder / f"{_safe(experiment.name)}-{_safe(axis.name)}-{field}.png"
                _draw_axis(axis, settings, rows, field=field, name=name, path=path)
                paths.append(path)
    path = folder / f"{_safe(experiment.name)}-qsa.png"
    _draw_bars(rows, path=path)
    return [*paths, path]


def _draw_axis(
    axis: Axis,
    settings: Sequence[Setting],
    rows: Sequence[list[Row]],
    *,
    field: str,
    name: str,
    path: Path,
) -> None:
    labels = [value.label for value in axis.values]
    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.9 * len(labels)), 4.5))
    for place, row in enumerate(rows[0]):
        heights = [
            fmean(
                some[place].values[field] for some in with_label(settings, rows, axis.name, label)
            )
            for label in labels
        ]
        axes.plot(labels, heights, marker="o", linewidth=3 if place == 0 else 1, label=row.policy)
    axes.set_title("simulated")
    axes.set_xlabel(axis.name)
    axes.set_ylabel(name)
    axes.set_ylim(0.0, 1.0)
    axes.grid(alpha=0.3)
    axes.tick_params(axis="x", rotation=20 if len(labels) > 5 else 0)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=90, bbox_inches="tight")
    pyplot.close(figure)


def _draw_bars(rows: Sequence[list[Row]], *, path: Path) -> None:
    names = [row.policy for row in rows[0]]
    heights = [
        fmean(of_setting[place].values["qsa"] for of_setting in rows) for place in range(len(names))
    ]
    figure, axes = pyplot.subplots(figsize=(7.0, 0.3 * len(names) + 1.5))
    axes.barh(names[::-1], heights[::-1])
    axes.axvline(heights[0], linewidth=0.8, linestyle="--")
    axes.set_title("simulated")
    axes.set_xlabel("QSA, mean of the settings")
    axes.set_xlim(0.0, 1.0)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=90, bbox_inches="tight")
    pyplot.close(figure)


def _safe(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter == "-" else "_" for letter in name)
