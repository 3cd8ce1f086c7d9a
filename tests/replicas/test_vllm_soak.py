"""Two thousand small requests of every kind, a quarter of them aborted: what is answered is right,
and afterwards nothing is held."""

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum, auto

import psutil
import pytest
import pytest_asyncio

from kv_tier.keys import content_id
from planner.policies import FULL_PREFILL, STATIC_POLICIES
from planner.types import RagRequest, Signal, Ticket
from replicas.vllm_engine import VllmEngine
from tests.replicas.vllm_harness import (
    GREEDY,
    NUM_LAYERS,
    Answer,
    ask,
    assert_idle,
    assert_same,
    make_request,
    make_ticket,
    running_engine,
    tokens,
)

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

NUM_WARMUP, NUM_REQUESTS = 300, 2000
ABORTED_SHARE = 0.26  # of the requests: 500 and some
NUM_CLIENTS = 7  # each with a batch of 1 to 4 requests: about 16 at a time
NUM_PROMPTS = 90
MAX_ANSWER = 6
MAX_GROWTH_BYTES = 64 << 20  # of an engine process's own memory, after the warm-up
BLOCK_TOKENS = 128  # vLLM's block on a CPU
NUM_BLOCKS = 24  # few enough that requests wait for them


class Leave(StrEnum):
    """When a client goes away."""

    AT_ONCE = auto()
    HELD = auto()  # while its batch waits for one that never comes
    PREFILL = auto()  # some engine steps later
    FIRST_TOKEN = auto()
    DECODE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One client's request, and when it leaves, if it does not wait for the answer."""

    request: RagRequest
    ticket: Ticket
    leave: Leave | None = None
    num_steps: int = 0

    @property
    def is_exact(self) -> bool:
        plan = self.ticket.plan
        return (
            not self.request.chunks
            or plan.policy == FULL_PREFILL
            or plan.coverage == 1.0
            or plan.warmup_depth == NUM_LAYERS
        )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # vLLM's linears keep a kernel for every number of rows they have seen, up to 1,024 of them:
        # memory that would hide a leak
        patch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
        async with running_engine(
            tmp_path_factory.mktemp("model"),
            inspected=True,
            max_num_seqs=16,
            slice_layers=2,
            max_model_len=NUM_BLOCKS * BLOCK_TOKENS,
            kv_cache_memory_bytes=(NUM_BLOCKS + 1) * BLOCK_TOKENS * 2048,  # vLLM keeps one block
            host_tier_bytes=2 << 20,  # less than all chunks: they are evicted and missed again
        ) as engine:
            yield engine


def make_prompts(rng: random.Random) -> list[RagRequest]:
    """Prompts that share chunks and the prefixes of conversations; every tenth has no chunk."""
    pool = [tokens(rng, rng.randint(1, 60)) for _ in range(60)]
    talk = tokens(rng, 80)
    prompts = []
    for idx in range(NUM_PROMPTS):
        chunks = [] if idx % 10 == 0 else rng.choices(pool, k=rng.randint(1, 4))
        prompt = make_request(rng, [], prefix=talk[: rng.choice((0, 1, 9, 30, 80))])
        prompts.append(
            replace(
                prompt,
                chunks=tuple(chunks),
                suffix_ids=tokens(rng, rng.randint(1, 20)),
                ttft_slo_ms=rng.choice((1.0, 200.0, 5000.0)),
                cache_salt=rng.choice(("", "", "tenant")),
            )
        )
    return prompts


def make_batch(rng: random.Random, prompts: list[RagRequest], batch_id: int) -> list[Visit]:
    """One to four requests with a shared (S, w, p), each with its own coverage."""
    name = rng.choice([*STATIC_POLICIES, *["custom"] * 6])
    size = rng.randint(1, 4)
    signal, warmup_depth = rng.choice(list(Signal)), rng.randint(0, NUM_LAYERS)
    probe_len = rng.randint(0, NUM_LAYERS - warmup_depth)
    leaves = [
        rng.choice(list(Leave)) if rng.random() < ABORTED_SHARE else None for _ in range(size)
    ]
    visits = []
    for leave in leaves:
        request = rng.choice(prompts)
        coverage = rng.choice((0.0, rng.random(), 1.0, 1.0))
        if name != "custom":
            config = STATIC_POLICIES[name].for_chunks([len(c) for c in request.chunks] or [1])
            signal, coverage = config.signal, config.coverage
            warmup_depth, probe_len = config.depths(NUM_LAYERS)
        ticket = make_ticket(
            batch_id,
            size + (Leave.HELD in leaves),
            policy=name,
            signal=signal,
            warmup_depth=warmup_depth,
            probe_len=probe_len,
            coverage=coverage,
        )
        sampling = replace(GREEDY, max_tokens=rng.randint(1, MAX_ANSWER))
        if leave in (Leave.FIRST_TOKEN, Leave.DECODE):  # not over when the client leaves
            sampling = replace(sampling, max_tokens=30)
        visits.append(
            Visit(
                request=replace(request, sampling=sampling),
                ticket=ticket,
                leave=leave,
                num_steps=rng.randint(1, 6),
            )
        )
    return visits


async def assert_nothing_held(engine: VllmEngine) -> None:
    """What was prefilled without blocks for a client that left goes with the next request."""
    await ask(engine, make_request(random.Random(0), [5]), make_ticket())
    await assert_idle(engine)


async def leave_after_tokens(engine: VllmEngine, visit: Visit, num_tokens: int) -> None:
    deltas = engine.generate(visit.request, visit.ticket)
    async for delta in deltas:
        if delta.num_generated >= num_tokens:
            break
    await deltas.aclose()


async def leave_early(engine: VllmEngine, visit: Visit) -> None:
    """Cancelled so many engine steps after it was sent."""
    task = asyncio.create_task(ask(engine, visit.request, visit.ticket))
    await asyncio.sleep(0)  # now it runs
    num_steps = {Leave.AT_ONCE: 0, Leave.HELD: 1}.get(visit.leave, visit.num_steps)
    for _ in range(num_steps):
        await engine._engine.engine_core.call_utility_async("held_by_scheduler")
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def visit_engine(engine: VllmEngine, visit: Visit) -> Answer | None:
    """The answer; None for a client that left."""
    match visit.leave:
        case None:
            return await ask(engine, visit.request, visit.ticket)
        case Leave.FIRST_TOKEN:
            await leave_after_tokens(engine, visit, 1)
        case Leave.DECODE:
            await leave_after_tokens(engine, visit, 1 + visit.num_steps)
        case _:
            await leave_early(engine, visit)
    return None


class Soak:
    """The clients of one engine, and what they saw."""

    def __init__(self, engine: VllmEngine, seed: int) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._prompts = make_prompts(self._rng)
        self._num_batches = 0
        self.num_sent = self.num_left = self.num_answered = self.num_parked = 0
        self.exact: list[tuple[Visit, Answer]] = []

    async def run(self, until_sent: int) -> None:
        async with asyncio.TaskGroup() as clients:
            for _ in range(NUM_CLIENTS):
                clients.create_task(self._client(until_sent))

    async def _client(self, until_sent: int) -> None:
        while self.num_sent < until_sent:
            chance = self._rng.random()
            if chance < 0.06:
                await self._ingest()
                continue
            if chance < 0.08:
                self._delete()
            visits = make_batch(self._rng, self._prompts, self._num_batches)
            self._num_batches += 1
            self.num_sent += len(visits)
            answers = await asyncio.gather(*(visit_engine(self._engine, v) for v in visits))
            for visit, answer in zip(visits, answers, strict=True):
                self._note(visit, answer)

    async def _ingest(self) -> None:
        prompt = self._rng.choice(self._prompts)
        self.num_sent += 1
        with suppress(ValueError):  # all of the store is leased at this moment
            for chunk in prompt.chunks[:1]:
                await self._engine.ingest(chunk, cache_salt=prompt.cache_salt)
        self.num_answered += 1

    def _delete(self) -> None:
        prompt = self._rng.choice(self._prompts)
        for chunk in prompt.chunks[:1]:
            self._engine.delete_chunk(content_id(chunk, cache_salt=prompt.cache_salt))

    def _note(self, visit: Visit, answer: Answer | None) -> None:
        if answer is None:
            self.num_left += 1
            return
        self.num_answered += 1
        self.num_parked += answer.result.parked
        assert len(answer.token_ids) == visit.request.sampling.max_tokens
        assert not answer.result.recovered
        if visit.is_exact:
            self.exact.append((visit, answer))

    async def check_exact(self) -> None:
        """Every answer that had to be exact is vLLM's own, or the beginning of it."""
        plain: dict[tuple[int, ...], Answer] = {}
        wanted = {tuple(v.request.prompt_ids): v.request for v, _ in self.exact}
        longest = replace(GREEDY, max_tokens=MAX_ANSWER)
        answers = await asyncio.gather(
            *(ask(self._engine, replace(r, sampling=longest)) for r in wanted.values())
        )
        plain.update(zip(wanted, answers, strict=True))
        for visit, answer in self.exact:
            whole = plain[tuple(visit.request.prompt_ids)]
            num_tokens = len(answer.token_ids)
            begun = replace(
                whole,
                token_ids=whole.token_ids[:num_tokens],
                logprobs=whole.logprobs[:num_tokens],
            )
            assert_same(answer, begun)


def own_memory() -> dict[int, int]:
    """Bytes that the core and each worker have for themselves: the arena is shared memory."""
    children = psutil.Process().children(recursive=True)
    return {p.pid: p.memory_full_info().uss for p in children if "VLLM::" in p.name()}


@pytest.mark.parametrize("seed", [1], ids="seed{}".format)
async def test_nothing_is_wrong_and_nothing_is_left(engine, seed):
    await assert_idle(engine)
    soak = Soak(engine, seed)
    await soak.run(NUM_WARMUP)
    await assert_nothing_held(engine)
    memory = own_memory()
    await soak.run(NUM_REQUESTS)
    await assert_nothing_held(engine)
    grown = {pid: now - memory[pid] for pid, now in own_memory().items()}
    assert len(grown) == 2
    assert max(grown.values()) < MAX_GROWTH_BYTES
    assert soak.num_sent >= NUM_REQUESTS
    assert soak.num_left >= 450
    assert soak.num_left + soak.num_answered == soak.num_sent
    assert len(soak.exact) >= 500
    assert engine._tier.stats().evictions > 0
    ended = await engine._engine.engine_core.call_utility_async("ended")
    assert ended["WAITING"] >= 30  # aborted while held, or before there were blocks
    assert ended["ACTIVE"] >= 30  # aborted in mid-prefill
    assert soak.num_parked > 0
    await soak.check_exact()


async def test_the_whole_cache_is_free_afterwards(engine):
    """Behaviour says it too: a prompt that needs every block is answered, and right."""
    length = NUM_BLOCKS * BLOCK_TOKENS - 40
    request = make_request(random.Random(2), [length // 2, length - length // 2], prefix=2)
    plain = await ask(engine, request)
    assert_same(await ask(engine, request, make_ticket(coverage=1.0)), plain)
    await assert_idle(engine)
