"""One simulated replica: what it runs, what it holds, and what the scheduler is told of it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost_model import CostModel
from planner.link_tracker import LinkTracker
from planner.scheduler import ReplicaState
from planner.simulator.chunk_store import Node
from planner.simulator.demand_truth import DemandTruth
from planner.simulator.hardware import Machine
from planner.simulator.prefill import PrefillRun
from planner.simulator.scenario import FleetSpec
from planner.timeline import Link
from planner.types import RequestPlan, RequestProfile

COST_WEIGHT = 0.2  # of a batch in the cost's scale, as in an engine


@dataclass(slots=True, eq=False)
class SimRequest:
    """One request on its way. tokens: what it holds of the KV blocks while it runs."""

    idx: int
    profile: RequestProfile
    output_tokens: int
    truth: DemandTruth
    difficulty: float
    taste: float
    vote: float
    attempts: int = 0  # replicas that were lost with it
    since_ms: float = 0.0  # when it was submitted, the last time
    tokens: int = 0


@dataclass(slots=True, eq=False)
class RunningBatch:
    """run: how it goes"""

    members: Sequence[SimRequest]
    plans: Sequence[RequestPlan]
    run: PrefillRun
    started_ms: float
    expected_end_ms: float


class SimReplica:
    """A replica's life ends with its death or once it has drained."""

    def __init__(
        self, replica_id: str, node: Node, machine: Machine, spec: FleetSpec, *, now_ms: float
    ) -> None:
        """now_ms: when it was asked for; it is paid from then on"""
        self.replica_id = replica_id
        self.node = node
        self.since_ms = now_ms
        self.is_draining = False
        self.is_alive = True
        self.batch: RunningBatch | None = None
        self.active: dict[int, SimRequest] = {}  # from the start of their batch to their end
        self._machine = machine
        self._spec = spec
        self.capacity = spec.capacity(machine)
        self._used = 0  # tokens of all that are active
        self._in_blocks = 0  # of those that decode
        self._num_decoding = 0
        self._parked: deque[SimRequest] = deque()
        self._cost = machine.cost
        self._token_bytes = machine.kv_token_bytes
        self._link: LinkTracker | None = None
        if node.redis is not None:
            speed, latency_ms = node.link.capacity(now_ms), spec.link_latency_ms
            self._link = LinkTracker(Link(bytes_per_ms=speed, latency_ms=latency_ms))

    @property
    def cost(self) -> CostModel:
        """As the replica knows it: prices that follow what prefills take."""
        return self._cost

    @property
    def is_idle(self) -> bool:
        return not self.active

    def state(self, *, knows_link: bool) -> ReplicaState:
        busy = None if self.batch is None else self.batch.expected_end_ms
        return ReplicaState(
            replica_id=self.replica_id,
            cost=self._cost,
            free_seqs=self._spec.max_num_seqs - len(self.active),
            free_kv_tokens=self.capacity - self._used,
            parking_tokens=self._spec.parking_tokens,
            resident=self.node.resident,
            node_id=self.node.store_id,
            busy_until_ms=busy,
            max_kv_tokens=self.capacity,
            link=self._link.link if self._link is not None and knows_link else None,
            kv_token_bytes=self._token_bytes * (self._link.loaded_share if self._link else 1.0),
        )

    def begin(self, batch: RunningBatch) -> None:
        self.batch = batch
        reserve = self._spec.decode_reserve_tokens
        for request in batch.members:
            request.tokens = request.profile.num_prompt_tokens + reserve
            self._used += request.tokens
            self.active[request.idx] = request

    def observe_link(self, bytes_per_ms: float | None, *, loaded: int, stored: int) -> None:
        """What a batch has seen. loaded, stored: tokens that came over the link, and all stored."""
        if self._link is not None:
            self._link.observe(loaded=loaded, stored=stored, bytes_per_ms=bytes_per_ms)

    def ends(self, batch: RunningBatch) -> None:
        """Its prefill is over; if it waited for no KV, its time moves the cost, as in an engine."""
        self.batch = None
        run = batch.run
        if run.stall_ms > 0.0:
            return
        self._cost = self._cost.observed(
            run.alone_ms, run.total_ms, plan_scale=1.0, weight=COST_WEIGHT
        )

    @property
    def pause_ms(self) -> float:
        """What decoding takes of each layer of a prefill that begins now."""
        if self._spec.slice_layers is None or not self._num_decoding:
            return 0.0
        return self._token_ms / self._spec.slice_layers

    @property
    def _token_ms(self) -> float:
        """One decoded token of every sequence that decodes now."""
        return self._machine.decode_ms + self._machine.decode_seq_ms * (self._num_decoding - 1)

    def prefilled(self, request: SimRequest) -> list[SimRequest]:
        """Has its first token. Returns who begins to decode: it, unless it has to wait for room."""
        self._parked.append(request)
        return self._unparked()

    def decode_ms(self, request: SimRequest) -> float:
        """From now to its last token, at the number of sequences that decode now."""
        return max(0, request.output_tokens - 1) * self._token_ms

    def finished(self, request: SimRequest) -> list[SimRequest]:
        """Has its last token. Returns who begins to decode in its place."""
        del self.active[request.idx]
        self._used -= request.tokens
        self._in_blocks -= request.tokens
        self._num_decoding -= 1
        return self._unparked()

    def _unparked(self) -> list[SimRequest]:
        """Parked prompts move into the blocks in the order they came."""
        begun = []
        while self._parked:
            request = self._parked[0]
            if self._num_decoding and self._in_blocks + request.tokens > self.capacity:
                break
            self._parked.popleft()
            self._in_blocks += request.tokens
            self._num_decoding += 1
            begun.append(request)
        return begun
