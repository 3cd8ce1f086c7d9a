"""The waiting requests as columns, so that a decision is arithmetic on arrays."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.pass_curves import NUM_SEGMENTS, Pace, RequestCurve, Times
from planner.types import RequestProfile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

FULL_PREFILL_KEY = 0  # of `WaitingQueue.key`
LONGEST_MS = 1e9  # a deadline further away, or none, counts as this

# rows: deadline_ms, longest_ms (no request ever has more slack), rounds, floor_ms, floor_passes,
# cold_ms, exact_ms, last_ms, probed, loaded, deepest, and the segments' ms and passes
FIRST_SEGMENT = 11
NUM_FLOATS = FIRST_SEGMENT + 2 * NUM_SEGMENTS
NUM_INTS = 4  # tokens, key, bucket, homes


@dataclass(slots=True)
class Waiting:
    """One request. `has_curve` and `num_cached` say what its columns were computed from."""

    profile: RequestProfile
    since_ms: float
    num_cached: int = -1  # unknown
    has_curve: bool = False


@dataclass(frozen=True, slots=True)
class WaitingQueue:
    """Who waits at one moment: arrays in order of deadline, the shorter of two prompts first.

    rows: of the table, the lower the earlier it came.
    slack_ms: time left; rounds: of the scheduler's counter when the request came.
    tokens: of the prompt; key: of its phases; bucket: of its context length; homes: the nodes
    where most of its chunks are hot, a bit each; 0 for none.
    cold_ms: the floor's time on the reference machine where nothing is stored.
    """

    rows: Ints
    slack_ms: Floats
    rounds: Floats
    cold_ms: Floats
    tokens: Ints
    key: Ints
    bucket: Ints
    homes: Ints
    floats: Floats  # the table's, of these rows
    _times: dict[Pace, Times] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def times(self, pace: Pace) -> Times:
        """The requests' curves at home, on a machine of this pace."""
        if pace not in self._times:
            self._times[pace] = self._loaded(pace)
        return self._times[pace]

    def _loaded(self, pace: Pace) -> Times:
        from planner.decision_kernel import loaded_times

        floor_ms, passes, _, exact_ms, last_ms, probed, loaded, deepest = self.floats[
            3:FIRST_SEGMENT
        ]
        segment_ms, gains = self.floats[FIRST_SEGMENT:].reshape(2, NUM_SEGMENTS, len(self))
        columns = loaded_times(
            floor_ms,
            passes,
            segment_ms,
            gains,
            exact_ms,
            last_ms,
            probed,
            loaded,
            deepest,
            pace.speed,
            pace.token_ms,
            pace.latency_ms,
        )
        return Times(columns)

    def oldest(self, mask: Bools) -> int | None:
        """The place of the one that came first."""
        places = mask.nonzero()[0]
        return int(places[self.rows[places].argmin()]) if len(places) else None


class WaitingTable:
    """Rows in order of arrival. Removed rows stay until half of them are gone; then all move up."""

    def __init__(self) -> None:
        self._entries: list[Waiting | None] = []
        self._rows: dict[str, int] = {}
        self._floats = np.zeros((NUM_FLOATS, 64))
        self._ints = np.zeros((NUM_INTS, 64), np.int64)
        self._alive = np.zeros(64, np.bool_)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    @property
    def num_rows(self) -> int:
        """Of those that wait and those not yet cleared away."""
        return len(self._entries)

    def live_rows(self) -> Ints:
        rows: Ints = self._alive[: len(self._entries)].nonzero()[0]
        return rows

    def row(self, request_id: str) -> int | None:
        return self._rows.get(request_id)

    def is_live(self, row: int) -> bool:
        return self._entries[row] is not None

    def entry(self, row: int) -> Waiting:
        entry = self._entries[row]
        assert entry is not None
        return entry

    def queue(self, now_ms: float) -> WaitingQueue:
        """A clock that jumps back gives nobody more slack than at first."""
        rows = self.live_rows()
        deadline_ms, longest_ms = self._floats[0].take(rows), self._floats[1].take(rows)
        slack_ms = np.minimum(deadline_ms - now_ms, longest_ms)
        order = np.lexsort((self._ints[0].take(rows), slack_ms))
        rows = rows.take(order)
        floats, ints = self._floats.take(rows, axis=1), self._ints.take(rows, axis=1)
        tokens, key, bucket, homes = ints
        return WaitingQueue(
            rows, slack_ms.take(order), floats[2], floats[5], tokens, key, bucket, homes, floats
        )

    def add(
        self, profile: RequestProfile, *, now_ms: float, key: int, bucket: int, rounds: float
    ) -> int:
        row = len(self._entries)
        if row == len(self._alive):
            self._grow()
        longest = profile.ttft_slo_ms - profile.elapsed_ms
        longest = 0.0 if longest != longest else max(-LONGEST_MS, min(LONGEST_MS, longest))
        self._entries.append(Waiting(profile, now_ms))
        self._rows[profile.request_id] = row
        self._alive[row] = True
        self._floats[:3, row] = now_ms + longest, longest, rounds
        self._ints[:, row] = profile.num_prompt_tokens, key, bucket, 0
        return row

    def set_homes(self, row: int, homes: int) -> None:
        self._ints[3, row] = homes

    def set_curve(self, row: int, curve: RequestCurve) -> None:
        times = [ms for ms, _ in curve.segments]
        gains = [passes for _, passes in curve.segments]
        padding = [0.0] * (NUM_SEGMENTS - len(times))
        self._floats[3:, row] = (
            curve.floor_ms,
            curve.floor_passes,
            curve.cold_ms,
            curve.exact_ms,
            curve.last_ms,
            curve.probed,
            curve.loaded,
            curve.deepest,
            *times,
            *padding,
            *gains,
            *padding,
        )

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
        kept = self.live_rows()
        for columns in (self._floats, self._ints):
            columns[:, : len(kept)] = columns[:, kept]
        self._alive[: len(kept)] = True
        self._alive[len(kept) :] = False
        self._entries = [entry for entry in self._entries if entry is not None]
        self._rows = {
            entry.profile.request_id: row for row, entry in enumerate(self._entries) if entry
        }
        return True

    def _grow(self) -> None:
        size = len(self._alive)
        self._floats = np.pad(self._floats, ((0, 0), (0, size)))
        self._ints = np.pad(self._ints, ((0, 0), (0, size)))
        self._alive = np.pad(self._alive, (0, size))
