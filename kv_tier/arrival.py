"""How far an entry has come that is fetched into the arena, for every process that maps it.

The marks are in the entry itself. Its header says that it is arriving; its checksum table is zero
where nothing has come yet, and a layer's checksums are filled in behind its bytes. Then the header
is written, or, when the fetch has failed, zeros.
"""

from enum import Enum, auto

from kv_tier.layout import HEADER_BYTES, KvLayout, arriving_header, header_matches
from kv_tier.store import ChunkLocation


class Arrival(Enum):
    ARRIVING = auto()
    WHOLE = auto()
    GONE = auto()  # the fetch failed, or the space is another entry's


def begin_arrival(entry: memoryview, layout: KvLayout, location: ChunkLocation) -> None:
    """Mark a reserved entry, before anybody hears of it; entry: its bytes, writable."""
    table_end = layout.layer_offset(location.num_tokens, 0)
    entry[HEADER_BYTES:table_end] = bytes(table_end - HEADER_BYTES)
    entry[:HEADER_BYTES] = arriving_header(layout, location.key, location.num_tokens)


def fail_arrival(entry: memoryview) -> None:
    entry[:HEADER_BYTES] = bytes(HEADER_BYTES)


def arrival_of(header: bytes, layout: KvLayout, location: ChunkLocation) -> Arrival:
    if header == arriving_header(layout, location.key, location.num_tokens):
        return Arrival.ARRIVING
    is_whole = header_matches(header, layout, location.key, location.num_tokens)
    return Arrival.WHOLE if is_whole else Arrival.GONE
