"""What happens to every request before its route: arrival time, credentials, size of the body."""

from collections import deque

from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.access import CALLER, Access
from cluster.errors import ApiError
from planner import Clock

ARRIVED = "cachesmith.arrived_ms"  # in the ASGI scope


def error_response(error: ApiError) -> Response:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())


class ArrivalStamp:
    """Notes when a request arrived, before its body is read."""

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ARRIVED] = self._clock.now_ms()
        await self._app(scope, receive, send)


class Authenticate:
    """Notes who asks, and refuses strangers before anything of theirs is read: on every path that
    is not named as open, so that no new route can be forgotten."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = self._access.caller(_headers(scope, b"authorization"))
            scope[CALLER] = caller
            try:
                self._access.check_known(caller, _route(scope))
            except ApiError as exc:
                return await error_response(exc)(scope, receive, send)
        await self._app(scope, receive, send)


class BodyLimit:
    """Reads a body at most to its limit, and answers 413 to a longer one, announced or not."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            return await self._app(scope, receive, send)
        messages = None if self._is_announced(scope) else await self._read(receive)
        if messages is None:
            error = ApiError(
                413,
                f"the body is over http.max_body_bytes, {self._max_body_bytes} bytes",
                code="body_too_large",
            )
            return await error_response(error)(scope, receive, send)

        async def read_again() -> Message:
            return messages.popleft() if messages else await receive()

        await self._app(scope, read_again, send)

    def _is_announced(self, scope: Scope) -> bool:
        lengths = _headers(scope, b"content-length")
        return any(value.isdigit() and int(value) > self._max_body_bytes for value in lengths)

    async def _read(self, receive: Receive) -> deque[Message] | None:
        """All of the body, or None where it is too long."""
        messages: deque[Message] = deque()
        num_bytes = 0
        while True:
            message = await receive()
            messages.append(message)
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                return None
            if not message.get("more_body"):  # the end, or the client's
                return messages


def _route(scope: Scope) -> str:
    """The path below the prefix of a proxy that strips one."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))


def _headers(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key.lower() == name]
