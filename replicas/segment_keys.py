"""What the parts of a prompt are called in the store."""

from collections.abc import Sequence

from kv_tier.keys import KeySpace
from kv_tier.store import ChunkQuery
from replicas.batch import SegmentKind
from replicas.connector_types import SegmentSpan


def segment_queries(
    keys: KeySpace, spans: Sequence[SegmentSpan], token_ids: Sequence[int], *, cache_salt: str
) -> list[ChunkQuery]:
    """One for each span of the prompt `token_ids`."""
    queries = []
    for span in spans:
        tokens = token_ids[span.start : span.end]
        anchored = span.kind is SegmentKind.CHUNK
        key = keys.key(tokens, cache_salt=cache_salt, anchored=anchored)
        queries.append(ChunkQuery(key=key, token_ids=tokens))
    return queries
