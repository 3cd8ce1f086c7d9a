"""What came of one question under one configuration, and the file that keeps it."""

from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from benchmarks.quality.curves import Curve, Point
from benchmarks.quality.scoring import score
from benchmarks.quality.types import Question
from cluster.prompt import Prompt


class Outcome(BaseModel):
    """One line of a results file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    question_id: str
    task: str
    curve: str
    point: str
    text: str
    gold: float  # score against the gold answers
    coverage: float  # share of the context tokens that were recomputed after WarmUp
    share: float  # token-layers computed, the Probe included, over those of full prefill
    num_context_tokens: int
    num_documents: int
    entropy: float | None = None  # of the first Probe layer's QCI scores, normalised

    @classmethod
    def of(
        cls,
        question: Question,
        prompt: Prompt,
        curve: Curve,
        point: Point,
        *,
        text: str,
        share: float,
        entropy: float | None = None,
    ) -> "Outcome":
        """An answer, scored. point: with the coverage that it means for this prompt."""
        return cls(
            question_id=question.question_id,
            task=question.task,
            curve=curve.name,
            point=point.label,
            text=text,
            gold=score(question.scorer, text, question.answers),
            coverage=point.config.coverage,
            share=share,
            num_context_tokens=sum(map(len, prompt.chunks)),
            num_documents=len(question.documents),
            entropy=entropy,
        )

    @property
    def key(self) -> tuple[str, str, str]:
        return self.question_id, self.curve, self.point


class ResultsFile:
    """Outcomes as JSON lines, appended question by question, so that a run can be taken up again.

    The first line says what was measured; a file of something else is refused. A last line that
    was cut off by a crash is dropped.
    """

    def __init__(self, path: Path, header: str) -> None:
        self._path = path
        self.outcomes: dict[tuple[str, str, str], Outcome] = {}
        if path.exists():
            self._read(header)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(header + "\n")

    def _read(self, header: str) -> None:
        lines = self._path.read_text().splitlines(keepends=True)
        if not lines or lines[0].rstrip("\n") != header:
            raise ValueError(
                f"{self._path} holds the results of another run; its first line is not {header}"
            )
        whole = lines if lines[-1].endswith("\n") else lines[:-1]
        for number, line in enumerate(whole[1:], start=2):
            try:
                outcome = Outcome.model_validate_json(line)
            except ValidationError as exc:
                raise ValueError(f"{self._path}, line {number}: {exc}") from exc
            self.outcomes[outcome.key] = outcome
        if len(whole) < len(lines):
            self._path.write_text("".join(whole))

    def add(self, outcomes: Iterable[Outcome]) -> None:
        new = list(outcomes)
        with self._path.open("a") as file:
            file.writelines(outcome.model_dump_json() + "\n" for outcome in new)
        self.outcomes.update({outcome.key: outcome for outcome in new})
