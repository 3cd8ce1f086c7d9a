"""The CacheSmith scheduler: the batch that lets most requests pass, now and of those left waiting.

This file holds the queue and what is known of replicas and requests; the decision itself is
`batch_choice`.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from planner.batch_choice import BatchChoice, CacheSmithConfig, Situation
from planner.cost_model import CostModel, Work
from planner.pass_curves import CurveBook, Pace, PassesOf, planned_passes
from planner.recompute_planner import RecomputePlanner
from planner.replica_table import ReplicaTable, node_of
from planner.scheduler import (
    BatchDecision,
    QueueFullError,
    RefusalReason,
    RefusedRequest,
    ReplicaState,
    hot_tokens,
    is_reusing,
    phase_key,
    request_shape,
    room_tokens,
)
from planner.timeline import Link
from planner.types import RequestProfile
from planner.waiting_table import FULL_PREFILL_KEY, WaitingQueue, WaitingTable

Bools = NDArray[np.bool_]

ALL_BUT_HOT = 0.9  # of the tokens hot on a request's best node: as good as that one
# to compare machines with
PROBE = Work(layers=64.0, rows=2e4, pairs=2e7, selected_pairs=2e7, reused=2e4)


class CacheSmithScheduler:
    """See the module. All methods are called from one thread; time arrives as an argument.

    planner: plans the chosen batches, and single requests for their curves.
    passes: what a plan promises; `one_each` for planners that do not say.
    """

    def __init__(
        self,
        config: CacheSmithConfig,
        planner: RecomputePlanner,
        *,
        passes: PassesOf = planned_passes,
    ) -> None:
        import_module("planner.decision_kernel")  # compiles it, before any request waits
        self._config = config
        self._planner = planner
        self._passes = passes
        self._table = WaitingTable()
        self._book: CurveBook | None = None
        self._keys: dict[tuple[object, ...], int] = {}
        self._replicas = ReplicaTable()
        self._node_numbers: dict[str, int] = {}
        # of each replica, behind what it was made of
        self._paces: dict[str, tuple[CostModel, Link | None, float, Pace]] = {}
        self._most_tokens: dict[str, int] = {}  # room seen at each replica, if it does not tell
        self._capacity = (0, 0)
        self._rounds = 0.0
        self._batches_since_late = 0  # since an overdue request that is late was put into one
        self._next_lookup = 0
        self._unseen: deque[str] = deque()
        self._cached_share = 1.0  # of context tokens, of the requests looked up
        self._now_ms = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._table)

    def submit(self, profile: RequestProfile, *, now_ms: float) -> None:
        if profile.request_id in self._table:
            raise ValueError(f"request {profile.request_id} is already waiting")
        if len(self._table) >= self._config.limits.max_waiting:
            raise QueueFullError(len(self._table), retry_after_s=1.0)
        self._tidy()
        key = FULL_PREFILL_KEY
        if is_reusing(profile):
            key = self._keys.setdefault(phase_key(profile), len(self._keys) + 1)
        bucket = bisect_left(self._config.bucket_tokens, profile.num_context_tokens)
        row = self._table.add(
            profile, now_ms=self._time(now_ms), key=key, bucket=bucket, rounds=self._rounds
        )
        if self._book is None:
            self._unseen.append(profile.request_id)
            return
        try:
            self._look_up_row(row)
        except BaseException:  # what cannot be planned does not wait
            self._table.remove(profile.request_id)
            raise

    def cancel(self, request_id: str) -> bool:
        return self._table.remove(request_id) is not None

    def take_refused(self, *, now_ms: float) -> Sequence[RefusedRequest]:
        """Requests too long for all replicas, and hopeless ones if the configuration says so.

        Nothing is refused before a replica has been seen. A request is hopeless if its slack is
        shorter than its floor cost on the fastest replica; `impossible` needs replicas that tell
        their capacity.
        """
        if self._book is None or not len(self._table):
            return ()
        queue = self._table.queue(self._time(now_ms))
        floor_ms = queue.times(self._replicas.fastest).floor_ms
        impossible = self._too_long(queue)
        hopeless = (queue.slack_ms < floor_ms) & ~impossible
        refused = []
        for mask, reason, wanted in (
            (impossible, RefusalReason.IMPOSSIBLE, self._config.refuse_impossible),
            (hopeless, RefusalReason.HOPELESS, self._config.refuse_hopeless),
        ):
            for place in mask.nonzero()[0] if wanted else ():
                profile = self._table.entry(queue.rows[place]).profile
                self._table.remove(profile.request_id)
                refused.append(
                    RefusedRequest(
                        request_id=profile.request_id,
                        reason=reason,
                        needed_ms=float(floor_ms[place]),
                        slack_ms=float(queue.slack_ms[place]),
                    )
                )
        return refused

    def next_batch(
        self, replicas: Sequence[ReplicaState], *, now_ms: float
    ) -> BatchDecision | None:
        now_ms = self._time(now_ms)
        if not len(self._table) or not replicas:
            return None
        self._meet(replicas)
        self._tidy()
        self._look_up()
        free = self._replicas.free()
        if not free:
            return None
        queue = self._table.queue(now_ms)
        can_be_timely = queue.slack_ms >= queue.times(self._replicas.fastest).floor_ms
        forced, free = self._overdue(queue, can_be_timely, free)
        decision = None
        while free and decision is None:
            leader = self._leader(queue, can_be_timely, free) if forced is None else forced
            if leader is None:
                return None
            chosen = self._best_replica(self._table.entry(queue.rows[leader]).profile, free)
            situation = self._situation(queue, chosen, can_be_timely, now_ms, forced)
            choice = BatchChoice(self._config, self._planner, self._passes, self._table, situation)
            decision = choice.timely() or choice.late()
            free = [r for r in free if r is not chosen]
        if decision is not None:
            self._rounds += 1.0 / len(replicas)
            self._batches_since_late += 1
            if forced is not None and not can_be_timely[forced]:
                self._batches_since_late = 0
            for profile in decision.requests:
                self._table.remove(profile.request_id)
        return decision

    def _tidy(self) -> None:
        """Forget what belongs to requests that are gone."""
        if self._table.compact():
            self._next_lookup = 0
        if not len(self._table):
            self._keys.clear()
            self._node_numbers.clear()
        if len(self._unseen) > 2 * len(self._table) + 32:
            self._unseen = deque(i for i in self._unseen if i in self._table)

    # --- what is known of the replicas -------------------------------------------------------

    def _time(self, now_ms: float) -> float:
        """The caller's clock, or its latest sane answer."""
        if isfinite(now_ms):
            self._now_ms = now_ms
        return self._now_ms

    def _meet(self, replicas: Sequence[ReplicaState]) -> None:
        """Take over nodes, paces and capacities.

        Curves are made anew for another model; for other machines their paces have to do.
        """
        if self._book is None or replicas[0].cost.num_layers != self._book.cost.num_layers:
            first = min(replicas, key=lambda r: r.replica_id)
            reference = replace(first.cost, scale=1.0)
            self._book = CurveBook(
                self._planner, self._passes, reference, reserve=self._config.reserve
            )
            self._paces.clear()
            self._replicas = ReplicaTable()
            for row in self._table.live_rows():
                self._set_curve(int(row), num_cached=None, homes=0)
        if len(self._most_tokens) + len(self._paces) > 4096 + 2 * len(replicas):
            self._most_tokens.clear()
            self._paces.clear()
        plain, reuse = self._capacity  # one that was larger may come back
        for r in self._replicas.take(replicas, self._pace):
            most = r.max_kv_tokens
            if most is None:
                most = max(r.free_kv_tokens, self._most_tokens.get(r.replica_id, 0))
                self._most_tokens[r.replica_id] = most
            plain = max(plain, most)
            reuse = max(reuse, most + r.parking_tokens)
        self._capacity = plain, reuse

    def _pace(self, r: ReplicaState) -> Pace:
        known = self._paces.get(r.replica_id)
        if known is not None:
            cost, link, token_bytes, pace = known
            if cost is r.cost and link is r.link and token_bytes == r.kv_token_bytes:
                return pace
        assert self._book is not None
        reference_ms = self._book.cost.work_ms(PROBE)
        pace = Pace(r.cost.work_ms(PROBE) / reference_ms if reference_ms > 0.0 else 1.0)
        if r.link is not None and r.kv_token_bytes:
            token_ms = r.kv_token_bytes / r.link.bytes_per_ms
            pace = Pace(pace.speed, token_ms, r.link.latency_ms)
        self._paces[r.replica_id] = (r.cost, r.link, r.kv_token_bytes, pace)
        return pace

    def _too_long(self, queue: WaitingQueue) -> Bools:
        """Those that fit no replica, however empty."""
        if not self._replicas.all_tell:
            return np.zeros(len(queue), np.bool_)
        return ~_fits(queue, *self._capacity)

    # --- what is known of the requests -------------------------------------------------------

    def _look_up(self) -> None:
        """Count the stored chunks of requests that came before any replica, and others in turns."""
        left = self._config.max_lookups
        while self._unseen and left:
            request_id = self._unseen.popleft()
            if (row := self._table.row(request_id)) is not None:
                self._look_up_row(row)
                left -= 1
        for _ in range(min(left // 8, self._table.num_rows)):
            self._next_lookup = (self._next_lookup + 1) % self._table.num_rows
            if self._table.is_live(self._next_lookup):
                self._look_up_row(self._next_lookup)

    def _look_up_row(self, row: int) -> None:
        profile = self._table.entry(row).profile
        hot: dict[str, int] = {}
        stored = 0
        if is_reusing(profile):
            has_shared = any(chunk.is_shared for chunk in profile.chunks)
            for node, r in self._replicas.nodes.items():
                hot[node] = hot_tokens(profile, r.resident)
                num = hot[node]
                if has_shared:
                    shape = request_shape(profile, r.resident, can_load=r.can_load)
                    num = shape.num_cached
                stored = max(stored, num)
        if profile.num_context_tokens and hot:
            share = stored / profile.num_context_tokens
            self._cached_share += 0.05 * (share - self._cached_share)
        homes, best = 0, max(hot.values(), default=0)
        if best:
            for node, num in hot.items():
                if num >= ALL_BUT_HOT * best:
                    homes |= self._bit(node)
        self._set_curve(row, num_cached=stored, homes=homes)

    def _bit(self, node: str) -> int:
        """Of a set of nodes in 62 bits; of more nodes, some share one."""
        number = self._node_numbers.setdefault(node, len(self._node_numbers))
        return 1 << number % 62

    def _set_curve(self, row: int, *, num_cached: int | None, homes: int) -> None:
        """num_cached: of the context; None: not counted yet, as many as usual."""
        assert self._book is not None
        entry = self._table.entry(row)
        self._table.set_homes(row, homes)
        if entry.has_curve and num_cached == entry.num_cached:
            return
        profile = entry.profile
        if num_cached is None:
            entry.num_cached = -1
            reusing = is_reusing(profile)
            num_cached = int(self._cached_share * profile.num_context_tokens) if reusing else 0
        else:
            entry.num_cached = num_cached
        entry.has_curve = True
        curve = self._book.curve(
            profile.num_prompt_tokens, num_cached, policy=profile.policy, config=profile.config
        )
        self._table.set_curve(row, curve)

    def _situation(
        self,
        queue: WaitingQueue,
        chosen: ReplicaState,
        can_be_timely: Bools,
        now_ms: float,
        forced: int | None,
    ) -> Situation:
        times = queue.times(self._pace(chosen))
        others_ms = self._replicas.others_ms(chosen, now_ms=now_ms)
        at_home = None
        if len(self._replicas.nodes) > 1:
            at_home = (queue.homes == 0) | ((queue.homes & self._bit(node_of(chosen))) != 0)
        return Situation(
            queue=queue,
            chosen=chosen,
            now_ms=now_ms,
            others_ms=others_ms,
            has_free_others=self._replicas.num_free > 1,
            times=times,
            speed=self._pace(chosen).speed,
            queue_times=queue.times(self._replicas.slowest),
            timely=(queue.slack_ms >= times.floor_ms) & ~self._too_long(queue),
            hopeless=~can_be_timely,
            fits=_fits_now(queue, [chosen]),
            at_home=at_home,
            forced=forced,
        )

    # --- which replica, which request first --------------------------------------------------

    def _overdue(
        self, queue: WaitingQueue, can_be_timely: Bools, free: list[ReplicaState]
    ) -> tuple[int | None, list[ReplicaState]]:
        """The oldest overdue request that can run now, and the replicas that may take a batch.

        An older one that fits no free replica yet keeps the emptiest one from taking others.
        """
        overdue = queue.rounds <= self._rounds - self._config.max_rounds
        if self._batches_since_late + 1 < self._config.late_every:
            overdue &= can_be_timely
        if not overdue.any():
            return None, free
        plain, reuse = self._capacity
        fits = _fits_now(queue, free)
        runs = queue.oldest(overdue & fits)
        waits_for_room = queue.oldest(overdue & _fits(queue, plain, reuse) & ~fits)
        if waits_for_room is not None and (
            runs is None or queue.rows[waits_for_room] < queue.rows[runs]
        ):
            profile = self._table.entry(queue.rows[waits_for_room]).profile
            emptiest = max(free, key=lambda r: (room_tokens(profile, r), r.replica_id))
            free = [r for r in free if r is not emptiest]
            runs = queue.oldest(overdue & _fits_now(queue, free)) if free else None
        return runs, free

    def _leader(
        self, queue: WaitingQueue, can_be_timely: Bools, free: Sequence[ReplicaState]
    ) -> int | None:
        """The earliest deadline that can be met, or the oldest request if none can."""
        fits = _fits_now(queue, free)
        timely = fits & can_be_timely
        return int(timely.argmax()) if timely.any() else queue.oldest(fits)

    def _best_replica(self, profile: RequestProfile, free: Sequence[ReplicaState]) -> ReplicaState:
        """The one where most of the request's tokens are hot; then the emptiest."""
        hot: dict[str, int] = {}
        reusing = is_reusing(profile)

        def preference(r: ReplicaState) -> tuple[int, int, str]:
            node = node_of(r)
            if node not in hot:
                hot[node] = hot_tokens(profile, r.resident) if reusing else 0
            return -hot[node], -r.free_kv_tokens, r.replica_id

        fitting = [r for r in free if profile.num_prompt_tokens <= room_tokens(profile, r)]
        return min(fitting, key=preference)


def _fits(queue: WaitingQueue, plain: int, reuse: int) -> Bools:
    """Which requests fit into this room, given for full prefills and for others."""
    room = plain if plain == reuse else np.where(queue.key == FULL_PREFILL_KEY, plain, reuse)
    result: Bools = queue.tokens <= room
    return result


def _fits_now(queue: WaitingQueue, replicas: Sequence[ReplicaState]) -> Bools:
    """Which requests one of the replicas could take now."""
    plain = max(r.free_kv_tokens for r in replicas)
    return _fits(queue, plain, max(r.free_kv_tokens + r.parking_tokens for r in replicas))
