"""Outstanding tickets: which request holds a place on which replica, until when."""

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.messages import ActiveRequest


@dataclass(slots=True)
class Lease:
    """A place that a request holds on a replica."""

    request_id: str
    replica_id: str
    num_tokens: int
    expires_ms: float  # counts until the replica has confirmed the request
    prefill_until_ms: float = 0.0  # as planned, of the scheduler's clock
    in_prefill: bool = True
    confirmed: bool = False


class LeaseTable:
    """Leases by request. Events free them at once, reports and expiry where an event got lost."""

    def __init__(self, *, lease_ms: float) -> None:
        self.lease_ms = lease_ms
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(
        self,
        request_id: str,
        replica_id: str,
        num_tokens: int,
        *,
        now_ms: float,
        expected_ms: float = 0.0,
    ) -> None:
        """expected_ms: until the first token, as planned"""
        self._leases[request_id] = Lease(
            request_id,
            replica_id,
            num_tokens,
            expires_ms=now_ms + self.lease_ms,
            prefill_until_ms=now_ms + expected_ms,
        )

    def of(self, replica_id: str) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.replica_id == replica_id]

    def by_replica(self) -> dict[str, list[Lease]]:
        found: dict[str, list[Lease]] = {}
        for lease in self._leases.values():
            found.setdefault(lease.replica_id, []).append(lease)
        return found

    def prefill_left_ms(self, *, now_ms: float) -> float:
        """Of all batches in prefill, as planned; a replica has one of them at a time."""
        until_ms: dict[str, float] = {}
        for lease in self._leases.values():
            if lease.in_prefill:
                latest_ms = until_ms.get(lease.replica_id, now_ms)
                until_ms[lease.replica_id] = max(latest_ms, lease.prefill_until_ms)
        return sum(end_ms - now_ms for end_ms in until_ms.values())

    def first_token(self, replica_id: str, request_id: str) -> None:
        """The request's prefill is over. It may have moved there from another replica's ticket."""
        if lease := self._leases.get(request_id):
            lease.replica_id = replica_id
            lease.in_prefill = False
            lease.confirmed = True

    def release(self, request_id: str) -> bool:
        return self._leases.pop(request_id, None) is not None

    def release_replicas(self, keep: frozenset[str]) -> int:
        """Drop the leases on replicas that are gone; returns how many."""
        lost = [i for i, lease in self._leases.items() if lease.replica_id not in keep]
        for request_id in lost:
            del self._leases[request_id]
        return len(lost)

    def reconcile(self, replica_id: str, active: Iterable[ActiveRequest]) -> None:
        """Make the leases on a replica what the replica says it works on.

        Tickets that are still on their way stay; requests unknown here (a scheduler that has just
        restarted) are taken over.
        """
        reported = {request.request_id: request for request in active}
        for lease in self.of(replica_id):
            if lease.confirmed and lease.request_id not in reported:
                del self._leases[lease.request_id]
        for request in reported.values():
            known = self._leases.get(request.request_id)
            if known is None:
                self._leases[request.request_id] = Lease(
                    request.request_id,
                    replica_id,
                    request.num_tokens,
                    expires_ms=0.0,
                    in_prefill=request.in_prefill,
                    confirmed=True,
                )
                continue
            known.replica_id = replica_id
            known.confirmed = True
            known.in_prefill = known.in_prefill and request.in_prefill

    def expire(self, *, now_ms: float) -> list[str]:
        """Drop and return tickets that nobody has used in time."""
        late = [
            lease.request_id
            for lease in self._leases.values()
            if not lease.confirmed and lease.expires_ms <= now_ms
        ]
        for request_id in late:
            del self._leases[request_id]
        return late
