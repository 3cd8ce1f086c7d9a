"""One decision: the batch for one replica, and its budget.

A candidate batch is worth its expected passes under a budget, plus those of the requests left
waiting while the replica is busy for that long (`QueueProjection`). A longer budget buys passes in
the batch and costs passes in the queue. The candidates are compared by curves (`pass_curves`), the
best few at more budgets, and of those the best few are planned for real.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.candidate_batches import BatchLimits, candidate_batches
from planner.pass_curves import AMPLE_MS, BatchCurves, PassesOf
from planner.queue_projection import QueuedWork, QueueProjection
from planner.recompute_planner import RecomputePlanner
from planner.scheduler import (
    BatchDecision,
    FcfsConfig,
    JudgedBatch,
    ReplicaState,
    plan_input,
    room_tokens,
)
from planner.types import BatchPlan
from planner.waiting_table import FULL_PREFILL_KEY, WaitingTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

EPS_MS = 1e-6
DIGITS = 6  # of expected passes, that make a difference
MAX_KEYS = 4  # kinds of phases that a decision looks at, those with the earliest deadlines
MIN_CANDIDATES, MAX_CANDIDATES = 8, 64
MIN_SEARCHED, MAX_SEARCHED = 2, 6  # candidates tried with budgets between least and most
NUM_BUDGETS = 4  # evenly spaced, and as many breakpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSmithConfig:
    """The rules of the scheduler.

    No starvation: a request is overdue after `max_rounds` rounds, a round being as many batches
    as there are replicas. Every batch then includes the oldest overdue request that fits a free
    replica; if it fits none for now, one replica takes nothing else until it does. Requests that
    miss their deadline anyway would take the time of those that do not, so an overdue one among
    them is put into every `late_every`-th batch only. So a request that came when W others waited
    is in a batch after at most `max_rounds` rounds and (W + 1)·`late_every` batches, as long as
    replicas become free and it fits one of them.
    """

    limits: FcfsConfig = field(default_factory=FcfsConfig)
    bucket_tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384)  # of context, closed
    max_rounds: int = 16
    late_every: int = 16
    refuse_hopeless: bool = False
    refuse_impossible: bool = True
    reserve: float = 0.0  # share of a budget that the planner keeps back
    max_exhaustive: int = 5  # up to so many requests of a kind, every subset is a candidate
    num_planned: int = 1  # candidates that are planned for real in a decision
    max_lookups: int = 32  # requests whose stored chunks are counted in a decision
    effort: int = 4_096  # candidates × waiting requests that a decision looks at, about

    def __post_init__(self) -> None:
        for name in ("max_rounds", "late_every", "num_planned", "max_lookups", "effort"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if not 0 <= self.max_exhaustive <= 6:
            raise ValueError(f"max_exhaustive must be within 0 and 6, got {self.max_exhaustive}")
        if not 0.0 <= self.reserve < 1.0:
            raise ValueError(f"reserve must be at least 0 and less than 1, got {self.reserve}")
        if list(self.bucket_tokens) != sorted(set(self.bucket_tokens)):
            raise ValueError(f"bucket_tokens must rise, got {self.bucket_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a decision starts from. Arrays are rows of the table.

    slack_ms: time left; timely: waits, and can be on time at the floor, on the chosen replica;
    fits: waits, and the chosen replica can take it now; too_long: fits no replica, ever;
    at_home: its chunks are hot on the chosen replica's node, or nowhere; None: there is one node.
    speed, slowest: time of the chosen replica and of the slowest one, over that of the curves.
    forced: the row that must be in the batch.
    """

    table: WaitingTable
    chosen: ReplicaState
    others: Sequence[ReplicaState]
    now_ms: float
    slack_ms: Floats
    timely: Bools
    fits: Bools
    too_long: Bools
    at_home: Bools | None
    speed: float
    slowest: float
    forced: int | None


@dataclass(frozen=True, slots=True)
class _Candidates:
    """All candidates that can be on time, one a row."""

    members: Ints  # [num_candidates, max_members], −1 fills up
    parked: Bools
    slack_ms: Floats  # the smallest of those that can be on time: the longest budget
    most_ms: Floats  # the longest budget that makes a difference
    curves: BatchCurves


@dataclass(frozen=True, slots=True)
class _Offer:
    """A candidate with how long it would take, and the passes of the queue meanwhile."""

    row: int
    occupied_ms: float
    waiting_passes: float


class BatchChoice:
    def __init__(
        self,
        config: CacheSmithConfig,
        planner: RecomputePlanner,
        passes: PassesOf,
        situation: Situation,
    ) -> None:
        self._config = config
        self._planner = planner
        self._passes = passes
        self._s = situation
        self._table = situation.table
        self._has_free_others = any(r.is_free for r in situation.others)

    def timely(self) -> BatchDecision | None:
        """The best batch of requests that can be on time, and of the forced one if there is one."""
        projection = self._projection()
        batches = self._batches(self._config.effort // max(1, projection.num_columns))
        candidates = self._candidates(batches) if batches else None
        if candidates is None:
            if self._s.forced is None:
                return None
            rows = [self._s.forced]  # late here, though perhaps not where its chunks are
            return self._decision(rows, self._plan(rows, 0.0), judged=())
        offers = self._search(candidates, projection)[: self._config.num_planned]
        planned = [self._planned(candidates, projection, offer) for offer in offers]
        planned.sort(key=lambda entry: round(entry[2].value, DIGITS), reverse=True)
        rows, plan, _ = planned[0]
        return self._decision(rows, plan, judged=tuple(judged for *_, judged in planned))

    def late(self) -> BatchDecision | None:
        """The oldest requests that miss their deadlines anyway, at the floor."""
        late = self._s.fits & ~self._s.timely
        if not late.any():
            return None
        head = int(np.argmax(late))
        key, tokens = self._table.ints("key"), self._table.ints("tokens")
        limits = self._limits(head, parking=True)
        rows: list[int] = []
        num_tokens = 0
        for row in map(int, np.flatnonzero(late & (key == key[head]))[: limits.max_requests]):
            num_tokens += int(tokens[row])
            if rows and num_tokens > min(limits.max_tokens, limits.room_tokens):
                break
            rows.append(row)
        return self._decision(rows, self._plan(rows, 0.0), judged=())

    # --- candidates --------------------------------------------------------------------------

    def _projection(self) -> QueueProjection:
        """On the slowest replica's costs."""
        s, table = self._s, self._table
        rows = np.flatnonzero(s.timely & ~s.too_long)
        rows = rows[np.lexsort((table.ints("tokens")[rows], s.slack_ms[rows]))]
        work = QueuedWork(
            rows=rows,
            slack_ms=s.slack_ms[rows],
            floor_ms=table.floats("floor_ms")[rows] * s.slowest,
            floor_passes=table.floats("floor_passes")[rows],
            segment_ms=table.segment_ms[rows] * (s.slowest / (1.0 - self._config.reserve)),
            segment_passes=table.segment_passes[rows],
        )
        others_ms = [
            0.0 if r.busy_until_ms is None else r.busy_until_ms - s.now_ms for r in s.others
        ]
        return QueueProjection(work, others_ms=others_ms, num_rows=table.num_rows)

    def _limits(self, row: int, *, parking: bool) -> BatchLimits:
        limits, chosen = self._config.limits, self._s.chosen
        profile = self._table.entry(row).profile
        return BatchLimits(
            max_requests=min(limits.max_batch_requests, chosen.free_seqs),
            max_tokens=limits.max_batch_tokens,
            room_tokens=room_tokens(profile, chosen) if parking else chosen.free_kv_tokens,
        )

    def _batches(self, most: int) -> dict[tuple[int, ...], bool]:
        """Candidates, and whether each is parked.

        In a burst, when the KV blocks cannot hold the requests that could run, the search is
        repeated with the room that parking prompts in host memory gives.
        """
        s = self._s
        key, tokens = self._table.ints("key"), self._table.ints("tokens")
        ready = np.flatnonzero(s.timely & s.fits)
        if s.forced is not None:
            ready = ready[(ready != s.forced) & (key[ready] == key[s.forced])]
        order = ready[np.lexsort((tokens[ready], s.slack_ms[ready]))]
        kinds = list(dict.fromkeys(key[order].tolist()))
        if s.forced is not None:
            kinds = [int(key[s.forced])]
        most = min(MAX_CANDIDATES, max(MIN_CANDIDATES, most))
        found: dict[tuple[int, ...], bool] = {}
        for kind in kinds[:MAX_KEYS]:
            of_kind = order[key[order] == kind] if len(kinds) > 1 else order
            first = s.forced if s.forced is not None else int(of_kind[0])
            for parking in (False, True):
                limits = self._limits(first, parking=parking)
                if s.forced is not None and tokens[s.forced] > limits.room_tokens:
                    continue
                batches = candidate_batches(
                    of_kind[tokens[of_kind] <= limits.room_tokens],
                    tokens=tokens,
                    buckets=self._table.ints("bucket"),
                    at_home=s.at_home,
                    limits=limits,
                    forced=s.forced,
                    max_exhaustive=self._config.max_exhaustive,
                    most=most,
                )
                for batch in batches:
                    found.setdefault(batch, parking)
                wanted = int(tokens[of_kind].sum()) + int(tokens[first]) * (s.forced is not None)
                is_burst = wanted > s.chosen.free_kv_tokens
                if kind == FULL_PREFILL_KEY or not s.chosen.parking_tokens or not is_burst:
                    break
        return found

    def _candidates(self, batches: dict[tuple[int, ...], bool]) -> _Candidates | None:
        """Those that keep the deadlines of all members that can be kept."""
        s, table = self._s, self._table
        width = max(map(len, batches))
        members = np.array([batch + (-1,) * (width - len(batch)) for batch in batches])
        parked = np.fromiter(batches.values(), np.bool_, len(batches))
        timely = (members >= 0) & s.timely[members]
        # the fixed time is paid once
        fixed_ms = s.chosen.cost.fixed_ms * s.chosen.cost.scale
        own_ms = table.floats("floor_ms")[members]
        segment_ms = table.segment_ms[members] * (timely[:, :, None] * s.speed)
        if s.at_home is not None:  # away from home, all has to be computed
            is_home = s.at_home[members]
            own_ms = np.where(is_home, own_ms, table.floats("cold_ms")[members])
            segment_ms *= is_home[:, :, None]
        own_ms = np.maximum(own_ms * s.speed - fixed_ms, 0.0)
        floor_ms = fixed_ms + np.where(members >= 0, own_ms, 0.0).sum(axis=1)
        slack_ms = np.where(timely, s.slack_ms[members], np.inf).min(axis=1)
        kept = floor_ms <= slack_ms + EPS_MS
        if not kept.any():
            return None
        if not kept.all():
            members, parked, timely = members[kept], parked[kept], timely[kept]
            segment_ms = segment_ms[kept]
            floor_ms, slack_ms = floor_ms[kept], slack_ms[kept]
        curves = BatchCurves.merge(
            floor_ms,
            np.where(timely, table.floats("floor_passes")[members], 0.0).sum(axis=1),
            segment_ms.reshape(len(members), -1),
            (table.segment_passes[members] * timely[:, :, None]).reshape(len(members), -1),
        )
        usable = 1.0 - self._config.reserve
        most_ms = np.minimum(slack_ms, np.maximum(floor_ms, curves.saturation_ms / usable))
        return _Candidates(members, parked, slack_ms, np.maximum(most_ms, floor_ms), curves)

    # --- budgets -----------------------------------------------------------------------------

    def _search(self, c: _Candidates, projection: QueueProjection) -> list[_Offer]:
        """Offers of different candidates, the best first."""
        usable = 1.0 - self._config.reserve
        num, columns = len(c.members), max(1, projection.num_columns)
        if num == 1 and len(self._table) == np.count_nonzero(c.members >= 0):
            return [_Offer(0, float(c.most_ms[0]), 0.0)]
        # the shortest budget of every candidate, and the longest if the queue is not long
        value, ms = c.curves.passes[:, 0].copy(), c.curves.floor_ms.copy()
        is_short = 2 * num * columns <= self._config.effort
        occupied = np.concatenate([c.most_ms, ms]) if is_short else ms
        members = np.concatenate([c.members, c.members]) if is_short else c.members
        waiting = projection.passes(members, occupied)
        waits = waiting[-num:].copy()
        value = (value + waits).round(DIGITS)
        if is_short:
            most = (c.curves.passes_at(usable * c.most_ms) + waiting[:num]).round(DIGITS)
            better = most >= value
            value[better], ms[better] = most[better], c.most_ms[better]
            waits[better] = waiting[:num][better]
        affordable = self._config.effort // (2 * NUM_BUDGETS * columns)
        num_searched = min(MAX_SEARCHED, max(MIN_SEARCHED, affordable))
        best = self._order(c, value, ms)[:num_searched]
        # and more budgets of the best candidates
        tries = _budgets(
            projection.breakpoints(c.members[best]), c.curves.floor_ms[best], c.most_ms[best]
        )
        rows = np.repeat(best, tries.shape[1])
        waiting = projection.passes(c.members[rows], tries.ravel()).reshape(tries.shape)
        own = c.curves.passes_at(usable * tries.ravel(), rows).reshape(tries.shape)
        tried = (own + waiting).round(DIGITS)
        longest = tried.shape[1] - 1 - tried[:, ::-1].argmax(axis=1)  # of the best ones
        places = np.arange(len(best))
        better = tried[places, longest] >= value[best]
        best, longest, places = best[better], longest[better], places[better]
        value[best], ms[best] = tried[places, longest], tries[places, longest]
        waits[best] = waiting[places, longest]
        best = self._order(c, value, ms)[: self._config.num_planned]
        return [_Offer(int(row), float(ms[row]), float(waits[row])) for row in best]

    def _order(self, c: _Candidates, value: Floats, occupied_ms: Floats) -> Ints:
        """The best first. Ties: unparked; small while another replica is free; more time; early."""
        size = np.count_nonzero(c.members >= 0, axis=1)
        by_size = size if self._has_free_others else -size
        order: Ints = np.lexsort((-occupied_ms, by_size, c.parked, -value))
        return order

    def _planned(
        self, c: _Candidates, projection: QueueProjection, offer: _Offer
    ) -> tuple[list[int], BatchPlan, JudgedBatch]:
        """What the offer is worth with the planner's own plan."""
        row = offer.row
        rows = [member for member in c.members[row].tolist() if member >= 0]
        # where more time makes no difference, a machine that is slower than expected may take it
        is_most = offer.occupied_ms >= c.most_ms[row]
        budget_ms = float(c.slack_ms[row]) if is_most else offer.occupied_ms
        # nobody to be on time for: the floor
        plan = self._plan(rows, min(budget_ms, AMPLE_MS) if np.isfinite(budget_ms) else 0.0)
        on_time = sum(self._s.slack_ms[member] >= plan.expected_ms - EPS_MS for member in rows)
        waiting = offer.waiting_passes
        if plan.expected_ms > 1.01 * offer.occupied_ms:
            occupied = np.array([plan.expected_ms])
            waiting = float(projection.passes(c.members[[row]], occupied)[0])
        judged = JudgedBatch(
            request_ids=tuple(self._table.entry(member).profile.request_id for member in rows),
            budget_ms=plan.budget_ms,
            expected_ms=plan.expected_ms,
            expected_passes=self._passes(plan) * float(on_time) / len(rows),
            waiting_passes=waiting,
            parked=bool(c.parked[row]),
        )
        return rows, plan, judged

    def _plan(self, rows: Sequence[int], budget_ms: float) -> BatchPlan:
        chosen = self._s.chosen
        inputs = [plan_input(self._table.entry(row).profile, chosen) for row in rows]
        return self._planner.plan(
            inputs, budget_ms=max(0.0, budget_ms), cost=chosen.cost, link=chosen.link
        )

    def _decision(
        self, rows: Sequence[int], plan: BatchPlan, *, judged: tuple[JudgedBatch, ...]
    ) -> BatchDecision:
        entries = [self._table.entry(row) for row in rows]
        return BatchDecision(
            replica_id=self._s.chosen.replica_id,
            requests=tuple(entry.profile for entry in entries),
            queue_ms=tuple(max(0.0, self._s.now_ms - entry.since_ms) for entry in entries),
            plan=plan,
            judged=judged,
        )


def _budgets(points: Floats, floor_ms: Floats, most_ms: Floats) -> Floats:
    """Budgets to try, rising: breakpoints between the two, the shortest always, and even steps.

    points: [num_candidates, num_points]; floor_ms, most_ms: [num_candidates]
    returns: [num_candidates, 2 · NUM_BUDGETS]; short of breakpoints, the longest budget again
    """
    least, most = floor_ms[:, None], most_ms[:, None]
    inside = np.where((points > least) & (points < most), points, np.inf)
    inside.sort(axis=1)
    count = np.isfinite(inside).sum(axis=1)
    evenly = np.arange(NUM_BUDGETS) / (NUM_BUDGETS - 1)
    picked = np.arange(NUM_BUDGETS) + np.zeros((len(points), 1), np.int64)
    many = count > NUM_BUDGETS
    picked[many] = (evenly * (count[many, None] - 1)).astype(np.int64)
    if inside.shape[1] < NUM_BUDGETS:
        padding = np.full((len(points), NUM_BUDGETS - inside.shape[1]), np.inf)
        inside = np.concatenate([inside, padding], axis=1)
    chosen = np.minimum(np.take_along_axis(inside, picked, axis=1), most)
    steps = np.arange(1, NUM_BUDGETS + 1) / NUM_BUDGETS
    tries: Floats = np.concatenate([chosen, least + (most - least) * steps], axis=1)
    tries.sort(axis=1)
    return tries
