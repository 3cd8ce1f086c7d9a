"""Who asks, and who may: API keys, the administrators' token. The one place that checks them."""

import hashlib
import hmac
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from cluster.errors import ApiError
from cluster.key_file import KeyFile, KeyFileError, key_hash
from cluster.tenants import Tenant

log = logging.getLogger(__name__)

CALLER = "cachesmith.caller"  # in the ASGI scope
OPEN_PATHS = frozenset({"/health", "/ping"})  # for load balancers and probes


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request, as far as it has shown."""

    tenant: Tenant | None = None
    is_admin: bool = False
    has_credential: bool = False  # perhaps a wrong one

    def cache_salt(self, given: str | None) -> str:
        """What parts this caller's stored KV from others', for the salt of a request."""
        return (given or "") if self.tenant is None else self.tenant.cache_salt(given or "")

    def chunk_id(self, content_id: str) -> str:
        """A chunk's id as this caller sees it."""
        return content_id if self.tenant is None else self.tenant.chunk_id(content_id)

    def content_id(self, chunk_id: str) -> str | None:
        """The store's id of it; None where it is no chunk of this caller.

        An administrator may give a tenant's id or the store's.
        """
        if self.tenant is not None:
            return self.tenant.content_id(chunk_id)
        return chunk_id.partition("-")[0] if self.is_admin else chunk_id


class KeyRing:
    """The keys of a file, followed as it changes: a key that was added or removed there counts
    from the next request on.

    A file that has become unreadable or wrong changes nothing, and the log says so. Raises
    KeyFileError where there is no good file to begin with.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = _stamp(path)
        self._keys = _tenants(KeyFile.load(path))

    def tenant_of(self, credential: bytes) -> Tenant | None:
        self._follow()
        wanted, found = key_hash(credential), None
        for known, tenant in self._keys:  # all of them, so that the time tells nothing
            if hmac.compare_digest(known, wanted):
                found = tenant
        return found

    def _follow(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = _tenants(KeyFile.load(self._path))
        except KeyFileError as exc:
            log.error("api_keys_not_read reason=%s", exc)
        else:
            log.info("api_keys_read num_keys=%d", len(self._keys))


class Access:
    """What credentials are asked for. Without keys and token everything is open."""

    def __init__(self, *, keys: KeyRing | None = None, admin_token: str | None = None) -> None:
        self._keys = keys
        self._admin_hash = None if admin_token is None else _sha256(admin_token.encode())

    @property
    def needs_key(self) -> bool:
        return self._keys is not None

    def caller(self, authorization: Sequence[bytes]) -> Caller:
        """authorization: the request's headers of this name; only one is of use."""
        scheme, _, credential = b"".join(authorization[:1]).partition(b" ")
        credential = credential.strip()
        if scheme.lower() != b"bearer" or not credential or len(authorization) > 1:
            return Caller()
        if self._admin_hash is not None and hmac.compare_digest(
            self._admin_hash, _sha256(credential)
        ):
            return Caller(is_admin=True, has_credential=True)
        tenant = None if self._keys is None else self._keys.tenant_of(credential)
        return Caller(tenant=tenant, has_credential=True)

    def check_known(self, caller: Caller, path: str) -> None:
        """Where there are keys, nobody else comes past this. Raises ApiError."""
        if not self.needs_key or path in OPEN_PATHS or caller.tenant or caller.is_admin:
            return
        if not caller.has_credential:
            raise ApiError(
                401,
                "this needs the header Authorization: Bearer, with an API key of this server",
                code="missing_api_key",
            )
        raise ApiError(
            401, "the header Authorization holds no API key of this server", code="invalid_api_key"
        )

    def check_tenant(self, caller: Caller) -> None:
        """For work that belongs to somebody. Raises ApiError."""
        if self.needs_key and caller.tenant is None:
            raise ApiError(403, "this needs an API key, not http.admin_token", code="no_tenant")

    def check_admin(self, caller: Caller) -> None:
        """Raises ApiError."""
        if caller.is_admin or (self._admin_hash is None and not self.needs_key):
            return
        if self.needs_key:
            has_none = ", which it does not have" if self._admin_hash is None else ""
            raise ApiError(
                403,
                f"this is for administrators: it needs the server's http.admin_token{has_none}",
                code="not_admin",
            )
        if not caller.has_credential:
            raise ApiError(
                401,
                "this needs the header Authorization: Bearer, with the server's http.admin_token",
                code="missing_admin_token",
            )
        raise ApiError(
            401,
            "the token of the header Authorization is not the server's http.admin_token",
            code="wrong_admin_token",
        )


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope[CALLER]
    return caller


async def _asking(request: Request) -> Caller:  # async, so that no thread is asked
    return caller_of(request)


Asking = Annotated[Caller, Depends(_asking)]


def _tenants(file: KeyFile) -> tuple[tuple[str, Tenant], ...]:
    secret = bytes.fromhex(file.tenant_secret)
    return tuple((key.sha256, Tenant(name=key.tenant, secret=secret)) for key in file.keys)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Another one whenever the file was replaced or written; None while there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
