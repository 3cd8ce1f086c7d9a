"""What an operator does with the chunks in Redis. Only keys with names of ours are touched.

All of these read with SCAN, a few keys at a time, over every primary of a cluster. They take
redis-py's client (`RedisTier.client()`), and raise its errors, and ValueError for a prefix that can
not be; they are no part of serving.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from redis.cluster import RedisCluster

from kv_tier.redis.config import check_key_prefix
from kv_tier.redis.misses import Miss
from kv_tier.redis.topology import Client
from kv_tier.redis.values import (
    Manifest,
    check_value,
    chunk_names,
    is_our_name,
    layer_name,
    manifest_name,
    parse_manifest,
    parse_name,
)

_SCAN_COUNT = 1000
_BATCH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """One chunk in Redis."""

    manifest: Manifest
    num_layers_there: int
    ttl_s: float | None  # None: until Redis evicts it

    @property
    def is_whole(self) -> bool:
        return self.num_layers_there == self.manifest.shape.layout.num_layers

    @property
    def nbytes(self) -> int:
        """Of its layers' values."""
        return self.num_layers_there * self.manifest.shape.value_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStats:
    """What is ours below the prefix."""

    num_keys: int  # also those of other versions
    num_chunks: int  # with a manifest
    num_tokens: int
    nbytes: int  # as Redis counts memory, keys and overhead included


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One chunk that would be a miss."""

    key: bytes
    reason: Miss
    layer: int | None  # None: the manifest


def ls(client: Client, prefix: str) -> Iterator[StoredChunk]:
    """Every chunk that has a readable manifest, in no order."""
    for found in _manifests(client, prefix):
        ttls = _each(client, "PTTL", [manifest_name(prefix, m.key) for m in found])
        for manifest, ttl_ms in zip(found, ttls, strict=True):
            names = chunk_names(prefix, manifest.key, manifest.shape.layout.num_layers)[1:]
            num_there = int(_run(client, "EXISTS", *names))
            yield StoredChunk(
                manifest=manifest,
                num_layers_there=num_there,
                ttl_s=ttl_ms / 1e3 if ttl_ms >= 0 else None,
            )


def stats(client: Client, prefix: str) -> PrefixStats:
    """Counts and bytes. Asks for every key's size, so it takes time on a large Redis."""
    num_keys = nbytes = 0
    for names in _batches(set(_names(client, prefix))):
        num_keys += len(names)
        nbytes += sum(size or 0 for size in _each(client, "MEMORY USAGE", names))
    chunks = list(ls(client, prefix))
    return PrefixStats(
        num_keys=num_keys,
        num_chunks=len(chunks),
        num_tokens=sum(chunk.manifest.shape.num_tokens for chunk in chunks),
        nbytes=nbytes,
    )


def rm(client: Client, prefix: str, *, content_id: str) -> int:
    """Remove every chunk of a public id, of whatever model. Returns how many."""
    if not content_id:
        raise ValueError("content_id must not be empty: it would be that of all chunks without one")
    keys = [
        manifest.key
        for found in _manifests(client, prefix)
        for manifest in found
        if manifest.content_id == content_id
    ]
    for key in keys:
        remove_chunk(client, prefix, key)
    return len(keys)


def remove_chunk(client: Client, prefix: str, key: bytes) -> int:
    """Remove one chunk's manifest and layers. Returns how many keys there were."""
    names = set(_names(client, prefix, hex_key=key.hex()))
    return sum(_each(client, "UNLINK", list(names)))


def clear(client: Client, prefix: str) -> int:
    """Remove all keys of ours below the prefix, other versions' too. Returns how many."""
    num_removed = 0
    for names in _batches(_names(client, prefix)):
        num_removed += sum(_each(client, "UNLINK", names))
    return num_removed


def verify(
    client: Client,
    prefix: str,
    *,
    repair: bool = False,
    on_chunk: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """Read and check every value. With repair, remove what has a problem and is not FOREIGN.

    on_chunk: told before each chunk how many were checked, of how many, and once at the end; what
    it raises ends the work
    """
    layers_of: dict[bytes, set[int | None]] = defaultdict(set)
    for key, layer in _our_names(client, prefix):
        layers_of[key].add(layer)
    problems: list[Problem] = []
    on_chunk = on_chunk or (lambda num_checked, num_chunks: None)
    for num_checked, (key, there) in enumerate(layers_of.items()):
        on_chunk(num_checked, len(layers_of))
        problem = _chunk_problem(client, prefix, key, there)
        if problem is not None:
            problems.append(problem)
            if repair and problem.reason is not Miss.FOREIGN:
                names = [
                    manifest_name(prefix, key) if layer is None else layer_name(prefix, key, layer)
                    for layer in there
                ]
                _run(client, "UNLINK", *names)
    on_chunk(len(layers_of), len(layers_of))
    return problems


def _chunk_problem(
    client: Client, prefix: str, key: bytes, there: set[int | None]
) -> Problem | None:
    value = _run(client, "GET", manifest_name(prefix, key))
    if value is None:
        # Layers without a manifest: a write that was cut off, or one that is under way.
        return Problem(key=key, reason=Miss.ABSENT, layer=None)
    manifest = parse_manifest(value)
    if isinstance(manifest, Miss):
        return Problem(key=key, reason=manifest, layer=None)
    if manifest.key != key:
        return Problem(key=key, reason=Miss.CORRUPT, layer=None)
    for layer in range(manifest.shape.layout.num_layers):
        value = _run(client, "GET", layer_name(prefix, key, layer))
        reason = Miss.MISSING if value is None else None
        reason = reason or _value_problem(memoryview(value), manifest, layer)
        if reason is not None:
            return Problem(key=key, reason=reason, layer=layer)
    return None


def _value_problem(value: memoryview, manifest: Manifest, layer: int) -> Miss | None:
    shape = manifest.shape
    if len(value) != shape.value_bytes:
        return Miss.TRUNCATED
    prefix, blocks = value[: shape.prefix_bytes], value[shape.prefix_bytes :]
    return check_value(prefix, blocks, manifest.key, shape, manifest.write_id, layer)


def _manifests(client: Client, prefix: str) -> Iterator[list[Manifest]]:
    """Every readable manifest once, some at a time; Redis itself leaves out the layers."""
    seen: set[bytes] = set()
    for names in _batches(_names(client, prefix, field="chunk")):
        parsed = [found[0] for name in names if (found := parse_name(prefix, name)) is not None]
        keys = list(dict.fromkeys(key for key in parsed if key not in seen))
        seen.update(keys)
        values = _each(client, "GET", [manifest_name(prefix, key) for key in keys])
        yield [m for v in values if v and not isinstance(m := parse_manifest(v), Miss)]


def _names(client: Client, prefix: str, *, hex_key: str = "*", field: str = "*") -> Iterator[bytes]:
    """Names of ours, of all versions; each at least once."""
    check_key_prefix(prefix)  # it holds no character that has a meaning in a pattern
    options = {"target_nodes": "primaries"} if isinstance(client, RedisCluster) else {}
    pattern = f"{prefix}:v*:{{{hex_key}}}:{field}"
    for name in client.scan_iter(match=pattern, count=_SCAN_COUNT, **options):
        if is_our_name(prefix, name):
            yield name


def _our_names(client: Client, prefix: str) -> Iterator[tuple[bytes, int | None]]:
    """(chunk key, layer or None for the manifest) of this version's keys; each at least once."""
    for name in _names(client, prefix):
        if (parsed := parse_name(prefix, name)) is not None:
            yield parsed


def _each(client: Client, word: str, names: Sequence[bytes]) -> list[Any]:
    """The command on every name, in one pipeline."""
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.execute_command(word, name)
        return list(pipeline.execute())


def _run(client: Client, *words: str | bytes) -> Any:
    run: Callable[..., Any] = client.execute_command
    return run(*words)


def _batches(names: Iterable[bytes]) -> Iterator[list[bytes]]:
    iterator = iter(names)
    while batch := list(islice(iterator, _BATCH)):
        yield batch
