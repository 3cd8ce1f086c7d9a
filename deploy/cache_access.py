"""Where `cachesmith cache` does its work: a running server, or Redis itself where none runs.

Both answer with the bodies of the HTTP API (docs/api.md).
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urlsplit

import httpx

if TYPE_CHECKING:
    from kv_tier.redis import RedisTierConfig

Body = dict[str, Any]
Progress = Callable[[str], None]

TOKEN_VARIABLE = "CACHESMITH_ADMIN_TOKEN"
_POLL_S = 2.0
_CONNECT_S = 10.0


class CacheCommandError(Exception):
    """The command can not be done. The message is for the user."""


class CacheAccess(Protocol):
    """Every method raises CacheCommandError."""

    @property
    def name(self) -> str:
        """What is asked, for messages: without password or token."""
        ...

    def stats(self, *, redis_keys: bool) -> Body: ...

    def entries(self, tier: str, limit: int) -> Body: ...

    def remove(self, chunk_id: str) -> bool: ...

    def clear(self, tier: str) -> Body: ...

    def verify(self, tier: str, *, repair: bool, progress: Progress) -> Body: ...


class ServerCache:
    """The tiers of a running server, over its API."""

    def __init__(self, url: str, token: str | None) -> None:
        self.name = url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def stats(self, *, redis_keys: bool) -> Body:
        return self._ask("GET", "/v1/cache", params={"redis_keys": redis_keys})

    def entries(self, tier: str, limit: int) -> Body:
        return self._ask("GET", "/v1/cache/chunks", params={"tier": tier, "limit": limit})

    def remove(self, chunk_id: str) -> bool:
        response = self._send("DELETE", f"/v1/chunks/{quote(chunk_id, safe='')}")
        if response.status_code == 404 and _error_of(response).get("code") == "chunk_not_found":
            return False
        self._body(response)
        return True

    def clear(self, tier: str) -> Body:
        return self._ask("DELETE", "/v1/cache", params={"tier": tier})

    def verify(self, tier: str, *, repair: bool, progress: Progress) -> Body:
        """The server says in its stats how far it is."""
        ended = threading.Event()
        watching = threading.Thread(target=self._watch, args=(ended, progress), daemon=True)
        watching.start()
        try:
            body = {"tier": tier, "repair": repair}
            return self._ask("POST", "/v1/cache/verify", json=body)
        finally:
            ended.set()

    def _watch(self, ended: threading.Event, progress: Progress) -> None:
        while not ended.wait(_POLL_S):
            try:
                nodes = self.stats(redis_keys=False)["nodes"]
            except CacheCommandError:
                continue
            for node_id, node in nodes.items():
                now = node["verifying"]
                if now is not None and not ended.is_set():
                    where = "Redis" if now["tier"] == "redis" else f"node {node_id[:12]}"
                    progress(f"{where}: {now['num_checked']} of {now['num_entries']} checked")

    def _ask(self, method: str, path: str, **options: Any) -> Body:
        return self._body(self._send(method, path, **options))

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        try:
            return httpx.request(
                method, f"{self.name}{path}", headers=self._headers, timeout=timeout, **options
            )
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise CacheCommandError(f"{self.name} does not answer: {exc}") from exc

    def _body(self, response: httpx.Response) -> Body:
        if response.status_code != 200:
            message = _error_of(response).get("message") or response.text[:200]
            if response.status_code == 401:
                message += f"; give it with --token or in {TOKEN_VARIABLE}"
            raise CacheCommandError(f"{self.name} answered {response.status_code}: {message}")
        try:
            body = response.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise CacheCommandError(
                f"{self.name} is not a CacheSmith server: it answered {response.text[:200]!r}"
            )
        return body


class RedisCache:
    """What is in Redis below one prefix, without any server."""

    def __init__(self, config: "RedisTierConfig", name: str) -> None:
        """name: the address, without a password"""
        self.name = name
        self._config = config

    def stats(self, *, redis_keys: bool) -> Body:
        with self._admin() as admin:
            keys = asdict(admin.keys())
        return {"object": "cache", "nodes": {}, "redis": {"replicas": {}, "keys": keys}}

    def entries(self, tier: str, limit: int) -> Body:
        from cluster.cache_api import entries_body

        with self._admin() as admin:
            return entries_body("redis", {"": admin.entries(limit)})

    def remove(self, chunk_id: str) -> bool:
        with self._admin() as admin:
            return bool(admin.remove(chunk_id))

    def clear(self, tier: str) -> Body:
        from cluster.cache_api import cleared_body
        from cluster.cache_service import Cleared

        with self._admin() as admin:
            return cleared_body(Cleared(entries_by_node=None, num_redis_keys=admin.clear()))

    def verify(self, tier: str, *, repair: bool, progress: Progress) -> Body:
        from cluster.cache_api import verified_body
        from cluster.cache_service import Verified

        told_s = time.monotonic()

        def on_checked(num_checked: int, num_chunks: int) -> None:
            nonlocal told_s
            if time.monotonic() - told_s >= _POLL_S:
                told_s = time.monotonic()
                progress(f"{num_checked} of {num_chunks} checked")

        with self._admin() as admin:
            report = admin.verify(repair=repair, on_checked=on_checked)
        return verified_body(Verified(by_node=None, redis=report), repair=repair)

    @contextmanager
    def _admin(self) -> Iterator[Any]:
        from replicas.cache_types import CacheError
        from replicas.redis_admin import RedisAdmin

        try:
            yield RedisAdmin(self._config)
        except CacheError as exc:
            raise CacheCommandError(f"{self.name}: {exc}") from exc


def redis_cache(
    url: str, *, key_prefix: str, mode: str, nodes: tuple[str, ...], sentinel_password: str | None
) -> RedisCache:
    """Raises CacheCommandError for what can not be an address."""
    from redis import ConnectionPool

    from kv_tier.redis import RedisTierConfig

    try:
        config = RedisTierConfig(
            url=url,
            mode=mode,  # type: ignore[arg-type]
            nodes=nodes,
            sentinel_password=sentinel_password,
            key_prefix=key_prefix,
        )
    except ValueError as exc:
        raise CacheCommandError(f"--redis: {exc}") from exc
    try:
        pool = ConnectionPool.from_url(url)
        pool.connection_class(**pool.connection_kwargs)  # connects to nobody yet
    except (ValueError, TypeError) as exc:
        # the message may hold a part of the password
        raise CacheCommandError("--redis: wrong port, database or option in the URL") from exc
    parts = urlsplit(url)
    return RedisCache(config, f"Redis at {parts.netloc.rpartition('@')[2] or parts.path}")


def _error_of(response: httpx.Response) -> Body:
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}
