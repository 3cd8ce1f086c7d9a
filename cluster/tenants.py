"""Tenants: their stored KV is found by nobody else, their chunk ids are of use to nobody else."""

import hmac
from dataclasses import dataclass, field

from kv_tier.keys import KEY_BYTES, keyed_digest

_SALT, _CHUNK_TAG = b"cachesmith tenant salt v1", b"cachesmith tenant chunk tag v1"
_TAG_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whom a key belongs to. The same name and secret make the same tenant, on every ingress."""

    name: str
    secret: bytes = field(repr=False)  # [KEY_BYTES], one for all tenants

    def __post_init__(self) -> None:
        if not self.name or len(self.secret) != KEY_BYTES:
            raise ValueError(f"need a name and a secret of {KEY_BYTES} bytes, got {self}")

    def cache_salt(self, given: str) -> str:
        """The salt that the store sees, for the one of a request: no client can choose it."""
        return self._digest(_SALT, given).hex()

    def chunk_id(self, content_id: str) -> str:
        """The id that the tenant sees: the store's, and a tag that only this tenant's ids have."""
        return f"{content_id}-{self._digest(_CHUNK_TAG, content_id)[:_TAG_BYTES].hex()}"

    def content_id(self, chunk_id: str) -> str | None:
        """The store's id of an id of this tenant; None for anything else."""
        content_id, _, _ = chunk_id.partition("-")
        fits = hmac.compare_digest(_bytes(self.chunk_id(content_id)), _bytes(chunk_id))
        return content_id if fits else None

    def _digest(self, purpose: bytes, text: str) -> bytes:
        return keyed_digest(self.secret, purpose, self.name.encode(), _bytes(text))


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # a URL may hold anything
