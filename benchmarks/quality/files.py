"""Questions from users' own files: multi-hop questions, RULER's variable tracking, LongBench.

Every file holds one JSON object a line, or one JSON list of them. A loader raises
QuestionFileError, which names file, line and field. Tasks are named as in `mix`. Facts:
num_documents, context_words (of all documents, without titles), and what a form knows besides.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.quality.types import Question, RetrievedDocument, Scorer

# tokens of an answer: what the benchmarks themselves allow
VT_ANSWER_TOKENS = 30
OTHER_ANSWER_TOKENS = 32

QA_QUESTION = "Answer with a few words. Question: {}"
RETRIEVAL_QUESTION = (
    "One of the numbered paragraphs is summarised here:\n\n{}\n\n"
    "Which one? Answer with the word Paragraph and its number only."
)

_NUMBER = re.compile(r"\d+")
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_SENTENCE = re.compile(r".+?(?:[.!?]+\s+|\Z)", re.DOTALL)
_RULER_QUESTION = "Question:"


class QuestionFileError(ValueError):
    """A file of questions that can not be read: `file, line 3, field 'answers': problem`."""


def load_multi_hop(path: str | Path, limit: int | None = None) -> list[Question]:
    """Multi-hop questions, each row in one of three forms, told apart by its fields.

    - MuSiQue: question, answer, answer_aliases, paragraphs [{title, paragraph_text,
      is_supporting}]; rows marked `answerable: false` are left out
    - HotpotQA, 2WikiMultihopQA: question, answer, context [[title, [sentence]]] or
      {title: [], sentences: [[]]}
    - plain: question, answers, documents [{title, text}], title optional

    Documents without a word are left out. Facts: num_supporting where MuSiQue's form has it.

    limit: questions to load at most, from the front
    raises: QuestionFileError
    """
    return _load(Path(path), limit, _multi_hop_question)


def load_ruler_vt(
    path: str | Path, limit: int | None = None, chunk_words: int = 200
) -> list[Question]:
    """RULER's variable tracking: rows of input, outputs and, in newer files, answer_prefix.

    The input is one text: instructions and a worked example, a blank line, the haystack, and the
    question from the last "Question:" on. All up to the last blank line is the first document
    (fact num_head_documents is 1, else 0); the haystack is cut between lines, or within a line
    that is too long between sentences. A statement is never cut.

    chunk_words: words of a document of haystack at most, if no line and sentence alone has more
    raises: QuestionFileError
    """
    if chunk_words < 1:
        raise ValueError(f"chunk_words must be 1 or more, got {chunk_words}")
    return _load(Path(path), limit, lambda row: _ruler_question(row, chunk_words))


def load_longbench_retrieval(path: str | Path, limit: int | None = None) -> list[Question]:
    """LongBench's passage_retrieval_en: rows of input, context and answers ("Paragraph 7").

    Each document is a paragraph of the context with its "Paragraph N:", which the answer names.
    raises: QuestionFileError
    """
    return _load(Path(path), limit, _retrieval_question)


def load_longbench_qa(path: str | Path, limit: int | None = None) -> list[Question]:
    """LongBench's hotpotqa, 2wikimqa and musique: rows of input, context and answers.

    Each document is a "Passage N:" block of the context without that line; its first line is the
    title, if others follow.
    raises: QuestionFileError
    """
    return _load(Path(path), limit, _longbench_qa_question)


@dataclass(frozen=True, slots=True)
class _Row:
    """One object of a file, whose readers check what they return."""

    path: Path
    place: str  # such as "line 3"
    fields: Mapping[str, Any]
    prefix: str = ""  # of field names, such as `paragraphs[2].`

    def error(self, field: str, problem: str) -> QuestionFileError:
        return _error(self.path, self.place, problem, f"{self.prefix}{field}")

    def text(self, field: str) -> str:
        value = self._value(field, str)
        if not value.strip():
            raise self.error(field, "is empty")
        return value

    def any_text(self, field: str) -> str:
        """The text, which may be missing, null or empty."""
        return "" if self.fields.get(field) is None else self._value(field, str)

    def items(self, field: str) -> list[Any]:
        value = self._value(field, list)
        if not value:
            raise self.error(field, "is empty")
        return value

    def texts(self, field: str) -> list[str]:
        """A list of texts; none of them, and not the list, is empty."""
        values = self.items(field)
        for i, value in enumerate(values):
            if not isinstance(value, str) or not value.strip():
                raise self.error(f"{field}[{i}]", f"must be a text with words, is {value!r}")
        return values

    def rows(self, field: str) -> list["_Row"]:
        rows = []
        for i, value in enumerate(self.items(field)):
            if not isinstance(value, Mapping):
                raise self.error(f"{field}[{i}]", f"must be an object, is {_kind(value)}")
            rows.append(_Row(self.path, self.place, value, f"{self.prefix}{field}[{i}]."))
        return rows

    def _value(self, field: str, kind: type) -> Any:
        if field not in self.fields:
            raise self.error(field, "is missing")
        value = self.fields[field]
        if not isinstance(value, kind):
            raise self.error(field, f"must be {_KINDS[kind]}, is {_kind(value)}")
        return value


def _multi_hop_question(row: _Row) -> Question | None:
    facts: dict[str, int] = {}
    if "paragraphs" in row.fields:
        if row.fields.get("answerable") is False:
            return None
        field, paragraphs = "paragraphs", row.rows("paragraphs")
        found = [(p.any_text("title"), p.any_text("paragraph_text")) for p in paragraphs]
        aliases = row.texts("answer_aliases") if row.fields.get("answer_aliases") else []
        answers = list(dict.fromkeys([row.text("answer"), *aliases]))
        if all("is_supporting" in p.fields for p in paragraphs):
            facts["num_supporting"] = sum(bool(p.fields["is_supporting"]) for p in paragraphs)
    elif "context" in row.fields:
        field, found, answers = "context", _hotpot_documents(row), [row.text("answer")]
    elif "documents" in row.fields:
        field, answers = "documents", row.texts("answers")
        found = [(d.any_text("title"), d.any_text("text")) for d in row.rows("documents")]
    else:
        raise row.error("documents", "is missing, and so are 'paragraphs' and 'context'")
    return _question(
        row,
        task="mhqa",
        documents=_documents(row, field, found),
        question=QA_QUESTION.format(row.text("question").strip()),
        answers=answers,
        scorer=Scorer.TOKEN_F1,
        facts=facts,
    )


def _hotpot_documents(row: _Row) -> list[tuple[str, str]]:
    """Title and text of each; sentences are joined by a space."""
    context = row.fields["context"]
    if isinstance(context, Mapping):
        columns = _Row(row.path, row.place, context, f"{row.prefix}context.")
        titles, sentences = columns.items("title"), columns.items("sentences")
        if len(titles) != len(sentences):
            raise row.error("context", f"has {len(titles)} titles, but {len(sentences)} texts")
        pairs = list(zip(titles, sentences, strict=True))
    else:
        pairs = row.items("context")
    found = []
    for i, pair in enumerate(pairs):
        match pair:
            case [str(title), [*parts]] if all(isinstance(part, str) for part in parts):
                found.append((title, " ".join(part.strip() for part in parts)))
            case _:
                raise row.error(f"context[{i}]", "must be a title and a list of sentences")
    return found


def _ruler_question(row: _Row, chunk_words: int) -> Question:
    text = row.text("input")
    asked_at = text.rfind(_RULER_QUESTION)
    if asked_at < 0:
        raise row.error("input", f"has no {_RULER_QUESTION!r}")
    context, suffix = text[:asked_at].rstrip(), text[asked_at:].strip()
    prefix = row.any_text("answer_prefix").strip()
    if not suffix.endswith(prefix):
        suffix = f"{suffix} {prefix}"
    head, _, haystack = context.rpartition("\n\n")
    found = [head.strip()] if head.strip() else []
    num_head_documents = len(found)
    found += _chunks(haystack, chunk_words)
    return _question(
        row,
        task="vt",
        documents=_documents(row, "input", [("", text) for text in found]),
        question=suffix,
        answers=row.texts("outputs"),
        scorer=Scorer.CONTAINS_ALL,
        facts={"num_head_documents": num_head_documents},
    )


def _retrieval_question(row: _Row) -> Question:
    blocks = _blocks(row, "Paragraph", keep_heading=True)
    numbers = {int(_NUMBER.search(block)[0]) for block in blocks}
    answers = row.texts("answers")
    for i, answer in enumerate(answers):
        number = _NUMBER.search(answer)
        if number is None or int(number[0]) not in numbers:
            raise row.error(f"answers[{i}]", f"names no paragraph of the context: {answer!r}")
    return _question(
        row,
        task="pr",
        documents=_documents(row, "context", [("", block) for block in blocks]),
        question=RETRIEVAL_QUESTION.format(row.text("input").strip()),
        answers=answers,
        scorer=Scorer.PASSAGE_NUMBER,
    )


def _longbench_qa_question(row: _Row) -> Question:
    found = []
    for block in _blocks(row, "Passage", keep_heading=False):
        title, _, text = block.partition("\n")
        found.append((title, text) if text.strip() else ("", title))
    return _question(
        row,
        task="mhqa",
        documents=_documents(row, "context", found),
        question=QA_QUESTION.format(row.text("input").strip()),
        answers=row.texts("answers"),
        scorer=Scorer.TOKEN_F1,
    )


def _blocks(row: _Row, word: str, *, keep_heading: bool) -> list[str]:
    """The parts of the context that begin with a heading such as "Passage 3:"; what stands before
    the first is not one of them."""
    context = row.text("context")
    headings = list(re.finditer(rf"^{word} \d+:", context, re.MULTILINE))
    if not headings:
        raise row.error("context", f"has no line that begins with '{word} N:'")
    begins = [h.start() if keep_heading else h.end() for h in headings]
    ends = [h.start() for h in headings[1:]] + [len(context)]
    return [context[a:b].strip() for a, b in zip(begins, ends, strict=True)]


def _chunks(text: str, chunk_words: int) -> list[str]:
    """The text cut between lines or sentences; no part has more words, if none of these has."""
    units: list[str] = []
    for line in _LINE.findall(text):
        units += [line] if len(line.split()) <= chunk_words else _SENTENCE.findall(line)
    chunks: list[str] = []
    num_words = 0
    for unit in units:
        more = len(unit.split())
        if not chunks or num_words + more > chunk_words:
            chunks.append("")
            num_words = 0
        chunks[-1] += unit
        num_words += more
    return [chunk.strip() for chunk in chunks]


def _documents(
    row: _Row, field: str, found: list[tuple[str, str]]
) -> tuple[RetrievedDocument, ...]:
    """Of pairs of title and text; an error where none has a word."""
    documents = tuple(
        RetrievedDocument(text=text.strip(), title=title.strip() or None)
        for title, text in found
        if text.strip()
    )
    if not documents:
        raise row.error(field, "has no document with words")
    return documents


def _question(
    row: _Row,
    *,
    task: str,
    documents: tuple[RetrievedDocument, ...],
    question: str,
    answers: list[str],
    scorer: Scorer,
    facts: Mapping[str, int] | None = None,
) -> Question:
    return Question(
        question_id=f"{row.path.stem}/{row.place.split()[-1]}",
        task=task,
        documents=documents,
        question=question,
        answers=tuple(answers),
        scorer=scorer,
        max_new_tokens=VT_ANSWER_TOKENS if task == "vt" else OTHER_ANSWER_TOKENS,
        facts={
            "num_documents": len(documents),
            "context_words": sum(len(document.text.split()) for document in documents),
            **(facts or {}),
        },
    )


def _load(path: Path, limit: int | None, make: Callable[[_Row], Question | None]) -> list[Question]:
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be 1 or more, got {limit}")
    found: list[Question] = []
    for place, value in _objects(path):
        if not isinstance(value, Mapping):
            raise _error(path, place, f"must be an object, is {_kind(value)}")
        question = make(_Row(path, place, value))
        if question is not None:
            found.append(question)
        if len(found) == limit:
            break
    if not found:
        raise QuestionFileError(f"{path} has no questions")
    return found


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    """Each value with its place, counted from 1: "line 3", or "item 3" in a file that is a list."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as exc:
        raise QuestionFileError(f"{path} is not UTF-8: {exc}") from exc
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except json.JSONDecodeError as exc:
            raise _error(path, f"line {exc.lineno}", f"is not JSON: {exc.msg}") from exc
        yield from ((f"item {number}", value) for number, value in enumerate(values, 1))
        return
    # not splitlines: JSON texts may hold other line ends, such as U+2028
    for number, row in enumerate(text.split("\n"), 1):
        if not row.strip():
            continue
        try:
            value = json.loads(row)
        except json.JSONDecodeError as exc:
            raise _error(path, f"line {number}", f"is not JSON: {exc.msg}") from exc
        yield f"line {number}", value


def _error(path: Path, place: str, problem: str, field: str | None = None) -> QuestionFileError:
    at = f"{path}, {place}" + (f", field {field!r}" if field else "")
    return QuestionFileError(f"{at}: {problem}")


_KINDS = {str: "a text", list: "a list", dict: "an object", bool: "true or false"}


def _kind(value: object) -> str:
    if value is None:
        return "null"
    return _KINDS.get(type(value), "a number")
