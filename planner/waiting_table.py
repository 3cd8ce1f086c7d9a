"""The waiting requests as columns, so that a decision is arithmetic on arrays."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.pass_curves import NUM_SEGMENTS, RequestCurve
from planner.types import RequestProfile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FULL_PREFILL_KEY = 0  # of `WaitingTable.ints("key")`
LONGEST_MS = 1e9  # a deadline further away, or none, counts as this

_FLOATS = ("deadline_ms", "longest_ms", "floor_ms", "cold_ms", "floor_passes", "rounds")
_INTS = ("tokens", "key", "bucket", "homes")


@dataclass(slots=True)
class Waiting:
    """One request. `has_curve` and `num_cached` say what its columns were computed from."""

    profile: RequestProfile
    since_ms: float
    num_cached: int = -1  # unknown
    has_curve: bool = False


class WaitingTable:
    """Rows in order of arrival. Removed rows stay until half of them are gone; then all move up.

    deadline_ms: of the scheduler's clock; longest_ms: more slack than this no request ever has.
    floor_ms, floor_passes, segment_ms, segment_passes: the request's curve at home, at scale 1;
    cold_ms: its floor where nothing is stored.
    rounds: of the scheduler's counter when the request came.
    tokens: of the prompt; key: of its phases; bucket: of its context length; homes: the nodes
    where most of its chunks are hot, a bit each; 0 for none.
    """

    def __init__(self) -> None:
        self._entries: list[Waiting | None] = []
        self._rows: dict[str, int] = {}
        self._floats = {name: np.zeros(64) for name in _FLOATS}
        self._ints = {name: np.zeros(64, np.int64) for name in _INTS}
        self._segments = np.zeros((2, 64, NUM_SEGMENTS))
        self._alive = np.zeros(64, np.bool_)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    @property
    def num_rows(self) -> int:
        """Of those that wait and those not yet cleared away."""
        return len(self._entries)

    @property
    def alive(self) -> NDArray[np.bool_]:
        return self._alive[: len(self._entries)]

    @property
    def segment_ms(self) -> Floats:
        return self._segments[0, : len(self._entries)]

    @property
    def segment_passes(self) -> Floats:
        return self._segments[1, : len(self._entries)]

    def floats(self, name: str) -> Floats:
        return self._floats[name][: len(self._entries)]

    def ints(self, name: str) -> Ints:
        return self._ints[name][: len(self._entries)]

    def row(self, request_id: str) -> int | None:
        return self._rows.get(request_id)

    def entry(self, row: int) -> Waiting:
        entry = self._entries[row]
        assert entry is not None
        return entry

    def slack_ms(self, now_ms: float) -> Floats:
        """Time left until each deadline; a clock that jumps back gives nobody more than at first.

        Rows that are gone hold anything.
        """
        return np.minimum(self.floats("deadline_ms") - now_ms, self.floats("longest_ms"))

    def add(
        self, profile: RequestProfile, *, now_ms: float, key: int, bucket: int, rounds: float
    ) -> int:
        row = len(self._entries)
        if row == len(self._alive):
            self._grow()
        longest = profile.ttft_slo_ms - profile.elapsed_ms
        longest = float(np.clip(np.nan_to_num(longest, nan=0.0), -LONGEST_MS, LONGEST_MS))
        self._entries.append(Waiting(profile, now_ms))
        self._rows[profile.request_id] = row
        self._alive[row] = True
        self._floats["deadline_ms"][row] = now_ms + longest
        self._floats["longest_ms"][row] = longest
        self._floats["rounds"][row] = rounds
        self._ints["tokens"][row] = profile.num_prompt_tokens
        self._ints["key"][row] = key
        self._ints["bucket"][row] = bucket
        self._ints["homes"][row] = 0
        return row

    def set_curve(self, row: int, curve: RequestCurve) -> None:
        self._floats["floor_ms"][row] = curve.floor_ms
        self._floats["cold_ms"][row] = curve.cold_ms
        self._floats["floor_passes"][row] = curve.floor_passes
        self._segments[:, row] = 0.0
        for idx, (ms, passes) in enumerate(curve.segments):
            self._segments[0, row, idx] = ms
            self._segments[1, row, idx] = passes

    def remove(self, request_id: str) -> Waiting | None:
        row = self._rows.pop(request_id, None)
        if row is None:
            return None
        entry = self.entry(row)
        self._entries[row] = None
        self._alive[row] = False
        return entry

    def compact(self) -> bool:
        """Clear removed rows away if they are many; True if rows have moved."""
        if len(self._entries) <= 2 * len(self._rows) + 32:
            return False
        kept = np.flatnonzero(self.alive)
        for column in (*self._floats.values(), *self._ints.values()):
            column[: len(kept)] = column[kept]
        self._segments[:, : len(kept)] = self._segments[:, kept]
        self._alive[: len(kept)] = True
        self._alive[len(kept) :] = False
        self._entries = [entry for entry in self._entries if entry is not None]
        self._rows = {
            entry.profile.request_id: row for row, entry in enumerate(self._entries) if entry
        }
        return True

    def _grow(self) -> None:
        size = 2 * len(self._alive)
        for columns in (self._floats, self._ints):
            for name, column in columns.items():
                columns[name] = np.resize(column, size)
        self._alive = np.concatenate([self._alive, np.zeros_like(self._alive)])
        self._segments = np.concatenate([self._segments, np.zeros_like(self._segments)], axis=1)
