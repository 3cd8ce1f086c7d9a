"""Questions from files: each form, and errors that name the place."""

import json

import pytest

from benchmarks.quality.files import (
    QuestionFileError,
    load_longbench_qa,
    load_longbench_retrieval,
    load_multi_hop,
    load_ruler_vt,
)
from benchmarks.quality.scoring import score
from benchmarks.quality.types import RetrievedDocument, Scorer

MUSIQUE = {
    "id": "2hop__1_2",
    "question": "Where does the painter of the mill live?",
    "answer": "Lund",
    "answer_aliases": ["Lund, Sweden", "Lund"],
    "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "Mill", "paragraph_text": "Ada painted it.", "is_supporting": True},
        {"idx": 1, "title": "Boat", "paragraph_text": "It is red.", "is_supporting": False},
        {"idx": 2, "title": "Ada", "paragraph_text": "She lives in Lund.", "is_supporting": True},
    ],
}
HOTPOT = {
    "_id": "5a",
    "question": "Is the mill older?",
    "answer": "yes",
    "context": [["Mill", ["Built in 1700.", " It turns."]], ["Boat", ["Built in 1800."]]],
    "supporting_facts": [["Mill", 0], ["Boat", 0]],
}
HOTPOT_COLUMNS = {
    **HOTPOT,
    "context": {
        "title": ["Mill", "Boat"],
        "sentences": [["Built in 1700.", " It turns."], ["Built in 1800."]],
    },
}
PLAIN = {
    "question": "Who painted it?",
    "answers": ["Ada", "Ada L."],
    "documents": [{"title": "", "text": "Ada painted it."}, {"text": "A boat.", "title": "Boat"}],
}
HEAD = "Track the variables in this text."
NOISE = "The pond is calm. The road is long. We wait.\n"
HAYSTACK = NOISE * 6 + "VAR AAAAA = 12345\n" + NOISE * 6 + "VAR BBBBB = VAR AAAAA \n" + NOISE * 3
ASKED = "Question: Which variables have the value 12345? Answer: they are:"
RULER = {
    "index": 0,
    "input": f"{HEAD}\n\nVAR X = 1\nQuestion: Which? Answer: X\n\n{HEAD}\n\n{HAYSTACK}{ASKED}",
    "outputs": ["AAAAA", "BBBBB"],
    "length": 200,
}
RETRIEVAL = {
    "input": "A text on mills.",
    "context": "\n\n".join(f"Paragraph {n}: Text {n} speaks.\nParagraph ends." for n in (1, 2, 3)),
    "answers": ["Paragraph 2"],
    "length": 20,
    "dataset": "passage_retrieval_en",
}
LONGBENCH_QA = {
    "input": "Who painted the mill?",
    "context": "Passage 1:\nMill\nAda painted it.\n\nIt turns.\nPassage 2:\nA boat, red.\n",
    "answers": ["Ada"],
    "dataset": "hotpotqa",
}
ROWS = {
    load_multi_hop: MUSIQUE,
    load_ruler_vt: RULER,
    load_longbench_retrieval: RETRIEVAL,
    load_longbench_qa: LONGBENCH_QA,
}
EVERY_LOADER = pytest.mark.parametrize(("load", "row"), ROWS.items())


@pytest.fixture
def write(tmp_path):
    def write_rows(*rows, name="sample.jsonl"):
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write_rows


def documents(*pairs):
    return tuple(RetrievedDocument(title=title, text=text) for title, text in pairs)


def without(row, field):
    return {key: value for key, value in row.items() if key != field}


def test_musique(write):
    [question] = load_multi_hop(write(MUSIQUE))
    assert question.question_id == "sample/1" and question.task == "mhqa"
    assert question.answers == ("Lund", "Lund, Sweden")
    assert question.scorer is Scorer.TOKEN_F1
    assert question.documents == documents(
        ("Mill", "Ada painted it."), ("Boat", "It is red."), ("Ada", "She lives in Lund.")
    )
    assert question.question.startswith("Answer with a few words.")
    assert question.question.endswith(MUSIQUE["question"])
    assert question.facts == {"num_documents": 3, "context_words": 10, "num_supporting": 2}


def test_questions_without_an_answer_are_left_out(write):
    path = write({**MUSIQUE, "answerable": False}, MUSIQUE)
    assert [question.question_id for question in load_multi_hop(path)] == ["sample/2"]


@pytest.mark.parametrize("row", [HOTPOT, HOTPOT_COLUMNS])
def test_hotpot(write, row):
    [question] = load_multi_hop(write(row))
    assert question.answers == ("yes",)
    assert question.documents == documents(
        ("Mill", "Built in 1700. It turns."), ("Boat", "Built in 1800.")
    )


def test_the_plain_form(write):
    [question] = load_multi_hop(write(PLAIN))
    assert question.answers == ("Ada", "Ada L.")
    assert question.documents == documents((None, "Ada painted it."), ("Boat", "A boat."))


def test_forms_may_change_within_a_file_and_lines_may_be_empty(write):
    path = write(MUSIQUE, "", HOTPOT, "  ", PLAIN)
    ids = [question.question_id for question in load_multi_hop(path)]
    assert ids == ["sample/1", "sample/3", "sample/5"]


def test_a_file_may_be_one_list(write):
    path = write(json.dumps([MUSIQUE, HOTPOT], indent=1), name="list.json")
    assert [question.question_id for question in load_multi_hop(path)] == ["list/1", "list/2"]
    path = write(json.dumps([MUSIQUE, without(HOTPOT, "answer")], indent=1))
    with pytest.raises(QuestionFileError, match="item 2, field 'answer': is missing"):
        load_multi_hop(path)


def test_documents_without_a_word_are_left_out(write):
    row = {**PLAIN, "documents": [{"text": " "}, *PLAIN["documents"]]}
    assert len(load_multi_hop(write(row))[0].documents) == 2
    with pytest.raises(QuestionFileError, match="field 'documents': has no document with words"):
        load_multi_hop(write({**PLAIN, "documents": [{"text": " "}]}))


def test_ruler(write):
    [question] = load_ruler_vt(write(RULER), chunk_words=40)
    assert question.task == "vt" and question.scorer is Scorer.CONTAINS_ALL
    assert question.question == ASKED
    assert question.answers == ("AAAAA", "BBBBB")
    head, *chunks = [document.text for document in question.documents]
    assert head.startswith(HEAD) and head.endswith(HEAD) and "Answer: X" in head
    assert len(chunks) == 5
    assert " ".join(" ".join(chunks).split()) == " ".join(HAYSTACK.split())
    assert all(30 < len(chunk.split()) <= 40 for chunk in chunks[:-1])
    assert question.facts["num_head_documents"] == 1
    assert question.facts["num_documents"] == 1 + len(chunks)
    assert score(question.scorer, "AAAAA, CCCCC", question.answers) == 0.5


def test_ruler_without_line_breaks_is_cut_between_sentences(write):
    text = HAYSTACK.replace("\n", " ")
    [question] = load_ruler_vt(write({**RULER, "input": f"{text}\n{ASKED}"}), chunk_words=25)
    chunks = [document.text for document in question.documents]
    assert question.facts["num_head_documents"] == 0
    assert " ".join(" ".join(chunks).split()) == " ".join(text.split())
    assert all(len(chunk.split()) <= 25 for chunk in chunks)
    assert all(chunk.endswith(".") for chunk in chunks)
    assert sum("VAR BBBBB = VAR AAAAA" in chunk for chunk in chunks) == 1


def test_a_sentence_longer_than_a_chunk_stays_whole(write):
    text = "one two three four five six. seven eight."
    [question] = load_ruler_vt(write({**RULER, "input": f"{text}\n{ASKED}"}), chunk_words=3)
    texts = [document.text for document in question.documents]
    assert texts == ["one two three four five six.", "seven eight."]


def test_ruler_s_answer_prefix_ends_the_question_once(write):
    prefix = " Answer: they are:"
    apart = {**RULER, "input": RULER["input"].removesuffix(prefix), "answer_prefix": prefix}
    both = {**RULER, "answer_prefix": prefix}
    assert [q.question for q in load_ruler_vt(write(apart, both))] == [ASKED, ASKED]


def test_longbench_retrieval(write):
    [question] = load_longbench_retrieval(write(RETRIEVAL))
    assert question.task == "pr" and question.scorer is Scorer.PASSAGE_NUMBER
    assert question.documents == documents(
        *((None, f"Paragraph {n}: Text {n} speaks.\nParagraph ends.") for n in (1, 2, 3))
    )
    assert "A text on mills." in question.question
    assert score(question.scorer, "Paragraph 2", question.answers) == 1.0


def test_longbench_qa(write):
    [question] = load_longbench_qa(write(LONGBENCH_QA))
    assert question.task == "mhqa" and question.scorer is Scorer.TOKEN_F1
    assert question.documents == documents(
        ("Mill", "Ada painted it.\n\nIt turns."), (None, "A boat, red.")
    )


@EVERY_LOADER
def test_a_limit_takes_the_first(write, load, row):
    path = write(row, row, "not JSON")
    assert [q.question_id for q in load(path, limit=2)] == ["sample/1", "sample/2"]
    with pytest.raises(ValueError, match="limit"):
        load(path, limit=0)


@EVERY_LOADER
def test_files_that_are_no_rows(write, load, row):
    with pytest.raises(QuestionFileError, match=r"sample\.jsonl, line 2: is not JSON"):
        load(write(row, "{'single': 'quotes'}"))
    with pytest.raises(QuestionFileError, match=r"line 2: must be an object, is a number"):
        load(write(row, "3"))
    with pytest.raises(QuestionFileError, match=r"sample\.jsonl has no questions"):
        load(write(""))
    path = write("")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(QuestionFileError, match="not UTF-8"):
        load(path)


@pytest.mark.parametrize(
    ("load", "row", "field", "problem"),
    [
        (load_multi_hop, without(MUSIQUE, "question"), "question", "is missing"),
        (load_multi_hop, {**MUSIQUE, "question": 3}, "question", "must be a text, is a number"),
        (load_multi_hop, {**MUSIQUE, "answer": " "}, "answer", "is empty"),
        (load_multi_hop, {**MUSIQUE, "answer": None}, "answer", "must be a text, is null"),
        (load_multi_hop, {**MUSIQUE, "answer_aliases": [1]}, "answer_aliases[0]", "text"),
        (load_multi_hop, {**MUSIQUE, "paragraphs": []}, "paragraphs", "is empty"),
        (load_multi_hop, {**MUSIQUE, "paragraphs": ["a"]}, "paragraphs[0]", "an object"),
        (
            load_multi_hop,
            {**MUSIQUE, "paragraphs": [{"paragraph_text": ["a"]}]},
            "paragraphs[0].paragraph_text",
            "must be a text, is a list",
        ),
        (load_multi_hop, {**HOTPOT, "context": [["Mill", "text"]]}, "context[0]", "sentences"),
        (load_multi_hop, {**HOTPOT, "context": {"title": ["a"]}}, "context.sentences", "missing"),
        (
            load_multi_hop,
            {**HOTPOT, "context": {"title": ["a"], "sentences": [["b"], ["c"]]}},
            "context",
            "1 titles, but 2 texts",
        ),
        (load_multi_hop, without(PLAIN, "documents"), "documents", "and so are"),
        (load_multi_hop, {**PLAIN, "answers": []}, "answers", "is empty"),
        (load_multi_hop, {**PLAIN, "answers": "Ada"}, "answers", "must be a list, is a text"),
        (load_ruler_vt, {**RULER, "input": "no asking"}, "input", "has no 'Question:'"),
        (load_ruler_vt, {**RULER, "input": "Question: what?"}, "input", "no document"),
        (load_ruler_vt, without(RULER, "outputs"), "outputs", "is missing"),
        (load_longbench_retrieval, {**RETRIEVAL, "context": "text"}, "context", "Paragraph N:"),
        (load_longbench_retrieval, {**RETRIEVAL, "answers": ["Paragraph 9"]}, "answers[0]", "no"),
        (load_longbench_retrieval, {**RETRIEVAL, "answers": ["two"]}, "answers[0]", "no"),
        (load_longbench_qa, {**LONGBENCH_QA, "context": "text"}, "context", "Passage N:"),
        (load_longbench_qa, without(LONGBENCH_QA, "answers"), "answers", "is missing"),
    ],
)
def test_an_error_names_file_line_and_field(write, load, row, field, problem):
    path = write(ROWS[load], row)
    with pytest.raises(QuestionFileError) as caught:
        load(path)
    place, _, said = str(caught.value).partition(": ")
    assert place == f"{path}, line 2, field {field!r}"
    assert problem in said


def test_chunks_have_words(write):
    with pytest.raises(ValueError, match="chunk_words"):
        load_ruler_vt(write(RULER), chunk_words=0)


def test_line_ends_of_other_kinds_do_not_end_a_row(write):
    row = json.dumps({**PLAIN, "question": "Who\u2028painted it?"}, ensure_ascii=False)
    assert len(load_multi_hop(write(row, PLAIN))) == 2
