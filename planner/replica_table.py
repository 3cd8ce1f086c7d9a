"""The replicas as columns, so that a decision does not go through all of them one by one."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.pass_curves import Pace
from planner.scheduler import ReplicaState

Floats = NDArray[np.float64]

NUM_COLUMNS = 5  # free_at_ms, whether it does not tell its capacity, and its pace in three


class ReplicaTable:
    """Of the latest call, in the order of its list.

    nodes: one replica of each node, whose chunks stand for all of them.
    """

    def __init__(self) -> None:
        self.states: list[ReplicaState] = []
        self.nodes: dict[str, ReplicaState] = {}
        self.fastest = self.slowest = Pace()  # the best of all replicas in each, and the worst
        self._columns = np.empty((NUM_COLUMNS, 0))

    def take(
        self, states: Sequence[ReplicaState], pace_of: Callable[[ReplicaState], Pace]
    ) -> Sequence[ReplicaState]:
        """Returns those that differ from the latest call's; a state is never changed in place."""
        known = self.states
        if len(known) == len(states):
            places = [i for i, (a, b) in enumerate(zip(known, states, strict=True)) if a is not b]
            same = all(
                known[i].replica_id == states[i].replica_id
                and known[i].node_id == states[i].node_id
                for i in places
            )
        else:
            same = False
        if not same:
            self.nodes = {}
            self.states = known = list(states)
            self._columns = np.empty((NUM_COLUMNS, len(known)))
            places = list(range(len(known)))
        for i in places:
            state = states[i]
            known[i] = state
            self.nodes[node_of(state)] = state
            pace = pace_of(state)
            self._columns[:, i] = (
                _free_at_ms(state),
                state.max_kv_tokens is None,
                pace.speed,
                pace.token_ms,
                pace.latency_ms,
            )
        if places:
            paces = self._columns[2:]
            self.fastest = Pace(*paces.min(axis=1).tolist())
            self.slowest = Pace(*paces.max(axis=1).tolist())
        return [states[i] for i in places]

    @property
    def all_tell(self) -> bool:
        """How much each can hold."""
        return not self._columns[1].any()

    @property
    def num_free(self) -> int:
        return int(np.count_nonzero(self._columns[0] == -np.inf))

    def free(self) -> list[ReplicaState]:
        return [self.states[i] for i in (self._columns[0] == -np.inf).nonzero()[0].tolist()]

    def others_ms(self, chosen: ReplicaState, *, now_ms: float) -> Floats:
        """When each of the others is free, from now, in order; those that never are left out.

        One that takes longer than expected is taken for one that is free any moment.
        """
        free_at_ms = np.sort(self._columns[0])
        if chosen.is_free:
            free_at_ms = free_at_ms[1:]  # one of those that are free, whichever
        count = int(np.searchsorted(free_at_ms, np.inf))
        waits: Floats = np.maximum(free_at_ms[:count] - now_ms, 0.0)
        return waits


def node_of(state: ReplicaState) -> str:
    return state.node_id or state.replica_id


def _free_at_ms(state: ReplicaState) -> float:
    """Of the clock; nobody knows when one without a free seat takes a batch."""
    if state.busy_until_ms is not None:
        return state.busy_until_ms
    return -np.inf if state.is_free else np.inf
