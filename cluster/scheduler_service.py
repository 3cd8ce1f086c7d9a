"""The scheduler's state and event loop around the pure policy of `planner.scheduler`.

Routers push which replicas run, replicas push what they are and do, ingresses ask for tickets.
Nothing here is written to disk: a restarted scheduler learns it all again from the next pushes.
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from cluster.config import SchedulerConfig
from cluster.leases import Lease, LeaseTable
from cluster.load_meter import LoadMeter
from cluster.membership import Membership
from cluster.messages import (
    Refusal,
    ReplicaReport,
    ReplicaSummary,
    ReportAck,
    RequestOutcome,
    SchedulerStatus,
)
from cluster.metrics import ServerMetrics
from cluster.residency import NodeResidency
from planner import (
    CACHESMITH,
    BatchDecision,
    BudgetPlanner,
    Clock,
    DemandCurves,
    EngineInfo,
    LoadSignal,
    QueueFullError,
    RefusalReason,
    RefusedRequest,
    ReplicaState,
    RequestProfile,
    SloScheduler,
    Ticket,
    build_scheduler,
    plan_input,
)
from replicas.cache_types import TierReport

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiter:
    future: asyncio.Future[Ticket | Refusal]
    profile: RequestProfile
    since_ms: float
    ingress_id: str
    floor_ms: float | None = None  # asked for once, for the signal

    def slack_ms(self, now_ms: float) -> float:
        waited_ms = now_ms - self.since_ms
        return self.profile.ttft_slo_ms - self.profile.elapsed_ms - waited_ms


@dataclass(slots=True)
class _Replica:
    report: ReplicaReport  # the latest
    info: EngineInfo
    tiers: TierReport | None
    at_ms: float
    state: ReplicaState | None = None  # as last offered to the scheduler
    made_of: tuple[int, int, float | None] = (0, 0, None)  # leases, their tokens, busy until


def build_planning(
    config: SchedulerConfig, *, num_waiting: int = 0
) -> tuple[SloScheduler, BudgetPlanner]:
    """The policy with room for so many that wait already, and the planner that it asks.

    config: `for_model`, so that there is a demand to plan with
    """
    assert config.demand is not None
    planner = BudgetPlanner(config.planner, DemandCurves(config.demand))
    limits = config.policy.rules.limits
    held = replace(limits, max_waiting=max(limits.max_waiting, num_waiting))
    rules = replace(config.policy.rules, limits=held)
    return build_scheduler(replace(config.policy, rules=rules), planner), planner


class SchedulerService:
    """Admission, tickets and replica state. All methods run on one event loop.

    A replica takes one batch at a time into prefill: it is free again once every member of the
    batch has its first token, has ended or has given up.
    """

    def __init__(
        self,
        scheduler: SloScheduler,
        planner: BudgetPlanner,
        config: SchedulerConfig,
        clock: Clock,
        metrics: ServerMetrics,
    ) -> None:
        """planner: to explain decisions with, and to say what requests take"""
        self.epoch = uuid.uuid4().hex
        self._scheduler = scheduler
        self._planner = planner
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._waiters: dict[str, _Waiter] = {}
        self._membership = Membership(router_ttl_ms=config.router_ttl_ms)
        self._leases = LeaseTable(lease_ms=config.lease_ms)
        self._residency = NodeResidency()
        self._replicas: dict[str, _Replica] = {}
        self._ingresses: dict[str, float] = {}  # when each was heard of
        self._load = LoadMeter(planner)
        self._load_ms: float | None = None  # the latest that a replica has measured
        self._changed = asyncio.Event()
        self._due_ms: float | None = None
        # unique over restarts too, so that an engine never mixes batches of two lives
        self._batch_ids = itertools.count(time.time_ns() // 1000)

    # --- ingresses ---------------------------------------------------------------------------

    async def admit(self, profile: RequestProfile, *, ingress_id: str) -> Ticket | Refusal:
        """Wait for a place. Cancelling gives up the request, or the place if it was granted.

        So does the end of the ingress: it has to be `heard` of again and again.
        """
        self.heard(ingress_id)
        request_id = profile.request_id
        self.abandon(request_id)  # the caller asks again: its first call got lost
        now_ms = self._clock.now_ms()
        self._load.came(profile)
        try:
            self._check_room()
            self._scheduler.submit(profile, now_ms=now_ms)
        except QueueFullError as exc:
            return Refusal(
                status=429, message=str(exc), code="queue_full", retry_after_s=exc.retry_after_s
            )
        waiter = _Waiter(asyncio.get_running_loop().create_future(), profile, now_ms, ingress_id)
        self._waiters[request_id] = waiter
        self._dispatch_in(self._config.gather_ms)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            granted = waiter.future.done() and not waiter.future.cancelled()
            if granted or self._waiters.get(request_id) is waiter:
                self.abandon(request_id)
            raise

    def heard(self, ingress_id: str) -> None:
        """An ingress is alive."""
        self._ingresses[ingress_id] = self._clock.now_ms()

    def abandon(self, request_id: str) -> None:
        """Forget a request, waiting or with a ticket; unknown ids are ignored."""
        if waiter := self._waiters.pop(request_id, None):
            self._scheduler.cancel(request_id)
            waiter.future.cancel()
        if self._leases.release(request_id):
            self._dispatch_in(0.0)

    def record(self, outcome: RequestOutcome) -> None:
        self._metrics.record(outcome)

    def metrics_text(self) -> bytes:
        return self._metrics.render(self.status())

    def status(self) -> SchedulerStatus:
        running = self._membership.running(now_ms=self._clock.now_ms())
        return SchedulerStatus(
            epoch=self.epoch,
            num_waiting=self._scheduler.num_waiting,
            replicas=tuple(
                self._summary(replica_id, running)
                for replica_id in sorted(running | self._replicas.keys())
            ),
            generation=self._config.generation,
        )

    def signal(self) -> LoadSignal:
        """What autoscaling goes by, at this moment."""
        now_ms = self._clock.now_ms()
        running = self._membership.running(now_ms=now_ms)
        ready = sorted(running & self._replicas.keys())
        one_per_node = {self._replicas[i].report.node_id: i for i in ready}
        self._load.saw([self._state(i, (), now_ms) for i in one_per_node.values()])
        return LoadSignal(
            epoch=self.epoch,
            at_ms=now_ms,
            waiting=tuple(
                (waiter.slack_ms(now_ms), self._floor_ms(waiter))
                for waiter in self._waiters.values()
            ),
            prefill_ms=self._leases.prefill_left_ms(now_ms=now_ms),
            num_active=len(self._leases),
            num_ready=len(ready),
            load_ms=self._load_ms,
            arrived=self._load.arrived,
        )

    def _floor_ms(self, waiter: _Waiter) -> float:
        if waiter.floor_ms is None:
            waiter.floor_ms = self._load.floor_ms(waiter.profile)
        return waiter.floor_ms or 0.0

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Go on under another configuration. Who waits, or has a ticket, keeps place and deadline.

        config: `for_model`. A queue over the new bound stays, and takes no more until it is below.
        """
        scheduler, planner = build_planning(config, num_waiting=len(self._waiters))
        for waiter in self._waiters.values():
            scheduler.submit(waiter.profile, now_ms=waiter.since_ms)
        self._scheduler, self._planner, self._config = scheduler, planner, config
        self._load.plan_with(planner)
        self._membership.router_ttl_ms = config.router_ttl_ms
        self._leases.lease_ms = config.lease_ms
        log.info("reconfigured generation=%d num_waiting=%d", config.generation, len(self._waiters))
        self._dispatch_in(0.0)

    def _check_room(self) -> None:
        """Raises QueueFullError. The policy's own bound may be that of the queue it took over."""
        num_waiting = self._scheduler.num_waiting
        if num_waiting >= self._config.policy.rules.limits.max_waiting:
            raise QueueFullError(num_waiting, retry_after_s=1.0)

    # --- routers and replicas ----------------------------------------------------------------

    def sync_replicas(self, router_id: str, replica_ids: Sequence[str]) -> None:
        """Take over a router's list of running replicas."""
        self._membership.sync(router_id, replica_ids, now_ms=self._clock.now_ms())
        self._dispatch_in(0.0)

    def report(self, report: ReplicaReport) -> ReportAck:
        """Take over a replica's state; asks for a complete report if the replica is unknown."""
        known = self._replicas.get(report.replica_id)
        info = report.info or (known.info if known else None)
        if info is None:
            return ReportAck(epoch=self.epoch, needs_full=True)
        tiers = report.tiers or (known.tiers if known else None)
        self._replicas[report.replica_id] = _Replica(report, info, tiers, self._clock.now_ms())
        if report.info is not None and info.load_ms is not None:
            self._load_ms = info.load_ms
        self._residency.apply(report.node_id, report.residency)
        self._leases.reconcile(report.replica_id, report.active)
        self._dispatch_in(0.0)
        return ReportAck(epoch=self.epoch)

    def first_token(self, replica_id: str, request_id: str) -> None:
        self._leases.first_token(replica_id, request_id)
        self._dispatch_in(0.0)

    def finished(self, request_id: str) -> None:
        """A replica has ended a request, whichever way."""
        self._leases.release(request_id)
        self._dispatch_in(0.0)

    def replica_lost(self, replica_id: str) -> None:
        """An ingress has seen a replica fail: no tickets for it until routers have decided."""
        if replica_id in self._replicas:
            until_ms = self._clock.now_ms() + self._config.suspect_ms
            self._membership.suspect(replica_id, until_ms=until_ms)
            self._dispatch_in(0.0)

    # --- the loop ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Dispatch whenever something has changed, and expire what is late, for ever."""
        while True:
            delay_ms = self._config.tick_ms
            if self._due_ms is not None:
                delay_ms = min(delay_ms, self._due_ms - self._clock.now_ms())
            if delay_ms > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), delay_ms / 1e3)
            self._changed.clear()
            if self._due_ms is not None and self._clock.now_ms() < self._due_ms:
                continue  # woken early to learn of a new due time
            self._due_ms = None
            try:
                self.tick()
            except Exception:  # one bad decision must not end scheduling
                log.exception("scheduler_tick_failed")
                await asyncio.sleep(self._config.tick_ms / 1e3)

    def tick(self) -> None:
        """Expire what is late, then give tickets to all batches that can start now."""
        now_ms = self._clock.now_ms()
        running = self._membership.running(now_ms=now_ms)
        self._forget_gone(running, now_ms)
        self._refuse_late(running, now_ms)
        if self._scheduler.num_waiting:
            self._dispatch(running, now_ms)

    def _dispatch(self, running: frozenset[str], now_ms: float) -> None:
        """Give tickets to all batches that can start, and up what is not to wait any longer."""
        leases_of = self._leases.by_replica()
        states = {
            replica_id: self._state(replica_id, leases_of.get(replica_id, []), now_ms)
            for replica_id in sorted(running & self._replicas.keys())
        }
        num_free = sum(state.is_free for state in states.values())
        # asked once even if none is free: what no replica can ever hold is refused at once
        while decision := self._decide(list(states.values()), now_ms):
            replica_id = decision.replica_id
            self._grant(decision, states[replica_id], now_ms)
            states[replica_id] = self._state(replica_id, self._leases.of(replica_id), now_ms)
            num_free -= not states[replica_id].is_free
            if not num_free or not self._scheduler.num_waiting:
                break
        for refused in self._scheduler.take_refused(now_ms=now_ms):
            self._give_up(refused)

    def _decide(self, states: Sequence[ReplicaState], now_ms: float) -> BatchDecision | None:
        started_s = time.perf_counter()
        decision = self._scheduler.next_batch(states, now_ms=now_ms)
        if decision is not None:
            self._metrics.decided((time.perf_counter() - started_s) * 1e3)
        return decision

    def _dispatch_in(self, delay_ms: float) -> None:
        """Soon, if anybody waits; what is late expires by the next tick anyway."""
        if not self._scheduler.num_waiting:
            return
        due_ms = self._clock.now_ms() + delay_ms
        if self._due_ms is None or due_ms < self._due_ms:
            self._due_ms = due_ms
            self._changed.set()

    def _forget_gone(self, running: frozenset[str], now_ms: float) -> None:
        self._forget_ingresses(now_ms)
        for request_id in self._leases.expire(now_ms=now_ms):
            log.warning("ticket_expired request_id=%s", request_id)
        # a replica that still reports, but is in no router's list, drains or is about to join
        silent_ms = now_ms - self._config.router_ttl_ms
        for replica_id, replica in list(self._replicas.items()):
            if replica_id not in running and replica.at_ms < silent_ms:
                del self._replicas[replica_id]
                log.info("replica_gone replica=%s", replica_id)
        if num_lost := self._leases.release_replicas(running | self._replicas.keys()):
            log.warning("leases_lost num_leases=%d", num_lost)
        self._residency.keep_nodes({r.report.node_id for r in self._replicas.values()})

    def _forget_ingresses(self, now_ms: float) -> None:
        """Nobody would use the tickets of what waits through them, and replicas wait for that."""
        cutoff_ms = now_ms - self._config.ingress_ttl_ms
        gone = {key for key, at_ms in self._ingresses.items() if at_ms < cutoff_ms}
        for ingress_id in gone:
            del self._ingresses[ingress_id]
            lost = [key for key, w in self._waiters.items() if w.ingress_id == ingress_id]
            for request_id in lost:
                self.abandon(request_id)
            log.info("ingress_gone ingress_id=%s num_waiting=%d", ingress_id, len(lost))

    def _refuse_late(self, running: frozenset[str], now_ms: float) -> None:
        late = [
            request_id
            for request_id, waiter in self._waiters.items()
            if now_ms - waiter.since_ms > self._config.max_wait_ms
        ]
        for request_id in late:
            waiter = self._waiters.pop(request_id)
            self._scheduler.cancel(request_id)
            waited_s = (now_ms - waiter.since_ms) / 1e3
            reason = "every replica is busy" if running else "no replica is running"
            refusal = Refusal(
                status=503,
                message=f"the request waited {waited_s:.0f} s and {reason}",
                code="queue_timeout",
                retry_after_s=5.0,
            )
            if not waiter.future.done():
                waiter.future.set_result(refusal)

    def _give_up(self, refused: RefusedRequest) -> None:
        self._metrics.refused(refused.reason)
        waiter = self._waiters.pop(refused.request_id, None)
        if waiter is None or waiter.future.done():
            return
        if refused.reason is RefusalReason.IMPOSSIBLE:
            refusal = Refusal(
                status=400,
                message="the prompt is longer than what any replica can hold",
                code="context_length_exceeded",
            )
        else:
            refusal = Refusal(
                status=429,
                message=f"the TTFT objective can not be met: {max(0.0, refused.slack_ms):.0f} ms "
                f"are left of it, and the prefill takes {refused.needed_ms:.0f} ms at least",
                code="slo_unreachable",
                retry_after_s=1.0,
            )
        waiter.future.set_result(refusal)

    def _state(self, replica_id: str, leases: Sequence[Lease], now_ms: float) -> ReplicaState:
        """Of a replica that can take a batch, or is in prefill.

        The same object while nothing has changed: the scheduler looks at new ones alone.
        """
        replica = self._replicas[replica_id]
        in_prefill = [lease.prefill_until_ms for lease in leases if lease.in_prefill]
        busy_until_ms = max(now_ms, *in_prefill) if in_prefill else None
        used = sum(lease.num_tokens + self._config.decode_reserve_tokens for lease in leases)
        made_of = (len(leases), used, busy_until_ms)
        if replica.state is None or replica.made_of != made_of:
            replica.state = self._new_state(replica, *made_of)
            replica.made_of = made_of
        return replica.state

    def _new_state(
        self, replica: _Replica, num_leases: int, used_tokens: int, busy_until_ms: float | None
    ) -> ReplicaState:
        info, report = replica.info, replica.report
        # an idle engine takes whatever fits the model, so that no request waits for ever
        whole = max(info.kv_capacity_tokens, info.max_model_len)
        reuse = info.reuse_refusal is None
        return ReplicaState(
            replica_id=report.replica_id,
            cost=report.cost,
            free_seqs=info.max_num_seqs - num_leases,
            free_kv_tokens=(info.kv_capacity_tokens if num_leases else whole) - used_tokens,
            parking_tokens=info.parking_tokens,
            resident=self._residency.of(report.node_id) if reuse else frozenset[str](),
            can_load=report.load.can_load,
            node_id=report.node_id,
            busy_until_ms=busy_until_ms,
            max_kv_tokens=whole,
            link=report.link,
            kv_token_bytes=info.kv_token_bytes * report.load.loaded_share,
        )

    def _explanation(self, decision: BatchDecision, state: ReplicaState) -> str:
        """Why the batch and its plan were chosen, if one of its requests wants to know."""
        if not any(profile.wants_explanation for profile in decision.requests):
            return ""
        if self._config.policy.name != CACHESMITH:
            return f"the policy {self._config.policy.name} runs its configuration"
        try:
            explained = self._planner.explain(
                [plan_input(profile, state) for profile in decision.requests],
                budget_ms=decision.plan.budget_ms,
                cost=state.cost,
                link=state.link,
            )
        except Exception:  # the batch is formed: its requests must not wait for this
            log.exception("explaining_failed")
            return ""
        judged = [batch.text() for batch in decision.judged]
        return "\n".join([*judged, explained.text()])

    def _grant(self, decision: BatchDecision, state: ReplicaState, now_ms: float) -> None:
        explanation = self._explanation(decision, state)
        batch_id = next(self._batch_ids)
        members = zip(decision.requests, decision.queue_ms, decision.plan.requests, strict=True)
        for profile, queue_ms, plan in members:
            waiter = self._waiters.pop(profile.request_id, None)
            if waiter is None or waiter.future.done():  # cancelled in this very turn of the loop
                continue
            self._leases.grant(
                profile.request_id,
                decision.replica_id,
                profile.num_prompt_tokens,
                now_ms=now_ms,
                expected_ms=decision.plan.expected_ms,
            )
            waiter.future.set_result(
                Ticket(
                    replica_id=decision.replica_id,
                    batch_id=batch_id,
                    batch_size=len(decision.requests),
                    plan=plan,
                    queue_ms=queue_ms,
                    explanation=explanation if profile.wants_explanation else "",
                )
            )
        log.info(
            "batch_planned replica=%s batch_id=%d num_requests=%d budget_ms=%.1f expected_ms=%.1f",
            decision.replica_id,
            batch_id,
            len(decision.requests),
            decision.plan.budget_ms,
            decision.plan.expected_ms,
        )

    def _summary(self, replica_id: str, running: frozenset[str]) -> ReplicaSummary:
        replica = self._replicas.get(replica_id)
        leases = self._leases.of(replica_id)
        load = replica.report.load if replica else None
        node_id = replica.report.node_id if replica else ""
        return ReplicaSummary(
            replica_id=replica_id,
            node_id=node_id,
            ready=replica is not None and replica_id in running,
            num_running=load.num_running if load else 0,
            num_waiting=load.num_waiting if load else 0,
            num_ingest_backlog=load.num_ingest_backlog if load else 0,
            num_leases=len(leases),
            in_prefill=any(lease.in_prefill for lease in leases),
            num_resident_chunks=len(self._residency.of(node_id)),
            cost_drift=replica.report.cost.scale if replica else 1.0,
            info=replica.info if replica else None,
            tiers=replica.tiers if replica else None,
        )
