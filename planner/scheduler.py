"""Which requests run next, on which replica, with what budget.

The policy is pure: the actor around it (cluster/scheduler_actor.py) brings time, replicas and
their state as arguments, the simulator will do the same.
"""

from collections import OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from planner.cost_model import CostModel, PrefillShape
from planner.policies import FULL_PREFILL, STATIC_POLICIES
from planner.recompute_planner import PlanInput, RecomputePlanner
from planner.timeline import Link
from planner.types import BatchPlan, RequestProfile


class QueueFullError(Exception):
    """The queue is at its bound; `retry_after_s` says when trying again makes sense."""

    def __init__(self, num_waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{num_waiting} requests are waiting, the queue is full")
        self.num_waiting = num_waiting
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """A replica that could take a batch now, or one in prefill that will be free later.

    Those in prefill take no batch; a policy that looks ahead counts on them.
    """

    replica_id: str
    cost: CostModel
    free_seqs: int
    free_kv_tokens: int  # in KV blocks; negative when prompts are parked
    parking_tokens: int = 0  # room in host memory for prompts that are prefilled without blocks
    resident: Set[str] = field(default_factory=frozenset)  # chunk ids hot on its node
    can_load: bool = True  # what every node can load
    node_id: str = ""  # whose chunks `resident` are; empty: a node of its own
    busy_until_ms: float | None = None  # when its prefill should be over, of the clock; None: idle
    max_kv_tokens: int | None = None  # what `free_kv_tokens` is without any request; None: unknown
    link: Link | None = None  # what stored KV comes over to it; None: it is in host memory
    kv_token_bytes: float = 0.0  # stored KV of one token in one layer

    @property
    def is_free(self) -> bool:
        return self.busy_until_ms is None and self.free_seqs >= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedBatch:
    """A candidate batch and what it was worth, for those who ask why."""

    request_ids: tuple[str, ...]
    budget_ms: float
    expected_ms: float
    expected_passes: float
    waiting_passes: float  # of the requests that stay in the queue, in the projection
    parked: bool  # needs room in host memory

    @property
    def value(self) -> float:
        return self.expected_passes + self.waiting_passes

    def text(self) -> str:
        """A line for people."""
        where = ", into host memory" if self.parked else ""
        return (
            f"batch of {len(self.request_ids)}{where}: {self.expected_passes:.2f} expected to pass "
            f"in {self.expected_ms:.0f} ms, and {self.waiting_passes:.2f} of those left waiting"
        )


class RefusalReason(StrEnum):
    HOPELESS = "hopeless"  # the deadline cannot be met any more, even at the floor
    IMPOSSIBLE = "impossible"  # longer than what any replica can hold


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDecision:
    """A batch for one replica; requests in the order of `plan.requests`."""

    replica_id: str
    requests: tuple[RequestProfile, ...]
    queue_ms: tuple[float, ...]
    plan: BatchPlan
    judged: tuple[JudgedBatch, ...] = ()  # the best candidates, planned; the chosen one first


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRequest:
    """A request that the scheduler has given up."""

    request_id: str
    reason: RefusalReason
    needed_ms: float  # what it takes alone at the floor
    slack_ms: float  # what it had left


class SloScheduler(Protocol):
    """Holds the waiting requests and forms batches, one for each replica that asks."""

    @property
    def num_waiting(self) -> int: ...

    def submit(self, profile: RequestProfile, *, now_ms: float) -> None:
        """Queue a request. Raises QueueFullError at the bound, ValueError for a known id."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Forget a waiting request; False if it was not waiting."""
        ...

    def next_batch(
        self, replicas: Sequence[ReplicaState], *, now_ms: float
    ) -> BatchDecision | None:
        """Form a batch for one of the replicas that are free, or None if nothing can run."""
        ...

    def take_refused(self, *, now_ms: float) -> Sequence[RefusedRequest]:
        """Give up the requests that are not to wait any longer; each is returned once."""
        ...


def request_shape(
    profile: RequestProfile, resident: Set[str], *, can_load: bool = True
) -> PrefillShape:
    """Split a request's tokens by what the replica's node has in its store, or can load there.

    can_load: whether the replica reaches what every node can load
    """
    cached = sum(
        [
            c.num_tokens
            for c in profile.chunks
            if (can_load and c.is_shared) or c.chunk_id in resident
        ]
    )
    return PrefillShape(num_cached=cached, num_always=profile.num_prompt_tokens - cached)


def hot_tokens(profile: RequestProfile, resident: Set[str]) -> int:
    """What the node has in its own memory."""
    return sum([c.num_tokens for c in profile.chunks if c.chunk_id in resident])


def plan_input(profile: RequestProfile, replica: ReplicaState) -> PlanInput:
    """The request as the planner sees it on this replica."""
    if not is_reusing(profile):
        return PlanInput(
            shape=PrefillShape(num_cached=0, num_always=profile.num_prompt_tokens),
            policy=profile.policy,
            config=STATIC_POLICIES[FULL_PREFILL],
            num_context_tokens=profile.num_context_tokens,
        )
    shape = request_shape(profile, replica.resident, can_load=replica.can_load)
    return PlanInput(
        shape=shape,
        policy=profile.policy,
        config=profile.config,
        num_context_tokens=profile.num_context_tokens,
        layer_bytes=shape.num_cached * replica.kv_token_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Of every policy: what a batch and the queue hold at most."""

    max_batch_requests: int = 8
    max_batch_tokens: int = 16_384
    max_waiting: int = 256

    def __post_init__(self) -> None:
        for name in ("max_batch_requests", "max_batch_tokens", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")


@dataclass(slots=True)
class _Waiting:
    profile: RequestProfile
    since_ms: float

    @property
    def deadline_ms(self) -> float:
        return self.since_ms + self.profile.ttft_slo_ms - self.profile.elapsed_ms

    def slack_ms(self, now_ms: float) -> float:
        return self.profile.ttft_slo_ms - self.profile.elapsed_ms - (now_ms - self.since_ms)


class FcfsScheduler:
    """First come, first served: the oldest request, and those behind it that can share its batch.

    The batch goes to the free replica on whose node most of the oldest request's tokens are hot.
    Only the head of the queue decides; requests behind it that do not fit wait for the next batch,
    so nobody is passed over by a younger request of its own kind.
    """

    def __init__(self, config: QueueLimits, planner: RecomputePlanner) -> None:
        self._config = config
        self._planner = planner
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, profile: RequestProfile, *, now_ms: float) -> None:
        if profile.request_id in self._waiting:
            raise ValueError(f"request {profile.request_id} is already waiting")
        if len(self._waiting) >= self._config.max_waiting:
            raise QueueFullError(len(self._waiting), retry_after_s=1.0)
        self._waiting[profile.request_id] = _Waiting(profile, now_ms)

    def cancel(self, request_id: str) -> bool:
        return self._waiting.pop(request_id, None) is not None

    def next_batch(
        self, replicas: Sequence[ReplicaState], *, now_ms: float
    ) -> BatchDecision | None:
        if not self._waiting:
            return None
        queue = self._queue()
        head = queue[0].profile
        fitting = [r for r in replicas if self._fits(head, r)]
        if not fitting:
            return None
        replica = max(fitting, key=lambda r: (hot_tokens(head, r.resident), r.free_kv_tokens))
        members = self._members(queue, replica)
        for waiting in members:
            del self._waiting[waiting.profile.request_id]
        inputs = [plan_input(m.profile, replica) for m in members]
        budget_ms = min(m.slack_ms(now_ms) for m in members)
        return BatchDecision(
            replica_id=replica.replica_id,
            requests=tuple(m.profile for m in members),
            queue_ms=tuple(now_ms - m.since_ms for m in members),
            plan=self._planner.plan(
                inputs, budget_ms=budget_ms, cost=replica.cost, link=replica.link
            ),
        )

    def take_refused(self, *, now_ms: float) -> Sequence[RefusedRequest]:
        return ()  # whoever waits is served

    def _fits(self, profile: RequestProfile, replica: ReplicaState) -> bool:
        return replica.is_free and profile.num_prompt_tokens <= room_tokens(profile, replica)

    def _queue(self) -> list[_Waiting]:
        """All that wait, those whose turn it is first."""
        return list(self._waiting.values())

    def _members(self, queue: Sequence[_Waiting], replica: ReplicaState) -> list[_Waiting]:
        """The head and the first requests behind it with the same (S, w, p), up to the limits."""
        head = queue[0].profile
        members: list[_Waiting] = []
        num_tokens = 0
        limit = min(self._config.max_batch_requests, replica.free_seqs)
        max_tokens = min(self._config.max_batch_tokens, room_tokens(head, replica))
        for waiting in queue:
            if len(members) == limit:
                break
            profile = waiting.profile
            if phase_key(profile) != phase_key(head):
                continue
            num_tokens += profile.num_prompt_tokens
            if members and num_tokens > max_tokens:
                break
            members.append(waiting)
        return members


class EdfScheduler(FcfsScheduler):
    """Earliest deadline first, else as `FcfsScheduler`: the head of the queue decides alone."""

    def _queue(self) -> list[_Waiting]:
        return sorted(self._waiting.values(), key=lambda waiting: waiting.deadline_ms)


def is_reusing(profile: RequestProfile) -> bool:
    """Whether the request goes through the phases, and not through the engine's own prefill."""
    return profile.policy != FULL_PREFILL and bool(profile.chunks)


def room_tokens(profile: RequestProfile, replica: ReplicaState) -> int:
    """Tokens of prompts of this kind that the replica can prefill now."""
    parking = replica.parking_tokens if is_reusing(profile) else 0
    return replica.free_kv_tokens + parking


def phase_key(profile: RequestProfile) -> tuple[object, ...]:
    """Requests with the same key can share a batch's phases."""
    if not is_reusing(profile):
        return (FULL_PREFILL,)
    if profile.config is None:
        return ()
    config = profile.config
    return (config.signal, config.warmup_depth, config.probe_len, config.deviation)
