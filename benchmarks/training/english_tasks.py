"""Seeded English retrieval tasks: documents with one fact each, and questions with one answer.

| task | what it needs |
|---|---|
| single | one document |
| two_hop, three_hop | facts of two or three documents in any order |
| pr | the title of the passage that is about something |
| vt | "VAR AB = VAR XQ": assignments followed back to a number, in causal order |
| ref | a document about "the project named in the previous document" |

Every name of a context is used by one fact only (two along a chain), so no question has a second
answer. Training contexts of several hops also hold the questions of fewer hops, as steps.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.quality.types import Question, RetrievedDocument, Scorer, Split
from benchmarks.training.english_text import (
    CITIES,
    COMPANY_FIRST_WORDS,
    COMPANY_LAST_WORDS,
    FILLERS,
    FIRST_NAMES,
    INSTRUMENTS,
    LAST_NAMES,
    PASSAGE_QUESTIONS,
    PRODUCTS,
    PROJECTS,
    REFERENCES,
    RELATIONS,
    SYLLABLES,
    VARIABLE_QUESTIONS,
    Parts,
    Relation,
)

TASKS = ("single", "two_hop", "three_hop", "pr", "vt", "ref")
MAX_FILLERS = 3
MAX_NEW_TOKENS = 12
MADE_UP_NAMES = 0.2  # share in training
MAX_VT_HOPS = 4
MIN_VT_CHAINS = 4  # in tests: guessing a number is right once in four times or less
SHORT_VARIABLES = 0.5  # share of training contexts with names of one letter, easier to learn from
READ_OFF = 0.4  # share of the variables with a number of their own that training asks for
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TEST_EVERY = 4  # of the variables' names and numbers, for tests alone


@dataclass(frozen=True, slots=True, kw_only=True)
class EnglishContext:
    """Several questions about the same documents, each complete in itself.

    The other fields help training: a model that is told the answers alone does not find the hops.
    """

    documents: tuple[RetrievedDocument, ...]
    questions: tuple[Question, ...]
    steps: tuple[tuple[str, ...], ...]  # of each question: what one finds, hop by hop
    numbers: Mapping[int, tuple[str, str]]  # document: the variable it refers to, and its number


@dataclass(frozen=True, slots=True)
class _Asked:
    task: str
    text: str
    answer: str
    hops: int
    steps: tuple[str, ...] = ()
    scorer: Scorer = Scorer.EXACT


@dataclass(frozen=True, slots=True)
class _Draft:
    facts: list[str]  # one for each document
    asked: list[_Asked]
    numbers: dict[int, tuple[str, str]] = field(default_factory=dict)


def english_context(
    task: str, rng: random.Random, split: Split, *, num_documents: int, num_fillers: int
) -> EnglishContext:
    """A context of one task; `num_documents` at least 4, `num_fillers` sentences beside each fact.

    Reads nothing but rng: the same seed gives the same context. Question ids are unique in it.
    """
    if task not in TASKS:
        raise ValueError(f"no task {task!r}; there are {', '.join(TASKS)}")
    if num_documents < 4:
        raise ValueError(f"num_documents must be 4 or more, got {num_documents}")
    if not 0 <= num_fillers <= MAX_FILLERS:
        raise ValueError(f"num_fillers must be 0 to {MAX_FILLERS}, got {num_fillers}")
    draft = _MAKERS[task](_Names(rng, split), rng, split, num_documents)
    texts = [_with_fillers(fact, rng, split, num_fillers) for fact in draft.facts]
    documents = _titled(texts, task, rng)
    rng.shuffle(draft.asked)
    questions = tuple(
        Question(
            question_id=f"{task}-{index}",
            task=one.task,
            documents=documents,
            question=one.text,
            answers=(one.answer,),
            scorer=one.scorer,
            max_new_tokens=MAX_NEW_TOKENS,
            facts={"hops": one.hops},
        )
        for index, one in enumerate(draft.asked)
    )
    return EnglishContext(
        documents=documents,
        questions=questions,
        steps=tuple(one.steps for one in draft.asked),
        numbers=draft.numbers,
    )


class _Names:
    """Names of each kind, none of them twice in one context."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self._rng, self._split = rng, split
        self._used: set[str] = set()
        self._made_up = MADE_UP_NAMES if split is Split.TRAIN else 0.0
        self._last_names = rng.random() < 0.7

    def new(self, kind: str) -> str:
        for _ in range(200):
            name = self._draw(kind)
            if name not in self._used:
                self._used.add(name)
                return name
        raise ValueError(f"there are not enough names of the kind {kind}")

    def _draw(self, kind: str) -> str:
        if kind == "project":
            return f"Project {self._word(PROJECTS)}"
        if kind == "city":
            return self._word(CITIES)
        if kind == "person":
            first = self._word(FIRST_NAMES)
            return f"{first} {self._word(LAST_NAMES)}" if self._last_names else first
        if kind == "company":
            last = self._rng.choice(COMPANY_LAST_WORDS.of(self._split))
            return f"{self._word(COMPANY_FIRST_WORDS)} {last}"
        parts = {"instrument": INSTRUMENTS, "product": PRODUCTS}[kind]
        return self._rng.choice(parts.of(self._split))

    def _word(self, parts: Parts) -> str:
        if self._rng.random() < self._made_up:
            count = self._rng.choice([2, 2, 3])
            word = "".join(self._rng.choices(SYLLABLES, k=count)).capitalize()
            word += self._rng.choice(["", "n", "r", "s", "l"])
            if word not in _TEST_WORDS:
                return word
        return self._rng.choice(parts.of(self._split))


_TEST_WORDS = frozenset(
    word
    for parts in (PROJECTS, CITIES, FIRST_NAMES, LAST_NAMES, COMPANY_FIRST_WORDS)
    for word in parts.test
)


def _roomy(names: Sequence[str], num_documents: int, split: Split) -> list[str]:
    """Relations with enough objects for as many documents."""
    limited = {"instrument": INSTRUMENTS, "product": PRODUCTS}
    return [
        name
        for name in names
        if (parts := limited.get(RELATIONS[name].object)) is None
        or len(parts.of(split)) >= num_documents
    ]


def _say(parts: Parts, rng: random.Random, split: Split, **values: str) -> str:
    return rng.choice(parts.of(split)).format(**values)


def _single(names: _Names, rng: random.Random, split: Split, num_documents: int) -> _Draft:
    usable = _roomy(list(RELATIONS), num_documents, split)
    if rng.random() < 0.6:  # one or two relations only: every document is a rival
        usable = rng.sample(usable, rng.choice([1, 2]))
    facts, asked = [], []
    for _ in range(num_documents):
        relation = RELATIONS[rng.choice(usable)]
        subject, answer = names.new(relation.subject), names.new(relation.object)
        facts.append(_say(relation.statements, rng, split, s=subject, o=answer))
        question = _say(relation.questions, rng, split, s=subject)
        asked.append(_Asked("single", question, answer, 1, (answer,)))
    return _Draft(facts, asked)


def _paths(hops: int) -> list[tuple[str, ...]]:
    """Chains of relations in which the object of one is the subject of the next."""
    found: list[tuple[str, ...]] = [(name,) for name in RELATIONS]
    for _ in range(hops - 1):
        found = [
            (*path, name)
            for path in found
            for name, relation in RELATIONS.items()
            if relation.subject == RELATIONS[path[-1]].object
        ]
    return found


def _multi_hop(hops: int) -> Callable[..., _Draft]:
    paths = _paths(hops)
    task_names = {1: "single", 2: "two_hop", 3: "three_hop"}

    def make(names: _Names, rng: random.Random, split: Split, num_documents: int) -> _Draft:
        num_chains = num_documents // hops
        one_path = split is Split.TEST or rng.random() < 0.7  # every chain is a rival
        path = rng.choice(paths)
        facts, asked = [], []
        for _ in range(num_chains):
            if not one_path:
                path = rng.choice(paths)
            subject = phrase = names.new(RELATIONS[path[0]].subject)
            steps: list[str] = []
            for hop, name in enumerate(path, start=1):
                relation = RELATIONS[name]
                answer = names.new(relation.object)
                steps.append(answer)
                facts.append(_say(relation.statements, rng, split, s=subject, o=answer))
                if hop == hops or (split is Split.TRAIN and rng.random() < 0.5):
                    question = _say(relation.questions, rng, split, s=phrase)
                    asked.append(_Asked(task_names[hop], question, answer, hop, tuple(steps)))
                if hop < hops:
                    phrase = _say(relation.phrases, rng, split, s=phrase)
                subject = answer
        while len(facts) < num_documents:
            facts.append(_fact(RELATIONS[rng.choice(path)], names, rng, split))
        rng.shuffle(facts)
        return _Draft(facts, asked)

    return make


def _passages(names: _Names, rng: random.Random, split: Split, num_documents: int) -> _Draft:
    usable = _roomy(list(RELATIONS), num_documents, split)
    if rng.random() < 0.5:
        usable = rng.sample(usable, rng.choice([1, 2]))
    facts, asked = [], []
    for index in range(num_documents):
        relation = RELATIONS[rng.choice(usable)]
        subject, other = names.new(relation.subject), names.new(relation.object)
        facts.append(_say(relation.statements, rng, split, s=subject, o=other))
        about = subject
        if rng.random() < 0.7:
            about = _say(relation.descriptions, rng, split, o=other)
        question = _say(PASSAGE_QUESTIONS, rng, split, d=about)
        asked.append(
            _Asked("pr", question, f"Passage {index + 1}", 1, scorer=Scorer.PASSAGE_NUMBER)
        )
    return _Draft(facts, asked)


def _variables(names: _Names, rng: random.Random, split: Split, num_documents: int) -> _Draft:
    """Chains are interleaved, each in causal order."""
    del names  # variables have their own
    fewest = max(-(-num_documents // (MAX_VT_HOPS + 1)), min(MIN_VT_CHAINS, num_documents))
    most = max(fewest, num_documents // 3)
    num_chains = rng.randint(fewest, most)
    lengths = [1] * num_chains
    for _ in range(num_documents - num_chains):
        open_chains = [i for i, length in enumerate(lengths) if length <= MAX_VT_HOPS]
        # long chains grow first, so that there are always some of several hops
        weights = [lengths[i] ** 1.5 for i in open_chains]
        lengths[rng.choices(open_chains, weights)[0]] += 1
    order = [chain for chain, length in enumerate(lengths) for _ in range(length)]
    rng.shuffle(order)
    short = split is Split.TRAIN and rng.random() < SHORT_VARIABLES
    variables = _distinct(lambda: _variable(rng, split, short), num_documents)
    # tokenizers cut numbers into digits: the first one tells the numbers of a context apart
    first_digits = rng.sample("123456789", num_chains)
    numbers = [_number(rng, split, digit) for digit in first_digits]
    last: dict[int, str] = {}
    hops = [0] * num_chains
    draft = _Draft([], [])
    for chain, variable in zip(order, variables, strict=True):
        source = numbers[chain]
        if chain in last:
            source = f"VAR {last[chain]}"
            draft.numbers[len(draft.facts)] = (source, numbers[chain])
        draft.facts.append(f"VAR {variable} = {source}.")
        if split is Split.TEST or hops[chain] > 0 or not draft.asked or rng.random() < READ_OFF:
            question = _say(VARIABLE_QUESTIONS, rng, split, v=variable)
            draft.asked.append(_Asked("vt", question, numbers[chain], hops[chain]))
        last[chain] = variable
        hops[chain] += 1
    return draft


def _references(names: _Names, rng: random.Random, split: Split, num_documents: int) -> _Draft:
    references = list(REFERENCES)
    if rng.random() < 0.6:
        references = [rng.choice(references)]
    pairs: list[list[str]] = []
    asked = []
    for _ in range(num_documents // 2):
        reference = rng.choice(references)
        about = [r for r in RELATIONS.values() if r.subject == reference.subject]
        relation = rng.choice(about)
        subject = names.new(reference.subject)
        other, answer = names.new(relation.object), names.new(reference.object)
        pairs.append(
            [
                _say(relation.statements, rng, split, s=subject, o=other),
                _say(reference.statements, rng, split, thing=reference.subject, o=answer),
            ]
        )
        asked.append(_Asked("ref", _say(reference.questions, rng, split, s=subject), answer, 2))
        if split is Split.TRAIN and rng.random() < 0.3:
            question = _say(relation.questions, rng, split, s=subject)
            asked.append(_Asked("single", question, other, 1))
    if num_documents % 2:
        relation = RELATIONS[rng.choice(list(RELATIONS))]
        pairs.append([_fact(relation, names, rng, split)])
    rng.shuffle(pairs)
    return _Draft([text for pair in pairs for text in pair], asked)


_MAKERS = {
    "single": _single,
    "two_hop": _multi_hop(2),
    "three_hop": _multi_hop(3),
    "pr": _passages,
    "vt": _variables,
    "ref": _references,
}


def _fact(relation: Relation, names: _Names, rng: random.Random, split: Split) -> str:
    subject, other = names.new(relation.subject), names.new(relation.object)
    return _say(relation.statements, rng, split, s=subject, o=other)


def _variable(rng: random.Random, split: Split, short: bool) -> str:
    if short:
        return rng.choice(LETTERS)
    while True:
        first, second = rng.randrange(26), rng.randrange(26)
        if ((first + second) % TEST_EVERY == 0) == (split is Split.TEST):
            return LETTERS[first] + LETTERS[second]


def _number(rng: random.Random, split: Split, first_digit: str) -> str:
    while True:
        number = f"{first_digit}{rng.randrange(10_000):04}"
        if (int(number) % TEST_EVERY == 0) == (split is Split.TEST):
            return number


def _distinct(make: Callable[[], str], count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[make()] = None
    return list(found)


def _with_fillers(fact: str, rng: random.Random, split: Split, num_fillers: int) -> str:
    fillers = rng.sample(FILLERS.of(split), num_fillers)
    before = rng.randint(0, num_fillers) if rng.random() < 0.5 else 0
    return " ".join([*fillers[:before], fact, *fillers[before:]])


def _titled(texts: Iterable[str], task: str, rng: random.Random) -> tuple[RetrievedDocument, ...]:
    word = "Passage" if task == "pr" else rng.choice([None, "Document"])
    return tuple(
        RetrievedDocument(text=text, title=word and f"{word} {number}")
        for number, text in enumerate(texts, start=1)
    )
