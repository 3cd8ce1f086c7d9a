"""What an interrupted profiling run has measured so far, for the next one to go on from."""

import fcntl
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from benchmarks.profiling.cost_grid import MeasuredPoint
from benchmarks.quality.outcomes import Outcome

PARTIAL_VERSION = 1


class Record(BaseModel):
    """One line: a measured batch, or all answers of one stage to one question."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    point: MeasuredPoint | None = None
    stage: str = ""
    answers: tuple[Outcome, ...] = ()

    @model_validator(mode="after")
    def _is_one_thing(self) -> "Record":
        if (self.point is None) == (not self.answers):
            raise ValueError("a line holds either a point or answers")
        return self


class PartialFile:
    """JSON lines, the first of which says what is measured. A cut last line is dropped.

    restart: throw away what is there. Raises ValueError for the file of a run that measures
    something else, for a damaged one, and while another process measures into it.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], *, restart: bool = False) -> None:
        self.path = path
        self.points: list[MeasuredPoint] = []
        self.answers: dict[tuple[str, str], tuple[Outcome, ...]] = {}  # by stage and question
        own = json.loads(json.dumps({"partial": PARTIAL_VERSION, **header}))
        self._file = path.open("a+")
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another run measures into {path} at this moment") from None
            if restart:
                self._file.truncate(0)
            self._read(own)
        except ValueError:
            self._file.close()
            raise

    @property
    def is_empty(self) -> bool:
        return not self.points and not self.answers

    def close(self) -> None:
        """What is measured stays in the file."""
        self._file.close()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.close()

    def _read(self, own: dict[str, Any]) -> None:
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        if not lines:
            self._write(json.dumps(own))
            return
        whole = [line for line in lines if line.endswith("\n")]
        found = _header(whole[0]) if whole else None
        if found is None:
            raise ValueError(f"{self.path} is not a partial profile; --restart replaces it")
        if len(whole) == 1:  # nothing was measured: no matter what was meant to be
            self._file.truncate(0)
            self._write(json.dumps(own))
            return
        differing = [name for name in own.keys() | found.keys() if own.get(name) != found.get(name)]
        if differing:
            name = min(differing)
            raise ValueError(
                f"{self.path} was begun with {name} = {found.get(name)}, this run has "
                f"{own.get(name)}: go on with the same model, machine and options, or throw it "
                "away with --restart"
            )
        for number, line in enumerate(whole[1:], start=2):
            try:
                self._take(Record.model_validate_json(line))
            except ValidationError as exc:
                problem = exc.errors()[0]
                where = ".".join(map(str, problem["loc"])) or "the line"
                raise ValueError(
                    f"{self.path}, line {number}: {where}: {problem['msg']}; --restart starts anew"
                ) from None
        if len(whole) < len(lines):
            self._file.truncate(len("".join(whole).encode()))

    def _take(self, record: Record) -> None:
        if record.point is not None:
            self.points.append(record.point)
        else:
            self.answers[record.stage, record.answers[0].question_id] = record.answers

    def add_point(self, point: MeasuredPoint) -> None:
        self._add(Record(point=point))

    def add_answers(self, stage: str, answers: Sequence[Outcome]) -> None:
        self._add(Record(stage=stage, answers=tuple(answers)))

    def _add(self, record: Record) -> None:
        self._write(record.model_dump_json(exclude_defaults=True))
        self._take(record)

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


def _header(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "partial" in found else None
