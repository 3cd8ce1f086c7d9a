"""What can go wrong in the KV tier. A miss is a return value, never one of these.

KvTierError
├── ModelIdentityError       a model folder has no config or no weights to fingerprint
├── LayoutMismatchError      an arena in use holds another KV layout or another size
├── ArenaUnavailableError    the arena or its index can not be created, opened or used
│   └── ArenaInUseError      it can not be removed, because other processes have it open
└── CorruptChunkError        stored bytes do not describe the chunk that they should
"""


class KvTierError(Exception):
    """Base of every error of this package."""


class ModelIdentityError(KvTierError):
    """A model folder has no config or no weights to fingerprint."""


class LayoutMismatchError(KvTierError):
    """An arena in use holds another KV layout or another size."""


class ArenaUnavailableError(KvTierError):
    """The arena or its index can not be created, opened or used."""


class ArenaInUseError(ArenaUnavailableError):
    """The arena can not be removed, because other processes have it open."""


class CorruptChunkError(KvTierError):
    """Stored bytes do not describe the chunk that they should."""
