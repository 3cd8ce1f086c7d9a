"""How much coverage do requests of a model need? Questions with known answers, asked of itself.

1. *Qualification*: each question under full prefill and under full reuse. Only requests that full
   prefill answers right have a smallest coverage at which the answer is right.
2. *Search*: for each of these and each anchor, the smallest coverage that is enough
   (`benchmarks/quality/coverage_search.py`).

A task that full prefill can not do, or that full reuse does as well, says nothing of what reuse
needs: then no demand is written, rather than one that would look like a measurement.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.profiling.partial import PartialFile
from benchmarks.profiling.progress import Progress
from benchmarks.quality.curves import FULL_PREFILL, FULL_REUSE, Curve, bounds, kv_dev, qci
from benchmarks.quality.demand import demand_profile
from benchmarks.quality.outcomes import Outcome
from benchmarks.quality.scoring import passes
from benchmarks.quality.suites import Suite
from benchmarks.quality.types import Question
from planner.demand_profile import DemandProfile

# most requests need little where the ranking is good, so the small coverages lie close together
COVERAGES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
RIGHT = 1.0  # the score of an answer that is right
MIN_RIGHT = 16  # requests that full prefill answers right; fewer make no distribution
MIN_RIGHT_SHARE = 0.5  # of those asked: below, the model does not do the task
MAX_REUSED_SHARE = 0.9  # of those right, that full reuse answers as well
KV_DEV_DEPTHS = (0.125, 0.4375, 0.625)  # rank depths as shares of the layers
QCI_DEPTHS = (0.25, 0.5, 1.0)
FILTER_LAYERS = 3  # Probe layers of `kv_dev` where at least as many are warmed up before them

# numbers of documents, one bucket of context lengths each; and the tasks to try, in order: what
# is told of passage retrieval in the paper, and what a model needs that is robust there
SIZES = {"synthetic": (8, 16), "english": (6, 12)}
TASKS = {"english": (("pr",), ("ref", "vt1"))}
USUAL_TASKS = (("pr",),)


class Answers(Protocol):
    """A model that answers under any configuration; see `WalkedAnswers`."""

    @property
    def num_layers(self) -> int: ...

    def outcomes(self, question: Question, curves: Sequence[Curve]) -> Iterator[Outcome]: ...

    def searched(
        self, question: Question, curves: Sequence[Curve], *, gate: float
    ) -> Iterator[Outcome]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandOptions:
    """Which requests. tasks: tried in this order until one qualifies, each a task or a mixture of
    several by turns; num_requests: of each size"""

    tasks: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]
    num_requests: int
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Qualification:
    """How a task went under full prefill and full reuse, in requests."""

    task: str
    num_asked: int
    num_right: int
    num_reused: int  # of the right ones, also right under full reuse

    @property
    def refusal(self) -> str | None:
        """Why it says nothing about the demand, if it does not."""
        if self.num_right < max(MIN_RIGHT, MIN_RIGHT_SHARE * self.num_asked):
            return (
                f"full prefill answered {self.num_right} of {self.num_asked} requests of "
                f"{self.task} right"
            )
        if self.num_reused > MAX_REUSED_SHARE * self.num_right:
            return (
                f"full reuse answered {self.num_reused} of the {self.num_right} requests of "
                f"{self.task} that full prefill did, which tells nothing of what reuse loses"
            )
        return None

    @property
    def gate(self) -> str:
        return (
            f"the answer is right; asked of the {self.num_right} of {self.num_asked} requests that "
            f"full prefill answers right (full reuse: {self.num_reused})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """profile: None where no task qualified, for the reasons in `note`"""

    profile: DemandProfile | None
    note: str


def usual_options(suite: Suite, *, num_requests: int) -> DemandOptions:
    return DemandOptions(
        tasks=TASKS.get(suite.name, USUAL_TASKS),
        sizes=SIZES.get(suite.name, suite.sizes),
        num_requests=num_requests,
    )


def anchor_curves(num_layers: int) -> list[Curve]:
    """Three rank depths of each signal, each as the split that one would serve.

    The planner mixes the curves of neighbouring anchors and gives a depth between them at least
    as much WarmUp as they have, so a poor split would stay poor everywhere near it. For `kv_dev`
    WarmUp is what makes the ranking good, up to nearly half of the layers (docs/evaluation.md), and
    three Probe layers that drop candidates are better than one: at 16 layers w=4 p=3 and w=7 p=3.
    The shallowest anchor is as cheap as `kv_dev` gets, near CacheBlend's, and says what that is
    worth. `qci` asks only the question's few tokens, through stored KV: its Probe layers cost
    little, and it is good from half of the layers on without any WarmUp.
    """
    curves = []
    for share in KV_DEV_DEPTHS:
        depth = min(num_layers, max(2, round(share * num_layers)))
        p = FILTER_LAYERS if depth >= 2 * FILTER_LAYERS else 1
        curves.append(kv_dev(depth - p, p, coverages=COVERAGES))
    for share in QCI_DEPTHS:
        curves.append(qci(0, max(1, round(share * num_layers)), coverages=COVERAGES))
    return list({curve.name: curve for curve in curves}.values())  # fewer for small models


def questions_of(suite: Suite, tasks: Sequence[str], options: DemandOptions) -> list[Question]:
    """Tasks by turns in each size. Raises ValueError for a task that the suite does not have."""
    found = []
    for size in options.sizes:
        for index, task in enumerate(tasks):
            count = len(range(index, options.num_requests, len(tasks)))
            found += suite.questions(task, size, options.seed, count)
    return found


def measure_demand(
    answers: Answers,
    suite: Suite,
    options: DemandOptions,
    partial: PartialFile,
    progress: Progress,
    *,
    model: str,
) -> Demand:
    """The first of the tasks that qualifies, measured; answers in `partial` are not asked again."""
    curves = anchor_curves(answers.num_layers)
    refusals = []
    for tasks in options.tasks:
        name = "+".join(tasks)
        questions = questions_of(suite, tasks, options)
        asked = _asked(
            f"demand: full prefill and full reuse on {name}",
            questions,
            lambda question: answers.outcomes(question, bounds()),
            partial,
            progress,
            is_enough=_is_hopeless,
        )
        qualification = qualified(name, asked)
        if qualification.refusal:
            refusals.append(qualification.refusal)
            continue
        right = _right(asked, FULL_PREFILL)
        searched = _asked(
            f"demand: sufficient coverage on {name}",
            [question for question in questions if question.question_id in right],
            lambda question: answers.searched(question, curves, gate=RIGHT),
            partial,
            progress,
        )
        profile = demand_profile(
            [outcome for outcome in asked if outcome.question_id in right] + searched,
            curves,
            model=model,
            task=name,
            num_layers=answers.num_layers,
            gate=qualification.gate,
        )
        return Demand(profile=profile, note="")
    return Demand(profile=None, note="; ".join(refusals))


def qualified(task: str, outcomes: Sequence[Outcome]) -> Qualification:
    right = _right(outcomes, FULL_PREFILL)
    return Qualification(
        task=task,
        num_asked=len({outcome.question_id for outcome in outcomes}),
        num_right=len(right),
        num_reused=len(right & _right(outcomes, FULL_REUSE)),
    )


def _is_hopeless(outcomes: Sequence[Outcome], num_questions: int) -> bool:
    """Too few are right, whatever comes of the questions that are left."""
    num_left = num_questions - len({outcome.question_id for outcome in outcomes})
    needed = max(MIN_RIGHT, MIN_RIGHT_SHARE * num_questions)
    return len(_right(outcomes, FULL_PREFILL)) + num_left < needed


def _right(outcomes: Sequence[Outcome], curve: str) -> set[str]:
    """Questions that were answered right under a curve of one point."""
    return {o.question_id for o in outcomes if o.curve == curve and passes(o.gold, RIGHT)}


def _asked(
    stage: str,
    questions: Sequence[Question],
    ask: Callable[[Question], Iterator[Outcome]],
    partial: PartialFile,
    progress: Progress,
    *,
    is_enough: Callable[[Sequence[Outcome], int], bool] = lambda outcomes, num_questions: False,
) -> list[Outcome]:
    """Answers to all questions, or to so many of the first ones as are enough to know."""
    known = sum((stage, question.question_id) in partial.answers for question in questions)
    progress.start(stage, len(questions), done=known)
    found: list[Outcome] = []
    for question in questions:
        key = (stage, question.question_id)
        if key not in partial.answers:
            partial.add_answers(stage, list(ask(question)))
            progress.advance()
        found += partial.answers[key]
        if is_enough(found, len(questions)):
            break
    progress.end()
    return found
