"""The tiers in /metrics: what the replicas' latest reports say, counters as counters."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from cluster.messages import ReplicaSummary
from kv_tier.store import TierStats
from replicas.cache_types import RedisReport

Family = CounterMetricFamily | GaugeMetricFamily

COUNTER, GAUGE = CounterMetricFamily, GaugeMetricFamily


def _count(name: str) -> Callable[[RedisReport], float]:
    return lambda report: report.counts.get(name, 0)


# kind, name, text, value
_HOST: tuple[tuple[type[Family], str, str, Callable[[TierStats], float]], ...] = (
    (COUNTER, "host_hits", "Lookups that hit", lambda s: s.hits),
    (COUNTER, "host_misses", "Lookups that did not", lambda s: s.misses),
    (COUNTER, "host_collisions", "Misses of a key with other tokens", lambda s: s.collisions),
    (COUNTER, "host_evictions", "Entries evicted for others", lambda s: s.evictions),
    (COUNTER, "host_refused", "Entries that found no room", lambda s: s.refused),
    (GAUGE, "host_capacity_bytes", "Size of the arena", lambda s: s.capacity_bytes),
    (GAUGE, "host_used_bytes", "Of it, not free", lambda s: s.used_bytes),
    (GAUGE, "host_largest_free_bytes", "Longest free run", lambda s: s.largest_free_bytes),
    (GAUGE, "host_entries", "Resident entries", lambda s: s.num_entries),
    (GAUGE, "host_leases", "Leases held", lambda s: s.num_leases),
    (GAUGE, "host_reservations", "Entries being written", lambda s: s.num_reservations),
)
_REDIS: tuple[tuple[type[Family], str, str, Callable[[RedisReport], float]], ...] = (
    (COUNTER, "redis_lookup_hits", "Chunks found whole", _count("lookup_hits")),
    (COUNTER, "redis_chunks_read", "Chunks read", _count("chunks_read")),
    (COUNTER, "redis_read_ms", "Fetch to last layer, of these chunks", _count("read_ms")),
    (COUNTER, "redis_read_bytes", "Bytes of layers that verified", _count("bytes_read")),
    (COUNTER, "redis_chunks_written", "Chunks written", _count("chunks_written")),
    (COUNTER, "redis_written_bytes", "Bytes of their layers", _count("bytes_written")),
    (COUNTER, "redis_chunks_removed", "Chunks taken back", _count("chunks_removed")),
    (COUNTER, "redis_breaker_openings", "Redis nodes given up", lambda r: r.breaker_openings),
    (GAUGE, "redis_breakers_open", "Redis nodes not asked", lambda r: len(r.nodes_unavailable)),
    (GAUGE, "redis_backlog_bytes", "Waiting to be written", lambda r: r.backlog_bytes),
    (GAUGE, "redis_bytes_per_ms", "Bandwidth, smoothed", lambda r: r.bytes_per_ms),
    (GAUGE, "redis_latency_ms", "Lookup's round trip, smoothed", lambda r: r.latency_ms),
)
_WRITES_LOST = ("dropped", "refused", "failed", "damaged")


class TierMetrics(Collector):
    """Host tiers by node, Redis tiers by replica, as they were last shown."""

    def __init__(self) -> None:
        self._hosts: dict[str, TierStats] = {}
        self._redis: dict[str, RedisReport] = {}

    def show(self, replicas: Sequence[ReplicaSummary]) -> None:
        self._hosts.clear()
        self._redis.clear()
        for replica in replicas:
            if replica.tiers is None:
                continue
            if replica.tiers.redis is not None:
                self._redis[replica.replica_id] = replica.tiers.redis
            host, known = replica.tiers.host, self._hosts.get(replica.node_id)
            # of a node's replicas the one that has seen most, so that no counter goes back
            if host is not None and (known is None or _num_seen(host) > _num_seen(known)):
                self._hosts[replica.node_id] = host

    def collect(self) -> Iterator[Family]:
        for kind, name, text, host_value in _HOST:
            family = _family(kind, name, text, "node")
            for node_id, stats in self._hosts.items():
                family.add_metric([node_id], host_value(stats))
            yield family
        for kind, name, text, redis_value in _REDIS:
            family = _family(kind, name, text, "replica")
            for replica_id, report in self._redis.items():
                family.add_metric([replica_id], redis_value(report))
            yield family
        misses = _family(COUNTER, "redis_misses", "Chunks not had from Redis", "replica", "reason")
        lost = _family(COUNTER, "redis_writes_lost", "Chunks not written", "replica", "reason")
        for replica_id, report in self._redis.items():
            for reason, number in report.misses.items():
                misses.add_metric([replica_id, reason], number)
            for reason in _WRITES_LOST:
                lost.add_metric([replica_id, reason], report.counts.get(f"writes_{reason}", 0))
        yield misses
        yield lost


def _num_seen(stats: TierStats) -> tuple[int, int]:
    return stats.hits + stats.misses, stats.evictions


def _family(kind: type[Family], name: str, text: str, *labels: str) -> Family:
    return kind(f"cachesmith_{name}", text, labels=labels)
