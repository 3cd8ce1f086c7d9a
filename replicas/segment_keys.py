"""What the parts of a prompt are called in the store."""

from collections.abc import Sequence

from kv_tier.keys import KeySpace
from kv_tier.store import ChunkQuery
from replicas.batch import SegmentKind
from replicas.connector_types import SegmentSpan


def segment_query(
    keys: KeySpace, kind: SegmentKind, token_ids: Sequence[int], *, cache_salt: str
) -> ChunkQuery:
    key = keys.key(token_ids, cache_salt=cache_salt, anchored=kind is SegmentKind.CHUNK)
    return ChunkQuery(key=key, token_ids=token_ids)


def segment_queries(
    keys: KeySpace, spans: Sequence[SegmentSpan], token_ids: Sequence[int], *, cache_salt: str
) -> list[ChunkQuery]:
    """One for each span of the prompt `token_ids`."""
    return [
        segment_query(keys, span.kind, token_ids[span.start : span.end], cache_salt=cache_salt)
        for span in spans
    ]
