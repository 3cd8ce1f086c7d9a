"""What a replica tells the scheduler, and when it must tell everything again."""

from collections.abc import Iterable

from cluster.messages import ActiveRequest, ReplicaReport, ReportAck
from planner import EngineInfo
from replicas.cache_types import TierReport
from replicas.interface import RagEngine, ResidencyUpdate


class ReplicaReporter:
    """Builds reports: complete ones for a scheduler that does not know this replica, else changes.

    Each report is followed by `acknowledged` or `lost` before the next is built.
    """

    def __init__(self, engine: RagEngine, info: EngineInfo, *, replica_id: str, node_id: str):
        self._engine = engine
        self._info = info
        self._replica_id = replica_id
        self._node_id = node_id
        self._resident: set[str] = set()
        self._tiers: TierReport | None = None  # as last told
        self._epoch: str | None = None  # the scheduler's life that knows us; None: complete report

    def build(self, active: Iterable[ActiveRequest]) -> ReplicaReport:
        update = self._engine.residency_update()
        if update.reset:
            self._resident.clear()
        self._resident.difference_update(update.removed)
        self._resident.update(update.added)
        complete = self._epoch is None
        if complete:
            update = ResidencyUpdate(added=tuple(self._resident), reset=True)
        tiers = self._engine.tier_report()
        is_news = complete or tiers != self._tiers
        self._tiers = tiers
        return ReplicaReport(
            replica_id=self._replica_id,
            node_id=self._node_id,
            info=self._info if complete else None,
            cost=self._engine.cost,
            link=self._engine.link,
            load=self._engine.load(),
            active=tuple(active),
            residency=update,
            tiers=tiers if is_news else None,
        )

    def acknowledged(self, ack: ReportAck) -> bool:
        """Take note of the answer; True if the next report should follow at once."""
        knows_us = not ack.needs_full and self._epoch in (None, ack.epoch)
        self._epoch = ack.epoch if knows_us else None
        return not knows_us

    def lost(self) -> None:
        """The report may or may not have arrived: start over."""
        self._epoch = None
