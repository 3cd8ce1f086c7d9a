"""The tasks that go with a model, and how the model is asked."""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.quality.mix import MIXTURES, mixed
from benchmarks.quality.prompts import Endpoint, PromptForm
from benchmarks.quality.synthetic_tasks import (
    PrTask,
    VtTask,
    keeping_order,
    permute_documents,
    pr_question,
    vt_question,
)
from benchmarks.quality.types import Question, Split
from benchmarks.training.english_tasks import english_context
from cluster.config import PromptConfig

SUITE_FILE = "quality.json"  # in a model's folder: {"suite": name}; without it, English

SYNTHETIC_MODEL = Path(__file__).parents[1] / "models" / "synthetic"

MakeQuestion = Callable[[int, int, int], Question]  # (num_documents, seed, index)


class NoOtherOrderError(ValueError):
    """The documents of a question make sense in their order only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Tasks by name, made at any number of documents."""

    name: str
    form: PromptForm
    tasks: dict[str, MakeQuestion]
    sizes: tuple[int, ...]  # usual numbers of documents
    permute: Callable[[Question, int], Question]  # raises NoOtherOrderError

    def questions(self, task: str, num_documents: int, seed: int, count: int) -> Iterator[Question]:
        """The first `count` of a task or a mixture; each depends on seed and index alone.

        Raises ValueError for a task that the suite does not have.
        """
        if task in self.tasks:
            return (self.tasks[task](num_documents, seed, index) for index in range(count))
        if task not in MIXTURES:
            names = ", ".join([*self.tasks, *MIXTURES])
            raise ValueError(f"the {self.name} suite has no task {task!r}; it has {names}")
        mix = MIXTURES[task].over(self.tasks)
        sources = {name: self.questions(name, num_documents, seed, count) for name in mix.weights}
        return (
            replace(question, question_id=f"{task}/{question.question_id}", task=task)
            for question in mixed(sources, mix, seed, count)
        )


def suite_of(model_dir: Path) -> Suite:
    """The suite that a model was made for.

    Raises ValueError for a folder that names one that is not there.
    """
    path = model_dir / SUITE_FILE
    if not path.is_file():
        return ENGLISH
    name = json.loads(path.read_text()).get("suite")
    if name not in SUITES:
        raise ValueError(f"{path}: suite must be one of {', '.join(SUITES)}, got {name!r}")
    return SUITES[name]


# --- synthetic -----------------------------------------------------------------------------------

NUM_CHAINS = 6
HOPS = (1, 2, 3, 4)  # by turns
NUM_PASSAGE_NAMES = 4


def synthetic_chunk_tokens(num_documents: int) -> tuple[int, int]:
    """Shortest and longest chunk, as the training had them at this number of chunks."""
    for at_most, tokens in ((4, (20, 28)), (8, (20, 34)), (16, (24, 48))):
        if num_documents <= at_most:
            return tokens
    return 30, 62


def synthetic_vt(num_documents: int, seed: int, index: int) -> Question:
    task = VtTask(
        num_chunks=num_documents,
        chunk_tokens=synthetic_chunk_tokens(num_documents),
        num_chains=min(NUM_CHAINS, 4 * num_documents // 5),  # room for the longest chains
        hops=HOPS[index % len(HOPS)],
        other_hops=(2, 4),
    )
    return vt_question(task, seed, index)


def synthetic_pr(num_documents: int, seed: int, index: int) -> Question:
    task = PrTask(
        num_chunks=num_documents,
        chunk_tokens=synthetic_chunk_tokens(num_documents),
        num_names=NUM_PASSAGE_NAMES,
    )
    return pr_question(task, seed, index)


SYNTHETIC = Suite(
    name="synthetic",
    form=PromptForm(
        endpoint=Endpoint.COMPLETIONS,
        config=PromptConfig(intro="", untitled_template="{text} "),
    ),
    tasks={"vt": synthetic_vt, "pr": synthetic_pr},
    sizes=(4, 8, 16, 32),
    permute=permute_documents,
)

# --- English -------------------------------------------------------------------------------------

NUM_FILLERS = (1, 2)
MAX_TRIES = 1000  # of a context; one in a few has the wanted question where there can be any


def _english(*contexts: str, name: str, hops: tuple[int, ...] = ()) -> MakeQuestion:
    """Questions of the contexts by turns, of so many hops if that is said."""

    def make(num_documents: int, seed: int, index: int) -> Question:
        rng = random.Random(f"{name} {num_documents} {seed} {index}")
        kind = contexts[index % len(contexts)]
        for _ in range(MAX_TRIES):  # a context may have no question of so many hops
            context = english_context(
                kind,
                rng,
                Split.TEST,
                num_documents=num_documents,
                num_fillers=rng.choice(NUM_FILLERS),
            )
            own = [
                question
                for question in context.questions
                if question.task == kind and (not hops or question.facts["hops"] in hops)
            ]
            if own:
                question = rng.choice(own)
                return replace(question, question_id=f"{name}-d{num_documents}/{index}", task=name)
        raise ValueError(f"{name} has no question over {num_documents} documents")

    return make


def permute_english(question: Question, seed: int) -> Question:
    """The documents in another order that gives the same answer; chains of variables keep theirs.

    Raises NoOtherOrderError where a document speaks of the one before it.
    """
    if question.task == "ref":
        raise NoOtherOrderError("documents that refer to the one before them have one order only")
    rng = random.Random(f"permuted {seed} {question.question_id}")
    order = list(range(len(question.documents)))
    rng.shuffle(order)
    if question.task.startswith("vt"):
        order = keeping_order(order, set(_variable_documents(question)))
    return replace(
        question,
        question_id=f"{question.question_id}/permuted",
        documents=tuple(question.documents[index] for index in order),
    )


def _variable_documents(question: Question) -> Iterator[int]:
    """The documents that lead from the asked variable back to its number."""
    sources = {}
    for index, document in enumerate(question.documents):
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", document.text):
            sources[name] = source, index
    asked = [word for word in re.findall(r"\w+", question.question) if word in sources]
    name = asked[0] if asked else ""
    while name in sources:
        name, index = sources[name]
        yield index


ENGLISH = Suite(
    name="english",
    form=PromptForm(),
    tasks={
        "single": _english("single", name="single"),
        "mhqa": _english("two_hop", "three_hop", name="mhqa"),
        "mhqa2": _english("two_hop", name="mhqa2"),
        "pr": _english("pr", name="pr"),
        "vt": _english("vt", name="vt", hops=(1, 2, 3, 4)),
        "vt1": _english("vt", name="vt1", hops=(1,)),
        "ref": _english("ref", name="ref"),
    },
    sizes=(8,),
    permute=permute_english,
)

SUITES = {suite.name: suite for suite in (SYNTHETIC, ENGLISH)}
