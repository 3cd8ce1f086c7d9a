"""How far a long measurement is: a line that redraws on a terminal, one every 20 s elsewhere."""

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

SAY_EVERY_S = 20.0
REDRAW_EVERY_S = 0.2
BAR_WIDTH = 20


class Progress:
    """One stage at a time; what an earlier run has done counts, but not for the time left."""

    def __init__(
        self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._redraws = self._stream.isatty()
        self._stage, self._note, self._total = "", "", 0
        self._done = self._known = 0
        self._started = self._said = 0.0

    def start(self, stage: str, total: int, *, done: int = 0) -> None:
        """done: of the total, by an earlier run"""
        self._stage, self._total = stage, total
        self._done = self._known = done
        self._started = self._said = self._clock()
        self._write()

    def note(self, text: str) -> None:
        """What is being done until the next `advance`; may be told as often as it changes."""
        self._note = text
        now = self._clock()
        if now - self._said >= (REDRAW_EVERY_S if self._redraws else SAY_EVERY_S):
            self._said = now
            self._write()

    def advance(self) -> None:
        self._done += 1
        self._note = ""
        now = self._clock()
        if self._redraws or now - self._said >= SAY_EVERY_S or self._done == self._total:
            self._said = now
            self._write()

    def end(self) -> None:
        """Leave the line as it is; safe to call twice."""
        if self._stage and self._redraws:
            self._stream.write("\n")
            self._stream.flush()
        self._stage = ""

    def _write(self) -> None:
        text = self._text()
        if self._redraws:
            width = shutil.get_terminal_size().columns
            self._stream.write(f"\r\033[K{text[: width - 1]}")
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def _text(self) -> str:
        share = self._done / self._total if self._total else 1.0
        parts = [f"{share:4.0%}", f"{self._done} of {self._total}", self._stage]
        left = self._left_s()
        if left is not None:
            parts.append(f"about {duration(left)} left")
        if self._note:
            parts.append(self._note)
        if self._redraws:
            full = round(share * BAR_WIDTH)
            parts.insert(0, f"[{'#' * full}{'.' * (BAR_WIDTH - full)}]")
        return "  ".join(parts)

    def _left_s(self) -> float | None:
        now = self._done - self._known
        if now == 0 or self._done >= self._total:
            return None
        return (self._clock() - self._started) / now * (self._total - self._done)


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
