"""Which chunks of a prompt every node can load, asked before the request is admitted."""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kv_tier.keys import KeySpace
from kv_tier.layout import KvLayout
from kv_tier.redis import RedisTier, RedisTierConfig
from kv_tier.store import ChunkQuery
from planner import EngineInfo

log = logging.getLogger(__name__)

MAX_LOOKUPS = 16  # at the same time
_PATIENCE_MS = 50.0  # over a lookup's deadline, for a thread


class SharedChunks:
    """Looks chunks up in Redis, by the keys of the model that the replicas serve."""

    def __init__(self, config: RedisTierConfig) -> None:
        self._config = config
        self._pool = ThreadPoolExecutor(MAX_LOOKUPS, thread_name_prefix="shared-chunks")
        self._opened: tuple[KeySpace, RedisTier] | None = None

    async def are_shared(
        self, chunks: Sequence[tuple[int, ...]], *, cache_salt: str, info: EngineInfo | None
    ) -> list[bool]:
        """In the order of the chunks; all False while no replica says what it stores.

        Takes little more than the lookup deadline at most: what is not known then is not shared.
        """
        nothing = [False] * len(chunks)
        if info is None or not info.num_kv_heads or not chunks:
            return nothing
        keys, tier = self._tier_of(info)

        def look_up() -> list[bool]:
            queries = [
                ChunkQuery(key=keys.key(ids, cache_salt=cache_salt), token_ids=ids)
                for ids in chunks
            ]
            return [manifest is not None for manifest in tier.lookup(queries)]

        timeout_s = (self._config.lookup_deadline_ms + _PATIENCE_MS) / 1e3
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._pool, look_up)
        except TimeoutError:
            log.warning("shared_lookup_late")
        except Exception:  # a plan without it is only more careful
            log.exception("shared_lookup_failed")
        return nothing

    def close(self) -> None:
        self._pool.shutdown()
        if self._opened is not None:
            self._opened[1].close()

    def _tier_of(self, info: EngineInfo) -> tuple[KeySpace, RedisTier]:
        """Opened once, and anew when the replicas serve another model."""
        keys = KeySpace(
            fingerprint=info.fingerprint, kv_dtype=info.kv_dtype, anchor_ids=info.anchor_ids
        )
        if self._opened is None or self._opened[0] != keys:
            if self._opened is not None:
                self._pool.submit(self._opened[1].close)
            layout = KvLayout(
                num_layers=info.num_layers,
                num_kv_heads=info.num_kv_heads,
                head_dim=info.head_dim,
                dtype=info.kv_dtype,
            )
            self._opened = keys, RedisTier(self._config, layout, memoryview(b""))
        return self._opened
