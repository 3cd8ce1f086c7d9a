"""Why a chunk is not had from Redis."""

from enum import StrEnum


class Miss(StrEnum):
    """One reason a miss; each is a counter. The first four are found by a lookup."""

    ABSENT = "absent"  # no manifest
    COLLISION = "collision"  # the manifest is of other tokens
    INCOMPLETE = "incomplete"  # some layers are gone
    FOREIGN = "foreign"  # an intact manifest of another version, model shape, dtype or encoding
    MISSING = "missing"  # a layer went between lookup and read
    REPLACED = "replaced"  # an intact layer of another write than the manifest
    TRUNCATED = "truncated"  # a value has not the length of its shape
    CORRUPT = "corrupt"  # a checksum does not match, or the value is of another place
    DEADLINE = "deadline"  # the answer came late or not at all
    CONNECTION = "connection"  # refused, reset, not authenticated, or not Redis
    SERVER = "server"  # Redis answered with an error
    UNAVAILABLE = "unavailable"  # the breaker is open: nobody was asked
    CANCELLED = "cancelled"  # the reader did not want it any more


# What says that the stored chunk itself is bad. It is removed, unless it was written again: with
# REPLACED, a manifest that is still there is of a chunk that two writers made.
IS_DAMAGE = frozenset({Miss.INCOMPLETE, Miss.MISSING, Miss.REPLACED, Miss.TRUNCATED, Miss.CORRUPT})
