"""What the ports make of calls that Ray cancels: their own end, or the replica's?"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator
from contextvars import ContextVar
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import TaskCancelledError

from cluster import scheduler_actor
from cluster.cache_messages import ClearHost
from cluster.config import SchedulerAddress, SchedulerConfig
from cluster.errors import ReplicaLostError, SchedulerGoneError
from cluster.messages import Refusal, RequestOutcome, SchedulerStatus
from cluster.ray_ports import RayReplicas, RayScheduler
from planner import RequestProfile, Ticket
from tests.fakes.fake_ports import PLAN

PROFILE = RequestProfile(
    request_id="r", num_prefix_tokens=1, chunks=(), num_suffix_tokens=1, ttft_slo_ms=100.0
)
TICKET = Ticket(replica_id="a", batch_id=1, batch_size=1, plan=PLAN, queue_ms=0.0)


class FakeActor:
    """The scheduler actor's handle; every method counts its calls, `admit` answers in turn."""

    def __init__(self, *answers: Ticket | Exception) -> None:
        self._answers = list(answers)
        self.num_admissions = 0
        self.told: list[list[tuple[Any, ...]]] = []
        self.admit = SimpleNamespace(remote=self._admit)
        self.tell = SimpleNamespace(remote=self._tell)

    async def _tell(self, messages: list[tuple[Any, ...]]) -> None:
        self.told.append(messages)

    async def _admit(self, profile: RequestProfile, ingress_id: str) -> Ticket:
        self.num_admissions += 1
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def scheduler_of(actor: FakeActor) -> RayScheduler:
    port = RayScheduler(SchedulerAddress(name="s"), SchedulerConfig(), gone_after_s=2.0)
    port._handle = actor  # type: ignore[assignment]
    return port


class FakeHandle:
    """A deployment handle whose streams break off with `error` after one delta."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self.generate = SimpleNamespace(remote=lambda ticket, request: FakeStream(error))

    def options(self, *, stream: bool) -> "FakeHandle":
        return self


class FakeStream:
    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield "delta"
        raise self._error

    def cancel(self) -> None:
        """There is no work behind it."""


async def read_all(port: RayReplicas, seen: list[Any]) -> None:
    async for delta in port.generate(TICKET, None):  # type: ignore[arg-type]
        seen.append(delta)


async def test_an_admission_that_ends_before_its_own_task_is_a_cancellation():
    actor = FakeActor(TaskCancelledError())
    admitting = asyncio.create_task(scheduler_of(actor).admit(PROFILE))
    for _ in range(10):  # turns of the loop: the admission has seen its call end
        await asyncio.sleep(0)
    assert actor.num_admissions == 1
    admitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await admitting


async def test_what_happens_together_is_told_in_one_call():
    actor = FakeActor()
    port = scheduler_of(actor)
    outcome = RequestOutcome(outcome="cancelled", policy="adaptive")
    port.record(outcome)
    port.abandon("a")
    await asyncio.wait_for(_until(lambda: bool(actor.told)), 5.0)
    assert actor.told == [[("record", outcome), ("abandon", "a")]]

    port.replica_lost("x")
    await asyncio.wait_for(_until(lambda: len(actor.told) == 2), 5.0)
    assert actor.told[1] == [("replica_lost", "x")]

    port._handle = None  # it restarts: what is told now is lost
    port.abandon("b")
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(actor.told) == 2


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def test_an_admission_that_was_cancelled_by_mistake_is_repeated():
    ticket = replace(TICKET, replica_id="b")
    actor = FakeActor(TaskCancelledError(), ticket)
    assert await scheduler_of(actor).admit(PROFILE) == ticket
    assert actor.num_admissions == 2


class FakeScheduler:
    """The actor's handle, under the configuration of some deployment."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.adopted: list[SchedulerConfig] = []
        self.asked = asyncio.Event()
        self.status = SimpleNamespace(remote=self._status)
        self.adopt = SimpleNamespace(remote=self._adopt)

    async def _status(self, ingress_id: str) -> SchedulerStatus:
        self.asked.set()
        return SchedulerStatus(epoch="e", num_waiting=0, replicas=(), generation=self.generation)

    async def _adopt(self, config: SchedulerConfig) -> None:
        self.adopted.append(config)
        self.generation = config.generation


@pytest.mark.parametrize(("found", "num_adoptions"), [(1, 1), (2, 0), (3, 0)])
async def test_a_scheduler_of_an_older_deployment_is_brought_up_to_date(
    found: int, num_adoptions: int
):
    actor = FakeScheduler(found)
    config = SchedulerConfig(generation=2)
    port = RayScheduler(SchedulerAddress(name="s"), config, gone_after_s=60.0)
    port._handle = actor  # type: ignore[assignment]
    watching = asyncio.create_task(port.watch())
    for _ in range(2):  # what it does about the first status comes before the second
        actor.asked.clear()
        await asyncio.wait_for(actor.asked.wait(), 30.0)
    watching.cancel()
    assert actor.adopted == [config] * num_adoptions


async def test_while_the_actor_can_not_be_found_all_give_up_in_time_on_one_search(
    monkeypatch: pytest.MonkeyPatch,
):
    """As while the head node is away: a search ends when it is back, however long that takes."""
    is_back, searches = threading.Event(), []

    def search(address: SchedulerAddress, config: SchedulerConfig) -> FakeActor:
        searches.append(address)
        is_back.wait(60.0)
        return FakeActor(TICKET)

    monkeypatch.setattr(scheduler_actor, "get_or_create", search)
    port = RayScheduler(SchedulerAddress(name="s"), SchedulerConfig(), gone_after_s=0.2)
    try:
        for _ in range(2):  # the second time it is known to be gone
            answers = (port.admit(PROFILE) for _ in range(20))
            for answer in await asyncio.gather(*answers, return_exceptions=True):
                assert isinstance(answer, SchedulerGoneError)
    finally:
        is_back.set()
    while (answer := await _admitted(port)) is None:
        await asyncio.sleep(0.01)
    assert answer == TICKET
    assert len(searches) == 1


async def _admitted(port: RayScheduler) -> Ticket | Refusal | None:
    try:
        return await port.admit(PROFILE)
    except SchedulerGoneError:
        return None


@pytest.mark.parametrize("error", [TaskCancelledError(), asyncio.CancelledError()], ids=repr)
async def test_a_cancelled_stream_is_a_lost_replica_unless_its_reader_is_cancelled(
    error: BaseException,
):
    seen: list[Any] = []
    with pytest.raises(ReplicaLostError):
        await read_all(RayReplicas(FakeHandle(error)), seen)  # type: ignore[arg-type]
    assert seen == ["delta"]

    reading = asyncio.create_task(read_all(RayReplicas(FakeHandle(error)), seen))  # type: ignore[arg-type]
    while len(seen) < 2:
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="none")


class FakeCall:
    """A call's response: says which request it was made for, or waits for ever."""

    def __init__(self, answer: str | None) -> None:
        self._answer = answer
        self.num_cancelled = 0

    def __await__(self) -> Generator[Any, None, str]:
        if self._answer is None:
            yield from asyncio.sleep(60.0).__await__()
        assert self._answer is not None
        return self._answer

    def cancel(self) -> None:
        self.num_cancelled += 1


def handle_of(call: Callable[[], FakeCall]) -> RayReplicas:
    handle = FakeHandle(RuntimeError())
    handle.cache = SimpleNamespace(remote=lambda address, command: call())  # type: ignore[attr-defined]
    return RayReplicas(handle)  # type: ignore[arg-type]


async def test_calls_of_one_request_are_apart():
    """Serve's router tells calls apart by what the context says of their HTTP request."""
    REQUEST_ID.set("the request")
    port = handle_of(lambda: FakeCall(REQUEST_ID.get()))
    answers = [port.cache(name, ClearHost()) for name in ("a", "b")]
    assert await asyncio.gather(*answers) == ["none", "none"]


async def test_a_call_that_is_given_up_is_cancelled_on_the_replica():
    call = FakeCall(None)
    asking = asyncio.create_task(handle_of(lambda: call).cache("a", ClearHost()))
    await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert call.num_cancelled == 1
