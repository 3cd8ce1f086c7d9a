"""Which of the open choices of the phases keep most accuracy on this model?

For each choice it prints a table: accuracy by coverage under each alternative, on the same
questions. Full prefill is the ceiling. The defaults of CacheSmith come from these tables on the two
models of the repository (docs/evaluation.md).

  deviation   `kv_dev` compares keys, values or both
  fresh       exact KV of the layer that the Probe computed is kept for all tokens, or not
  gradual     `kv_dev` over several layers, with candidates dropped from layer to layer or not
  anchor      the text that chunks are prefilled behind
  epic        how many first tokens of each chunk are recomputed
  auto        whether the entropy of QCI scores tells which signal serves a request better
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.bench_quality import measured
from benchmarks.quality.auto_rule import best_rule, chosen, contests, pass_rate, picked_better
from benchmarks.quality.curves import (
    FULL_PREFILL,
    Curve,
    baselines,
    depths,
    kv_dev,
    qci,
    static_policy,
)
from benchmarks.quality.outcomes import Outcome
from benchmarks.quality.report import as_json, by_curve
from benchmarks.quality.stats import grouped, quantile
from benchmarks.quality.suites import Suite, suite_of
from benchmarks.quality.types import Question
from benchmarks.quality.walked_answers import WalkedAnswers, walked_answers
from benchmarks.report import argument_parser, print_json, print_table
from deploy.models import resolve_model
from planner import Deviation, Signal
from planner.auto_signal import AutoRule

COVERAGES = (0.05, 0.1, 0.2, 0.3, 0.5)
BATCH_SIZES = (1, 4, 8)
SEEDS = tuple(range(20))  # of the batches' composition
ANCHORS: dict[str, dict[str, str | None]] = {
    "synthetic": {
        "BOS": None,
        "two BOS": "<bos> <bos>",
        "a number": "<bos> next 42",
        "a sentence": "<bos> passage bater vesmar konin = here ;",
    },
    "english": {
        "BOS": None,
        "a line end": "<|im_start|>\n\n",
        "the user turn": "<|im_start|>user\n",
        "turn and intro": "<|im_start|>user\nAnswer the question from the documents.\n\n",
        "whole prefix": (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
            "Face<|im_end|>\n<|im_start|>user\nAnswer the question from the documents.\n\n"
        ),
    },
}


def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    model_dir = resolve_model(args.model)
    suite = suite_of(model_dir)
    questions = [
        question
        for task in args.tasks or suite.tasks
        for question in suite.questions(task, args.documents, args.seed, args.count)
    ]
    with walked_answers(model_dir, suite.form, dtype=args.dtype, seed=args.seed) as answers:
        num_layers = answers.num_layers
        wanted = {name: CHOICES[name](num_layers) for name in args.only if name != "anchor"}
        # several choices share curves: each question is asked once under each
        curves = {curve.name: curve for some in wanted.values() for curve in some}
        full = static_policy(FULL_PREFILL)
        found = measured(answers, questions, [full, *curves.values()], None) if curves else []
    results = []
    for name in args.only:
        print(f"\n{name}: {CHOICES[name].__doc__}")
        if name == "anchor":
            outcomes = _anchors(args, model_dir, suite, questions)
        else:
            names = {FULL_PREFILL, *(curve.name for curve in wanted[name])}
            outcomes = [outcome for outcome in found if outcome.curve in names]
        _print_curves(outcomes)
        if name == "auto":
            _print_auto(outcomes, num_layers)
        results += [{"choice": name, **row} for row in as_json(outcomes)]
    print_json("calibrate", seed=args.seed, results=results)


# --- the alternatives ----------------------------------------------------------------------------


def deviation(num_layers: int) -> list[Curve]:
    """what `kv_dev` compares"""
    return [
        replace(kv_dev(w, deviation=parts, coverages=COVERAGES), name=f"w={w} {parts}")
        for w in _some_depths(num_layers)
        for parts in Deviation
    ]


def fresh(num_layers: int) -> list[Curve]:
    """exact KV of the layer that the Probe computed"""
    return [
        replace(
            kv_dev(w, coverages=COVERAGES, keeps_fresh=keeps),
            name=f"w={w} {'kept' if keeps else 'dropped'}",
        )
        for w in _some_depths(num_layers)
        for keeps in (True, False)
    ]


def gradual(num_layers: int) -> list[Curve]:
    """one Probe layer of `kv_dev`, or three with candidates dropped from layer to layer, or kept"""
    curves = []
    for w in _some_depths(num_layers):
        curves.append(kv_dev(w, coverages=COVERAGES))
        curves.append(replace(kv_dev(w, 3, coverages=COVERAGES), name=f"kv_dev w={w} p=3 dropped"))
        curves.append(
            replace(kv_dev(w, 3, coverages=COVERAGES, filters=False), name=f"kv_dev w={w} p=3 kept")
        )
        curves.append(kv_dev(w + 2, coverages=COVERAGES))
    return list({curve.name: curve for curve in curves}.values())


def anchor(num_layers: int) -> list[Curve]:
    """the text that chunks are prefilled behind"""
    w = _some_depths(num_layers)[-1]
    return [static_policy("full_reuse"), kv_dev(w, coverages=COVERAGES)]


def epic(num_layers: int) -> list[Curve]:
    """first tokens of every chunk but the first"""
    del num_layers
    return [curve for curve in baselines() if curve.name == "epic"]


def auto(num_layers: int) -> list[Curve]:
    """both signals at the same WarmUp, with one Probe layer"""
    curves = []
    for w in _some_depths(num_layers):
        curves += [kv_dev(w, coverages=COVERAGES), qci(w, 1, coverages=COVERAGES)]
    return curves


CHOICES: dict[str, Callable[[int], list[Curve]]] = {
    "deviation": deviation,
    "fresh": fresh,
    "gradual": gradual,
    "anchor": anchor,
    "epic": epic,
    "auto": auto,
}


def _some_depths(num_layers: int) -> list[int]:
    """The first layer, and a little below and at a quarter of the layers."""
    every = depths(num_layers)
    return sorted({every[0], every[2], every[3]})


# --- anchors and signals -------------------------------------------------------------------------


def _anchors(
    args: argparse.Namespace, model_dir: Path, suite: Suite, questions: Sequence[Question]
) -> list[Outcome]:
    """Each anchor is another store, so a run of its own."""
    outcomes: list[Outcome] = []
    for name, text in ANCHORS[suite.name].items():
        with walked_answers(
            model_dir, suite.form, dtype=args.dtype, anchor_text=text, seed=args.seed
        ) as answers:
            curves = _renamed(answers, name)
            if not outcomes:
                curves.append(static_policy(FULL_PREFILL))
            outcomes += measured(answers, questions, curves, None)
    return outcomes


def _renamed(answers: WalkedAnswers, anchor_name: str) -> list[Curve]:
    return [
        replace(curve, name=f"{curve.name} behind {anchor_name}")
        for curve in anchor(answers.num_layers)
    ]


def _print_auto(outcomes: Sequence[Outcome], num_layers: int) -> None:
    """Rules are judged by the share of (request, coverage) that pass the relative gate."""
    for w in _some_depths(num_layers):
        some = contests(outcomes, f"kv_dev w={w} p=1", f"qci w={w} p=1")
        print(f"\nw={w}: entropy of the first Probe layer's QCI scores")
        rows = []
        for task in sorted({contest.task for contest in some}):
            own = [contest for contest in some if contest.task == task]
            entropies = [contest.entropy for contest in own]
            qci_rate, kv_rate = (
                pass_rate(own, [signal] * len(own)) for signal in (Signal.QCI, Signal.KV_DEV)
            )
            quantiles = [f"{quantile(entropies, q):.2f}" for q in (0.1, 0.5, 0.9)]
            rows.append([task, *quantiles, f"{kv_rate:.2f}", f"{qci_rate:.2f}"])
        print_table(["task", "p10", "median", "p90", "kv_dev passes", "qci passes"], rows)
        rows = []
        for batch_size in BATCH_SIZES:
            found = best_rule(some, batch_size, SEEDS)
            for label, rule in (("default", AutoRule()), ("best found", found)):
                picks = [chosen(some, rule, batch_size, seed) for seed in SEEDS]
                rows.append(
                    [
                        batch_size,
                        label,
                        f"{rule.threshold:g}",
                        "qci when peaked" if rule.qci_when_peaked else "qci when flat",
                        f"{sum(pass_rate(some, p) for p in picks) / len(picks):.3f}",
                        f"{sum(picked_better(some, p) for p in picks) / len(picks):.2f}",
                    ]
                )
        for signal in (Signal.KV_DEV, Signal.QCI):
            always = [signal] * len(some)
            rate, right = pass_rate(some, always), picked_better(some, always)
            rows.append(["any", f"always {signal}", "-", "-", f"{rate:.3f}", f"{right:.2f}"])
        print()
        print_table(["batch", "rule", "threshold", "direction", "passes", "picks better"], rows)


def _print_curves(outcomes: Sequence[Outcome]) -> None:
    for group, some in grouped(outcomes).items():
        curves = by_curve(some)
        full = curves.pop(FULL_PREFILL)["r=1"]
        print(f"\n{group}, {full.num_requests} requests: full prefill {full.gold:.2f}")
        for grid in dict.fromkeys(tuple(points) for points in curves.values()):
            rows = [
                [name, *(f"{points[p].gold:.2f} ({points[p].share:.2f})" for p in grid)]
                for name, points in curves.items()
                if tuple(points) == grid
            ]
            print_table(["accuracy (work)", *grid], rows)


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser("calibrate", __doc__)
    parser.add_argument("--model", required=True, help="a folder, an alias or a hub id")
    parser.add_argument("--only", nargs="+", choices=list(CHOICES), default=list(CHOICES))
    parser.add_argument("--tasks", nargs="+", help="some of the suite's tasks; default: all")
    parser.add_argument("--documents", type=int, default=8, help="of each question")
    parser.add_argument("--count", type=int, default=48, help="questions of each task")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    main()
