"""Messages arrive in order, one call at a time, and those that can wait do so for company."""

import asyncio
from contextvars import ContextVar

import pytest

from cluster.outbox import Outbox

REQUEST: ContextVar[str] = ContextVar("request", default="none")


class Receiver:
    """Takes calls; each is over when the test says so."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.requests: list[str] = []
        self.num_running = 0
        self.done = asyncio.Semaphore(0)

    async def take(self, messages: list[int]) -> None:
        assert self.num_running == 0
        self.num_running += 1
        self.calls.append(messages)
        self.requests.append(REQUEST.get())
        await self.done.acquire()
        self.num_running -= 1

    async def called(self, times: int) -> None:
        async with asyncio.timeout(5.0):
            while len(self.calls) < times:
                await asyncio.sleep(0)


async def test_what_comes_during_a_call_goes_together_in_the_next():
    receiver = Receiver()
    outbox = Outbox(receiver.take, linger_s=60.0)
    outbox.put(1)
    outbox.put(2)  # in the same turn of the loop
    await receiver.called(1)
    for message in (3, 4, 5):
        outbox.put(message)
        await asyncio.sleep(0)
    assert receiver.calls == [[1, 2]]
    receiver.done.release()
    await receiver.called(2)
    receiver.done.release()
    assert receiver.calls == [[1, 2], [3, 4, 5]]

    outbox.put(6)  # it has been idle meanwhile
    await receiver.called(3)
    assert receiver.calls[2] == [6]


async def test_messages_that_can_wait_do_until_one_that_can_not():
    receiver = Receiver()
    outbox = Outbox(receiver.take, linger_s=60.0)
    outbox.put(1, can_wait=True)
    outbox.put(2, can_wait=True)
    for _ in range(20):
        await asyncio.sleep(0)
    assert receiver.calls == []
    outbox.put(3)
    await receiver.called(1)
    assert receiver.calls == [[1, 2, 3]]


async def test_messages_that_can_wait_do_not_wait_for_ever():
    receiver = Receiver()
    Outbox(receiver.take, linger_s=0.01).put(1, can_wait=True)
    await receiver.called(1)


async def test_a_failed_call_loses_its_own_messages_only(caplog: pytest.LogCaptureFixture):
    sent: list[list[int]] = []

    async def fail_first(messages: list[int]) -> None:
        sent.append(messages)
        if len(sent) == 1:
            raise RuntimeError("no")

    outbox = Outbox(fail_first)
    outbox.put(1)
    async with asyncio.timeout(5.0):
        while not sent:
            await asyncio.sleep(0)
        outbox.put(2)
        while len(sent) < 2:
            await asyncio.sleep(0)
    assert sent == [[1], [2]] and "messages_lost" in caplog.text


async def test_a_call_belongs_to_no_request():
    """Ray cancels the calls of a request with it, and this one carries others' messages too."""
    receiver = Receiver()
    REQUEST.set("some request")
    Outbox(receiver.take).put(1)
    await receiver.called(1)
    assert receiver.requests == ["none"]
