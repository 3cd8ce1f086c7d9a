"""English tasks, read back by an interpreter of their sentences that shares no code with them."""

import random
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.quality.types import Question, RetrievedDocument, Scorer, Split
from benchmarks.training import english_text
from benchmarks.training.english_batches import MAX_TURNS, PromptIds, lay_out, training_context
from benchmarks.training.english_tasks import (
    MAX_VT_HOPS,
    MIN_VT_CHAINS,
    TASKS,
    EnglishContext,
    english_context,
)
from benchmarks.training.english_text import PASSAGE_QUESTIONS, REFERENCES, RELATIONS, Parts
from cluster.api_types import Document, Message
from cluster.config import PromptConfig
from cluster.prompt import PromptBuilder
from cluster.tokenizer import HfTokenizer
from tests.fakes.byte_tokenizer import write_model_dir

SEEDS = range(25)


def contexts(task: str, split: Split, num_fillers: int = 0) -> Iterator[EnglishContext]:
    for seed in SEEDS:
        rng = random.Random(seed)
        yield english_context(
            task, rng, split, num_documents=rng.randint(4, 16), num_fillers=num_fillers
        )


def found(template: str, text: str) -> dict[str, str] | None:
    """The names that a template would have been filled with to give the text."""
    match = pattern_of(template).fullmatch(text)
    return match and match.groupdict()


@cache
def pattern_of(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(\w)\\}", r"(?P<\1>.+)", re.escape(template)))


def all_of(parts: Parts) -> tuple[str, ...]:
    return parts.train + parts.test


@cache
def facts_of(document: RetrievedDocument) -> set[tuple[str, str, str]]:
    """What a document says, as (relation, subject, object)."""
    return {
        (name, values["s"], values["o"])
        for name, relation in RELATIONS.items()
        for template in all_of(relation.statements)
        if (values := found(template, document.text))
    }


def named(phrase: str, facts: set[tuple[str, str, str]]) -> set[str]:
    """Whom a name, or a phrase such as "the leader of Project Heron", can mean."""
    meant = {phrase}
    for name, relation in RELATIONS.items():
        for template in all_of(relation.phrases):
            if values := found(template, phrase):
                subjects = named(values["s"], facts)
                meant |= {o for fact, s, o in facts if fact == name and s in subjects}
    return meant


def answers_to(question: Question) -> set[str]:
    facts = set().union(*map(facts_of, question.documents))
    return {
        o
        for name, relation in RELATIONS.items()
        for template in all_of(relation.questions)
        if (values := found(template, question.question))
        for fact, s, o in facts
        if fact == name and s in named(values["s"], facts)
    }


def passages_about(question: Question) -> set[str]:
    abouts = {
        values["d"]
        for template in all_of(PASSAGE_QUESTIONS)
        if (values := found(template, question.question))
    }
    titles = set()
    for document in question.documents:
        for name, subject, other in facts_of(document):
            descriptions = all_of(RELATIONS[name].descriptions)
            described = {template.format(o=other) for template in descriptions}
            if abouts & (described | {subject}):
                titles.add(document.title)
    return titles


def reference_answers(question: Question) -> set[str]:
    answers = set()
    for before, document in pairwise(question.documents):
        subjects = {subject for _, subject, _ in facts_of(before)}
        for reference in REFERENCES:
            for statement in all_of(reference.statements):
                said = found(statement.replace("{thing}", reference.subject), document.text)
                for template in all_of(reference.questions):
                    asked = found(template, question.question)
                    if said and asked and asked["s"] in subjects:
                        answers.add(said["o"])
    return answers


def values_of(documents: tuple[RetrievedDocument, ...]) -> dict[str, str]:
    """Runs the assignments in order; a KeyError is one that stands before what it needs."""
    values: dict[str, str] = {}
    for document in documents:
        name, source = re.search(r"VAR (\w+) = (.+?)\.", document.text).groups()
        assert name not in values
        values[name] = values[source[4:]] if source.startswith("VAR ") else source
    return values


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    folder: Path = tmp_path_factory.mktemp("model")
    return HfTokenizer.load(write_model_dir(folder))


@pytest.fixture(scope="module")
def prompts(tokenizer: HfTokenizer) -> PromptIds:
    return PromptIds(tokenizer, PromptBuilder(tokenizer, PromptConfig()))


class TestWords:
    def test_no_part_shares_a_text_with_the_other(self) -> None:
        lists = [value for value in vars(english_text).values() if isinstance(value, Parts)]
        for relation in (*RELATIONS.values(), *REFERENCES):
            lists += [
                value
                for name in relation.__slots__
                if isinstance(value := getattr(relation, name), Parts)
            ]
        assert len(lists) > 40
        for parts in lists:
            assert not set(parts.train) & set(parts.test)
            assert len(set(all_of(parts))) == len(all_of(parts))

    @pytest.mark.parametrize("task", TASKS)
    def test_questions_and_fillers_of_the_splits_differ(self, task: str) -> None:
        train, test = (
            {q.question for context in contexts(task, split) for q in context.questions}
            for split in Split
        )
        assert not train & test
        for context in contexts(task, Split.TRAIN, num_fillers=1):
            for document in context.documents:
                assert not any(filler in document.text for filler in english_text.FILLERS.test)


@pytest.mark.parametrize("split", Split)
class TestAnswers:
    @pytest.mark.parametrize("task", ["single", "two_hop", "three_hop"])
    def test_facts_give_the_answer_alone(self, task: str, split: Split) -> None:
        for context in contexts(task, split):
            for question in context.questions:
                assert answers_to(question) == set(question.answers), question

    def test_one_passage_fits(self, split: Split) -> None:
        for context in contexts("pr", split):
            assert [d.title for d in context.documents] == [
                f"Passage {n}" for n in range(1, len(context.documents) + 1)
            ]
            for question in context.questions:
                assert passages_about(question) == set(question.answers), question
                assert question.scorer is Scorer.PASSAGE_NUMBER

    def test_one_document_refers_to_what_is_asked(self, split: Split) -> None:
        for context in contexts("ref", split):
            for question in context.questions:
                if question.task == "ref":
                    assert reference_answers(question) == set(question.answers), question
                else:
                    assert answers_to(question) == set(question.answers), question

    def test_assignments_give_the_number(self, split: Split) -> None:
        for context in contexts("vt", split, num_fillers=1):
            values = values_of(context.documents)
            numbers = set(values.values())
            assert len({number[0] for number in numbers}) == len(numbers) >= MIN_VT_CHAINS
            assert split is Split.TRAIN or len(context.questions) == len(values)
            for question in context.questions:
                [name] = re.findall(r"VAR (\w+)", question.question)
                assert question.answers == (values[name],)
                assert 0 <= question.facts["hops"] <= MAX_VT_HOPS

    def test_a_question_is_asked_once(self, split: Split) -> None:
        for task in TASKS:
            for context in contexts(task, split):
                ids = [question.question_id for question in context.questions]
                assert context.questions and len(set(ids)) == len(ids)


class TestShapes:
    @pytest.mark.parametrize("task", TASKS)
    def test_same_seed_same_context(self, task: str) -> None:
        def make(seed: int) -> EnglishContext:
            rng = random.Random(seed)
            return english_context(task, rng, Split.TEST, num_documents=8, num_fillers=1)

        assert make(1) == make(1) != make(2)
        context = make(1)
        assert len(context.documents) == 8
        assert all(question.documents == context.documents for question in context.questions)

    @pytest.mark.parametrize(
        ("task", "num_documents", "num_fillers", "told"),
        [("poem", 8, 1, "no task"), ("vt", 3, 1, "num_documents"), ("vt", 8, 4, "num_fillers")],
    )
    def test_wrong_arguments_are_refused(
        self, task: str, num_documents: int, num_fillers: int, told: str
    ) -> None:
        with pytest.raises(ValueError, match=told):
            english_context(
                task,
                random.Random(0),
                Split.TEST,
                num_documents=num_documents,
                num_fillers=num_fillers,
            )

    def test_long_chains_are_common(self) -> None:
        hops = [
            question.facts["hops"]
            for context in contexts("vt", Split.TEST)
            for question in context.questions
        ]
        assert set(hops) == set(range(MAX_VT_HOPS + 1))


class TestSequences:
    @pytest.mark.parametrize("task", TASKS)
    def test_every_turn_is_the_servers_prompt(
        self, task: str, tokenizer: HfTokenizer, prompts: PromptIds
    ) -> None:
        context = training_context(random.Random(0), task, 8)
        turns = lay_out(prompts, context, max_tokens=1 << 20)
        assert turns.questions == context.questions[:MAX_TURNS]
        builder = PromptBuilder(tokenizer, PromptConfig())
        start = 0
        for question, length in zip(turns.questions, turns.answer_lengths, strict=True):
            served = builder.chat(
                [Message(role="user", content=question.question)],
                [Document(title=d.title, text=d.text) for d in context.documents],
            )
            ids = [*served.prefix_ids, *(t for c in served.chunks for t in c), *served.suffix_ids]
            answer = f" {question.answers[0]}<|im_end|>"
            [expected] = tokenizer.encode([answer], add_special_tokens=False)
            asked_at = turns.asked_at[start : start + length]
            assert turns.answers[start : start + length].tolist() == expected
            # the tokens that the last answer token sees, itself included, are that prompt
            seen = turns.visible[asked_at[-1]]
            assert turns.ids[seen].tolist() == ids + expected[:-1]
            assert turns.positions[seen].tolist() == list(range(len(ids) + length - 1))
            first = turns.visible[asked_at[0]]
            assert turns.ids[first].tolist() == ids
            start += length

    def test_isolated_documents_see_the_prefix_and_themselves(self, prompts: PromptIds) -> None:
        context = training_context(random.Random(0), "single", 8)
        whole = lay_out(prompts, context, max_tokens=1 << 20)
        cut = lay_out(prompts, context, max_tokens=1 << 20, isolated=True)
        prefix, chunks = prompts.context(context.documents)
        ends = torch.tensor([len(prefix), *map(len, chunks)]).cumsum(0).tolist()
        for start, end in pairwise(ends):
            for token in range(start, end):
                seen = cut.visible[token].nonzero()[:, 0].tolist()
                assert seen == [*range(len(prefix)), *range(start, token + 1)]
        assert torch.equal(cut.visible[ends[-1] :], whole.visible[ends[-1] :])

    def test_turns_that_do_not_fit_are_left_out(self, prompts: PromptIds) -> None:
        context = training_context(random.Random(0), "single", 8)
        assert len(lay_out(prompts, context, max_tokens=1).questions) == 1

    def test_steps_are_helpers_from_the_question_on(self, prompts: PromptIds) -> None:
        suffix = prompts.question("Who runs Project Heron?")
        [end] = prompts.encode("<|im_end|>")
        last = suffix.index(end) - 1
        assert prompts.question_helpers(suffix, ()) == {}
        one, two = (prompts.encode(f" {name}")[0] for name in ("Anna", "Oslo"))
        found = prompts.question_helpers(suffix, ("Anna", "Oslo"))
        assert found == {last: one, last + 1: two, last + 2: two}

    def test_numbers_are_helpers_where_a_variable_is_referred_to(self, prompts: PromptIds) -> None:
        [chunk] = map(tuple, [prompts.encode("It rained. VAR AB = VAR XQ. It snowed.")])
        found = prompts.statement_helpers(chunk, "VAR XQ", "57806")
        at = len(prompts.encode("It rained. VAR AB = VAR XQ")) - 1
        assert found == {at: prompts.encode("5")[0]}

    def test_context_tells_what_helps(self) -> None:
        for context in contexts("vt", Split.TRAIN):
            values = values_of(context.documents)
            for index, (source, number) in context.numbers.items():
                assert source in context.documents[index].text
                assert values[source.removeprefix("VAR ")] == number
        for context in contexts("three_hop", Split.TEST):
            for question, steps in zip(context.questions, context.steps, strict=True):
                assert len(steps) == 3 and steps[-1] == question.answers[0]
                facts = set().union(*map(facts_of, context.documents))
                for first, second in pairwise(steps):
                    assert any((s, o) == (first, second) for _, s, o in facts)
