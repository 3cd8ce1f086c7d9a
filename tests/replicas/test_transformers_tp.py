"""`TransformersModel` on two ranks equals itself on one, over one store.

The ranks are two processes with gloo over loopback, started once. What they store goes through the
arena of the host tier, as in production.
"""

import copy
import functools
import gc
import multiprocessing
import os
import pickle
import random
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kv_tier.arena_view import ArenaView
from kv_tier.host_tier import HostTier, HostTierConfig
from kv_tier.keys import KeySpace
from kv_tier.layout import KvLayout
from kv_tier.store import ChunkLocation
from planner.types import Signal
from replicas.attention import SelectedAttention
from replicas.batch import BatchJob, Capture, PrefillJob, Segment, SegmentKind
from replicas.connector_worker import ArenaSource
from replicas.parking import FirstTokenSampling, ParkOrder
from replicas.phases import ThreePhasePrefill
from replicas.tensor_parallel import LayerSlice, head_slice
from replicas.transformers_model import TransformersModel
from tests.replicas.harness import (
    FAMILIES,
    VOCAB,
    LayerKv,
    full_kv,
    last_log_probs,
    random_tokens,
    worst_difference,
)

NUM_RANKS = 2
NUM_LAYERS = 4
HEAD_DIM = 16
ANCHOR = [1, 2]
KEYS = KeySpace(fingerprint="f", kv_dtype="float32", anchor_ids=tuple(ANCHOR))
TOLERANCE = 2e-4  # as in test_phases.py
LOG_PROB_TOLERANCE = 1e-4
HANG_S = 300  # a rank that has not answered by then never will, however busy the machine is

# Every signal where its ranking means something: at layer 0 stored KV is exact, so that kv_dev
# would rank rounding errors.
WALKS = [
    (Signal.KV_DEV, 1, 1),
    (Signal.KV_DEV, 1, 3),
    (Signal.QCI, 0, NUM_LAYERS),
    (Signal.QCI, 1, 2),
    (Signal.AUTO, 1, 2),
    (Signal.QCI_FINAL, 0, 0),
    (Signal.POSITION, 0, 0),
]


# ---- what both sides do ----


@functools.cache
def build(
    family: str,
    *,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    has_biases: bool = False,
) -> Any:
    """A random float32 Hugging Face model, the same in every process."""
    config_cls, model_cls = FAMILIES[family]
    extra: dict[str, Any] = {"sliding_window": None} if family == "mistral" else {}
    if has_biases:  # only some families have these
        extra |= {"attention_bias": True, "mlp_bias": True}
    config = config_cls(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        initializer_range=0.2,
        **extra,
    )
    torch.manual_seed(0)
    model = model_cls(config).to(torch.float32).eval()
    for name, weight in model.named_parameters():  # as made, biases are 0 and norms are 1
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.5)
        elif "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


class Walk(NamedTuple):
    """One rank's result of a batch."""

    kv: LayerKv  # of every row, this rank's heads
    selected: list[list[int]]  # by request
    num_filled: list[int]  # by request
    logits: dict[int, Tensor]  # of parked requests
    stores_heads: bool


class ArenaSink:
    """Collects a batch's KV, and captured heads into the arena."""

    def __init__(self, model: TransformersModel, arena: ArenaView) -> None:
        self.kv: LayerKv = []
        self._model = model
        self._arena = arena

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        assert layer == len(self.kv)
        self.kv.append((k.clone(), v.clone()))

    def rewrite(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        self.kv[layer][0][rows], self.kv[layer][1][rows] = k, v

    def capture(
        self, request_idx: int, location: ChunkLocation, layer: int, k: Tensor, v: Tensor
    ) -> None:
        if not self._model.stores_heads:
            return
        self._arena.write_header(location)
        head = self._model.kv_head_start
        self._arena.write_layer(location, layer, head, k.transpose(0, 1), v.transpose(0, 1))


class CountedArrivals:
    """Every layer is there at the n-th look at it."""

    keys: tuple[bytes, ...] = ()

    def __init__(self, num_looks: int) -> None:
        self._num_looks = num_looks
        self._looks: Counter[int] = Counter()

    def is_ready(self, layer: int) -> bool:
        self._looks[layer] += 1
        return self._looks[layer] >= self._num_looks

    def have_missed(self) -> list[bool]:
        return []

    def expected_ms(self, layer: int) -> float:
        return 0.0

    def wait(self, layer: int, timeout_ms: float) -> None:
        pass


def walk(
    model: TransformersModel, arena: ArenaView, batch: BatchJob, num_looks: int | None = None
) -> Walk:
    sink = ArenaSink(model, arena)
    arrivals = None if num_looks is None else CountedArrivals(num_looks)
    prefill = ThreePhasePrefill(model, ArenaSource(arena, model), sink, batch, arrivals=arrivals)
    with torch.inference_mode():
        for _ in prefill.steps():
            pass
    trace = prefill.trace
    assert not trace.failed
    return Walk(
        kv=sink.kv,
        selected=[rows.tolist() for rows in trace.selected],
        num_filled=trace.num_filled,
        logits=trace.logits,
        stores_heads=model.stores_heads,
    )


def forward(model: TransformersModel, tokens: list[int]) -> Tensor:
    """Logits of every token, over nothing but the protocol's methods."""
    with torch.inference_mode():
        hidden = model.embed(torch.tensor(tokens))
        positions, offsets = torch.arange(len(tokens)), [0, len(tokens)]
        attention = SelectedAttention(positions, offsets, offsets, model.dtype)
        for layer in range(model.num_layers):
            projected = model.project(layer, hidden)
            q = model.rotate(layer, positions, projected.q)
            k = model.rotate(layer, positions, projected.k)
            attended = attention(q, k, projected.v, model.scale)
            hidden = model.finish(layer, projected.residual, attended)
        return model.logits(hidden)


# ---- what runs on every rank ----


@functools.cache
def sliced(family: str, **kwargs) -> TransformersModel:
    return TransformersModel(build(family, **kwargs), dist.group.WORLD)


@functools.cache
def arena_at(directory: Path, layout: KvLayout) -> ArenaView:
    return ArenaView(directory, layout)


def rank_walk(
    kwargs: dict, directory: Path, layout: KvLayout, batch: BatchJob, num_looks: list[int] | None
) -> Walk:
    mine = None if num_looks is None else num_looks[dist.get_rank()]
    return walk(sliced(**kwargs), arena_at(directory, layout), batch, mine)


def rank_forward(kwargs: dict, tokens: list[int]) -> Tensor:
    return forward(sliced(**kwargs), tokens)


def rank_scores(values: list[list[float]]) -> Tensor:
    mine = torch.tensor(values[dist.get_rank()])
    total = sliced("llama").reduce_scores(mine)
    assert mine.tolist() == torch.tensor(values[dist.get_rank()]).tolist()
    return total


def rank_agree(values: list[list[float]]) -> Tensor:
    return sliced("llama").agree(torch.tensor(values[dist.get_rank()]).t())


def rank_all_ready(ready: list[bool]) -> list[bool]:
    return sliced("llama").all_ready([ready[dist.get_rank()], True])


def rank_refusal(kwargs: dict) -> str:
    with pytest.raises(ValueError, match="heads") as refused:
        TransformersModel(build(**kwargs), dist.group.WORLD)
    return str(refused.value)


def rank_ownership() -> dict[str, bool]:
    """Does slicing leave the caller's model alone, and let go of it?"""
    whole = copy.deepcopy(build("qwen3"))
    before = {name: weight.clone() for name, weight in whole.state_dict().items()}
    model = TransformersModel(whole, dist.group.WORLD)
    is_unchanged = all(before[name].equal(weight) for name, weight in whole.state_dict().items())
    gone = [weakref.ref(whole), weakref.ref(whole.model.layers[0].self_attn.q_proj.weight)]
    del whole
    gc.collect()
    return {
        "is_unchanged": is_unchanged,
        "is_freed": all(ref() is None for ref in gone),
        "still_works": bool(forward(model, [3, 4, 5]).isfinite().all()),
    }


def rank_small_groups() -> tuple[bool, int, int]:
    """A group of this rank alone, and one of the other rank alone."""
    groups = [dist.new_group([rank]) for rank in range(NUM_RANKS)]
    whole = build("llama")
    alone = TransformersModel(whole, groups[dist.get_rank()])
    with pytest.raises(ValueError, match="not in the group"):
        TransformersModel(whole, groups[1 - dist.get_rank()])
    return alone.model is whole, alone.num_ranks, alone.num_heads


def serve_rank(rank: int, store: str, requests: Any) -> None:
    """Answers calls until it is told to end, or its parent is gone."""
    torch.set_num_threads(1)
    if sys.platform.startswith("linux"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=HANG_S),
    )
    while True:
        try:
            call, args = pickle.loads(requests.recv_bytes())
        except EOFError:
            break
        try:
            answer = (True, call(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        requests.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()


# ---- the parent's side ----


class RankPool:
    """The rank processes. If one is lost in a call, all are replaced at the next one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._num_starts = 0
        self._ranks: list[tuple[Any, Any]] = []  # process, connection

    def __call__(self, call: Callable, *args: Any) -> list[Any]:
        """The answer of every rank."""
        if not self._ranks:
            self._start()
        request, answers, failures = pickle.dumps((call, args)), [], []
        try:
            for _, connection in self._ranks:
                connection.send_bytes(request)
            for rank, (_, connection) in enumerate(self._ranks):
                if not connection.poll(HANG_S):
                    raise TimeoutError(f"rank {rank} does not answer")
                is_good, answer = pickle.loads(connection.recv_bytes())
                if is_good:
                    answers.append(answer)
                else:
                    failures.append(f"on rank {rank}:\n{answer}")
        except BaseException as exc:
            self.kill()
            raise RuntimeError("\n".join([f"{exc!r}", *failures])) from exc
        if failures:
            raise RuntimeError("\n".join(failures))
        return answers

    def _start(self) -> None:
        self._num_starts += 1
        store = str(self._directory / f"ranks-{self._num_starts}")
        context = multiprocessing.get_context("forkserver")
        # the imports take longer than all the tests: once for both
        context.set_forkserver_preload(["torch.distributed", "transformers.models.qwen3"])
        for rank in range(NUM_RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve_rank, args=(rank, store, theirs), daemon=True)
            process.start()
            theirs.close()  # else the end of that process would not be seen here
            self._ranks.append((process, mine))

    def close(self) -> None:
        for _, connection in self._ranks:
            connection.close()
        for process, _ in self._ranks:
            process.join(HANG_S)
        self.kill()

    def kill(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.join()
        self._ranks.clear()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


class Degrees:
    """One model on one rank and on two, over the same store."""

    def __init__(self, directory: Path, ranks: RankPool, family: str, **kwargs: Any) -> None:
        self._kwargs = {"family": family, **kwargs}
        self.single = TransformersModel(build(**self._kwargs))
        layout = KvLayout(
            num_layers=NUM_LAYERS,
            num_kv_heads=self.single.num_kv_heads,
            head_dim=HEAD_DIM,
            dtype="float32",
        )
        self._ranks = ranks
        self._layout = layout
        self._stored: dict[bytes, ChunkLocation] = {}
        self._directory = directory / "tier"
        self.tier = HostTier(
            HostTierConfig(directory=self._directory, capacity_bytes=1 << 23, layout=layout)
        )
        self.arena = ArenaView(self._directory, layout)

    def on_one(self, batch: BatchJob, num_looks: int | None = None) -> Walk:
        return walk(self.single, self.arena, batch, num_looks)

    def on_two(self, batch: BatchJob, num_looks: list[int] | None = None) -> Walk:
        """Both ranks' heads side by side; in all else they must be of one mind."""
        parts = self._ranks(
            rank_walk, self._kwargs, self._directory, self._layout, batch, num_looks
        )
        first = parts[0]
        for part in parts:
            assert part.selected == first.selected
            assert part.num_filled == first.num_filled
            assert all(part.logits[i].equal(logits) for i, logits in first.logits.items())
        kept = [part.kv for part in parts if part.stores_heads]
        kv = [
            tuple(torch.cat([heads[layer][i] for heads in kept], dim=1) for i in range(2))
            for layer in range(NUM_LAYERS)
        ]
        return first._replace(kv=kv, stores_heads=True)

    def forward_on_two(self, tokens: list[int]) -> list[Tensor]:
        return self._ranks(rank_forward, self._kwargs, tokens)

    def ingest(self, tokens: list[int], *, anchored: bool = True, degree: int = 1) -> ChunkLocation:
        """Store the tokens' KV, computed on so many ranks."""
        key = KEYS.key(tokens, anchored=anchored, cache_salt=str(degree))
        if key not in self._stored:
            reservation = self.tier.reserve(key, tokens)
            anchor = ANCHOR if anchored else []
            start, end = len(anchor), len(anchor) + len(tokens)
            capture = Capture(start=start, end=end, location=reservation.location)
            job = request([*anchor, *tokens], captures=[capture])
            run = self.on_one if degree == 1 else self.on_two
            run(batch_of([job], Signal.KV_DEV, NUM_LAYERS, 0))
            assert self.tier.commit(reservation)
            self._stored[key] = reservation.location  # nothing is evicted from so large an arena
        return self._stored[key]

    def job(self, prompt: "Prompt", coverage: float, *, degree: int = 1) -> PrefillJob:
        """The prompt with its chunks stored on so many ranks."""
        segments, tokens = [], list(prompt.prefix)
        if prompt.prefix and prompt.is_prefix_cached:
            location = self.ingest(prompt.prefix, anchored=False, degree=degree)
            segments.append(segment(SegmentKind.PREFIX, 0, len(tokens), location))
        for idx, chunk in enumerate(prompt.chunks):
            location = None if idx in prompt.missing else self.ingest(chunk, degree=degree)
            start, end = len(tokens), len(tokens) + len(chunk)
            segments.append(segment(SegmentKind.CHUNK, start, end, location))
            tokens.extend(chunk)
        return request([*tokens, *prompt.suffix], segments=segments, coverage=coverage)


class Prompt(NamedTuple):
    prefix: list[int]
    chunks: list[list[int]]
    suffix: list[int]
    missing: frozenset[int] = frozenset()
    is_prefix_cached: bool = False


def request(tokens, *, segments=(), coverage=1.0, captures=()) -> PrefillJob:
    return PrefillJob(
        request_id="r",
        token_ids=tokens,
        segments=list(segments),
        coverage=coverage,
        block_ids=[],
        captures=list(captures),
    )


def segment(kind: SegmentKind, start: int, end: int, location: ChunkLocation | None) -> Segment:
    return Segment(kind=kind, start=start, end=end, location=location)


def batch_of(jobs: list[PrefillJob], signal: Signal, w: int, p: int) -> BatchJob:
    return BatchJob(batch_id=0, signal=signal, warmup_depth=w, probe_len=p, jobs=jobs)


def ragged_prompts(seed: int | str) -> list[Prompt]:
    """Misses, cached and uncached prefixes, and a prompt without documents."""
    rng = random.Random(seed)

    def prompt(num_chunks: int, **kwargs) -> Prompt:
        chunks = [random_tokens(rng, 2, 16) for _ in range(num_chunks)]
        return Prompt(random_tokens(rng, 1, 6), chunks, random_tokens(rng, 1, 6), **kwargs)

    return [
        prompt(3, is_prefix_cached=True),
        prompt(4, missing=frozenset({0, 2})),
        prompt(0),
        prompt(2, missing=frozenset({1}), is_prefix_cached=True)._replace(suffix=[9]),
        prompt(3)._replace(prefix=[]),
    ]


def by_request(walked: Walk, jobs: list[PrefillJob]) -> list[LayerKv]:
    """KV of each request, without the prompt's last token."""
    kvs, start = [], 0
    for job in jobs:
        end = start + len(job.token_ids)
        kvs.append([(k[start : end - 1], v[start : end - 1]) for k, v in walked.kv])
        start = end
    return kvs


def assert_same_log_probs(model: TransformersModel, a: LayerKv, b: LayerKv, tokens) -> None:
    difference = last_log_probs(model, a, tokens) - last_log_probs(model, b, tokens)
    assert float(difference.abs().max()) < LOG_PROB_TOLERANCE


@pytest.fixture(scope="module")
def degrees(ranks, tmp_path_factory):
    made: dict[str, Degrees] = {}

    def of(family: str, **kwargs: Any) -> Degrees:
        name = repr((family, kwargs))
        if name not in made:
            made[name] = Degrees(tmp_path_factory.mktemp(family), ranks, family, **kwargs)
        return made[name]

    yield of
    for one in made.values():
        one.tier.close()


# ---- tests ----


def test_every_signal_is_walked():
    assert {signal for signal, _, _ in WALKS} == set(Signal)


@pytest.mark.parametrize(("signal", "w", "p"), WALKS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_two_ranks_equal_one(degrees, family, signal, w, p):
    both = degrees(family)
    prompts = ragged_prompts(f"{family} {signal} {w} {p}")
    coverages = [0.3, 0.5, 0.5, 0.2, 0.6]
    jobs = [both.job(prompt, r) for prompt, r in zip(prompts, coverages, strict=True)]
    batch = batch_of(jobs, signal, w, p)
    one, two = both.on_one(batch), both.on_two(batch)
    assert two.selected == one.selected
    assert [len(rows) > 0 for rows in one.selected] == [True, True, False, True, True]
    assert worst_difference(one.kv, two.kv) < TOLERANCE
    for job, mine, its in zip(jobs, by_request(one, jobs), by_request(two, jobs), strict=True):
        assert_same_log_probs(both.single, mine, its, job.token_ids)


@pytest.mark.parametrize(("signal", "w", "p"), WALKS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_coverage_one_on_two_ranks_equals_the_models_forward(degrees, family, signal, w, p):
    both = degrees(family)
    jobs = [both.job(prompt, 1.0) for prompt in ragged_prompts(family)]
    two = both.on_two(batch_of(jobs, signal, w, p))
    for job, kv in zip(jobs, by_request(two, jobs), strict=True):
        assert worst_difference(kv, full_kv(both.single, job.token_ids)) < TOLERANCE


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_warmup_of_all_layers_on_two_ranks_equals_the_models_forward(degrees, family):
    both = degrees(family)
    jobs = [both.job(prompt, 0.0) for prompt in ragged_prompts(family)]
    two = both.on_two(batch_of(jobs, Signal.KV_DEV, NUM_LAYERS, 0))
    for job, kv in zip(jobs, by_request(two, jobs), strict=True):
        exact = full_kv(both.single, job.token_ids)
        assert worst_difference(kv, exact) < TOLERANCE
        assert_same_log_probs(both.single, kv, exact, job.token_ids)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("degree", [1, 2])
def test_a_chunk_behind_its_own_prefix_needs_no_recomputation(degrees, family, degree):
    both, rng = degrees(family), random.Random(f"{family} {degree}")
    prompt = Prompt(ANCHOR, [random_tokens(rng, 20, 30)], [5, 6, 7])
    job = both.job(prompt, 0.0, degree=degree)
    two = both.on_two(batch_of([job], Signal.QCI, 0, 1))
    assert two.selected == [[]]
    (kv,) = by_request(two, [job])
    exact = full_kv(both.single, job.token_ids)
    assert worst_difference(kv, exact) < TOLERANCE
    assert_same_log_probs(both.single, kv, exact, job.token_ids)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_store_does_not_know_the_degree(degrees, family):
    """What two ranks stored, one reuses, and the other way round."""
    both = degrees(family)
    prompts = ragged_prompts(f"store {family}")
    from_one, from_two = (
        batch_of([both.job(p, 0.3, degree=d) for p in prompts], Signal.KV_DEV, 1, 1) for d in (1, 2)
    )
    assert [r.segments for r in from_one.jobs] != [r.segments for r in from_two.jobs]
    expected = both.on_one(from_one)
    for walked in (both.on_one(from_two), both.on_two(from_one), both.on_two(from_two)):
        assert walked.selected == expected.selected
        assert worst_difference(walked.kv, expected.kv) < TOLERANCE


@pytest.mark.parametrize("w", [0, 2, NUM_LAYERS])
def test_parked_prompts_have_the_logits_of_the_models_forward(degrees, w):
    both = degrees("qwen2")
    order = ParkOrder(park_id="p", sampling=FirstTokenSampling())
    jobs = [replace(both.job(prompt, 1.0), park=order) for prompt in ragged_prompts("parked")]
    two = both.on_two(batch_of(jobs, Signal.KV_DEV, w, 0))
    assert sorted(two.logits) == list(range(len(jobs)))
    for i, job in enumerate(jobs):
        with torch.inference_mode():
            exact = both.single.model(torch.tensor([job.token_ids])).logits[0, -1]
        difference = two.logits[i].log_softmax(-1) - exact.log_softmax(-1)
        assert float(difference.abs().max()) < LOG_PROB_TOLERANCE


@pytest.mark.parametrize(("signal", "w", "p"), [(Signal.KV_DEV, 1, 1), (Signal.QCI, 1, 2)])
@pytest.mark.parametrize("num_looks", [[2, 3], [4, 1], [1, 1]])
def test_both_ranks_wait_for_the_slower_transfer(degrees, signal, w, p, num_looks):
    """And use the wait for the same tokens: each step of it is a step of both."""
    both = degrees("qwen3")
    jobs = [both.job(prompt, 0.3) for prompt in ragged_prompts("waiting")]
    batch = batch_of(jobs, signal, w, p)
    one, two = both.on_one(batch, max(num_looks)), both.on_two(batch, num_looks)
    assert two.num_filled == one.num_filled
    assert any(two.num_filled) == (max(num_looks) > 1)
    assert two.selected == one.selected
    assert worst_difference(one.kv, two.kv) < TOLERANCE


@pytest.mark.parametrize("signal", [Signal.KV_DEV, Signal.QCI])
def test_one_kv_head_is_held_by_both_ranks(degrees, signal):
    both = degrees("qwen3", num_kv_heads=1)
    prompts = ragged_prompts("one head")
    for degree in (1, 2):
        batch = batch_of([both.job(p, 0.3, degree=degree) for p in prompts], signal, 1, 1)
        one, two = both.on_one(batch), both.on_two(batch)
        assert two.kv[0][0].shape[1] == 1  # one of the ranks answers for the head
        assert two.selected == one.selected
        assert worst_difference(one.kv, two.kv) < TOLERANCE


@pytest.mark.parametrize(
    "kwargs",
    [{"family": f} for f in sorted(FAMILIES)]
    + [
        {"family": "llama", "has_biases": True},
        {"family": "qwen3", "num_kv_heads": 1},
        {"family": "llama", "num_heads": 8, "num_kv_heads": 8},
    ],
)
def test_logits_are_those_of_the_models_forward_and_the_same_on_both_ranks(degrees, kwargs):
    both, tokens = degrees(**kwargs), random_tokens(random.Random(3), 30, 30)
    first, second = both.forward_on_two(tokens)
    assert first.equal(second)
    assert first.dtype == torch.float32
    with torch.inference_mode():
        exact = both.single.model(torch.tensor([tokens])).logits[0]
    for logits in (first, forward(both.single, tokens)):
        difference = logits.log_softmax(-1) - exact.log_softmax(-1)
        assert float(difference.abs().max()) < LOG_PROB_TOLERANCE


def test_scores_are_summed_and_equal_on_both_ranks(ranks):
    rng = random.Random(4)
    values = [[rng.uniform(0, 1e6) for _ in range(1000)] for _ in range(NUM_RANKS)]
    first, second = ranks(rank_scores, values)
    assert first.equal(second)
    assert torch.allclose(first, torch.tensor(values).sum(0))


def test_ranks_agree_on_what_rank_0_says(ranks):
    for said in ranks(rank_agree, [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]):
        assert said.tolist() == [[1.0, 3.0], [2.0, 4.0]]


@pytest.mark.parametrize("ready", [[True, True], [True, False], [False, True], [False, False]])
def test_all_are_ready_only_if_each_is(ranks, ready):
    assert ranks(rank_all_ready, ready) == [[all(ready), True]] * NUM_RANKS


def test_one_rank_needs_nobody_to_agree_with():
    model, values = TransformersModel(build("llama")), torch.tensor([1.0, 2.0])
    assert model.agree(values).equal(values)
    assert model.reduce_scores(values).equal(values)
    assert model.all_ready([True, False]) == [True, False]
    assert model.num_ranks == 1 and model.stores_heads


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (
            {"num_heads": 3, "num_kv_heads": 3, "hidden_size": 48},
            "3 attention heads cannot be divided among 2 ranks",
        ),
        (
            {"num_heads": 12, "num_kv_heads": 3, "hidden_size": 48},
            "3 KV heads can neither be divided among 2 ranks",
        ),
    ],
)
def test_heads_that_do_not_divide_are_refused(ranks, heads, message):
    for refusal in ranks(rank_refusal, {"family": "llama", **heads}):
        assert refusal.startswith(message)


def test_slicing_leaves_the_callers_model_alone_and_lets_go_of_it(ranks):
    for answer in ranks(rank_ownership):
        assert answer == dict.fromkeys(answer, True)


def test_slices_are_copies():
    """A view would keep all of the weight that it shows a part of."""
    layer, ranks = build("qwen2").model.layers[0], SimpleNamespace(rank=1, size=2)
    part = LayerSlice(layer, head_slice(4, 2, 1, 2), HEAD_DIM, ranks)
    sizes = {}
    for name, weight in part.named_parameters():
        sizes[name] = weight.numel()
        assert weight.untyped_storage().nbytes() == weight.numel() * weight.itemsize, name
    for name, weight in layer.named_parameters():
        assert sizes[name] * (1 if "norm" in name else 2) == weight.numel(), name


def test_a_group_of_one_keeps_the_model_and_one_without_this_process_is_refused(ranks):
    assert ranks(rank_small_groups) == [(True, 1, 4)] * NUM_RANKS


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_every_head_is_held_with_its_kv_head_and_stored_once(num_kv_heads, num_ranks):
    num_heads = 16
    group = num_heads // num_kv_heads
    slices = [head_slice(num_heads, num_kv_heads, rank, num_ranks) for rank in range(num_ranks)]
    held = [h for s in slices for h in range(s.head_start, s.head_start + s.num_heads)]
    assert held == list(range(num_heads))
    for one in slices:
        for i in range(one.num_heads):  # as the attention groups the rank's own heads
            kv_head = one.kv_head_start + i // (one.num_heads // one.num_kv_heads)
            assert kv_head == (one.head_start + i) // group
    stored = [
        head
        for s in slices
        if s.stores_heads
        for head in range(s.kv_head_start, s.kv_head_start + s.num_kv_heads)
    ]
    assert stored == list(range(num_kv_heads))


def test_a_failure_on_the_ranks_is_told(ranks):
    with pytest.raises(RuntimeError, match=r"on rank 0:[\s\S]*index out of range[\s\S]*on rank 1"):
        ranks(rank_agree, [])
    assert ranks(rank_all_ready, [True, True]) == [[True, True]] * NUM_RANKS
