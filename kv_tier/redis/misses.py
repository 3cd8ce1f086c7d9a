"""Why a chunk is not had from Redis."""

from enum import StrEnum


class Miss(StrEnum):
    """One reason a miss; each is a counter. The first four are found by a lookup."""

    ABSENT = "absent"  # no manifest
    COLLISION = "collision"  # the manifest is of other tokens
    INCOMPLETE = "incomplete"  # some layers are gone
    FOREIGN = "foreign"  # another version, model shape, dtype, encoding, chunk or layer
    MISSING = "missing"  # a layer went between lookup and read
    TRUNCATED = "truncated"  # a value has not the length of its shape
    CORRUPT = "corrupt"  # a checksum does not match
    DEADLINE = "deadline"  # the answer came late or not at all
    CONNECTION = "connection"  # refused, reset, not authenticated, or not Redis
    SERVER = "server"  # Redis answered with an error
    UNAVAILABLE = "unavailable"  # the breaker is open: nobody was asked
    CANCELLED = "cancelled"  # the reader did not want it any more


# What says that the stored chunk itself is bad, so that it is removed.
IS_DAMAGE = frozenset({Miss.INCOMPLETE, Miss.FOREIGN, Miss.MISSING, Miss.TRUNCATED, Miss.CORRUPT})
