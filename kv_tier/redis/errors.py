"""Why a call to Redis had no answer. They stay inside the Redis tier: its callers see misses.

RedisCallError
├── LinkError        refused, reset, not authenticated, or what answers is not Redis
│   └── UnavailableError   the breaker is open: nobody was asked
├── DeadlineError    no answer in time
└── ReplyError       Redis answered with an error
    └── OversizeError      Redis answered with a value that is none of ours
"""

from kv_tier.errors import KvTierError

_MOVED_CODES = frozenset({"MOVED", "ASK", "CLUSTERDOWN", "MASTERDOWN", "LOADING", "READONLY"})


class RedisCallError(KvTierError):
    """Base of what a call to Redis can end with."""


class LinkError(RedisCallError):
    """Refused, reset, not authenticated, or what answers is not Redis."""


class UnavailableError(LinkError):
    """The breaker is open, or the tier closed: nobody was asked."""


class DeadlineError(RedisCallError):
    """No answer in time."""


class ReplyError(RedisCallError):
    """Redis answered with an error, for example `OOM ...`. The connection is good."""

    @property
    def is_redirect(self) -> bool:
        """Whether another node has the key now, or this one can not serve it."""
        return str(self).partition(" ")[0] in _MOVED_CODES


class OversizeError(ReplyError):
    """A value that is larger than any small one of ours: received to its end, and dropped."""
