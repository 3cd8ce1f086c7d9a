"""What a task asks, whatever model answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Scorer(StrEnum):
    """How an answer is compared with the gold ones; see `scoring.score`."""

    EXACT = "exact"  # equal to one of them, after normalisation
    CONTAINS_ALL = "contains_all"  # share of them found in the answer (RULER)
    PASSAGE_NUMBER = "passage_number"  # right numbers over all numbers written (LongBench)
    TOKEN_F1 = "token_f1"  # best token F1 over them (SQuAD, HotpotQA, MuSiQue)


class Split(StrEnum):
    """Names and templates of one are never those of the other."""

    TRAIN = "train"
    TEST = "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievedDocument:
    text: str
    title: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request with its gold answers."""

    question_id: str  # unique in its task and size, stable for a seed
    task: str
    documents: tuple[RetrievedDocument, ...]
    question: str
    answers: tuple[str, ...]
    scorer: Scorer
    max_new_tokens: int
    facts: Mapping[str, int | str] = field(default_factory=dict)  # such as hops, for tables

    def __post_init__(self) -> None:
        if not self.answers:
            raise ValueError(f"{self.question_id} has no answers")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be 1 or more, got {self.max_new_tokens}")
