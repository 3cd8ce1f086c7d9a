"""Which chunks are hot on which node, from the changes that replicas report."""

from replicas.interface import ResidencyUpdate


class NodeResidency:
    """One set of chunk ids a node: its replicas share one store, so any of them may report."""

    def __init__(self) -> None:
        self._chunks: dict[str, set[str]] = {}

    def apply(self, node_id: str, update: ResidencyUpdate) -> None:
        chunks = self._chunks.setdefault(node_id, set())
        if update.reset:
            chunks.clear()
        chunks.difference_update(update.removed)
        chunks.update(update.added)

    def of(self, node_id: str) -> set[str]:
        """The node's set itself, not a copy: read it, do not keep it."""
        return self._chunks.get(node_id, set())

    def keep_nodes(self, node_ids: set[str]) -> None:
        for node_id in self._chunks.keys() - node_ids:
            del self._chunks[node_id]
