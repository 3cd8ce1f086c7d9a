"""The chunk store of the whole cluster, for an operator: every node's host tier, and one Redis.

A node's store is reached by one of its replicas, Redis by any. What changes something goes on
after a replica is lost, and then says that it is not complete: nothing of it harms when repeated.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from cluster.cache_messages import (
    CacheCommand,
    ClearHost,
    ClearRedis,
    DiscardChunk,
    DropBacklog,
    ListEntries,
    RemoveFromRedis,
    ShowStats,
    VerifyTier,
)
from cluster.errors import ApiError, ReplicaLostError, error_of
from cluster.messages import Refusal, ReplicaSummary, SchedulerStatus
from replicas.cache_types import CacheStats, EntryPage, NoRedisTierError, Tier, VerifyReport

T = TypeVar("T")

TierChoice = Literal["host", "redis", "all"]


class CachePort(Protocol):
    async def cache(self, replica_id: str, command: CacheCommand[T]) -> T | Refusal:
        """Run it on the replica. Raises ReplicaLostError when that is gone."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """One replica's answer. The host tier is its node's: replicas of a node share it."""

    replica_id: str
    node_id: str
    stats: CacheStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """What was removed; None for a tier that was not asked for, or is not there."""

    entries_by_node: dict[str, int] | None
    num_redis_keys: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was found; None for a tier that was not asked for, or is not there."""

    by_node: dict[str, VerifyReport] | None
    redis: VerifyReport | None

    @property
    def reports(self) -> list[VerifyReport]:
        found = list((self.by_node or {}).values())
        return found if self.redis is None else [*found, self.redis]


class CacheService:
    """Sends an operator's commands to the replicas that they concern. All raise ApiError."""

    def __init__(self, replicas: CachePort, status: Callable[[], SchedulerStatus | None]) -> None:
        self._replicas = replicas
        self._status = status

    async def stats(self, *, redis_keys: bool) -> list[ReplicaStats]:
        """Of every replica that is ready and not lost meanwhile; Redis keys with the first."""
        replicas = self._ready()
        asked = [
            self._ask(replica.replica_id, ShowStats(redis_keys=redis_keys and index == 0))
            for index, replica in enumerate(replicas)
        ]
        answers = await _gather(asked)
        return [
            ReplicaStats(replica_id=replica.replica_id, node_id=replica.node_id, stats=answer)
            for replica, answer in zip(replicas, answers, strict=True)
            if not isinstance(answer, ReplicaLostError)
        ]

    async def entries(self, tier: Tier, limit: int) -> dict[str, EntryPage]:
        """By node, at most `limit` each; Redis, which has none, stands under an empty name."""
        command = ListEntries(tier=tier, limit=limit)
        if tier == "redis":
            return {"": await self._ask_any(command)}
        pages, _ = await self._ask_nodes(command)
        return pages

    async def remove(self, chunk_id: str) -> bool:
        """From everywhere. First the nodes, so that none writes it to Redis again, then Redis,
        then the nodes again, for one that has just fetched it from there."""
        discard = DiscardChunk(chunk_id=chunk_id)
        was_there, lost = await self._ask_replicas(discard)
        was_in_redis = await self._ask_any(RemoveFromRedis(chunk_id=chunk_id))
        if was_in_redis:
            again, lost_later = await self._ask_replicas(discard)
            was_there, lost = [*was_there, *again], lost | lost_later
        _check_complete(lost, "it may still have the chunk")
        return was_in_redis or any(was_there)

    async def clear(self, choice: TierChoice) -> Cleared:
        by_node: dict[str, int] | None = None
        num_keys: int | None = None
        lost: set[str] = set()
        if choice != "redis":
            by_node, lost = await self._ask_nodes(ClearHost())
        if choice != "host":
            _, lost_there = await self._ask_replicas(DropBacklog())
            lost |= lost_there
            num_keys = await self._of_redis(ClearRedis(), choice)
            if choice == "all" and num_keys:
                again, lost_later = await self._ask_nodes(ClearHost())  # what was just fetched
                by_node = {n: (by_node or {}).get(n, 0) + again.get(n, 0) for n in again}
                lost |= lost_later
        _check_complete(lost, "its store may not be empty")
        return Cleared(entries_by_node=by_node, num_redis_keys=num_keys)

    async def verify(self, choice: TierChoice, *, repair: bool) -> Verified:
        by_node: dict[str, VerifyReport] | None = None
        redis: VerifyReport | None = None
        lost: set[str] = set()
        if choice != "redis":
            by_node, lost = await self._ask_nodes(VerifyTier(tier="host", repair=repair))
        if choice != "host":
            redis = await self._of_redis(VerifyTier(tier="redis", repair=repair), choice)
        _check_complete(lost, "its store was not checked")
        return Verified(by_node=by_node, redis=redis)

    # --- whom to ask -------------------------------------------------------------------------

    async def _of_redis(self, command: CacheCommand[T], choice: TierChoice) -> T | None:
        """None where all tiers are meant, and there is no Redis."""
        try:
            return await self._ask_any(command)
        except ApiError as exc:
            if choice == "all" and exc.code == NoRedisTierError.code:
                return None
            raise

    async def _ask_nodes(self, command: CacheCommand[T]) -> tuple[dict[str, T], set[str]]:
        """(answers by node, the replicas that were lost)"""
        nodes = dict(sorted(self._known().one_per_node().items()))
        answers = await _gather(self._ask(replica_id, command) for replica_id in nodes.values())
        found = dict(zip(nodes, answers, strict=True))
        kept = {n: answer for n, answer in found.items() if not isinstance(answer, Exception)}
        return kept, {nodes[n] for n in nodes.keys() - kept.keys()}

    async def _ask_replicas(self, command: CacheCommand[T]) -> tuple[list[T], set[str]]:
        """(answers, the replicas that were lost)"""
        ids = [replica.replica_id for replica in self._ready()]
        answers = await _gather(self._ask(replica_id, command) for replica_id in ids)
        kept = [answer for answer in answers if not isinstance(answer, ReplicaLostError)]
        lost = zip(ids, answers, strict=True)
        return kept, {i for i, answer in lost if isinstance(answer, ReplicaLostError)}

    async def _ask_any(self, command: CacheCommand[T]) -> T:
        lost: ReplicaLostError | None = None
        for replica in self._ready():
            try:
                return await self._ask(replica.replica_id, command)
            except ReplicaLostError as exc:
                lost = exc
        raise _lost_error(f"every replica was lost: {lost}")

    async def _ask(self, replica_id: str, command: CacheCommand[T]) -> T:
        answer = await self._replicas.cache(replica_id, command)
        if isinstance(answer, Refusal):
            raise error_of(answer)
        return answer

    def _ready(self) -> tuple[ReplicaSummary, ...]:
        return self._known().ready

    def _known(self) -> SchedulerStatus:
        """With a replica that is ready."""
        status = self._status()
        if status is None or not status.ready:
            raise ApiError(503, "no replica is ready", code="no_replica_ready", retry_after_s=2.0)
        return status


async def _gather(asked: Iterable[Awaitable[T]]) -> list[T | ReplicaLostError]:
    """All answers, lost replicas among them; another error is raised when all have ended."""
    found: list[T | ReplicaLostError] = []
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, ReplicaLostError):
            raise answer
        found.append(answer)
    return found


def _check_complete(lost: set[str], what: str) -> None:
    if lost:
        names = ", ".join(sorted(lost))
        raise _lost_error(f"a replica was lost ({names}) and {what}; the rest is done: repeat it")


def _lost_error(message: str) -> ApiError:
    return ApiError(503, message, code="replica_lost", retry_after_s=2.0)
