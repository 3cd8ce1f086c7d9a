"""How good an answer is, 0–1, by the rules of the benchmark that a task comes from."""

import re
import string
from collections import Counter
from collections.abc import Sequence

from benchmarks.quality.types import Scorer

# shares such as 2 · p · r / (p + r) can end a rounding below the gate that they equal
ROUNDING = 1e-9

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NUMBER = re.compile(r"\d+")


def score(scorer: Scorer, text: str, answers: Sequence[str]) -> float:
    """How well a model's text matches the gold answers.

    text: what the model wrote, without the prompt
    answers: the gold answers; one is enough for every scorer but CONTAINS_ALL, which wants all
    returns: 0–1
    raises: ValueError without answers
    """
    if not answers:
        raise ValueError("a score needs at least one gold answer")
    if scorer is Scorer.CONTAINS_ALL:
        return contained_share(text, answers)
    one = {
        Scorer.EXACT: exact_match,
        Scorer.TOKEN_F1: token_f1,
        Scorer.PASSAGE_NUMBER: passage_number,
    }[scorer]
    return max(one(text, answer) for answer in answers)


def passes(value: float, gate: float) -> bool:
    """Whether a score (0–1) reaches a gate (0–1), a rounding error aside."""
    return value >= gate - ROUNDING


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation and articles, one space between words.

    The rules of SQuAD's evaluation (Rajpurkar et al., arXiv 1606.05250), which HotpotQA,
    2WikiMultihopQA and MuSiQue use too. An answer such as "The" becomes empty.
    """
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", bare).split())


def exact_match(text: str, answer: str) -> float:
    """SQuAD's exact match: 1 where both are equal after `normalise`, else 0."""
    return float(normalise(text) == normalise(answer))


def token_f1(text: str, answer: str) -> float:
    """SQuAD's F1: harmonic mean of precision and recall over the words of both, each as often
    as it occurs.

    As in SQuAD 2.0 (arXiv 1806.03822), where one side has no words the score is 1 if the other
    has none either, else 0. HotpotQA's rule that yes and no earn no part of the score is not
    applied.
    """
    written, gold = normalise(text).split(), normalise(answer).split()
    if not written or not gold:
        return float(written == gold)
    num_common = (Counter(written) & Counter(gold)).total()
    return 2 * num_common / (len(written) + len(gold))


def contained_share(text: str, answers: Sequence[str]) -> float:
    """RULER's score (arXiv 2404.06654): the share of the gold answers that are substrings of the
    text, upper and lower case alike."""
    lowered = text.lower()
    return sum(answer.lower() in lowered for answer in answers) / len(answers)


def passage_number(text: str, answer: str) -> float:
    """LongBench's score for passage retrieval (arXiv 2308.14508): of all numbers in the text, the
    share that is the gold one; 0 without a number.

    answer: holds the number, such as "Paragraph 7" or "7"
    raises: ValueError where the answer has no number
    """
    gold = _NUMBER.search(answer)
    if gold is None:
        raise ValueError(f"the gold answer {answer!r} has no passage number")
    numbers = [int(n) for n in _NUMBER.findall(text)]
    return numbers.count(int(gold[0])) / len(numbers) if numbers else 0.0
