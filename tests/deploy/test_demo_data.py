"""The sample corpus: what the demo asks must be answerable from what it hands over."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).parents[2] / "deploy" / "demo"


def read_jsonl(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DEMO / name).read_text(encoding="utf-8").splitlines()]


CORPUS = {document["id"]: document for document in read_jsonl("corpus.jsonl")}
QUESTIONS = read_jsonl("questions.jsonl")


def test_corpus_is_well_formed() -> None:
    documents = read_jsonl("corpus.jsonl")
    assert len(documents) >= 18
    for key in ("id", "title", "text"):
        assert len({document[key] for document in documents}) == len(documents), key
    for document in documents:
        assert set(document) == {"id", "title", "text"}
        assert all(value == value.strip() != "" for value in document.values())
        assert 140 <= len(document["text"].split()) <= 290  # words: 180 to 380 tokens


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q["answer"])
def test_question_can_be_answered(question: dict[str, Any]) -> None:
    assert set(question) == {"question", "document_ids", "answer"}
    ids = question["document_ids"]
    assert 6 <= len(ids) <= 10
    assert len(set(ids)) == len(ids)
    assert set(ids) <= set(CORPUS)
    assert len(question["answer"].split()) <= 4
    assert any(question["answer"] in CORPUS[i]["text"] for i in ids)


def test_questions_share_documents_in_other_places() -> None:
    assert len(QUESTIONS) == 8
    uses = Counter(i for question in QUESTIONS for i in question["document_ids"])
    assert sum(uses.values()) >= 2 * len(uses)  # on average, every document is used twice
    places: dict[str, set[int]] = {}
    for question in QUESTIONS:
        for place, i in enumerate(question["document_ids"]):
            places.setdefault(i, set()).add(place)
    moved = [i for i in uses if len(places[i]) > 1]
    assert len(moved) >= len(uses) / 2
    assert len({tuple(sorted(question["document_ids"])) for question in QUESTIONS}) == 8
