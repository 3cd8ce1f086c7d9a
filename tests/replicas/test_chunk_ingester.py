"""Ingestion over a real host tier in a temporary folder, with a prefill that the test controls."""

import asyncio

import pytest

from kv_tier.host_tier import HostTier, HostTierConfig
from kv_tier.keys import KeySpace, content_id
from kv_tier.layout import KvLayout
from planner.types import PrefillResult, PrefillTimings, Signal
from replicas.batch import SegmentKind
from replicas.chunk_ingester import ChunkIngester, IngesterConfig, WantedChunk
from replicas.connector_types import ResultParams
from replicas.interface import EngineDeadError

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32")
ANCHOR = (1, 2)
KEYS = KeySpace(fingerprint="f", kv_dtype="float32", anchor_ids=ANCHOR)
CONFIG = IngesterConfig(num_layers=2, max_model_len=100, max_backlog=3)


class FakePrefill:
    """Stores what it is asked for, once `gate` is open; `error` is raised instead."""

    def __init__(self, tier):
        self._tier = tier
        self.prompts = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error = None
        self.stores = True

    async def __call__(self, token_ids, params):
        self.prompts.append(tuple(token_ids))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        (span,) = params.segments
        tokens = token_ids[span.start : span.end]
        if self.stores:
            key = KEYS.key(
                tokens,
                cache_salt=params.cache_salt,
                anchored=span.kind is SegmentKind.CHUNK,
            )
            reservation = self._tier.reserve(key, tokens, content_id=params.ingest_content_id)
            self._tier.commit(reservation)
        result = PrefillResult(
            policy="",
            signal=Signal.KV_DEV,
            warmup_depth=2,
            probe_len=0,
            coverage=1.0,
            num_prompt_tokens=len(token_ids),
            num_context_tokens=0,
            num_miss_tokens=0,
            num_recomputed_tokens=0,
            cached_tokens={},
            batch_size=1,
            timings=PrefillTimings(),
        )
        return ResultParams(result=result, stored=self.stores)


@pytest.fixture
def tier(tmp_path):
    config = HostTierConfig(directory=tmp_path / "tier", capacity_bytes=1 << 20, layout=LAYOUT)
    with HostTier(config) as tier:
        yield tier


@pytest.fixture
async def prefill(tier):
    return FakePrefill(tier)


@pytest.fixture
async def ingester(tier, prefill):
    ingester = ChunkIngester(tier, KEYS, prefill, CONFIG, recompute_ms=float)
    yield ingester
    await ingester.close()


@pytest.fixture
async def working(ingester):
    """The ingester's background work, running."""
    task = asyncio.create_task(ingester.run())
    yield task
    task.cancel()


async def settle(ingester, num_open=0):
    """Let the background work get as far as it can."""
    async with asyncio.timeout(5):
        while ingester.num_open > num_open:
            await asyncio.sleep(0)


def chunk(*token_ids, **values):
    return WantedChunk(token_ids=token_ids, **values)


async def test_a_chunk_is_computed_behind_the_anchor_and_a_prefix_without(ingester, prefill, tier):
    stored = await ingester.ingest(chunk(7, 8, 9))
    assert stored.num_tokens == 3
    assert tier.find(stored.chunk_id)[0].nbytes == stored.nbytes
    await ingester.ingest(chunk(7, 8, 9, kind=SegmentKind.PREFIX))
    assert prefill.prompts == [(*ANCHOR, 7, 8, 9), (7, 8, 9)]


async def test_what_is_stored_is_not_computed_again(ingester, prefill):
    assert await ingester.ingest(chunk(7, 8)) == await ingester.ingest(chunk(7, 8))
    assert len(prefill.prompts) == 1
    await ingester.ingest(chunk(7, 8, cache_salt="other"))
    assert len(prefill.prompts) == 2


async def test_callers_share_one_computation_and_may_leave(ingester, prefill):
    prefill.gate.clear()
    waiting = [asyncio.create_task(ingester.ingest(chunk(5, 6))) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    prefill.gate.set()
    assert (await waiting[1]) == (await waiting[2])
    assert len(prefill.prompts) == 1


async def test_missed_chunks_wait_until_nobody_waits_for_a_first_token(ingester, prefill, working):
    ingester.set_idle(False)
    for i in range(3):
        ingester.remember(chunk(i, i))
    for _ in range(10):
        await asyncio.sleep(0)
    assert prefill.prompts == []
    ingester.set_idle(True)
    await settle(ingester)
    assert [p[2] for p in prefill.prompts] == [2, 1, 0]  # the latest first


async def test_the_backlog_is_bounded_and_keeps_each_chunk_once(ingester):
    for i in range(5):
        ingester.remember(chunk(i, i))
        ingester.remember(chunk(i, i))
    assert ingester.num_open == CONFIG.max_backlog


async def test_one_failure_does_not_end_the_work(ingester, prefill, working):
    prefill.error = RuntimeError("something unforeseen")
    ingester.remember(chunk(1, 1))
    await settle(ingester)
    prefill.error = None
    ingester.remember(chunk(2, 2))
    await settle(ingester)
    assert len(prefill.prompts) == 2
    assert not working.done()


async def test_a_dead_engine_ends_the_work(ingester, prefill, working):
    prefill.error = EngineDeadError("gone")
    ingester.remember(chunk(1, 1))
    await asyncio.wait_for(working, 5)


@pytest.mark.parametrize(
    ("token_ids", "message"), [((), "at least one token"), (tuple(range(98)), "98 tokens.*100")]
)
async def test_impossible_chunks_are_refused(ingester, prefill, token_ids, message):
    with pytest.raises(ValueError, match=message):
        await ingester.ingest(chunk(*token_ids))
    assert prefill.prompts == []


async def test_a_full_store_is_said(ingester, prefill):
    prefill.stores = False
    with pytest.raises(ValueError, match="no room in the host tier"):
        await ingester.ingest(chunk(3, 4))


async def test_a_missed_chunk_that_was_deleted_is_not_computed_when_idle(ingester):
    ingester.set_idle(False)
    for tokens in ((5, 6), (7, 8), (9, 10)):
        ingester.remember(chunk(*tokens))
    ingester.forget(content_id((7, 8)))
    assert ingester.num_open == 2
    ingester.forget()
    assert ingester.num_open == 0
