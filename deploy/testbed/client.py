"""One streamed request, as a client behind a load balancer sees it."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

HTTP_PORT = 8000
_CONNECT_TIMEOUT_S = 2.0
_READ_TIMEOUT_S = 60.0
_RETRY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back. Times are seconds since the load began."""

    index: int
    prompt: int
    is_exact: bool  # asked with coverage 1
    started_s: float
    ended_s: float
    host: str  # whose proxy took it; "" if none did
    num_refused: int = 0  # connections that were refused first
    status: int | None = None
    ttft_ms: float | None = None
    error: str | None = None
    is_closed: bool = False  # the stream had its `[DONE]`
    num_ends: int = 0  # events with a finish_reason
    num_tokens: int | None = None
    text: str = ""
    did: dict[str, Any] | None = None  # the answer's `cachesmith` field


@dataclass(slots=True)
class _Stream:
    """What a stream has brought so far."""

    first_s: float | None = None
    error: str | None = None
    is_closed: bool = False
    num_ends: int = 0
    num_tokens: int | None = None
    text: list[str] = field(default_factory=list)
    did: dict[str, Any] | None = None

    def take(self, line: str) -> None:
        if not line.startswith("data: "):
            return
        if line == "data: [DONE]":
            self.is_closed = True
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.error = f"stream {event['error'].get('code')}"
            return
        for choice in event["choices"]:
            if content := choice["delta"].get("content"):
                self.first_s = self.first_s or time.monotonic()
                self.text.append(content)
            self.num_ends += choice["finish_reason"] is not None
        self.did = event.get("cachesmith", self.did)
        if usage := event.get("usage"):
            self.num_tokens = usage["completion_tokens"]


class Client:
    """Sends requests to the proxies in turn, past those that refuse a connection."""

    def __init__(self, proxies: Callable[[], Sequence[str]], *, began_s: float) -> None:
        """proxies: addresses of the hosts that are in rotation now; began_s: by time.monotonic"""
        self._proxies = proxies
        self._began_s = began_s
        self._turn = 0
        # every request has a connection of its own: one that was kept may be dead
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, body: dict[str, Any], *, index: int, prompt: int, is_exact: bool) -> Answer:
        """The answer, whatever became of it."""
        started_s = time.monotonic()
        stream, status, error, num_refused, host = _Stream(), None, None, 0, ""
        while True:
            proxies = self._proxies()
            host = proxies[self._turn % len(proxies)] if proxies else ""
            self._turn += 1
            try:
                if not host:
                    raise httpx.ConnectError("no proxy is in rotation")
                status = await self._stream(host, body, stream)
                if status != 200:
                    error = f"http {status} {stream.error or ''}".strip()
                break
            except (httpx.ConnectError, httpx.ConnectTimeout):
                num_refused += 1
                if time.monotonic() - started_s > _READ_TIMEOUT_S:
                    error = "unreachable"
                    break
                await asyncio.sleep(_RETRY_S)
            except httpx.ReadTimeout:
                break  # neither an end nor an error: lost
            except httpx.HTTPError as exc:
                error = f"disconnected {type(exc).__name__}"
                break
        first_s = stream.first_s
        return Answer(
            index=index,
            prompt=prompt,
            is_exact=is_exact,
            started_s=started_s - self._began_s,
            ended_s=time.monotonic() - self._began_s,
            host=host,
            num_refused=num_refused,
            status=status or (200 if first_s else None),
            ttft_ms=None if first_s is None else (first_s - started_s) * 1e3,
            error=error or stream.error,
            is_closed=stream.is_closed,
            num_ends=stream.num_ends,
            num_tokens=stream.num_tokens,
            text="".join(stream.text),
            did=stream.did,
        )

    async def _stream(self, host: str, body: dict[str, Any], stream: _Stream) -> int:
        url = f"http://{host}:{HTTP_PORT}/v1/chat/completions"
        async with self._http.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                stream.error = _code_of(await response.aread())
                return response.status_code
            async for line in response.aiter_lines():
                stream.take(line)
            return 200


def _code_of(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return content[:60].decode(errors="replace")
