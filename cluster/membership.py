"""Which replicas every router can reach, from what the routers push."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _View:
    replica_ids: frozenset[str]
    at_ms: float


class Membership:
    """Replicas are running while every router that still speaks lists them.

    A router that has just seen a replica die drops it before Serve's controller tells the others,
    and a new replica counts once all can send to it.
    """

    def __init__(self, *, router_ttl_ms: float) -> None:
        self.router_ttl_ms = router_ttl_ms
        self._views: dict[str, _View] = {}
        self._suspects: dict[str, float] = {}

    def sync(self, router_id: str, replica_ids: Sequence[str], *, now_ms: float) -> None:
        self._views[router_id] = _View(frozenset(replica_ids), now_ms)

    def suspect(self, replica_id: str, *, until_ms: float) -> None:
        """Count a replica out for a while: a request has just failed on it."""
        self._suspects[replica_id] = until_ms

    def running(self, *, now_ms: float) -> frozenset[str]:
        cutoff = now_ms - self.router_ttl_ms
        self._views = {k: v for k, v in self._views.items() if v.at_ms >= cutoff}
        self._suspects = {k: t for k, t in self._suspects.items() if t > now_ms}
        if not self._views:
            return frozenset()
        common = frozenset.intersection(*(view.replica_ids for view in self._views.values()))
        return common - self._suspects.keys()
