"""Who a chunk's KV belongs to: model fingerprint, chunk key, public chunk id.

Every digest is BLAKE3 over length-prefixed fields, so that no two different inputs share one byte
string, and each purpose has its own derivation context.
"""

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kv_tier.errors import ModelIdentityError

if TYPE_CHECKING:
    from blake3 import blake3

LAYOUT_VERSION = 1
KEY_BYTES = 32

_FINGERPRINT_CONTEXT = "cachesmith model fingerprint v1"
_CONTENT_CONTEXT = "cachesmith chunk content id v1"
_KEY_CONTEXT = "cachesmith chunk key v1"

# Written by tools, not read by any model: they differ between copies of the same weights.
_IGNORED_CONFIG_FIELDS = frozenset({"transformers_version", "_name_or_path", "_commit_hash"})


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySpace:
    """Everything but the tokens that decides a chunk's KV. One a served model."""

    fingerprint: str  # from model_fingerprint
    kv_dtype: str
    anchor_ids: tuple[int, ...]  # prefilled before a chunk, their KV is dropped
    layout_version: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        if not self.fingerprint or not self.kv_dtype:
            raise ValueError(f"fingerprint and kv_dtype must not be empty, got {self}")

    def key(
        self, token_ids: Sequence[int], *, cache_salt: str = "", anchored: bool = True
    ) -> bytes:
        """The store's key, 32 bytes.

        anchored: True for KV computed behind the anchor; False for an exact prompt prefix,
        computed from position 0. The two are different KV of the same tokens.
        """
        return _digest(
            _KEY_CONTEXT,
            self.fingerprint.encode(),
            self.kv_dtype.encode(),
            struct.pack("<q?", self.layout_version, anchored),
            token_bytes(self.anchor_ids),
            _text_bytes(cache_salt),
            token_bytes(token_ids),
        ).digest(KEY_BYTES)


def content_id(token_ids: Sequence[int], *, cache_salt: str = "") -> str:
    """The public chunk id, hex: the same whatever model computed the KV."""
    return _digest(_CONTENT_CONTEXT, _text_bytes(cache_salt), token_bytes(token_ids)).hexdigest()


def keyed_digest(secret: bytes, *fields: bytes) -> bytes:
    """32 bytes that nobody can compute without the secret. The first field names the purpose.

    secret: [KEY_BYTES]
    """
    from blake3 import blake3

    return _hash_fields(blake3(key=secret), fields).digest(KEY_BYTES)


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """token_ids: [num_tokens], each in [0, 2**32). Returns them as little-endian uint32."""
    return np.asarray(array("I", token_ids), dtype="<u4").tobytes()


def token_ids_of(data: bytes) -> list[int]:
    """The inverse of `token_bytes`."""
    ids: list[int] = np.frombuffer(data, dtype="<u4").tolist()
    return ids


def model_fingerprint(model_dir: Path, *, lora_id: str | None = None) -> str:
    """Identity of the weights and of the config that shapes KV, hex.

    Reads every weight file in full, with all cores: a changed weight must change the key even
    where name, size and modification time stay the same.
    """
    digests = [_file_digest(path) for path in _weight_files(model_dir)]
    return _digest(
        _FINGERPRINT_CONTEXT,
        _canonical_config(model_dir / "config.json"),
        b"" if lora_id is None else b"lora:" + _text_bytes(lora_id),
        *digests,
    ).hexdigest()


def _digest(context: str, *fields: bytes) -> "blake3":
    from blake3 import blake3  # here: a machine that only runs the phases may be without it

    return _hash_fields(blake3(derive_key_context=context), fields)


def _hash_fields(hasher: "blake3", fields: Sequence[bytes]) -> "blake3":
    for field in fields:
        hasher.update(struct.pack("<Q", len(field)))
        hasher.update(field)
    return hasher


def _text_bytes(text: str) -> bytes:
    # A salt comes from a JSON body, which may hold lone surrogates.
    return text.encode("utf-8", errors="surrogatepass")


def _weight_files(model_dir: Path) -> list[Path]:
    for pattern in ("*.safetensors", "*.bin"):
        if paths := sorted(model_dir.glob(pattern), key=lambda path: path.name):
            return paths
    raise ModelIdentityError(f"no *.safetensors or *.bin weight files in {model_dir}")


def _file_digest(path: Path) -> bytes:
    from blake3 import blake3

    try:
        return blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
    except OSError as exc:
        raise ModelIdentityError(f"can not read weights {path}: {exc}") from exc


def _canonical_config(path: Path) -> bytes:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise ModelIdentityError(f"can not read model config {path}: {exc}") from exc
    kept = _without_ignored(config)
    return json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()


def _without_ignored(value: object) -> object:
    if isinstance(value, dict):
        kept = {name: v for name, v in value.items() if name not in _IGNORED_CONFIG_FIELDS}
        return {name: _without_ignored(v) for name, v in kept.items()}
    if isinstance(value, list):
        return [_without_ignored(item) for item in value]
    return value
