"""The worker side over a small Hugging Face model and a real arena, without vLLM."""

import random
from dataclasses import replace

import pytest
import torch

from kv_tier.arena_view import ArenaView
from kv_tier.host_tier import HostTier, HostTierConfig
from kv_tier.keys import KeySpace
from kv_tier.layout import KvLayout
from planner.cost_model import CostModel
from planner.types import Signal
from replicas.batch import BatchJob, Capture, CoverageTerms, PrefillJob, Segment, SegmentKind
from replicas.connector_types import Restore, StepMeta
from replicas.connector_worker import WorkerSettings, WorkerSide, _is_finite
from replicas.parking import FirstTokenSampling, ParkOrder
from tests.fakes.fake_clock import FakeClock
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

    def write_cache(self, layer, k, v, slots):
        written = slots >= 0
        self.pages[layer][slots[written], 0] = k[written]
        self.pages[layer][slots[written], 1] = v[written]

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
    return worker_side(tier, model)


def worker_side(tier, model, *, clock=None, **settings):
    return WorkerSide(
        ArenaView(tier.config.directory, tier.config.layout),
        model,
        WorkerSettings(block_size=BLOCK_SIZE, **settings),
        clock or FakeClock(),
    )


def job(name, tokens, blocks, *, segments=(), captures=(), coverage=1.0, **options):
    return PrefillJob(
        request_id=name,
        token_ids=list(tokens),
        segments=list(segments),
        coverage=coverage,
        block_ids=blocks,
        captures=list(captures),
        **options,
    )


def batch(*jobs, w=1, p=1, is_ingest=False, terms=None):
    return BatchJob(
        batch_id=0,
        signal=Signal.KV_DEV,
        warmup_depth=w,
        probe_len=p,
        jobs=list(jobs),
        is_ingest=is_ingest,
        terms=terms,
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
    side = worker_side(tier, model)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(side, batch(job("a", [1, 2, 3], [0])))


def test_impossible_batches_fail_and_the_next_one_runs(side, model):
    tokens = random_tokens(random.Random(7), 20, 20)
    run(side, batch(job("a", tokens, [0, 1]), w=NUM_LAYERS + 1))
    assert side.take_finished(set()) == {"a"}
    assert side.take_failed_blocks() == {0, 1}
    run(side, batch(job("b", tokens, [2, 3])))
    assert side.take_finished(set()) == {"b"}


# ---- parked prefills ----

GREEDY = FirstTokenSampling(temperature=0.0)


def parked_job(name, tokens, **options):
    park = ParkOrder(park_id=f"park-{name}", sampling=GREEDY)
    return job(name, tokens, [], park=park, **options)


def restore(name, num_tokens, blocks):
    return Restore(
        request_id=f"{name}-rest", park_id=f"park-{name}", num_tokens=num_tokens, block_ids=blocks
    )


@pytest.mark.parametrize("w", [0, 1, NUM_LAYERS])
def test_a_parked_prefill_tells_its_first_token_and_comes_back_into_blocks(side, model, w):
    tokens = random_tokens(random.Random(w), 40, 40)
    neighbour = random_tokens(random.Random(9), 20, 20)
    p = min(1, NUM_LAYERS - w)
    run(side, batch(parked_job("a", tokens), job("b", neighbour, [7, 8]), w=w, p=p))
    reports = side.take_report().jobs
    with torch.inference_mode():
        logits = model.model(torch.tensor([tokens])).logits[0, -1]
    assert reports["a"].first_token == int(logits.argmax())
    assert reports["a"].first_logprob == pytest.approx(
        float(logits.log_softmax(-1).max()), abs=1e-4
    )
    assert reports["b"].first_token is None
    assert_exact(model, neighbour, [7, 8])
    assert not model.pages[0][: 3 * BLOCK_SIZE].any()  # a has no pages yet
    side.run_step(StepMeta(restores=[restore("a", 40, [0, 1, 2])]))
    assert side.take_finished(set()) == {"a", "b", "a-rest"}
    assert not side.take_report().jobs["a-rest"].failed
    # now of all of the prompt's tokens, also the last
    assert_exact(model, [*tokens, 5], [0, 1, 2])


def test_a_parked_prefill_that_is_gone_is_vllms_to_compute(side):
    tokens = random_tokens(random.Random(1), 40, 40)
    run(side, batch(parked_job("a", tokens)))
    side.take_report()
    side.drop_parked("park-a")
    side.drop_parked("park-unknown")
    side.run_step(StepMeta(restores=[restore("a", 40, [0, 1, 2])]))
    assert side.take_failed_blocks() == {0, 1, 2}
    assert side.take_report().jobs["a-rest"].failed


def test_an_abort_in_mid_walk_frees_the_parked_layers(side):
    tokens = random_tokens(random.Random(2), 40, 40)
    other = random_tokens(random.Random(3), 30, 30)
    run(side, batch(parked_job("a", tokens), parked_job("b", other)), num_layers=2)
    assert len(side._parking) == 2
    side.take_finished({"a"})
    assert len(side._parking) == 1
    run(side)
    assert len(side._parking) == 1
    side.run_step(StepMeta(restores=[restore("b", 30, [0, 1])]))
    assert len(side._parking) == 0


def test_what_is_dropped_while_it_walks_does_not_come_back(side):
    """The abort may reach the rank in the step in which the walk ends, or after it."""
    tokens = random_tokens(random.Random(2), 40, 40)
    run(side, batch(parked_job("a", tokens)), num_layers=2)
    side.drop_parked("park-a")
    run(side)
    side.take_finished({"a"})
    assert len(side._parking) == 0
    run(side)
    assert side._unwanted == set()


def test_unreadable_stored_kv_parks_nothing(side, model, tier):
    chunk = random_tokens(random.Random(4), 20, 20)
    location = stored_chunk(side, tier, chunk)
    tier_view = ArenaView(tier.config.directory, tier.config.layout)
    tier_view.mapping[location.offset + 5] ^= 255  # in its header
    tokens = [*KEYS.anchor_ids, *chunk, 7, 8]
    segment = Segment(kind=SegmentKind.CHUNK, start=2, end=22, location=location)
    run(side, batch(parked_job("a", tokens, segments=[segment], coverage=0.0)))
    told = side.take_report().jobs["a"]
    assert told.failed and told.first_token is None and told.damaged == [location.key]
    assert len(side._parking) == 0


def stored_chunk(side, tier, chunk):
    made, reservation = ingest(tier, "i", chunk, [0, 1])
    run(side, made)
    side.take_finished(set())
    side.take_report()
    tier.commit(reservation)
    return reservation.location


# ---- what the store holds ----


def test_a_stored_value_that_is_not_finite_is_damaged(side, model, tier):
    chunk = random_tokens(random.Random(5), 20, 20)
    location = stored_chunk(side, tier, chunk)
    view = ArenaView(tier.config.directory, tier.config.layout)
    k, v = (x.clone() for x in view.read_layer(location, 2, 0, model.num_kv_heads))
    v[1, 3, 0] = float("nan")
    view.write_layer(location, 2, 0, k, v)  # with a checksum that is right
    segment = Segment(kind=SegmentKind.CHUNK, start=2, end=22, location=location)
    damaged = job("a", [*KEYS.anchor_ids, *chunk, 7, 8], [3, 4], segments=[segment], coverage=0.2)
    fine = random_tokens(random.Random(6), 20, 20)
    run(side, batch(damaged, job("b", fine, [5, 6])))
    reports = side.take_report().jobs
    assert reports["a"].failed and reports["a"].damaged == [location.key]
    assert not reports["b"].failed
    assert_exact(model, fine, [5, 6])


# ---- time ----


class SteppingClock(FakeClock):
    """Every look takes a millisecond."""

    def now_ms(self):
        self.advance(1.0)
        return super().now_ms()


def test_a_slow_link_is_waited_for_and_the_wait_is_used(tier, model):
    side = worker_side(tier, model, clock=SteppingClock(), load_bytes_per_ms=1e3)
    chunk = random_tokens(random.Random(7), 20, 20)
    location = stored_chunk(side, tier, chunk)
    tokens = [*KEYS.anchor_ids, *chunk, 7, 8, 9]
    segment = Segment(kind=SegmentKind.CHUNK, start=2, end=22, location=location)
    run(side, batch(job("r", tokens, [3, 4], segments=[segment], coverage=0.0)))
    assert side.take_finished(set()) == {"r"}
    told = side.take_report().jobs["r"]
    assert told.num_filled == told.num_selected == 20
    assert told.timings.fill_ms > 0
    assert_exact(model, tokens, [3, 4])


def test_a_wait_is_not_used_where_the_settings_say_so(tier, model):
    side = worker_side(tier, model, clock=SteppingClock(), load_bytes_per_ms=1e3, fill_stalls=False)
    chunk = random_tokens(random.Random(7), 20, 20)
    location = stored_chunk(side, tier, chunk)
    segment = Segment(kind=SegmentKind.CHUNK, start=2, end=22, location=location)
    tokens = [*KEYS.anchor_ids, *chunk, 7, 8, 9]
    run(side, batch(job("r", tokens, [3, 4], segments=[segment], coverage=0.0)))
    told = side.take_report().jobs["r"]
    assert told.num_filled == told.num_selected == 0
    assert told.timings.fill_ms == 0.0 and told.timings.stall_ms > 0


def test_open_coverages_are_solved_for_the_batchs_deadline(tier, model):
    clock = FakeClock()
    side = worker_side(tier, model, clock=clock)
    chunk = random_tokens(random.Random(8), 20, 20)
    location = stored_chunk(side, tier, chunk)
    tokens = [*KEYS.anchor_ids, *chunk, 7, 8, 9]
    segment = Segment(kind=SegmentKind.CHUNK, start=2, end=22, location=location)
    cost = CostModel(
        num_layers=4, fixed_ms=0, row_ms=1.0, pair_ms=0, selected_pair_ms=0, reuse_ms=0
    )
    selected = []
    for left_ms in (1.0, 48.0, 1e6):  # three layers of 6 rows without stored KV and r · 20
        terms = CoverageTerms(deadline_ms=clock.now_ms() + left_ms, cost=cost)
        made = job("r", tokens, [3, 4], segments=[segment], coverage=0.1, band=(0.05, 0.8))
        run(side, batch(made, terms=terms))
        selected.append(side.take_report().jobs["r"].num_selected)
    assert selected[0] == 1 and selected[2] == 16
    assert 1 < selected[1] < 16


def test_a_timeline_goes_to_those_who_ask(side):
    tokens = random_tokens(random.Random(10), 30, 30)
    asked = replace(job("a", tokens, [0, 1]), wants_timeline=True)
    run(side, batch(asked, job("b", tokens, [2, 3])))
    reports = side.take_report().jobs
    assert reports["b"].timeline == []
    spans = reports["a"].timeline
    assert [s.layer for s in spans if s.phase == "write"] == [0, 1, 2, 3]
    assert {s.phase for s in spans} == {"warmup", "load", "patch", "write"}
    ends = [s.start_ms + s.duration_ms for s in spans]
    assert all(end <= later.start_ms + 1e-6 for end, later in zip(ends, spans[1:], strict=False))
    totals = reports["a"].timings
    assert sum(s.duration_ms for s in spans) == pytest.approx(
        totals.compute_ms - totals.pause_ms, rel=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_value_that_is_not_finite_is_seen(dtype):
    torch.manual_seed(0)
    largest = torch.finfo(dtype).max
    fine = torch.randn(2, 5, 8).to(dtype)
    fine[0, 0, 0], fine[1, 4, 7] = largest, -largest
    assert _is_finite((fine, fine))
    for bad in (float("nan"), float("inf"), -float("inf"), -float("nan")):
        one = fine.clone()
        one[1, 2, 3] = bad
        assert not _is_finite((fine, one))
        assert not _is_finite((one[1:], fine))
