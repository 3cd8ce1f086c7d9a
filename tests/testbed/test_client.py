"""The client against servers that misbehave in every way that it must tell apart."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deploy.testbed import client as module
from deploy.testbed.accounting import is_answered, is_lost
from deploy.testbed.client import Answer, Client

Handler = Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]
OK = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"


def event(text: str = "", *, finish: str | None = None, **fields: Any) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice], **fields})}\n\n"


WHOLE = (
    event("one ")
    + event("two", finish="length", cachesmith={"replica": "r1"})
    + 'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'
    + "data: [DONE]\n\n"
)


def says(text: str, *, headers: str = OK, num_promised: int | None = None) -> Handler:
    """Sends this and closes; num_promised: the length that the headers name, if another."""

    async def handle(writer: asyncio.StreamWriter) -> None:
        length = len(text) if num_promised is None else num_promised
        writer.write(f"{headers}Content-Length: {length}\r\n\r\n{text}".encode())

    return handle


@asynccontextmanager
async def served(handler: Handler, address: str, port: int) -> AsyncIterator[None]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await handler(writer)
        writer.close()

    async with await asyncio.start_server(handle, address, port):
        yield


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int) -> int:
    monkeypatch.setattr(module, "HTTP_PORT", unused_tcp_port)
    return unused_tcp_port


async def ask(*proxies: str) -> Answer:
    client = Client(lambda: proxies, began_s=time.monotonic())
    try:
        return await client.ask({}, index=3, prompt=1, is_exact=True)
    finally:
        await client.close()


async def answer_to(handler: Handler, port: int) -> Answer:
    async with served(handler, "127.0.0.1", port):
        return await ask("127.0.0.1")


async def test_a_whole_stream(port: int):
    answer = await answer_to(says(WHOLE), port)
    assert is_answered(answer)
    assert (answer.text, answer.num_tokens, answer.num_ends) == ("one two", 2, 1)
    assert (answer.status, answer.host, answer.index) == (200, "127.0.0.1", 3)
    assert answer.ttft_ms is not None


async def test_a_refused_connection_goes_to_the_next_proxy(port: int):
    async with served(says(WHOLE), "127.0.0.2", port):
        answer = await ask("127.0.0.1", "127.0.0.2")
    assert is_answered(answer)
    assert (answer.host, answer.num_refused) == ("127.0.0.2", 1)


async def test_a_stream_that_just_ends_is_lost(port: int):
    answer = await answer_to(says(event("one ")), port)
    assert is_lost(answer)
    assert answer.text == "one "


async def test_a_connection_that_breaks_is_an_error(port: int):
    answer = await answer_to(says(event("one "), num_promised=9999), port)
    assert answer.error is not None and answer.error.startswith("disconnected")
    assert (answer.status, is_lost(answer)) == (200, False)


async def test_an_error_in_the_stream_is_told_by_its_code(port: int):
    text = event("one ") + 'data: {"error": {"code": "replica_lost"}}\n\n'
    answer = await answer_to(says(text), port)
    assert (answer.error, is_answered(answer), is_lost(answer)) == (
        "stream replica_lost",
        False,
        False,
    )


async def test_a_refusal_is_told_by_its_code(port: int):
    headers = "HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\n"
    answer = await answer_to(says('{"error": {"code": "queue_full"}}', headers=headers), port)
    assert (answer.error, answer.status) == ("http 429 queue_full", 429)


async def test_silence_is_lost(port: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_READ_TIMEOUT_S", 0.2)

    async def is_silent(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5.0)

    assert is_lost(await answer_to(is_silent, port))


async def test_two_ends_are_seen(port: int):
    text = WHOLE.replace("data: [DONE]\n\n", "") + WHOLE
    answer = await answer_to(says(text), port)
    assert (answer.num_ends, answer.text) == (2, "one twoone two")
