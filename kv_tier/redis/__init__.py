"""The Redis tier: chunks that nodes share, read layer by layer into the arena.

A scheduler-side process looks chunks up (`RedisTier.lookup`) and reserves their entries; whoever
maps the arena fetches layers into them (`RedisTier.fetch`). `Promoter` does both in one process.
Committed entries are copied to Redis when there is time (`RedisTier.write_behind`).
"""

from kv_tier.redis.config import RedisTierConfig
from kv_tier.redis.counters import Count, RedisTierStats
from kv_tier.redis.encoding import Encoding, EncodingError, encoding_error
from kv_tier.redis.fetch import ChunkFetch, Fetch, FetchRequest
from kv_tier.redis.link import LinkLimit, LinkSpeed
from kv_tier.redis.misses import Miss
from kv_tier.redis.promoter import ArrivingChunk, Promoter
from kv_tier.redis.remote import ChunkWrite, RemoteTier
from kv_tier.redis.tier import RedisTier
from kv_tier.redis.values import Manifest, StoredShape

__all__ = [
    "ArrivingChunk",
    "ChunkFetch",
    "ChunkWrite",
    "Count",
    "Encoding",
    "EncodingError",
    "Fetch",
    "FetchRequest",
    "LinkLimit",
    "LinkSpeed",
    "Manifest",
    "Miss",
    "Promoter",
    "RedisTier",
    "RedisTierConfig",
    "RedisTierStats",
    "RemoteTier",
    "StoredShape",
    "encoding_error",
]
