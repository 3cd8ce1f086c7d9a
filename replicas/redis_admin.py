"""`kv_tier.redis.operations` as an operator sees them: plain answers, one kind of error. Blocking.

They have connections of their own, with more patience than serving has, and need no server.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

import redis
from redis.exceptions import RedisClusterException

from kv_tier.errors import KvTierError
from kv_tier.redis import RedisTierConfig, operations
from kv_tier.redis.topology import Client, RedisTopology
from replicas.cache_types import (
    CacheEntry,
    CacheUnavailableError,
    DamagedEntry,
    EntryPage,
    RedisKeys,
    VerifyReport,
)

OnChecked = Callable[[int, int], None]  # how many, of how many

_PATIENCE_MS = 5000.0  # for one answer: nobody waits for a first token here


class RedisAdmin:
    """The operations on the prefix of a Redis tier. Each connects, and leaves nothing open."""

    def __init__(self, config: RedisTierConfig) -> None:
        patience_ms = max(config.connect_deadline_ms, _PATIENCE_MS)
        self._config = replace(config, connect_deadline_ms=patience_ms)
        self._prefix = config.key_prefix

    def ping(self) -> None:
        """Raises CacheUnavailableError, with the reason, if Redis can not be used."""
        with self._asked() as client:
            client.ping()

    def keys(self) -> RedisKeys:
        with self._asked() as client:
            stats = operations.stats(client, self._prefix)
        return RedisKeys(
            num_keys=stats.num_keys,
            num_chunks=stats.num_chunks,
            num_tokens=stats.num_tokens,
            nbytes=stats.nbytes,
        )

    def entries(self, limit: int) -> EntryPage:
        with self._asked() as client:
            found = list(islice(operations.ls(client, self._prefix), limit + 1))
        return EntryPage(
            entries=tuple(_entry(chunk) for chunk in found[:limit]), has_more=len(found) > limit
        )

    def remove(self, chunk_id: str) -> bool:
        with self._asked() as client:
            return operations.rm(client, self._prefix, content_id=chunk_id) > 0

    def clear(self) -> int:
        with self._asked() as client:
            return operations.clear(client, self._prefix)

    def verify(self, *, repair: bool, on_checked: OnChecked | None = None) -> VerifyReport:
        """on_checked: what it raises ends the work, and comes out of here"""
        num_checked = 0

        def on_chunk(num_done: int, num_chunks: int) -> None:
            nonlocal num_checked
            num_checked = num_done
            if on_checked is not None:
                on_checked(num_done, num_chunks)

        with self._asked() as client:
            problems = operations.verify(client, self._prefix, repair=repair, on_chunk=on_chunk)
        damaged = tuple(
            DamagedEntry(key=found.key.hex(), reason=found.reason.value, layer=found.layer)
            for found in problems
        )
        return VerifyReport(
            num_checked=num_checked, damaged=damaged, num_removed=len(damaged) if repair else 0
        )

    @contextmanager
    def _asked(self) -> Iterator[Client]:
        topology = RedisTopology(self._config)
        try:
            yield topology.client()
        except (redis.RedisError, RedisClusterException, KvTierError, OSError) as exc:
            reason = str(exc).partition(" : <")[0]  # Sentinel's would list its whole client
            raise CacheUnavailableError(f"Redis can not be asked: {reason}") from exc
        finally:
            topology.close()


def _entry(chunk: operations.StoredChunk) -> CacheEntry:
    manifest = chunk.manifest
    return CacheEntry(
        content_id=manifest.content_id,
        key=manifest.key.hex(),
        num_tokens=manifest.shape.num_tokens,
        nbytes=chunk.nbytes,
        recompute_ms=manifest.recompute_ms,
        ttl_s=chunk.ttl_s,
        is_whole=chunk.is_whole,
    )
