"""Lookups, with nodes of the test's own: whatever goes wrong is a miss."""

import time
from collections.abc import Callable, Iterator

import pytest

from kv_tier.redis import Manifest, Miss
from kv_tier.redis.counters import Counters
from kv_tier.redis.errors import LinkError, OversizeError
from kv_tier.redis.link import LinkMeter
from kv_tier.redis.lookup import ManifestLookup
from tests.kv_tier.redis.cases import LAYOUT, config, query


class FakeNode:
    """Answers each command with the next reply."""

    def __init__(self, *replies: object, delay_s: float = 0.0) -> None:
        self.replies = list(replies)
        self.delay_s = delay_s

    def call(self, run: Callable[[object], object], deadline_s: float) -> object:
        return run(self)

    def send(self, parts: list[bytes], deadline_s: float) -> None:
        pass

    def read_reply(self, deadline_s: float) -> object:
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        if not self.replies:
            time.sleep(self.delay_s)
        return reply


class FakeDirectory:
    def __init__(self, nodes: dict[int, FakeNode]) -> None:
        self._nodes = {query(chunk).key.hex().encode(): node for chunk, node in nodes.items()}

    def node_for(self, name: bytes, deadline_s: float) -> FakeNode:
        return next(node for key, node in self._nodes.items() if key in name)


MakeLookup = Callable[..., tuple[ManifestLookup, Counters, LinkMeter]]


@pytest.fixture
def make_lookup() -> Iterator[MakeLookup]:
    made: list[ManifestLookup] = []

    def make(**nodes: FakeNode) -> tuple[ManifestLookup, Counters, LinkMeter]:
        directory = FakeDirectory({int(name[1:]): node for name, node in nodes.items()})
        counters, meter = Counters(), LinkMeter()
        lookup = ManifestLookup(
            config("redis://nobody"),
            LAYOUT,
            directory,  # type: ignore[arg-type]
            counters,
            meter,
            on_damage=lambda key, write_id: None,
        )
        made.append(lookup)
        return lookup, counters, meter

    yield make
    for lookup in made:
        lookup.close()


def find(lookup: ManifestLookup, *chunks: int) -> list[Manifest | None]:
    return lookup.find([query(chunk) for chunk in chunks])


def reasons(counters: Counters) -> dict[Miss, int]:
    return {miss: number for miss, number in counters.misses().items() if number}


def test_what_nobody_thought_of_is_a_miss(make_lookup: MakeLookup) -> None:
    lookup, counters, _ = make_lookup(
        n1=FakeNode(RecursionError("deep")), n2=FakeNode(LinkError("lost")), n3=FakeNode(None, 0)
    )
    assert find(lookup, 1, 2, 3) == [None, None, None]
    assert reasons(counters) == {Miss.CONNECTION: 2, Miss.ABSENT: 1}


def test_a_tier_that_is_closed_meanwhile_gives_misses(make_lookup: MakeLookup) -> None:
    lookup, counters, _ = make_lookup(n1=FakeNode(None, 0), n2=FakeNode(None, 0))
    lookup.close()
    assert find(lookup, 1, 2) == [None, None]
    assert reasons(counters) == {Miss.ABSENT: 2}


def test_a_value_that_is_too_large_is_foreign(make_lookup: MakeLookup) -> None:
    lookup, counters, _ = make_lookup(n1=FakeNode(OversizeError("large"), 1))
    assert find(lookup, 1) == [None]
    assert reasons(counters) == {Miss.FOREIGN: 1}


def test_the_latency_is_that_of_the_first_answer(make_lookup: MakeLookup) -> None:
    lookup, _, meter = make_lookup(n1=FakeNode(None, 0, delay_s=0.05))
    find(lookup, 1)
    assert meter.speed().latency_ms < 25.0
