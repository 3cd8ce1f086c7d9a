"""The replicas of one model: their nodes, schedulers, births, deaths and number."""

from functools import partial

import numpy as np

from planner.arrival_forecast import Arrivals
from planner.autoscaling import LoadSignal
from planner.budget_planner import BudgetPlanner
from planner.cost_model import PrefillShape
from planner.recompute_planner import PlanInput
from planner.service_times import ServiceTimes
from planner.simulator.autoscaling import FixedSize
from planner.simulator.cell import Cell
from planner.simulator.chunk_store import UNLIMITED_TOKENS, LruTier, Node, NodeLink
from planner.simulator.event_queue import EventQueue
from planner.simulator.hardware import Machine
from planner.simulator.outcomes import Outcomes
from planner.simulator.replica import SimReplica, SimRequest
from planner.simulator.scenario import FleetSpec
from planner.types import ChunkRef


class Fleet:
    def __init__(
        self,
        name: str,
        spec: FleetSpec,
        *,
        machine: Machine,
        planner: BudgetPlanner,
        events: EventQueue,
        outcomes: Outcomes,
        rng: np.random.Generator,
        popular: list[ChunkRef],
    ) -> None:
        """rng: of the faults; popular: chunks to begin with, the most used first"""
        self._name = name
        self._spec = spec
        self._machine = machine
        self._events = events
        self._outcomes = outcomes
        self._rng = rng
        self._popular = popular if spec.prewarmed else []
        self._redis: LruTier | None = None
        if spec.redis_tokens != 0:
            self._redis = LruTier(spec.redis_tokens or UNLIMITED_TOKENS)
            self._redis.fill(self._popular)
        self._nodes: dict[int, Node] = {}
        self._replicas: dict[int, SimReplica] = {}  # those that are paid, by number
        self._cells: list[Cell] = []
        self._times = ServiceTimes(planner)
        self._arrived = Arrivals()
        sizing = spec.sizing
        self._sizer = None if isinstance(sizing, FixedSize) else sizing.sizer()

    def open(self, cells: list[Cell]) -> None:
        """All replicas are up at time 0. cells: their schedulers; each gets every so many-th."""
        self._cells = cells
        for number in range(self._spec.replicas):
            self._born(number, since_ms=0.0)
        for at_s, number in self._spec.faults.deaths:
            self._events.at(at_s * 1e3, partial(self._dies, number))
        sizing = self._spec.sizing
        if not isinstance(sizing, FixedSize):
            self._events.after(sizing.period_s * 1e3, self._look)

    def submit(self, request: SimRequest) -> None:
        """To the scheduler with the shortest queue; of equals, to that with more free replicas."""
        if self._sizer is not None:
            objective_ms = request.profile.ttft_slo_ms
            counted = self._arrived.counted()
            self._arrived = counted.sized(*self._service_ms(request), objective_ms)
        cells = self._cells
        cell = cells[0] if len(cells) == 1 else min(cells, key=_crowding)
        cell.submit(request)

    def tick(self) -> None:
        for cell in self._cells:
            cell.tick()

    def close(self, *, now_ms: float) -> None:
        """The replicas that are left are paid until now."""
        for replica in self._replicas.values():
            self._outcomes.replica_ms += now_ms - replica.since_ms

    def gone_if_drained(self, replica: SimReplica) -> None:
        if replica.is_draining and replica.is_alive:
            self._ends(replica)

    # --- births and deaths -------------------------------------------------------------------

    def _born(self, number: int, *, since_ms: float) -> None:
        """It serves from now on."""
        replica = SimReplica(
            f"{self._name}-{number}", self._node(number), self._machine, self._spec, now_ms=since_ms
        )
        self._replicas[number] = replica
        cell = self._cell(number)
        cell.board.add(replica)
        cell.dispatch_in(0.0)
        if self._spec.faults.mtbf_s is not None:
            lifetime_ms = float(self._rng.exponential(self._spec.faults.mtbf_s * 1e3))
            self._events.after(lifetime_ms, partial(self._fails, number, replica))

    def _cell(self, number: int) -> Cell:
        return self._cells[number % len(self._cells)]

    def _node(self, number: int) -> Node:
        """Of this replica; its host memory outlives the replica."""
        place = number // self._spec.replicas_per_node
        if place not in self._nodes:
            host = LruTier(self._spec.host_tokens)
            host.fill(self._popular)
            self._nodes[place] = Node(
                f"{self._name}-node-{place}",
                host=host,
                redis=self._redis,
                link=NodeLink(self._spec.link_bytes_per_ms),
            )
        return self._nodes[place]

    def _fails(self, number: int, replica: SimReplica) -> None:
        if replica.is_alive:
            self._dies(number)

    def _dies(self, number: int) -> None:
        """Its requests are admitted again, and another one takes its place."""
        replica = self._replicas.get(number)
        if replica is None or not replica.is_alive:
            return
        self._outcomes.num_deaths += 1
        was_draining = replica.is_draining
        self._ends(replica)
        self._cell(number).readmit(replica)
        if not was_draining:
            self._order(number)

    def _ends(self, replica: SimReplica) -> None:
        number = next(n for n, each in self._replicas.items() if each is replica)
        replica.is_alive = False
        self._cell(number).board.remove(replica)
        self._outcomes.replica_ms += self._events.now_ms() - replica.since_ms
        del self._replicas[number]

    def _order(self, number: int) -> None:
        """A replica that serves once it has started; it is paid from now on."""
        now = self._events.now_ms()
        starting = SimReplica(
            f"{self._name}-{number}", self._node(number), self._machine, self._spec, now_ms=now
        )
        starting.is_alive = False
        self._replicas[number] = starting

        def serve() -> None:
            if self._replicas.get(number) is starting:
                self._born(number, since_ms=now)

        self._events.after(self._spec.startup_s * 1e3, serve)

    # --- number ------------------------------------------------------------------------------

    def _look(self) -> None:
        """Every period: start more, or let some go."""
        sizing = self._spec.sizing
        assert self._sizer is not None and not isinstance(sizing, FixedSize)
        now = self._events.now_ms()
        staying = [n for n, replica in self._replicas.items() if not replica.is_draining]
        wanted = self._sizer.wanted(self._signal(now), num_target=len(staying), now_s=now / 1e3)
        for _ in range(wanted - len(staying)):
            number = 0
            while number in self._replicas:
                number += 1
            self._order(number)
        leaving = max(0, len(staying) - wanted)
        for number in sorted(staying, reverse=True)[:leaving]:
            self._let_go(number)
        self._events.after(sizing.period_s * 1e3, self._look)

    def _signal(self, now_ms: float) -> LoadSignal:
        """As the scheduler's; several schedulers are one here."""
        ready = [r for r in self._replicas.values() if r.is_alive and not r.is_draining]
        running = [r.batch.expected_end_ms for r in ready if r.batch is not None]
        return LoadSignal(
            epoch=self._name,
            at_ms=now_ms,
            waiting=tuple(
                (self._slack_ms(request, now_ms), self._service_ms(request)[0])
                for cell in self._cells
                for request in cell.waiting()
            ),
            prefill_ms=sum(max(0.0, end_ms - now_ms) for end_ms in running),
            num_active=sum(len(replica.active) for replica in ready),
            num_ready=len(ready),
            load_ms=self._spec.startup_s * 1e3,
            arrived=self._arrived,
        )

    def _let_go(self, number: int) -> None:
        replica = self._replicas[number]
        if not replica.is_alive:  # it has not started yet
            self._outcomes.replica_ms += self._events.now_ms() - replica.since_ms
            del self._replicas[number]
            return
        replica.is_draining = True
        self._cell(number).board.remove(replica)
        if replica.is_idle:
            self._ends(replica)

    def _slack_ms(self, request: SimRequest, now_ms: float) -> float:
        idx = request.idx
        return float(self._outcomes.arrival_ms[idx] + self._outcomes.slo_ms[idx] - now_ms)

    def _service_ms(self, request: SimRequest) -> tuple[float, float]:
        """At the floor and at the saturation, with all chunks stored."""
        context = request.profile.num_context_tokens
        always = request.profile.num_prompt_tokens - context
        asked = PlanInput(
            shape=PrefillShape(num_cached=context, num_always=always),
            policy=request.profile.policy,
            config=request.profile.config,
        )
        return self._times.of(asked, self._machine.cost)


def _crowding(cell: Cell) -> tuple[bool, int]:
    """Of a scheduler; one without any replica is the last to go to."""
    return not len(cell.board), cell.num_waiting - cell.board.num_free
