"""Where the stored KV of chunks is: host memory of each node, and Redis for all of them."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from planner.types import ChunkRef

UNLIMITED_TOKENS = 1e15  # a tier that is never full


class LruTier:
    """Chunks up to a number of tokens; the one that was used least recently goes first."""

    def __init__(self, capacity_tokens: float) -> None:
        self._capacity = capacity_tokens
        self._chunks: OrderedDict[str, int] = OrderedDict()
        self.ids: set[str] = set()  # the same object for ever: it is handed to the scheduler
        self.num_tokens = 0

    @property
    def has_room(self) -> bool:
        return self._capacity > 0

    def use(self, chunk_id: str) -> bool:
        """Whether it is there; it is then the most recently used one."""
        if chunk_id not in self.ids:
            return False
        if self._capacity < UNLIMITED_TOKENS:
            self._chunks.move_to_end(chunk_id)
        return True

    def insert(self, chunk: ChunkRef) -> None:
        if chunk.num_tokens > self._capacity or self.use(chunk.chunk_id):
            return
        self._chunks[chunk.chunk_id] = chunk.num_tokens
        self.ids.add(chunk.chunk_id)
        self.num_tokens += chunk.num_tokens
        while self.num_tokens > self._capacity:
            oldest, num_tokens = self._chunks.popitem(last=False)
            self.ids.remove(oldest)
            self.num_tokens -= num_tokens

    def fill(self, chunks: Iterable[ChunkRef]) -> None:
        """With the first ones that fit, the first one the most recently used."""
        kept, total = [], 0
        for chunk in chunks:
            total += chunk.num_tokens
            if total > self._capacity:
                break
            kept.append(chunk)
        for chunk in reversed(kept):
            self.insert(chunk)


class NodeLink:
    """A node's way to Redis. A batch gets an equal share of those that load when it starts.

    The share stays for the whole batch, which is rough: it neither grows when others end nor
    shrinks when others start. capacity: bytes per ms, and from when on, ascending.
    """

    def __init__(self, steps: tuple[tuple[float, float], ...]) -> None:
        self._steps = steps
        self._loading_until: list[float] = []

    def capacity(self, now_ms: float) -> float:
        """bytes per ms"""
        current = self._steps[0][1]
        for start_ms, value in self._steps:
            if start_ms <= now_ms:
                current = value
        return current

    def begin(self, layer_bytes: float, num_layers: int, *, now_ms: float) -> float:
        """The share of a batch that loads from now on, bytes per ms."""
        self._loading_until = [end for end in self._loading_until if end > now_ms]
        share = self.capacity(now_ms) / (len(self._loading_until) + 1)
        self._loading_until.append(now_ms + layer_bytes * num_layers / share)
        return share


class Node:
    """One machine: its host tier and its link; `redis` is the same object for all, or None."""

    def __init__(
        self, node_id: str, *, host: LruTier, redis: LruTier | None, link: NodeLink
    ) -> None:
        self.node_id = node_id
        self.host = host
        self.redis = redis
        self.link = link
        # in the order they are asked; one without room holds nothing
        self._tiers = [tier for tier in (host, redis) if tier is not None and tier.has_room]

    @property
    def store_id(self) -> str:
        """Whose chunks `resident` are: with Redis, all nodes can load the same ones."""
        return self.node_id if self.redis is None else "redis"

    @property
    def resident(self) -> set[str]:
        return self.host.ids if self.redis is None else self.redis.ids

    def split(self, chunks: Iterable[ChunkRef]) -> tuple[int, int]:
        """Tokens of those in host memory, and of those in Redis alone; all of them are used."""
        in_host = in_redis = 0
        tried = self._tiers
        for chunk in chunks:
            for tier in tried:
                if tier.use(chunk.chunk_id):
                    if tier is self.host:
                        in_host += chunk.num_tokens
                    else:
                        in_redis += chunk.num_tokens
                    break
        return in_host, in_redis

    def keep(self, chunks: Sequence[ChunkRef]) -> None:
        """Loaded or computed: in both tiers from now on."""
        for tier in self._tiers:
            for chunk in chunks:
                if chunk.chunk_id not in tier.ids:
                    tier.insert(chunk)
