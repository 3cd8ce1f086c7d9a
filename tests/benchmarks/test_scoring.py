"""Scores of answers: worked examples of each rule, and what holds for any text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.quality.scoring import passes, score
from benchmarks.quality.types import Scorer

SOME_TEXT = st.text(max_size=40)
ANSWERS = st.lists(SOME_TEXT, min_size=1, max_size=4)
TEXT_SCORERS = [Scorer.EXACT, Scorer.TOKEN_F1, Scorer.CONTAINS_ALL]


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        (" The Blue  House. ", ["blue house"], 1.0),
        ("blue-house", ["bluehouse"], 1.0),  # punctuation goes, nothing takes its place
        ("the theatre", ["theatre"], 1.0),  # an article is a whole word
        ("theatre", ["atre"], 0.0),
        ("17 ;", ["17"], 1.0),
        ("17 18", ["17"], 0.0),
        ("no", ["yes", "No!"], 1.0),
    ],
)
def test_exact(text, answers, expected):
    assert score(Scorer.EXACT, text, answers) == expected


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        ("a red fox", ["The red fox"], 1.0),
        ("the red fox ran", ["red fox"], 0.8),  # 2 of 3 right, 2 of 2 found
        ("red red", ["red"], 2 / 3),  # each word counts as often as it stands
        ("green", ["red fox"], 0.0),
        ("green", ["red fox", "green grass", "green"], 1.0),
        ("", ["red"], 0.0),
        ("the", ["a"], 1.0),  # no words on both sides
    ],
)
def test_token_f1(text, answers, expected):
    assert score(Scorer.TOKEN_F1, text, answers) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        ("they are: ABCDE, fghij", ["ABCDE", "FGHIJ"], 1.0),
        ("ABCDE", ["ABCDE", "FGHIJ", "KLMNO", "PQRST"], 0.25),
        ("XABCDEX", ["abcde"], 1.0),
        ("", ["ABCDE"], 0.0),
    ],
)
def test_contains_all(text, answers, expected):
    assert score(Scorer.CONTAINS_ALL, text, answers) == expected


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        ("Paragraph 7", ["Paragraph 7"], 1.0),
        ("Paragraph 7, not 17", ["Paragraph 7"], 0.5),
        ("7 7 1 2", ["7"], 0.5),
        ("Paragraph 17", ["Paragraph 7"], 0.0),
        ("I do not know", ["Paragraph 7"], 0.0),
    ],
)
def test_passage_number(text, answers, expected):
    assert score(Scorer.PASSAGE_NUMBER, text, answers) == expected


@given(text=SOME_TEXT, answers=ANSWERS)
def test_scores_lie_between_0_and_1(text, answers):
    for scorer in TEXT_SCORERS:
        assert 0.0 <= score(scorer, text, answers) <= 1.0
    numbered = [f"Paragraph {i}" for i in range(len(answers))]
    assert 0.0 <= score(Scorer.PASSAGE_NUMBER, text, numbered) <= 1.0


@given(answers=ANSWERS)
def test_a_gold_answer_gets_the_whole_score(answers):
    for scorer in [Scorer.EXACT, Scorer.TOKEN_F1]:
        assert score(scorer, answers[0], answers) == 1.0
    assert score(Scorer.CONTAINS_ALL, " ".join(answers), answers) == 1.0


@given(text=SOME_TEXT, answers=ANSWERS)
def test_an_exact_answer_has_all_its_words(text, answers):
    if score(Scorer.EXACT, text, answers) == 1.0:
        assert score(Scorer.TOKEN_F1, text, answers) == 1.0


@pytest.mark.parametrize("scorer", Scorer)
def test_no_gold_answers_is_an_error(scorer):
    with pytest.raises(ValueError, match="gold answer"):
        score(scorer, "text", [])


def test_a_gold_answer_without_a_number_is_an_error():
    with pytest.raises(ValueError, match="no passage number"):
        score(Scorer.PASSAGE_NUMBER, "Paragraph 7", ["the seventh"])


def test_a_rounding_error_does_not_miss_the_gate():
    assert passes(0.1 + 0.2, 0.3) and passes(0.3, 0.1 + 0.2)
    assert passes(1.0, 1.0) and passes(0.0, 0.0)
    assert not passes(0.79, 0.8)
