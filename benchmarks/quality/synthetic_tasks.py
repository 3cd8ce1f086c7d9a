"""Questions for the synthetic model, as text with the layout that its training batches have.

A document is one chunk of a batch in words, a question is what follows the chunks. What is asked
is held out: no training batch has the answer as a target for the same name. `solve` answers by
reading alone; it shares nothing with what makes the questions.
"""

import random
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace

from benchmarks.quality.types import Question, RetrievedDocument, Scorer
from benchmarks.training.synthetic_batches import NUM_ASKED_NAMES, STATEMENT_TOKENS
from benchmarks.training.synthetic_words import (
    FIRST_FILLER,
    FIRST_NAME,
    FIRST_NUMBER,
    NUM_FILLERS,
    NUM_NAMES,
    NUM_NUMBERS,
    is_held_out,
    vocabulary,
)

_WORDS = vocabulary()
NAMES = tuple(_WORDS[FIRST_NAME : FIRST_NAME + NUM_NAMES])
NUMBERS = tuple(_WORDS[FIRST_NUMBER : FIRST_NUMBER + NUM_NUMBERS])
FILLERS = tuple(_WORDS[FIRST_FILLER : FIRST_FILLER + NUM_FILLERS])

PASSAGE_FRAME_TOKENS = 3  # `passage`, `next` and a number
MAX_TRIES = 10_000  # for names that are about one passage alone
MAX_ORDER_TRIES = 100  # with two orders allowed, one in 2¹⁰⁰ cases sees the old one only


@dataclass(frozen=True, slots=True, kw_only=True)
class VtTask:
    """How hard variable tracking is; ranges are closed."""

    num_chunks: int
    chunk_tokens: tuple[int, int]  # shortest and longest chunk
    num_chains: int
    hops: int  # statements between the asked variable and the value of its chain
    other_hops: tuple[int, int]  # the same for the other chains
    scrambled: float = 0.3  # chance of each other chain to stand out of order

    def __post_init__(self) -> None:
        _check_range("chunk_tokens", self.chunk_tokens, STATEMENT_TOKENS)
        _check_range("other_hops", self.other_hops, 0)
        if self.num_chunks < 1 or self.hops < 0 or not 1 <= self.num_chains <= NUM_NUMBERS:
            raise ValueError(
                f"need num_chunks >= 1, hops >= 0, 1 <= num_chains <= {NUM_NUMBERS}, got {self}"
            )
        if not 0.0 <= self.scrambled <= 1.0:
            raise ValueError(f"scrambled must be within 0 and 1, got {self.scrambled}")
        most = self.hops + 1 + (self.num_chains - 1) * (self.other_hops[1] + 1)
        largest_offset = STATEMENT_TOKENS - 1
        room = self.num_chunks * ((self.chunk_tokens[0] - largest_offset) // STATEMENT_TOKENS)
        if most > min(room, NUM_NAMES):
            raise ValueError(
                f"up to {most} statements, but there are {NUM_NAMES} names, and chunks of "
                f"{self.chunk_tokens[0]} tokens may have room for {room} statements only"
            )

    @property
    def name(self) -> str:
        return f"vt-c{self.num_chunks}-h{self.hops}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrTask:
    """How hard passage retrieval is; the range is closed."""

    num_chunks: int
    chunk_tokens: tuple[int, int]  # shortest and longest passage
    num_names: int  # in each passage

    def __post_init__(self) -> None:
        if not 2 <= self.num_chunks < NUM_NUMBERS:
            raise ValueError(f"need 2 <= num_chunks < {NUM_NUMBERS}, got {self.num_chunks}")
        if not 2 <= self.num_names <= NUM_NAMES:
            raise ValueError(f"need 2 <= num_names <= {NUM_NAMES}, got {self.num_names}")
        least = PASSAGE_FRAME_TOKENS + STATEMENT_TOKENS * self.num_names
        _check_range("chunk_tokens", self.chunk_tokens, least)

    @property
    def name(self) -> str:
        return f"pr-c{self.num_chunks}-n{self.num_names}"


def questions(task: VtTask | PrTask, seed: int, count: int) -> Iterator[Question]:
    """The first `count` questions of a task; each depends on task, seed and its index alone."""
    for index in range(count):
        if isinstance(task, VtTask):
            yield vt_question(task, seed, index)
        else:
            yield pr_question(task, seed, index)


def vt_question(task: VtTask, seed: int, index: int) -> Question:
    """A question about the last variable of one chain, whose statements stand in order.

    Variable and value are a held-out pair. Facts: hops, num_documents, context_tokens (words of
    all documents), num_chain_documents (that hold statements of the asked chain).
    """
    rng = random.Random(f"{seed} {index} {task!r}")
    chunks = [_fillers(rng, rng.randint(*task.chunk_tokens)) for _ in range(task.num_chunks)]
    slots = []
    for chunk_idx, chunk in enumerate(chunks):
        offset = rng.randrange(STATEMENT_TOKENS)
        last = len(chunk) - STATEMENT_TOKENS
        slots += [(chunk_idx, at) for at in range(offset, last + 1, STATEMENT_TOKENS)]

    # the asked chain is the first; a chain is a list of names, from the one with the number on
    asked = 0
    hops = [task.hops] + [rng.randint(*task.other_hops) for _ in range(task.num_chains - 1)]
    numbers = rng.sample(range(NUM_NUMBERS), task.num_chains)
    last_name = rng.choice([n for n in range(NUM_NAMES) if is_held_out(n, numbers[asked])])
    num_statements = sum(hops) + len(hops)
    names = rng.sample([n for n in range(NUM_NAMES) if n != last_name], num_statements - 1)
    names.insert(hops[asked], last_name)
    statements = []
    for chain, last_hop in enumerate(hops):
        own, names = names[: last_hop + 1], names[last_hop + 1 :]
        sources = [NUMBERS[numbers[chain]], *(NAMES[name] for name in own[:-1])]
        order = list(range(last_hop + 1))
        if chain != asked and last_hop > 0 and rng.random() < task.scrambled:
            while order == sorted(order):
                rng.shuffle(order)
        statements.append([[NAMES[own[hop]], "=", sources[hop], ";"] for hop in order])

    chain_of = [chain for chain, own in enumerate(statements) for _ in own]
    rng.shuffle(chain_of)
    chain_documents = set()
    places = sorted(rng.sample(slots, num_statements))
    for chain, (chunk_idx, at) in zip(chain_of, places, strict=True):
        chunks[chunk_idx][at : at + STATEMENT_TOKENS] = statements[chain].pop(0)
        if chain == asked:
            chain_documents.add(chunk_idx)
    return Question(
        question_id=f"{task.name}/{index}",
        task="vt",
        documents=_documents(chunks),
        question=f"value {NAMES[last_name]}",
        answers=(NUMBERS[numbers[asked]],),
        scorer=Scorer.EXACT,
        max_new_tokens=1,
        facts={
            "hops": task.hops,
            "num_documents": task.num_chunks,
            "context_tokens": sum(map(len, chunks)),
            "num_chain_documents": len(chain_documents),
        },
    )


def pr_question(task: PrTask, seed: int, index: int) -> Question:
    """Names of one passage, never the first; the answer ends the passage before it.

    At least one asked name and the answer are a held-out pair; no other passage holds all asked
    names; no number ends two passages. Facts: hops (1, from a passage to the one before it),
    num_documents, context_tokens (words of all documents), num_names.
    raises: ValueError where passages share so many names that no question is about one alone
    """
    rng = random.Random(f"{seed} {index} {task!r}")
    chunks = [_fillers(rng, rng.randint(*task.chunk_tokens)) for _ in range(task.num_chunks)]
    numbers = rng.sample(range(NUM_NUMBERS), task.num_chunks)  # that end each passage
    names, passage, asked = _names_to_ask(rng, task, numbers)
    for chunk, own, number in zip(chunks, names, numbers, strict=True):
        room = len(chunk) - PASSAGE_FRAME_TOKENS
        spare = room - STATEMENT_TOKENS * task.num_names
        offset = rng.randrange(min(STATEMENT_TOKENS, spare + 1))
        num_slots = (room - offset) // STATEMENT_TOKENS
        chunk[0] = "passage"
        chunk[-2:] = ["next", NUMBERS[number]]
        for name, slot in zip(own, rng.sample(range(num_slots), task.num_names), strict=True):
            at = 1 + offset + STATEMENT_TOKENS * slot
            chunk[at : at + STATEMENT_TOKENS] = [NAMES[name], "=", "here", ";"]
    return Question(
        question_id=f"{task.name}/{index}",
        task="pr",
        documents=_documents(chunks),
        question=" ".join(["which", *(NAMES[name] for name in asked), "id"]),
        answers=(NUMBERS[numbers[passage - 1]],),
        scorer=Scorer.EXACT,
        max_new_tokens=1,
        facts={
            "hops": 1,
            "num_documents": task.num_chunks,
            "context_tokens": sum(map(len, chunks)),
            "num_names": task.num_names,
        },
    )


def permute_documents(question: Question, seed: int) -> Question:
    """The same question over the same documents in another order, with the answer they now give.

    Variable tracking: the documents of the asked chain keep their order among each other, so the
    answer stays. Passage retrieval: the asked passage is not the first; the answer is the number
    that ends the passage now before it, which need not be a held-out one. Every such order is
    equally likely, the old one only where there is no other.
    """
    rng = random.Random(f"permuted {seed} {question.question_id}")
    kind = question.question.split()[0]
    permuted = _vt_order if kind == "value" else _pr_order
    old = order = list(range(len(question.documents)))
    for _ in range(MAX_ORDER_TRIES):
        order = permuted(rng, question)
        if order != old:
            break
    moved = replace(
        question,
        question_id=f"{question.question_id}/permuted",
        documents=tuple(question.documents[i] for i in order),
    )
    return replace(moved, answers=(solve(moved),))


def solve(question: Question) -> str:
    """The answer that the documents give, read in their order.

    raises: ValueError where they give none, or more than one
    """
    words = question.question.split()
    texts = [document.text.split() for document in question.documents]
    if words[0] == "value" and len(words) == 2:
        return _value(texts, words[1])
    if words[0] == "which" and words[-1] == "id":
        passage = _passage_of(texts, words[1:-1])
        if passage == 0:
            raise ValueError("the first passage has no id")
        return texts[passage - 1][-1]
    raise ValueError(f"not a question of these tasks: {question.question!r}")


def _value(texts: list[list[str]], asked: str) -> str:
    """The value of a variable: a statement about one that has none yet leaves none."""
    values: dict[str, str] = {}
    for text in texts:
        for name, source in _statements(text):
            value = source if source.isdigit() else values.get(source)
            if value is not None:
                values[name] = value
    if asked not in values:
        raise ValueError(f"the documents give {asked} no value")
    return values[asked]


def _passage_of(texts: list[list[str]], asked: list[str]) -> int:
    """The index of the one passage that holds all asked names."""
    names = [{name for name, _ in _statements(text)} for text in texts]
    holders = [i for i, held in enumerate(names) if held >= set(asked)]
    if len(holders) != 1:
        raise ValueError(f"{len(holders)} passages hold {' '.join(asked)}")
    return holders[0]


def _statements(text: list[str]) -> list[tuple[str, str]]:
    """Left and right side of each statement of one document, in order."""
    return [(text[i - 1], text[i + 1]) for i, word in enumerate(text) if word == "="]


def _vt_order(rng: random.Random, question: Question) -> list[int]:
    sources = {}
    for index, document in enumerate(question.documents):
        for name, source in _statements(document.text.split()):
            sources[name] = source, index
    name, chain = question.question.split()[1], set()
    while name in sources:
        name, index = sources[name]
        chain.add(index)
    return keeping_order(_shuffled(rng, range(len(question.documents))), chain)


def keeping_order(order: Iterable[int], kept: Set[int]) -> list[int]:
    """An order of documents in which those of `kept` stand at the same places, but ascending."""
    ascending = iter(sorted(kept))
    return [next(ascending) if index in kept else index for index in order]


def _pr_order(rng: random.Random, question: Question) -> list[int]:
    texts = [document.text.split() for document in question.documents]
    asked = _passage_of(texts, question.question.split()[1:-1])
    order = _shuffled(rng, [i for i in range(len(texts)) if i != asked])
    order.insert(rng.randint(1, len(order)), asked)
    return order


def _names_to_ask(
    rng: random.Random, task: PrTask, numbers: list[int]
) -> tuple[list[list[int]], int, list[int]]:
    """The names of each passage, the asked passage and the asked names, drawn until they fit."""
    for _ in range(MAX_TRIES):
        names = [rng.sample(range(NUM_NAMES), task.num_names) for _ in range(task.num_chunks)]
        passage = rng.randrange(1, task.num_chunks)
        asked = rng.sample(names[passage], min(NUM_ASKED_NAMES, task.num_names))
        answer = numbers[passage - 1]
        num_holders = sum(set(asked) <= set(own) for own in names)
        if num_holders == 1 and any(is_held_out(name, answer) for name in asked):
            asked += asked[: NUM_ASKED_NAMES - len(asked)]  # small passages: the first name again
            return names, passage, asked
    raise ValueError(f"found no question about one passage alone in {MAX_TRIES} tries: {task}")


def _fillers(rng: random.Random, count: int) -> list[str]:
    return rng.choices(FILLERS, k=count)


def _documents(chunks: list[list[str]]) -> tuple[RetrievedDocument, ...]:
    return tuple(RetrievedDocument(text=" ".join(chunk)) for chunk in chunks)


def _shuffled(rng: random.Random, items: Iterable[int]) -> list[int]:
    return rng.sample(list(items), len(items))


def _check_range(field: str, limits: tuple[int, int], least: int) -> None:
    if not least <= limits[0] <= limits[1]:
        raise ValueError(f"need {least} <= shortest <= longest in {field}, got {limits}")
