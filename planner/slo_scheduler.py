"""The CacheSmith scheduler: the batch that lets most requests pass, now and of those left waiting.

This file holds the queue and what is known of replicas and requests; the decision itself is
`batch_choice`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from planner.batch_choice import BatchChoice, CacheSmithConfig, Situation
from planner.cost_model import PRICES, CostModel, Work
from planner.pass_curves import CurveBook, PassesOf, planned_passes
from planner.recompute_planner import RecomputePlanner
from planner.scheduler import (
    BatchDecision,
    QueueFullError,
    RefusalReason,
    RefusedRequest,
    ReplicaState,
    is_reusing,
    phase_key,
    request_shape,
    room_tokens,
)
from planner.types import RequestProfile
from planner.waiting_table import FULL_PREFILL_KEY, WaitingTable

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ALL_BUT_HOT = 0.9  # of the tokens hot on a request's best node: as good as that one
PROBE = Work(layers=64.0, rows=2e4, pairs=2e7, selected_pairs=2e7, reused=2e4)  # to compare machines with


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
        self._config = config
        self._planner = planner
        self._passes = passes
        self._table = WaitingTable()
        self._book: CurveBook | None = None
        self._keys: dict[tuple[object, ...], int] = {}
        # one replica of each node, of the latest call: new requests are looked up in its chunks
        self._nodes: dict[str, ReplicaState] = {}
        self._node_numbers: dict[str, int] = {}
        self._speeds: dict[str, tuple[CostModel, float]] = {}
        self._fastest = 1.0
        self._most_tokens: dict[str, int] = {}  # room seen at each replica, if it does not tell
        self._capacity: tuple[int, int, bool] = (0, 0, False)
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
        key = FULL_PREFILL_KEY
        if is_reusing(profile):
            key = self._keys.setdefault(phase_key(profile), len(self._keys) + 1)
        bucket = int(np.searchsorted(self._config.bucket_tokens, profile.num_context_tokens))
        row = self._table.add(
            profile, now_ms=self._time(now_ms), key=key, bucket=bucket, rounds=self._rounds
        )
        if self._book is not None:
            self._look_up_row(row)
        else:
            self._unseen.append(profile.request_id)

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
        slack = self._table.slack_ms(self._time(now_ms))
        floor = self._table.floats("floor_ms") * self._fastest
        impossible = self._table.alive & self._too_long()
        hopeless = self._table.alive & (slack < floor) & ~impossible
        refused = []
        for mask, reason, wanted in (
            (impossible, RefusalReason.IMPOSSIBLE, self._config.refuse_impossible),
            (hopeless, RefusalReason.HOPELESS, self._config.refuse_hopeless),
        ):
            for row in np.flatnonzero(mask) if wanted else ():
                profile = self._table.entry(int(row)).profile
                self._table.remove(profile.request_id)
                refused.append(
                    RefusedRequest(
                        request_id=profile.request_id,
                        reason=reason,
                        needed_ms=float(floor[row]),
                        slack_ms=float(slack[row]),
                    )
                )
        return refused

    def next_batch(
        self, replicas: Sequence[ReplicaState], *, now_ms: float
    ) -> BatchDecision | None:
        now_ms = self._time(now_ms)
        if not len(self._table) or not replicas:
            return None
        replicas = sorted(replicas, key=lambda r: r.replica_id)
        self._meet(replicas)
        if self._table.compact():
            self._next_lookup = 0
        self._look_up()
        free = [r for r in replicas if r.is_free]
        slack = self._table.slack_ms(now_ms)
        forced, free = self._overdue(slack, free)
        if not free:
            return None
        leader = self._leader(slack, free) if forced is None else forced
        if leader is None:
            return None
        chosen = self._best_replica(leader, free)
        forced_late = forced is not None and bool(
            slack[forced] < self._table.floats("floor_ms")[forced] * self._fastest
        )
        situation = self._situation(chosen, replicas, slack, now_ms, forced)
        choice = BatchChoice(self._config, self._planner, self._passes, situation)
        decision = choice.timely() or choice.late()
        if decision is not None:
            self._rounds += 1.0 / len(replicas)
            self._batches_since_late += 1
            if forced_late:
                self._batches_since_late = 0
            for profile in decision.requests:
                self._table.remove(profile.request_id)
        return decision

    # --- what is known of the replicas -------------------------------------------------------

    def _time(self, now_ms: float) -> float:
        """The caller's clock, or its latest sane answer."""
        if isfinite(now_ms):
            self._now_ms = now_ms
        return self._now_ms

    def _meet(self, replicas: Sequence[ReplicaState]) -> None:
        """Take over nodes, speeds and capacities."""
        if self._book is None or not any(
            _prices(r.cost) == _prices(self._book.cost) for r in replicas
        ):
            reference = replace(replicas[0].cost, scale=1.0)
            self._book = CurveBook(
                self._planner, self._passes, reference, reserve=self._config.reserve
            )
            self._speeds.clear()
            for row in np.flatnonzero(self._table.alive):
                self._set_curve(int(row), num_cached=None, homes=0)
        self._nodes = {}
        for r in replicas:
            self._nodes.setdefault(_node(r), r)
        self._fastest = min(self._speed(r) for r in replicas)
        if len(self._most_tokens) > 4096:
            self._most_tokens.clear()
        plain = reuse = 0
        told = True
        for r in replicas:
            most = r.max_kv_tokens
            if most is None:
                told = False
                most = max(r.free_kv_tokens, self._most_tokens.get(r.replica_id, 0))
                self._most_tokens[r.replica_id] = most
            plain = max(plain, most)
            reuse = max(reuse, most + r.parking_tokens)
        self._capacity = (plain, reuse, told)

    def _speed(self, r: ReplicaState) -> float:
        """How much longer this replica takes than the reference."""
        known = self._speeds.get(r.replica_id)
        if known is not None and known[0] is r.cost:
            return known[1]
        assert self._book is not None
        reference = self._book.cost
        reference_ms = reference.work_ms(PROBE)
        factor = r.cost.work_ms(PROBE) / reference_ms if reference_ms > 0.0 else 1.0
        if len(self._speeds) > 4096:
            self._speeds.clear()
        self._speeds[r.replica_id] = (r.cost, factor)
        return factor

    def _too_long(self) -> Bools:
        """Rows that fit no replica, however empty."""
        plain, reuse, told = self._capacity
        if not told:
            return np.zeros(self._table.num_rows, np.bool_)
        result: Bools = self._table.ints("tokens") > np.where(self._is_plain(), plain, reuse)
        return result

    def _fits(self, replicas: Sequence[ReplicaState]) -> Bools:
        """Rows that one of the replicas could take now."""
        plain = max(r.free_kv_tokens for r in replicas)
        reuse = max(r.free_kv_tokens + r.parking_tokens for r in replicas)
        room = np.where(self._is_plain(), plain, reuse)
        result: Bools = self._table.alive & (self._table.ints("tokens") <= room)
        return result

    def _is_plain(self) -> Bools:
        result: Bools = self._table.ints("key") == FULL_PREFILL_KEY
        return result

    # --- what is known of the requests -------------------------------------------------------

    def _look_up(self) -> None:
        """Count the stored chunks of requests that came before any replica, and others in turns."""
        left = self._config.max_lookups
        while self._unseen and left:
            request_id = self._unseen.popleft()
            if (row := self._table.row(request_id)) is not None:
                self._look_up_row(row)
                left -= 1
        for _ in range(min(left // 4, self._table.num_rows)):
            self._next_lookup = (self._next_lookup + 1) % self._table.num_rows
            if self._table.alive[self._next_lookup]:
                self._look_up_row(self._next_lookup)

    def _look_up_row(self, row: int) -> None:
        profile = self._table.entry(row).profile
        counts: dict[str, int] = {}
        if is_reusing(profile):
            for node, r in self._nodes.items():
                counts[node] = request_shape(profile, r.resident).num_cached
        best = max(counts.values(), default=0)
        if profile.num_context_tokens and counts:
            share = best / profile.num_context_tokens
            self._cached_share += 0.05 * (share - self._cached_share)
        homes = 0
        for node, cached in counts.items():
            if cached and cached >= ALL_BUT_HOT * best:
                homes |= self._bit(node)
        self._set_curve(row, num_cached=best, homes=homes)

    def _bit(self, node: str) -> int:
        """Of a set of nodes in 62 bits; of more nodes, some share one."""
        number = self._node_numbers.setdefault(node, len(self._node_numbers))
        return 1 << number % 62

    def _set_curve(self, row: int, *, num_cached: int | None, homes: int) -> None:
        """num_cached: of the context; None: not counted yet, as many as usual."""
        assert self._book is not None
        entry = self._table.entry(row)
        self._table.ints("homes")[row] = homes
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
        chosen: ReplicaState,
        replicas: Sequence[ReplicaState],
        slack: Floats,
        now_ms: float,
        forced: int | None,
    ) -> Situation:
        speed = self._speed(chosen)
        at_home = None
        if len(self._nodes) > 1:
            homes = self._table.ints("homes")
            at_home = (homes == 0) | ((homes & self._bit(_node(chosen))) != 0)
        return Situation(
            table=self._table,
            chosen=chosen,
            others=[r for r in replicas if r is not chosen],
            now_ms=now_ms,
            slack_ms=slack,
            timely=self._table.alive & (slack >= self._table.floats("floor_ms") * speed),
            fits=self._fits([chosen]),
            too_long=self._too_long(),
            at_home=at_home,
            speed=speed,
            slowest=max(map(self._speed, replicas)),
            forced=forced,
        )

    # --- which replica, which request first --------------------------------------------------

    def _overdue(
        self, slack: Floats, free: list[ReplicaState]
    ) -> tuple[int | None, list[ReplicaState]]:
        """The oldest overdue request that can run now, and the replicas that may take a batch.

        An older one that fits no free replica yet keeps the emptiest one from taking others.
        """
        table = self._table
        overdue = table.alive & (table.floats("rounds") <= self._rounds - self._config.max_rounds)
        if self._batches_since_late + 1 < self._config.late_every:
            overdue &= slack >= table.floats("floor_ms") * self._fastest
        if not free or not overdue.any():
            return None, free
        plain, reuse, _ = self._capacity
        could = table.ints("tokens") <= np.where(self._is_plain(), plain, reuse)
        fits = self._fits(free)
        waits_for_room = np.flatnonzero(overdue & could & ~fits)
        runs = np.flatnonzero(overdue & fits)
        if len(waits_for_room) and not (len(runs) and runs[0] < waits_for_room[0]):
            profile = table.entry(int(waits_for_room[0])).profile
            emptiest = max(free, key=lambda r: (room_tokens(profile, r), r.replica_id))
            free = [r for r in free if r is not emptiest]
            runs = np.flatnonzero(overdue & self._fits(free)) if free else runs[:0]
        return (int(runs[0]) if len(runs) else None), free

    def _leader(self, slack: Floats, free: Sequence[ReplicaState]) -> int | None:
        """The earliest deadline that can be met, or the oldest request if none can."""
        fits = self._fits(free)
        timely = fits & (slack >= self._table.floats("floor_ms") * self._fastest)
        if timely.any():
            return int(np.argmin(np.where(timely, slack, np.inf)))
        return int(np.argmax(fits)) if fits.any() else None

    def _best_replica(self, row: int, free: Sequence[ReplicaState]) -> ReplicaState:
        """The one where most of the request's tokens are hot; then the emptiest."""
        profile = self._table.entry(row).profile
        cached: dict[str, int] = {}

        def preference(r: ReplicaState) -> tuple[int, int]:
            node = _node(r)
            if node not in cached:
                cached[node] = request_shape(profile, r.resident).num_cached
            return cached[node], r.free_kv_tokens

        fitting = [r for r in free if profile.num_prompt_tokens <= room_tokens(profile, r)]
        return max(fitting, key=preference)


def _node(r: ReplicaState) -> str:
    return r.node_id or r.replica_id


def _prices(cost: CostModel) -> tuple[float, ...]:
    """What makes two machines differ in more than their speed."""
    return tuple(getattr(cost, name) for name in PRICES)
