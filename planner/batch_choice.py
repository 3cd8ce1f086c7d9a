"""One decision: the batch for one replica, and its budget.

A candidate batch is worth its expected passes under a budget, plus those of the requests left
waiting while the replica is busy for that long (`QueueProjection`). A longer budget buys passes in
the batch and costs passes in the queue. The candidates are compared by curves (`pass_curves`), the
best few at more budgets, and of those the best few are planned for real.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from planner.candidate_batches import BatchLimits, candidate_batches
from planner.pass_curves import AMPLE_MS, PassesOf, Times
from planner.queue_projection import QueueProjection
from planner.recompute_planner import RecomputePlanner
from planner.scheduler import (
    BatchDecision,
    JudgedBatch,
    QueueLimits,
    ReplicaState,
    plan_input,
    room_tokens,
)
from planner.types import BatchPlan, RequestProfile
from planner.waiting_table import FULL_PREFILL_KEY, WaitingQueue, WaitingTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

EPS_MS = 1e-6
DIGITS = 6  # of expected passes, that make a difference
MAX_KEYS = 4  # kinds of phases that a decision looks at, those with the earliest deadlines
MIN_CANDIDATES, MAX_CANDIDATES = 8, 32
MIN_SEARCHED, MAX_SEARCHED = 1, 6  # candidates tried with budgets between least and most
BUDGETS_TRIED = 8  # of each of these, in `decision_kernel.search`


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

    limits: QueueLimits = field(default_factory=QueueLimits)
    bucket_tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384)  # of context, closed
    max_rounds: int = 16
    late_every: int = 16
    refuse_hopeless: bool = False
    refuse_impossible: bool = True
    reserve: float = 0.0  # share of a budget that the planner keeps back
    max_exhaustive: int = 5  # up to so many requests of a kind, every subset is a candidate
    num_planned: int = 1  # candidates that are planned for real in a decision
    max_lookups: int = 32  # requests whose stored chunks are counted in a decision
    effort: int = 2_048  # candidates × waiting requests that a decision looks at, about

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
    """What a decision starts from. Requests are named by their place in the queue.

    others_ms: when the other replicas are free, from now, in order.
    times: of the requests on the chosen replica; queue_times: on the slowest one.
    timely: can be on time at the floor, on the chosen replica; hopeless: on none; fits: the chosen
    one can take it now.
    at_home: its chunks are hot on the chosen replica's node, or nowhere; None: there is one node.
    forced: must be in the batch.
    """

    queue: WaitingQueue
    chosen: ReplicaState
    now_ms: float
    others_ms: Floats
    has_free_others: bool
    times: Times
    speed: float
    queue_times: Times
    timely: Bools
    hopeless: Bools
    fits: Bools
    at_home: Bools | None
    forced: int | None


@dataclass(frozen=True, slots=True)
class _Candidates:
    """All candidates that can be on time, one a row."""

    members: Ints  # [num_candidates, max_members], −1 fills up
    parked: Bools
    limits: Floats  # [num_candidates, 4], and
    curves: Floats  # [num_candidates, 3, num_segments]: as of `candidate_curves_ref`


@dataclass(frozen=True, slots=True)
class _Offer:
    """A candidate with how long it would take, and the passes of the queue meanwhile."""

    places: list[int]
    parked: bool
    occupied_ms: float
    slack_ms: float  # the smallest of those that can be on time: the longest budget
    most_ms: float  # the longest budget that makes a difference
    waiting_passes: float


class BatchChoice:
    def __init__(
        self,
        config: CacheSmithConfig,
        planner: RecomputePlanner,
        passes: PassesOf,
        table: WaitingTable,
        situation: Situation,
    ) -> None:
        self._config = config
        self._planner = planner
        self._passes = passes
        self._table = table
        self._s = situation

    def timely(self) -> BatchDecision | None:
        """The best batch of requests that can be on time, and of the forced one if there is one."""
        projection = self._projection()
        batches = self._batches(self._config.effort // max(1, projection.num_columns))
        candidates = self._candidates(batches) if batches else None
        if candidates is None:
            if self._s.forced is None:
                return None
            places = [self._s.forced]  # late here, though perhaps not where its chunks are
            return self._decision(places, self._plan(places, 0.0), judged=())
        offers = self._search(candidates, projection)
        planned = [self._planned(projection, offer) for offer in offers]
        planned.sort(key=lambda entry: round(entry[2].value, DIGITS), reverse=True)
        places, plan, _ = planned[0]
        return self._decision(places, plan, judged=tuple(judged for *_, judged in planned))

    def late(self) -> BatchDecision | None:
        """The oldest request that misses its deadline anyway, at the floor.

        It runs alone, so that whoever comes meanwhile and can be on time waits for no more.
        """
        head = self._s.queue.oldest(self._s.fits & self._s.hopeless)
        if head is None:
            return None
        slack_ms = max(0.0, float(self._s.queue.slack_ms[head]))
        return self._decision([head], self._plan([head], slack_ms), judged=())

    # --- candidates --------------------------------------------------------------------------

    def _projection(self) -> QueueProjection:
        """On the slowest replica's costs."""
        s, times = self._s, self._s.queue_times
        return QueueProjection.of(
            s.timely,
            slack_ms=s.queue.slack_ms,
            floor_ms=times.floor_ms,
            floor_passes=times.floor_passes,
            segment_ms=times.segment_ms / (1.0 - self._config.reserve),
            segment_passes=times.segment_passes,
            others_ms=s.others_ms,
        )

    def _limits(self, place: int, *, parking: bool) -> BatchLimits:
        limits, chosen = self._config.limits, self._s.chosen
        room = room_tokens(self._profile(place), chosen) if parking else chosen.free_kv_tokens
        return BatchLimits(
            max_requests=min(limits.max_batch_requests, chosen.free_seqs),
            max_tokens=limits.max_batch_tokens,
            room_tokens=room,
        )

    def _batches(self, most: int) -> dict[tuple[int, ...], bool]:
        """Candidates, and whether each is parked.

        In a burst, when the KV blocks cannot hold the requests that could run, the search is
        repeated with the room that parking prompts in host memory gives.
        """
        s = self._s
        key, tokens = s.queue.key, s.queue.tokens
        ready = s.timely & s.fits
        if s.forced is not None:
            ready &= key == key[s.forced]
            ready[s.forced] = False
        order = ready.nonzero()[0]
        keys = key.take(order)
        is_one = len(keys) > 0 and bool((keys == keys[0]).all())
        kinds = [int(keys[0])] if is_one else list(dict.fromkeys(keys.tolist()))
        if s.forced is not None:
            kinds = [int(key[s.forced])]
        most = min(MAX_CANDIDATES, max(MIN_CANDIDATES, most))
        found: dict[tuple[int, ...], bool] = {}
        for kind in kinds[:MAX_KEYS]:
            of_kind = order[keys == kind] if len(kinds) > 1 else order
            lengths = tokens.take(of_kind)
            first = s.forced if s.forced is not None else int(of_kind[0])
            for parking in (False, True):
                limits = self._limits(first, parking=parking)
                if s.forced is not None and tokens[s.forced] > limits.room_tokens:
                    continue
                batches = candidate_batches(
                    of_kind[lengths <= limits.room_tokens],
                    tokens=tokens,
                    buckets=s.queue.bucket,
                    at_home=s.at_home,
                    limits=limits,
                    forced=s.forced,
                    max_exhaustive=self._config.max_exhaustive,
                    most=most,
                )
                for batch in batches:
                    found.setdefault(batch, parking)
                wanted = int(lengths.sum()) + int(tokens[first]) * (s.forced is not None)
                is_burst = wanted > s.chosen.free_kv_tokens
                if kind == FULL_PREFILL_KEY or not s.chosen.parking_tokens or not is_burst:
                    break
        return found

    def _candidates(self, batches: dict[tuple[int, ...], bool]) -> _Candidates | None:
        """Those that keep the deadlines of all members that can be kept."""
        from planner.decision_kernel import candidate_curves

        s, times = self._s, self._s.times
        width = max(map(len, batches))
        members = np.array([batch + (-1,) * (width - len(batch)) for batch in batches])
        rows, limits, curves = candidate_curves(
            members,
            s.timely,
            np.ones(len(s.queue), np.bool_) if s.at_home is None else s.at_home,
            s.queue.slack_ms,
            times.floor_ms,
            s.queue.cold_ms * s.speed,
            times.floor_passes,
            times.segment_ms,
            times.segment_passes,
            s.chosen.cost.shared_ms,
            1.0 - self._config.reserve,
        )
        if not len(rows):
            return None
        parked = np.array(list(batches.values()))
        if len(rows) < len(members):
            members, parked = members[rows], parked[rows]
        return _Candidates(members, parked, limits, curves)

    # --- budgets -----------------------------------------------------------------------------

    def _search(self, c: _Candidates, projection: QueueProjection) -> list[_Offer]:
        """Offers of different candidates, the best first."""
        from planner.decision_kernel import search

        effort, columns = self._config.effort, max(1, projection.num_columns)
        sizes = (c.members >= 0).sum(axis=1)
        rows, occupied_ms, waiting = search(
            c.members,
            c.parked,
            sizes if self._s.has_free_others else -sizes,
            c.limits,
            c.curves,
            projection.queue,
            projection.column_of,
            projection.other,
            projection.other_column_of,
            projection.first_ms,
            1.0 - self._config.reserve,
            min(MAX_SEARCHED, max(MIN_SEARCHED, effort // (BUDGETS_TRIED * columns))),
            2 * len(c.members) * columns <= effort,
            self._config.num_planned,
        )
        offers = []
        found = zip(rows.tolist(), occupied_ms.tolist(), waiting.tolist(), strict=True)
        for row, ms, passes in found:
            _, _, slack_ms, most_ms = c.limits[row].tolist()
            places = c.members[row, : sizes[row]].tolist()
            offers.append(_Offer(places, bool(c.parked[row]), ms, slack_ms, most_ms, passes))
        return offers

    def _planned(
        self, projection: QueueProjection, offer: _Offer
    ) -> tuple[list[int], BatchPlan, JudgedBatch]:
        """What the offer is worth with the planner's own plan."""
        places = offer.places
        # where more time makes no difference, a machine that is slower than expected may take it
        is_most = offer.occupied_ms >= offer.most_ms
        budget_ms = offer.slack_ms if is_most else offer.occupied_ms
        # nobody to be on time for: the floor
        plan = self._plan(places, min(budget_ms, AMPLE_MS) if isfinite(budget_ms) else 0.0)
        slack_ms = self._s.queue.slack_ms[places].tolist()
        on_time = sum(slack >= plan.expected_ms - EPS_MS for slack in slack_ms)
        waiting = offer.waiting_passes
        if plan.expected_ms > 1.01 * offer.occupied_ms:
            occupied_ms = np.array([plan.expected_ms])
            waiting = float(projection.passes(np.array([places]), occupied_ms)[0])
        judged = JudgedBatch(
            request_ids=tuple(self._profile(place).request_id for place in places),
            budget_ms=plan.budget_ms,
            expected_ms=plan.expected_ms,
            expected_passes=self._passes(plan) * on_time / len(places),
            waiting_passes=waiting,
            parked=offer.parked,
        )
        return places, plan, judged

    def _profile(self, place: int) -> RequestProfile:
        return self._table.entry(self._s.queue.rows[place]).profile

    def _plan(self, places: Sequence[int], budget_ms: float) -> BatchPlan:
        chosen = self._s.chosen
        inputs = [plan_input(self._profile(place), chosen) for place in places]
        return self._planner.plan(
            inputs, budget_ms=max(0.0, budget_ms), cost=chosen.cost, link=chosen.link
        )

    def _decision(
        self, places: Sequence[int], plan: BatchPlan, *, judged: tuple[JudgedBatch, ...]
    ) -> BatchDecision:
        entries = [self._table.entry(self._s.queue.rows[place]) for place in places]
        return BatchDecision(
            replica_id=self._s.chosen.replica_id,
            requests=tuple(entry.profile for entry in entries),
            queue_ms=tuple(max(0.0, self._s.now_ms - entry.since_ms) for entry in entries),
            plan=plan,
            judged=judged,
        )
