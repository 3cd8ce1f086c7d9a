"""A scheduler with its replicas: the production one's event loop, on virtual time.

As `cluster/scheduler_service.py`: decisions are made `gather_ms` after a request came, whenever a
replica is free again or a request has ended, and every `tick_ms`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from planner.cost_model import PrefillShape
from planner.scheduler import BatchDecision, QueueFullError, SloScheduler
from planner.simulator.event_queue import EventQueue
from planner.simulator.gate import is_enough, late_choice
from planner.simulator.gauge import Gauge
from planner.simulator.hardware import Machine
from planner.simulator.outcomes import Ending, Outcomes
from planner.simulator.prefill import run_prefill
from planner.simulator.replica import RunningBatch, SimReplica, SimRequest
from planner.simulator.replica_board import ReplicaBoard
from planner.simulator.scenario import FleetSpec, LimitsSpec
from planner.timeline import Link
from planner.types import Signal

NOISE_AT_ONCE = 1_024
MAX_ATTEMPTS = 3  # replicas tried before the first token, as an ingress does


class Cell:
    """when_idle: is told of replicas that have nothing left to do."""

    def __init__(
        self,
        scheduler: SloScheduler,
        *,
        events: EventQueue,
        outcomes: Outcomes,
        machine: Machine,
        fleet: FleetSpec,
        limits: LimitsSpec,
        knows_link: bool,
        entropy_accuracy: float,
        rng: np.random.Generator,
        waiting: Gauge,
        prefilling: Gauge,
        when_idle: Callable[[SimReplica], None],
    ) -> None:
        self.board = ReplicaBoard(knows_link=knows_link)
        self._scheduler = scheduler
        self._events = events
        self._outcomes = outcomes
        self._machine = machine
        self._fleet = fleet
        self._limits = limits
        self._capacity = fleet.capacity(machine)
        self._entropy_accuracy = entropy_accuracy
        self._rng = rng
        self._slowness: list[float] = []
        self._waiting_gauge = waiting
        self._prefilling_gauge = prefilling
        self._when_idle = when_idle
        self._waiting: dict[str, SimRequest] = {}
        self._arrived: deque[tuple[SimRequest, float]] = deque()
        self._due_ms: float | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def waiting(self) -> list[SimRequest]:
        return list(self._waiting.values())

    # --- requests ----------------------------------------------------------------------------

    def submit(self, request: SimRequest) -> None:
        """A prompt that no replica can ever hold is refused, whatever the policy."""
        now = self._events.now_ms()
        if request.profile.num_prompt_tokens > self._capacity:
            self._outcomes.end(request.idx, Ending.REFUSED, now_ms=now)
            return
        try:
            self._scheduler.submit(request.profile, now_ms=now)
        except QueueFullError:
            self._outcomes.end(request.idx, Ending.REFUSED, now_ms=now)
            return
        request.since_ms = now
        self._waiting[request.profile.request_id] = request
        self._arrived.append((request, now))
        self._waiting_gauge.add(1, now_ms=now)
        self.dispatch_in(self._limits.gather_ms)

    def readmit(self, replica: SimReplica) -> None:
        """As their ingresses do with the requests of a replica that is lost; the deadlines stay.

        Who has its first token, or has been on `MAX_ATTEMPTS` replicas, fails.
        """
        now = self._events.now_ms()
        batch = replica.batch
        if batch is not None:
            self._prefilling_gauge.add(-len(batch.members), now_ms=now)
            replica.batch = None
            self._book(batch, share=(now - batch.started_ms) / batch.run.total_ms)
        for request in replica.active.values():
            request.attempts += 1
            has_begun = not np.isnan(self._outcomes.ttft_ms[request.idx])
            if has_begun or request.attempts >= MAX_ATTEMPTS:
                self._outcomes.end(request.idx, Ending.FAILED, now_ms=now)
                continue
            elapsed_ms = now - float(self._outcomes.arrival_ms[request.idx])
            request.profile = replace(request.profile, elapsed_ms=elapsed_ms)
            self._outcomes.num_readmitted += 1
            self.submit(request)

    def tick(self) -> None:
        """Give up who has waited too long, then decide."""
        now = self._events.now_ms()
        limit = now - self._limits.max_wait_ms
        while self._arrived and self._arrived[0][1] < limit:
            request, since_ms = self._arrived.popleft()
            request_id = request.profile.request_id
            if self._waiting.get(request_id) is request and request.since_ms == since_ms:
                self._scheduler.cancel(request_id)
                self._leave_queue(request_id)
                self._outcomes.end(request.idx, Ending.CANCELLED, now_ms=now)
        self._dispatch()

    def _leave_queue(self, request_id: str) -> SimRequest:
        self._waiting_gauge.add(-1, now_ms=self._events.now_ms())
        return self._waiting.pop(request_id)

    # --- decisions ---------------------------------------------------------------------------

    def dispatch_in(self, delay_ms: float) -> None:
        due = self._events.now_ms() + delay_ms
        if self._waiting and (self._due_ms is None or due < self._due_ms):
            self._due_ms = due
            self._events.at(due, self._dispatch_if_due)

    def _dispatch_if_due(self) -> None:
        if self._due_ms is not None and self._events.now_ms() >= self._due_ms:
            self._dispatch()

    def _dispatch(self) -> None:
        self._due_ms = None
        if not self._waiting:
            return
        now = self._events.now_ms()
        states = self.board.states()
        while self.board.num_free and self._waiting:
            decision = self._scheduler.next_batch(states, now_ms=now)
            if decision is None:
                break
            self._start(decision)
            states = self.board.states()
        if self._waiting:
            for refused in self._scheduler.take_refused(now_ms=now):
                request = self._leave_queue(refused.request_id)
                self._outcomes.end(request.idx, Ending.REFUSED, now_ms=now)

    def _start(self, decision: BatchDecision) -> None:
        now = self._events.now_ms()
        replica = self.board.replica(decision.replica_id)
        members = [self._leave_queue(profile.request_id) for profile in decision.requests]
        plans = decision.plan.requests
        shapes, loaded, stored = [], 0, 0
        for request in members:
            in_host, in_redis = replica.node.split(request.profile.chunks)
            cached = in_host + in_redis
            always = request.profile.num_prompt_tokens - cached
            shapes.append(PrefillShape(num_cached=cached, num_always=always))
            loaded += in_redis
            stored += cached
        layer_bytes = loaded * self._machine.kv_token_bytes
        behind = self._machine.cost.num_layers - plans[0].warmup_depth
        link = None
        if layer_bytes > 0.0 and behind > 0:
            share = replica.node.link.begin(layer_bytes, behind, now_ms=now)
            link = Link(bytes_per_ms=share, latency_ms=self._fleet.link_latency_ms)
        run = run_prefill(
            plans,
            shapes,
            layer_bytes=layer_bytes,
            link=link,
            cost=self._machine.cost,
            known=replica.cost,
            slowness=self._next_slowness(),
            pause_ms=replica.pause_ms,
        )
        batch = RunningBatch(
            members,
            plans,
            run,
            started_ms=now,
            expected_end_ms=now + decision.plan.expected_ms,
        )
        replica.begin(batch)
        self.board.changed(replica)
        self._prefilling_gauge.add(len(members), now_ms=now)
        self._outcomes.num_batches += 1
        seen = None if link is None else link.bytes_per_ms
        replica.observe_link(seen, loaded=loaded, stored=stored)
        cached_tokens = [shape.num_cached for shape in shapes]
        self._events.at(now + run.total_ms, partial(self._prefilled, replica, batch, cached_tokens))

    def _next_slowness(self) -> float:
        """Lognormal with mean 1."""
        if self._fleet.noise == 0.0:
            return 1.0
        if not self._slowness:
            noise = self._fleet.noise
            draws = self._rng.lognormal(-(noise**2) / 2, noise, NOISE_AT_ONCE)
            self._slowness = draws[::-1].tolist()
        return self._slowness.pop()

    # --- what happens on replicas ------------------------------------------------------------

    def _prefilled(
        self, replica: SimReplica, batch: RunningBatch, cached_tokens: list[int]
    ) -> None:
        if replica.batch is not batch:  # it died
            return
        now = self._events.now_ms()
        self._prefilling_gauge.add(-len(batch.members), now_ms=now)
        replica.ends(batch)
        self._book(batch)
        num_layers = self._machine.cost.num_layers
        signal = batch.plans[0].signal
        if signal is Signal.AUTO:
            signal = late_choice(batch.members, self._entropy_accuracy)
        members: Any = zip(
            batch.members, batch.plans, batch.run.coverages, cached_tokens, strict=True
        )
        for request, plan, coverage, num_cached in members:
            passed = is_enough(
                request,
                plan,
                signal=signal,
                coverage=coverage,
                num_cached=num_cached,
                num_layers=num_layers,
            )
            got = 1.0 if plan.warmup_depth >= num_layers else coverage
            self._outcomes.first_token(request.idx, now_ms=now, passed=passed, coverage=got)
            if plan.warmup_depth < num_layers:
                replica.node.keep(request.profile.chunks)
            self._decode(replica, replica.prefilled(request))
        self._freed(replica)

    def _book(self, batch: RunningBatch, *, share: float = 1.0) -> None:
        """share: of the prefill, that has been run"""
        self._outcomes.prefill_ms += share * batch.run.total_ms
        self._outcomes.stall_ms += share * batch.run.stall_ms

    def _decode(self, replica: SimReplica, begun: list[SimRequest]) -> None:
        for request in begun:
            self._events.after(
                replica.decode_ms(request), partial(self._finished, replica, request)
            )

    def _finished(self, replica: SimReplica, request: SimRequest) -> None:
        if not replica.is_alive:
            return
        self._outcomes.end(request.idx, Ending.ANSWERED, now_ms=self._events.now_ms())
        self._decode(replica, replica.finished(request))
        self._freed(replica)

    def _freed(self, replica: SimReplica) -> None:
        self.board.changed(replica)
        if replica.is_idle:
            self._when_idle(replica)
        self.dispatch_in(0.0)
