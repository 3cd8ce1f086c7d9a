"""An operator's work on the tiers that one replica reaches, beside serving.

Everything that blocks runs in threads, an entry at a time, so that neither the event loop nor the
other processes of the node wait for it.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kv_tier.arena_view import ArenaView
from kv_tier.errors import KvTierError
from kv_tier.host_tier import HostTier
from kv_tier.redis import RedisTier, RedisTierStats
from kv_tier.store import EntryInfo
from kv_tier.verify import check_entry
from replicas.cache_types import (
    CacheEntry,
    CacheStats,
    CacheUnavailableError,
    DamagedEntry,
    EntryPage,
    NoRedisTierError,
    RedisReport,
    Tier,
    TierReport,
    VerificationRunningError,
    VerifyProgress,
    VerifyReport,
)
from replicas.redis_admin import RedisAdmin

T = TypeVar("T")

_DISCARDS_A_STEP = 64
_FLUSH_MS = 2000.0  # for the chunk that is being written when the backlog is dropped


class CacheAdmin:
    """`CacheOperations` on a node's host tier and on Redis, each None where there is none."""

    def __init__(
        self,
        tier: HostTier | None,
        remote: RedisTier | None = None,
        *,
        forget: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        """forget: that a chunk was missed, or any; called on the event loop"""
        self._forget = forget
        self._tier = tier
        self._remote = remote
        self._is_verifying = False
        self._progress: VerifyProgress | None = None

    def report(self) -> TierReport:
        return TierReport(
            host=self._tier.stats() if self._tier else None,
            redis=_redis_report(self._remote.stats()) if self._remote else None,
        )

    async def stats(self, *, redis_keys: bool = False) -> CacheStats:
        return CacheStats(
            tiers=await _in_thread(self.report),
            verifying=self._progress if self._is_verifying else None,
            keys=await _in_thread(self._redis().keys) if redis_keys else None,
        )

    async def entries(self, tier: Tier, limit: int) -> EntryPage:
        if tier == "redis":
            redis = self._redis()
            return await _in_thread(lambda: redis.entries(limit))
        host = self._tier
        found = await _in_thread(lambda: host.entries(limit + 1)) if host else []
        return EntryPage(
            entries=tuple(_entry(entry) for entry in found[:limit]), has_more=len(found) > limit
        )

    async def discard(self, chunk_id: str) -> bool:
        self._forget(chunk_id)
        host, remote = self._tier, self._remote

        def run() -> bool:
            num_found = host.discard_content(chunk_id) if host else 0
            # after the entry, so that nobody can hand it over for writing any more
            num_waiting = remote.cancel_writes(chunk_id) if remote else 0
            return num_found + num_waiting > 0

        return await _in_thread(run)

    async def remove_from_redis(self, chunk_id: str) -> bool:
        if self._remote is None:
            return False
        redis = self._redis()
        return await _in_thread(lambda: redis.remove(chunk_id))

    async def clear_host(self) -> int:
        self._forget(None)
        host = self._tier
        if host is None:
            return 0
        keys = [entry.key for entry in await _in_thread(host.entries)]

        def discard(start: int) -> int:
            return sum(host.discard(key) for key in keys[start : start + _DISCARDS_A_STEP])

        num_discarded = 0
        for start in range(0, len(keys), _DISCARDS_A_STEP):
            num_discarded += await _in_thread(lambda start=start: discard(start))
        await _in_thread(host.clear)  # the few that are new, and what is being written
        return num_discarded

    async def drop_backlog(self) -> int:
        remote = self._remote
        if remote is None:
            return 0
        num_dropped = await _in_thread(remote.shed_backlog)
        await _in_thread(lambda: remote.flush(_FLUSH_MS))
        return num_dropped

    async def clear_redis(self) -> int:
        return await _in_thread(self._redis().clear)

    async def verify(self, tier: Tier, *, repair: bool) -> VerifyReport:
        with self._verification(tier):
            if tier == "redis":
                return await self._verify_redis(repair)
            return await self._verify_host(repair)

    async def _verify_host(self, repair: bool) -> VerifyReport:
        host = self._tier
        if host is None:
            return VerifyReport()
        layout = host.config.layout
        view = await _in_thread(lambda: ArenaView(host.config.directory, layout))
        entries = await _in_thread(host.entries)
        damaged: list[DamagedEntry] = []
        num_checked = 0
        for index, entry in enumerate(entries):
            self._checked("host", index, len(entries))
            check = await _in_thread(
                lambda entry=entry: check_entry(host, view, entry, repair=repair)
            )
            num_checked += check.is_there
            if check.damage is not None:
                damaged.append(
                    DamagedEntry(
                        key=entry.key.hex(),
                        content_id=entry.content_id,
                        reason="corrupt",
                        layer=check.damage.layer,
                    )
                )
        return VerifyReport(
            num_checked=num_checked,
            damaged=tuple(damaged),
            num_removed=len(damaged) if repair else 0,
            index_problems=tuple(await _in_thread(host.check_integrity)),
        )

    async def _verify_redis(self, repair: bool) -> VerifyReport:
        redis = self._redis()
        given_up = threading.Event()

        def on_checked(num_checked: int, num_chunks: int) -> None:
            if given_up.is_set():
                raise CacheUnavailableError("the verification was given up")
            self._checked("redis", num_checked, num_chunks)

        try:
            return await _in_thread(lambda: redis.verify(repair=repair, on_checked=on_checked))
        finally:
            given_up.set()  # its thread may outlive a caller who has left

    @contextmanager
    def _verification(self, tier: Tier) -> Iterator[None]:
        if self._is_verifying:
            raise VerificationRunningError("a verification is running; wait for its end")
        self._is_verifying = True
        self._checked(tier, 0, 0)
        try:
            yield
        finally:
            self._is_verifying = False

    def _checked(self, tier: Tier, num_checked: int, num_entries: int) -> None:
        self._progress = VerifyProgress(tier=tier, num_checked=num_checked, num_entries=num_entries)

    def _redis(self) -> RedisAdmin:
        remote = self._remote
        if remote is None:
            raise NoRedisTierError("this server has no Redis tier")
        return RedisAdmin(remote.config)


async def _in_thread(work: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(work)
    except KvTierError as exc:
        raise CacheUnavailableError(str(exc)) from exc


def _redis_report(stats: RedisTierStats) -> RedisReport:
    return RedisReport(
        counts={count.value: number for count, number in stats.counts.items()},
        misses={reason.value: number for reason, number in stats.misses.items()},
        bytes_per_ms=stats.speed.bytes_per_ms,
        latency_ms=stats.speed.latency_ms,
        backlog_bytes=stats.backlog_bytes,
        num_backlog=stats.num_backlog,
        nodes_unavailable=stats.nodes_unavailable,
        breaker_openings=stats.breaker_openings,
    )


def _entry(entry: EntryInfo) -> CacheEntry:
    return CacheEntry(
        content_id=entry.content_id,
        key=entry.key.hex(),
        num_tokens=entry.num_tokens,
        nbytes=entry.nbytes,
        recompute_ms=entry.recompute_ms,
        uses=entry.uses,
        num_leases=entry.num_leases,
    )
