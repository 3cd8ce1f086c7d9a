"""The worker side over a small Hugging Face model and a real arena, without vLLM."""

import random
from types import SimpleNamespace

import pytest
import torch

from kv_tier.arena_view import ArenaView
from kv_tier.host_tier import HostTier, HostTierConfig
from kv_tier.keys import KeySpace
from kv_tier.layout import KvLayout
from planner.types import Signal
from replicas.batch import BatchJob, Capture, PrefillJob, Segment, SegmentKind
from replicas.connector_types import StepMeta
from replicas.connector_worker import WorkerSide
from tests.replicas.harness import full_kv, random_tokens, tiny_model

NUM_LAYERS = 4
BLOCK_SIZE = 16
NUM_BLOCKS = 32
KEYS = KeySpace(fingerprint="f", kv_dtype="float32", anchor_ids=(1, 2))


class PagedModel:
    """The test model with one paged cache a layer, as a vLLM worker has it."""

    stores_heads = True

    def __init__(self, model, num_ranks=1):
        self._model = model
        self.num_ranks = num_ranks
        self.broken = False
        shape = (NUM_BLOCKS * BLOCK_SIZE, 2, model.num_kv_heads, model.head_dim)
        self.pages = [torch.zeros(shape) for _ in range(NUM_LAYERS)]

    def __getattr__(self, name):
        return getattr(self._model, name)

    def embed(self, token_ids):
        if self.broken:
            raise RuntimeError("out of memory, say")
        return self._model.embed(token_ids)

    def attention_layer(self, layer):
        def update(attn, k, v, cache, slots):
            written = slots >= 0
            self.pages[layer][slots[written], 0] = k[written]
            self.pages[layer][slots[written], 1] = v[written]

        return SimpleNamespace(
            impl=SimpleNamespace(do_kv_cache_update=update), kv_cache=self.pages[layer]
        )

    def kv_at(self, blocks, num_tokens):
        """By layer: K, V of a request's first tokens."""
        positions = torch.arange(num_tokens)
        slots = torch.tensor(blocks)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        return [(page[slots, 0], page[slots, 1]) for page in self.pages]


@pytest.fixture(scope="module")
def hf_model():
    return tiny_model(num_layers=NUM_LAYERS)


@pytest.fixture
def tier(tmp_path, hf_model):
    layout = KvLayout(
        num_layers=NUM_LAYERS,
        num_kv_heads=hf_model.num_kv_heads,
        head_dim=hf_model.head_dim,
        dtype="float32",
    )
    config = HostTierConfig(directory=tmp_path / "tier", capacity_bytes=1 << 22, layout=layout)
    with HostTier(config) as tier:
        yield tier


@pytest.fixture
def model(hf_model):
    return PagedModel(hf_model)


@pytest.fixture
def side(tier, model):
    return WorkerSide(ArenaView(tier.config.directory, tier.config.layout), model, BLOCK_SIZE)


def job(name, tokens, blocks, *, segments=(), captures=(), coverage=1.0):
    return PrefillJob(
        request_id=name,
        token_ids=list(tokens),
        segments=list(segments),
        coverage=coverage,
        block_ids=blocks,
        captures=list(captures),
    )


def batch(*jobs, w=1, p=1, is_ingest=False):
    return BatchJob(
        batch_id=0,
        signal=Signal.KV_DEV,
        warmup_depth=w,
        probe_len=p,
        jobs=list(jobs),
        is_ingest=is_ingest,
    )


def run(side, *batches, num_layers=100):
    side.run_step(StepMeta(batches=list(batches), num_layers=num_layers))


def ingest(tier, name, chunk, blocks):
    """An ingest's batch and the reservation that it writes."""
    reservation = tier.reserve(KEYS.key(chunk), chunk)
    capture = Capture(start=2, end=2 + len(chunk), location=reservation.location)
    tokens = [*KEYS.anchor_ids, *chunk]
    made = batch(job(name, tokens, blocks, captures=[capture]), w=NUM_LAYERS, p=0, is_ingest=True)
    return made, reservation


def assert_exact(model, tokens, blocks):
    paged = model.kv_at(blocks, len(tokens) - 1)
    for layer, exact in enumerate(full_kv(model._model, list(tokens))):
        for mine, its in zip(paged[layer], exact, strict=True):
            torch.testing.assert_close(mine, its, atol=2e-4, rtol=1e-4)


def test_a_prefill_fills_the_requests_pages_and_no_others(side, model):
    tokens = random_tokens(random.Random(0), 40, 40)
    run(side, batch(job("r", tokens, [5, 2, 9])))
    assert side.take_finished(set()) == {"r"}
    assert_exact(model, tokens, [5, 2, 9])
    used = {5, 2, 9}
    for block in set(range(NUM_BLOCKS)) - used:
        rows = slice(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
        assert not model.pages[0][rows].any()
    last = model.pages[0][9 * BLOCK_SIZE + (len(tokens) - 1) % BLOCK_SIZE]
    assert not last.any()  # the last token is vLLM's


def test_stored_chunks_are_used(side, model, tier):
    rng = random.Random(1)
    chunk = random_tokens(rng, 20, 20)
    made, reservation = ingest(tier, "i", chunk, [0, 1])
    run(side, made)
    assert side.take_finished(set()) == {"i"}
    assert not side.take_report().jobs["i"].failed
    tier.commit(reservation)
    tokens = [*KEYS.anchor_ids, *chunk, 7, 8, 9]
    segment = Segment(kind=SegmentKind.CHUNK, start=2, end=22, location=reservation.location)
    run(side, batch(job("r", tokens, [3, 4], segments=[segment], coverage=0.0)))
    assert side.take_report().jobs["r"].num_selected == 0
    assert_exact(model, tokens, [3, 4])  # its own anchor before it: exact without recomputation


def test_work_is_sliced_and_requests_go_before_ingests(side, model, tier):
    rng = random.Random(2)
    chunk, tokens = random_tokens(rng, 20, 20), random_tokens(rng, 30, 30)
    made, reservation = ingest(tier, "i", chunk, [0, 1])
    run(side, made, num_layers=2)
    assert side.take_finished(set()) == set()
    run(side, batch(job("r", tokens, [2, 3])), num_layers=NUM_LAYERS + 1)  # and the end of it
    assert side.take_finished(set()) == {"r"}
    run(side, num_layers=NUM_LAYERS)
    assert side.take_finished(set()) == {"i"}
    assert_exact(model, tokens, [2, 3])
    arena = ArenaView(tier.config.directory, tier.config.layout)
    for layer in range(NUM_LAYERS):
        assert arena.verify_layer(reservation.location, layer, 0, model.num_kv_heads)


def test_an_aborted_request_writes_nothing_more_and_the_rest_goes_on(side, model):
    rng = random.Random(3)
    tokens = [random_tokens(rng, 30, 30) for _ in range(2)]
    both = batch(job("a", tokens[0], [0, 1]), job("b", tokens[1], [2, 3]))
    run(side, both, num_layers=2)
    assert side.take_finished({"a"}) == {"a"}
    kept = [page[: 2 * BLOCK_SIZE].clone() for page in model.pages]
    run(side)
    assert side.take_finished(set()) == {"b"}
    assert set(side.take_report().jobs) == {"b"}
    for before, page in zip(kept, model.pages, strict=True):
        assert torch.equal(before, page[: 2 * BLOCK_SIZE])
    assert_exact(model, tokens[1], [2, 3])


def test_aborts_of_whole_waiting_and_unknown_requests(side, model):
    rng = random.Random(4)
    first, second = (random_tokens(rng, 20, 20) for _ in range(2))
    run(side, batch(job("a", first, [0, 1])), batch(job("b", second, [2, 3])), num_layers=1)
    assert side.take_finished({"a", "b", "never seen"}) == {"a", "b"}
    assert side.take_finished({"a"}) == set()
    run(side)  # nothing is left
    assert side.take_report() is None
    assert not model.pages[0][2 * BLOCK_SIZE : 4 * BLOCK_SIZE].any()


def test_an_aborted_ingest_writes_no_more_into_the_arena(side, tier):
    chunk = random_tokens(random.Random(5), 20, 20)
    made, reservation = ingest(tier, "i", chunk, [0, 1])
    run(side, made, num_layers=2)
    side.take_finished({"i"})
    run(side)
    arena = ArenaView(tier.config.directory, tier.config.layout)
    written = [arena.verify_layer(reservation.location, i, 0, 2) for i in range(NUM_LAYERS)]
    assert written == [True, True, False, False]


def test_a_walk_that_raises_fails_its_batch_alone(side, model):
    rng = random.Random(6)
    tokens = random_tokens(rng, 20, 20)
    model.broken = True
    run(side, batch(job("a", tokens, [0, 1])), num_layers=1)
    model.broken = False
    run(side, batch(job("b", tokens, [2, 3])))
    assert side.take_finished(set()) == {"a", "b"}
    assert side.take_failed_blocks() == {0, 1}
    assert side.take_failed_blocks() == set()
    report = side.take_report()
    assert (report.jobs["a"].failed, report.jobs["b"].failed) == (True, False)
    assert_exact(model, tokens, [2, 3])


def test_with_several_ranks_a_walk_that_raises_ends_the_rank(tier, hf_model):
    model = PagedModel(hf_model, num_ranks=2)
    model.broken = True
    side = WorkerSide(ArenaView(tier.config.directory, tier.config.layout), model, BLOCK_SIZE)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(side, batch(job("a", [1, 2, 3], [0])))


def test_impossible_batches_fail_and_the_next_one_runs(side, model):
    tokens = random_tokens(random.Random(7), 20, 20)
    run(side, batch(job("a", tokens, [0, 1]), w=NUM_LAYERS + 1))
    assert side.take_finished(set()) == {"a"}
    assert side.take_failed_blocks() == {0, 1}
    run(side, batch(job("b", tokens, [2, 3])))
    assert side.take_finished(set()) == {"b"}
