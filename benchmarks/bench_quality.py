"""How much accuracy does each configuration keep, at which coverage and for how much work?

For each request it answers the same question under every signal, depth, coverage and published
baseline, and compares with the gold answer and with what full prefill gives. Full prefill bounds
the accuracy of a model from above; its token-layers are the unit of the work.

  cachesmith bench quality --model FOLDER --qualify       can this model be measured so?
  cachesmith bench quality --model FOLDER --out R.jsonl   all curves; run it again to go on
  cachesmith bench quality --model FOLDER --tasks vt --curves kv_dev qci random
  cachesmith bench quality --model FOLDER --questions musique.jsonl --format multi-hop

The model's folder names the tasks that fit it (`quality.json`); any other model gets the English
ones. Bring your own questions with --questions.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.quality import report
from benchmarks.quality.curves import Curve, bounds, named, standard
from benchmarks.quality.demand import demand_profile
from benchmarks.quality.files import (
    load_longbench_qa,
    load_longbench_retrieval,
    load_multi_hop,
    load_ruler_vt,
)
from benchmarks.quality.outcomes import Outcome, ResultsFile
from benchmarks.quality.suites import SUITES, NoOtherOrderError, Suite, suite_of
from benchmarks.quality.types import Question
from benchmarks.report import argument_parser, print_json, say
from deploy.models import resolve_model
from kv_tier.keys import model_fingerprint

RESULTS_VERSION = 1
REPORT_EVERY_S = 20.0
FORMATS = {
    "multi-hop": load_multi_hop,  # MuSiQue, HotpotQA and a plain form
    "ruler-vt": load_ruler_vt,
    "longbench-retrieval": load_longbench_retrieval,
    "longbench-qa": load_longbench_qa,
}


class Answers(Protocol):
    """A model that answers under any configuration."""

    @property
    def num_layers(self) -> int: ...

    def outcomes(self, question: Question, curves: Sequence[Curve]) -> Iterator[Outcome]: ...


def main(argv: list[str] | None = None) -> None:
    parser = _parser()
    args = parser.parse_args(argv)
    if bool(args.questions) != bool(args.format):
        parser.error("--questions and --format go together")
    if args.count < 1 or min(args.documents or [1]) < 1:
        parser.error("--count and --documents must be 1 or more")
    if any(not 0.0 <= coverage <= 1.0 for coverage in args.coverages or ()):
        parser.error("--coverages must be within 0 and 1")
    model_dir = resolve_model(args.model)
    try:
        suite = SUITES[args.suite] if args.suite else suite_of(model_dir)
        results = ResultsFile(args.out, _header(args, model_dir)) if args.out else None
        questions = list(_questions(args, suite))
    except (ValueError, OSError) as exc:  # of what the user gave: no trace of calls helps
        parser.error(str(exc))
    with _answers(args, model_dir, suite) as answers:
        try:
            curves = _curves(args, answers.num_layers)
        except ValueError as exc:
            parser.error(str(exc))
        outcomes = measured(answers, questions, curves, results)
    if args.qualify:
        report.print_qualification(outcomes)
    else:
        report.print_report(outcomes)
    if args.plot:
        for path in report.plot(outcomes, args.plot):
            say(f"drew {path}")
    if args.demand:
        task = "+".join(sorted({question.task for question in questions}))
        profile = demand_profile(
            outcomes, curves, model=model_dir.name, task=task, num_layers=answers.num_layers
        )
        profile.save(args.demand)
        say(f"wrote {args.demand}")
    print_json("quality", seed=args.seed, results=report.as_json(outcomes))


def measured(
    answers: Answers,
    questions: Sequence[Question],
    curves: Sequence[Curve],
    results: ResultsFile | None,
) -> list[Outcome]:
    """Every question under every curve; what a results file has already is not asked again."""
    known = {} if results is None else results.outcomes
    found: list[Outcome] = []
    started = said = time.monotonic()
    for done, question in enumerate(questions):
        open_curves = []
        for curve in curves:
            keys = [(question.question_id, curve.name, p.label) for p in curve.points()]
            if all(key in known for key in keys):
                found += [known[key] for key in keys]
            else:
                open_curves.append(curve)
        new = list(answers.outcomes(question, open_curves)) if open_curves else []
        if results is not None:
            results.add(new)
        found += new
        now = time.monotonic()
        if now - said >= REPORT_EVERY_S:
            said = now
            left = (now - started) / (done + 1) * (len(questions) - done - 1)
            say(f"{done + 1} of {len(questions)} questions, about {left / 60:.0f} min left")
    return found


def _questions(args: argparse.Namespace, suite: Suite) -> Iterator[Question]:
    if args.questions:
        yield from FORMATS[args.format](args.questions, limit=args.count)
        return
    for task in args.tasks or suite.tasks:
        for size in args.documents or suite.sizes:
            for question in suite.questions(task, size, args.seed, args.count):
                yield question
                if args.qualify:
                    try:
                        moved = suite.permute(question, args.seed)
                    except NoOtherOrderError:
                        continue
                    yield replace(moved, task=question.task + report.PERMUTED)


def _curves(args: argparse.Namespace, num_layers: int) -> list[Curve]:
    if args.qualify:
        return bounds()
    curves = standard(num_layers)
    if args.coverages:
        curves = [
            replace(curve, coverages=tuple(sorted(args.coverages))) if curve.coverages else curve
            for curve in curves
        ]
    return named(curves, args.curves) if args.curves else curves


def _answers(args: argparse.Namespace, model_dir: Path, suite: Suite) -> Any:
    """A context manager of `Answers`; engines are imported where they are used."""
    if args.engine == "vllm":
        from benchmarks.quality.vllm_answers import vllm_answers

        return vllm_answers(
            model_dir, suite.form, dtype=args.dtype, anchor_text=args.anchor, tp=args.tp
        )
    from benchmarks.quality.walked_answers import walked_answers

    return walked_answers(
        model_dir,
        suite.form,
        dtype=args.dtype,
        device=args.device,
        anchor_text=args.anchor,
        seed=args.seed,
    )


def _header(args: argparse.Namespace, model_dir: Path) -> str:
    """What results must share to be counted together."""
    return json.dumps(
        {
            "version": RESULTS_VERSION,
            "model": model_dir.name,
            "fingerprint": model_fingerprint(model_dir),
            "engine": args.engine,
            "dtype": args.dtype,
            "anchor": args.anchor,
            "seed": args.seed,
            "questions": args.questions.name if args.questions else None,
        }
    )


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser("quality", __doc__)
    parser.add_argument("--model", required=True, help="a folder, an alias or a hub id")
    parser.add_argument("--suite", choices=list(SUITES), help="default: the model's own")
    parser.add_argument("--tasks", nargs="+", help="some of the suite's tasks or mixtures")
    parser.add_argument("--documents", nargs="+", type=int, help="numbers of documents")
    parser.add_argument("--count", type=int, default=64, help="questions of each task and size")
    parser.add_argument("--curves", nargs="+", help="names, or how they start; default: all")
    parser.add_argument("--coverages", nargs="+", type=float, help="instead of the usual ones")
    parser.add_argument("--qualify", action="store_true", help="full prefill and full reuse only")
    parser.add_argument("--questions", type=Path, help="a file of your own instead of a suite")
    parser.add_argument("--format", choices=sorted(FORMATS), help="of --questions")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu", help="of the transformers engine")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallelism of the vllm engine")
    parser.add_argument("--anchor", help="text that chunks are prefilled behind; default: BOS")
    parser.add_argument("--out", type=Path, help="results as JSON lines; taken up if it exists")
    parser.add_argument("--plot", type=Path, help="a folder for pictures")
    parser.add_argument("--demand", type=Path, help="write the demand profile for the planner")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
