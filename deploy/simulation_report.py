"""What `cachesmith simulate` prints: a table for each setting, means, and gains."""

from collections.abc import Sequence
from statistics import fmean

from deploy.console import say
from planner.simulator import (
    BEST_STATIC,
    Experiment,
    Row,
    Setting,
    Summary,
    assumptions,
    own_best_static,
    with_label,
)

# column, field of a summary, format
_COLUMNS = (
    ("QSA", "qsa", ".3f"),
    ("accuracy", "accuracy", ".3f"),
    ("SLO", "slo_attainment", ".3f"),
    ("P50 ms", "p50_ttft_ms", ".0f"),
    ("P99 ms", "p99_ttft_ms", ".0f"),
    ("stall", "stall_share", ".3f"),
    ("replica s", "replica_seconds", ".0f"),
    ("refused", "refused", ".0f"),
    ("late", "late", ".0f"),
)


def report(
    experiment: Experiment,
    settings: Sequence[Setting],
    rows: Sequence[list[Row]],
    runs: Sequence[list[dict[str, Summary]]],
    *,
    took_s: float,
) -> None:
    """rows: of each setting; runs: of each setting and seed"""
    _print(experiment, settings, rows, took_s)
    if len(settings) > 1:
        _print_means(experiment, settings, rows)
    if BEST_STATIC in experiment.policies:
        _print_gains(experiment, settings, rows, runs)


def all_assumptions(settings: Sequence[Setting]) -> list[str]:
    """Of all settings, each once."""
    lines = [line for setting in settings for line in assumptions(setting.scenario)]
    return list(dict.fromkeys(lines))


def _print(
    experiment: Experiment, settings: Sequence[Setting], rows: Sequence[list[Row]], took_s: float
) -> None:
    num = len(settings) * len(experiment.seeds)
    say(f"SIMULATED: {experiment.name}, {num} settings × seeds in {took_s:.0f} s")
    for line in all_assumptions(settings):
        say(f"  {line}")
    width = max(len(row.policy) for of_setting in rows for row in of_setting)
    for setting, of_setting in zip(settings, rows, strict=True):
        say(f"\n{setting.name} (simulated)")
        say(" ".join([" " * width, *(f"{name:>9}" for name, _, _ in _COLUMNS)]))
        for row in of_setting:
            cells = [_cell(row.values.get(field), form) for _, field, form in _COLUMNS]
            note = f"  = {row.runs}" if row.runs != row.policy else ""
            say(" ".join([f"{row.policy:>{width}}", *(f"{cell:>9}" for cell in cells)]) + note)


def _print_means(
    experiment: Experiment, settings: Sequence[Setting], rows: Sequence[list[Row]]
) -> None:
    """Of every policy over all settings, and its QSA by the values of each axis."""
    names = [row.policy for row in rows[0]]
    width = max(map(len, names))
    say(f"\nmeans over {len(settings)} settings (simulated)")
    say(" ".join([" " * width, *(f"{name:>9}" for name, _, _ in _COLUMNS)]))
    for place, name in enumerate(names):
        cells = []
        for _, field, form in _COLUMNS:
            values = [of_setting[place].values.get(field) for of_setting in rows]
            known = [value for value in values if value is not None]
            cells.append(_cell(fmean(known) if known else None, form))
        say(" ".join([f"{name:>{width}}", *(f"{cell:>9}" for cell in cells)]))
    for axis in experiment.sweep:
        labels = [value.label for value in axis.values]
        sizes = [max(9, len(label)) for label in labels]
        heads = [f"{label:>{size}}" for label, size in zip(labels, sizes, strict=True)]
        say(f"\nQSA by {axis.name} (simulated)")
        say(" ".join([" " * width, *heads]))
        for place, name in enumerate(names):
            cells = []
            for label, size in zip(labels, sizes, strict=True):
                some = with_label(settings, rows, axis.name, label)
                qsa = fmean(of_setting[place].values["qsa"] for of_setting in some)
                cells.append(f"{qsa:>{size}.3f}")
            say(" ".join([f"{name:>{width}}", *cells]))


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _print_gains(
    experiment: Experiment,
    settings: Sequence[Setting],
    rows: Sequence[list[Row]],
    runs: Sequence[list[dict[str, Summary]]],
) -> None:
    """Of the first policy over `best_static`, in all and by each axis' values."""
    gains = []
    for of_setting in rows:
        qsa = {row.policy: row.values["qsa"] for row in of_setting}
        gains.append(qsa[of_setting[0].policy] - qsa[BEST_STATIC])
    first = rows[0][0].policy
    won = sum(gain > 0 for gain in gains)
    say(
        f"\n{first} over {BEST_STATIC} (simulated): above in {won} of {len(gains)} settings, "
        f"mean {fmean(gains):+.3f}, worst {min(gains):+.3f}, best {max(gains):+.3f}"
    )
    own = [own_best_static(experiment, each)[1] for each in runs]
    first_qsa = [of_setting[0].values["qsa"] for of_setting in rows]
    above = sum(a > b for a, b in zip(first_qsa, own, strict=True))
    say(f"over the static configuration that is best in each single setting: above in {above}")
    for axis in experiment.sweep:
        for value in axis.values:
            some = with_label(settings, gains, axis.name, value.label)
            won = sum(gain > 0 for gain in some)
            say(f"  {axis.name} {value.label}: {fmean(some):+.3f}, above in {won} of {len(some)}")
