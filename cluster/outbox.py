"""Messages that nobody waits for, on their way to an actor in as few calls as keep up."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Context
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

M = TypeVar("M")


class Outbox(Generic[M]):
    """One call at a time: what is put meanwhile goes together in the next, in order.

    So an idle receiver is told at once, and a busy one in batches.
    """

    def __init__(
        self, send: Callable[[list[M]], Awaitable[None]], *, linger_s: float = 0.1
    ) -> None:
        """linger_s: how long messages that can wait do so for company"""
        self._send = send
        self._linger_s = linger_s
        self._messages: list[M] = []
        self._urgent = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None

    def put(self, message: M, *, can_wait: bool = False) -> None:
        self._messages.append(message)
        if not can_wait:
            self._urgent.set()
        if self._sending is None:
            # a context of its own: Ray would cancel the call with the request that it is made in
            sending = self._send_all()
            self._sending = asyncio.get_running_loop().create_task(sending, context=Context())

    async def _send_all(self) -> None:
        while self._messages:
            if not self._urgent.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._urgent.wait(), self._linger_s)
            self._urgent.clear()
            messages, self._messages = self._messages, []
            try:
                await self._send(messages)
            except Exception:
                log.exception("messages_lost num_messages=%d", len(messages))
        self._sending = None
