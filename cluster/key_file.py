"""The file with the API keys: whose each key is, as hashes, and the secret behind the tenants.

A key is random, 256 bits, so that its SHA-256 lets nobody in and no slow hash is needed.
"""

import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

KEY_PREFIX = "cs-"  # so that scanners for lost secrets can tell what it is

_SECRET_BYTES = 32
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class KeyFileError(Exception):
    """The file can not be used. The message holds nothing of a secret."""


class ApiKey(BaseModel):
    """One key of a tenant: `sha256` is the hash of what clients send."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Name
    tenant: Name
    sha256: Hex32


class KeyFile(BaseModel):
    """`tenant_secret` parts the tenants' stored KV; with another one nothing stored is found."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    version: Literal[1] = 1
    tenant_secret: Hex32 = Field(
        default_factory=lambda: secrets.token_hex(_SECRET_BYTES), repr=False
    )
    keys: tuple[ApiKey, ...] = ()

    @field_validator("keys")
    @classmethod
    def _are_different(cls, keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
        for what in ("name", "sha256"):
            if len({getattr(key, what) for key in keys}) < len(keys):
                raise ValueError(f"two keys have the same {what}")
        return keys

    @classmethod
    def load(cls, path: Path) -> "KeyFile":
        """Raises KeyFileError."""
        try:
            content = yaml.safe_load(path.read_bytes())
        except OSError as exc:
            raise KeyFileError(f"can not read {path}: {exc.strerror}") from None
        except (yaml.YAMLError, UnicodeError):
            raise KeyFileError(f"{path} is not valid YAML") from None  # the cause quotes the file
        if not isinstance(content, dict) or "tenant_secret" not in content:
            # a made-up secret would part this server from the others, and from its past
            raise KeyFileError(f"{path} must hold tenant_secret and keys")
        try:
            return cls.model_validate(content)
        except ValidationError as exc:
            error = exc.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, error["loc"]))
            raise KeyFileError(f"{path}: {where}: {error['msg']}") from None

    def with_keys(self, keys: tuple[ApiKey, ...]) -> "KeyFile":
        return self.model_copy(update={"keys": keys})

    def save(self, path: Path) -> None:
        """Replaces the file in one step; a new one is for its owner alone. Raises OSError."""
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o600
        target = path.resolve()
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with open(part, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                yaml.safe_dump(self.model_dump(), file, sort_keys=False)
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            part.rename(target)
        finally:
            part.unlink(missing_ok=True)


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def key_hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()
