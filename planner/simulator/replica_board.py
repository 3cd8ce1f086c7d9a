"""What a scheduler sees of its replicas, kept up to date where something has changed.

A thousand replicas are a thousand states in every decision; between two decisions a few change.
"""

from planner.scheduler import ReplicaState
from planner.simulator.replica import SimReplica


class ReplicaBoard:
    def __init__(self, *, knows_link: bool) -> None:
        self._knows_link = knows_link
        self._replicas: dict[str, SimReplica] = {}
        self._places: dict[str, int] = {}
        self._states: list[ReplicaState] = []
        self._stale: dict[str, None] = {}
        self.num_free = 0  # as of the latest `states`

    def __len__(self) -> int:
        return len(self._replicas)

    def replica(self, replica_id: str) -> SimReplica:
        return self._replicas[replica_id]

    def replicas(self) -> list[SimReplica]:
        return list(self._replicas.values())

    def add(self, replica: SimReplica) -> None:
        state = replica.state(knows_link=self._knows_link)
        self._replicas[replica.replica_id] = replica
        self._places[replica.replica_id] = len(self._states)
        self._states.append(state)
        self.num_free += state.is_free

    def remove(self, replica: SimReplica) -> None:
        """It may be on its way out for long: nothing else happens to it here."""
        if self._replicas.pop(replica.replica_id, None) is None:
            return
        self._stale.pop(replica.replica_id, None)
        place = self._places.pop(replica.replica_id)
        self.num_free -= self._states.pop(place).is_free
        for each, at in self._places.items():
            if at > place:
                self._places[each] = at - 1

    def changed(self, replica: SimReplica) -> None:
        if replica.replica_id in self._replicas:
            self._stale[replica.replica_id] = None

    def states(self) -> list[ReplicaState]:
        """The same list every time."""
        for replica_id in self._stale:
            place, replica = self._places[replica_id], self._replicas[replica_id]
            state = replica.state(knows_link=self._knows_link)
            self.num_free += state.is_free - self._states[place].is_free
            self._states[place] = state
        self._stale.clear()
        return self._states
