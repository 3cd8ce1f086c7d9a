"""The invariants of the three phases, on random ragged inputs in float32."""

import random
from dataclasses import replace

import pytest
import torch

from planner.policies import STATIC_POLICIES
from planner.types import Signal
from replicas import walk
from replicas.model import Hidden
from replicas.triton_stitch import stitch_rotated_ref
from tests.replicas import harness
from tests.replicas.harness import (
    FAMILIES,
    MemorySource,
    full_kv,
    last_log_probs,
    make_job,
    random_tokens,
    run,
    tiny_model,
    worst_difference,
)

# float32 sums in another order: the worst difference of a key or value of magnitude 1 to 10
TOLERANCE = 2e-4
SIGNALS = list(Signal)
DEPTHS = [(0, 1), (0, 4), (1, 1), (1, 2), (2, 2), (3, 1), (2, 0)]
ANCHOR = [1, 2]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def source():
    return MemorySource()


def random_request(model, source, rng, coverage, **kwargs):
    chunks = [random_tokens(rng, 1, 24) for _ in range(rng.randint(1, 5))]
    return make_job(
        model,
        source,
        random_tokens(rng, 0, 6),
        chunks,
        random_tokens(rng, 1, 9),
        coverage=coverage,
        anchor=ANCHOR,
        **kwargs,
    )


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_own_walk_equals_the_models_forward(family):
    model, source, rng = tiny_model(family), MemorySource(), random.Random(family)
    jobs = [random_request(model, source, rng, 0.0) for _ in range(3)]
    kvs, _ = run(model, source, jobs, Signal.KV_DEV, model.num_layers, 0)
    for job, kv in zip(jobs, kvs, strict=True):
        assert worst_difference(kv, full_kv(model, job.token_ids)) < TOLERANCE


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize(("w", "p"), DEPTHS)
@pytest.mark.parametrize("seed", range(3))
def test_coverage_one_equals_full_prefill(model, source, signal, w, p, seed):
    rng = random.Random(seed)
    jobs = [
        random_request(model, source, rng, 1.0, cached_prefix=rng.random() < 0.5) for _ in range(3)
    ]
    kvs, _ = run(model, source, jobs, signal, w, p)
    for job, kv in zip(jobs, kvs, strict=True):
        assert worst_difference(kv, full_kv(model, job.token_ids)) < TOLERANCE


ROPES = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 1024},
}


def rope_options(rope):
    parameters = {"rope_type": rope, "rope_theta": 1e4, **ROPES.get(rope, {})}
    return {"rope_parameters": parameters}


@pytest.mark.parametrize("rope", ROPES)
def test_scaled_rope_is_exact_at_coverage_one_and_for_a_chunk_in_its_own_place(rope):
    model = tiny_model("llama", **rope_options(rope))
    source, rng = MemorySource(), random.Random(rope)
    job = random_request(model, source, rng, 1.0)
    (kv,), _ = run(model, source, [job], Signal.KV_DEV, 1, 1)
    assert worst_difference(kv, full_kv(model, job.token_ids)) < TOLERANCE
    alone = make_job(
        model, source, ANCHOR, [random_tokens(rng, 20, 30)], [5, 6], coverage=0.0, anchor=ANCHOR
    )
    (kv,), _ = run(model, source, [alone], Signal.KV_DEV, 0, 0)
    assert worst_difference(kv, full_kv(model, alone.token_ids)) < TOLERANCE


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize(("w", "p"), DEPTHS)
def test_single_chunk_behind_its_own_prefix_needs_no_recomputation(model, source, signal, w, p):
    rng = random.Random(7)
    job = make_job(
        model, source, ANCHOR, [random_tokens(rng, 20, 40)], [3, 4, 5], coverage=0.0, anchor=ANCHOR
    )
    (kv,), trace = run(model, source, [job], signal, w, p)
    assert trace.num_selected == [0]
    assert worst_difference(kv, full_kv(model, job.token_ids)) < TOLERANCE
    exact = last_log_probs(model, full_kv(model, job.token_ids), job.token_ids)
    assert float((last_log_probs(model, kv, job.token_ids) - exact).abs().max()) < 1e-4


def test_full_reuse_of_two_chunks_is_not_exact(model, source):
    """The negative control: isolation loses cross-chunk attention."""
    rng = random.Random(8)
    chunks = [random_tokens(rng, 20, 30) for _ in range(2)]
    job = make_job(model, source, ANCHOR, chunks, [3, 4], coverage=0.0, anchor=ANCHOR)
    (kv,), _ = run(model, source, [job], Signal.KV_DEV, 0, 0)
    assert worst_difference(kv, full_kv(model, job.token_ids)) > 0.1


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize(("w", "p"), DEPTHS)
@pytest.mark.parametrize("seed", range(2))
def test_a_request_alone_equals_itself_in_a_batch(model, source, signal, w, p, seed):
    rng = random.Random(100 + seed)
    coverages = [0.0, 0.3, 1.0, 0.5]
    jobs = [
        random_request(model, source, rng, r, missing=frozenset({0} if i == 1 else ()))
        for i, r in enumerate(coverages)
    ]
    together, trace = run(model, source, jobs, signal, w, p)
    for i, job in enumerate(jobs):
        (alone,), alone_trace = run(model, source, [job], signal, w, p)
        offset = int(sum(len(j.token_ids) for j in jobs[:i]))
        assert (trace.selected[i] - offset).tolist() == alone_trace.selected[0].tolist()
        assert worst_difference(alone, together[i]) < TOLERANCE


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("coverage", [0.0, 0.05, 0.15, 0.5, 0.999, 1.0])
def test_selection_is_a_sorted_subset_of_the_context_of_the_right_size(
    model, source, signal, coverage
):
    rng = random.Random(coverage)
    job = random_request(model, source, rng, coverage)
    _, trace = run(model, source, [job], signal, 1, 2)
    context = {t for s in job.segments for t in range(s.start, s.end)}
    selected = trace.selected[0].tolist()
    assert selected == sorted(set(selected))
    assert set(selected) <= context
    num = len(context)
    assert len(selected) == min(num, -int(-(coverage * num - 1e-9) // 1))


def hidden_states(model, tokens, **kwargs):
    """By layer: what enters it, as the model's own forward has it."""
    with torch.inference_mode():
        out = model.model(torch.tensor([tokens]), output_hidden_states=True, **kwargs)
    return [h[0] for h in out.hidden_states]


def stored_rotated(model, source, job, layer):
    """Stored K at its final positions and V of a request's context tokens; and those positions."""
    ks, vs, at = [], [], []
    for segment in job.segments:
        k, v = source.values[segment.location.key][layer]
        positions = torch.arange(segment.start, segment.end)
        ks.append(model.rotate(layer, positions, k))
        vs.append(v)
        at.append(positions)
    return torch.cat(ks), torch.cat(vs), torch.cat(at)


def several_chunks(model, source, seed, coverage):
    rng = random.Random(seed)
    chunks = [random_tokens(rng, 5, 20) for _ in range(4)]
    return make_job(model, source, [9, 8], chunks, [3, 4, 5], coverage=coverage, anchor=ANCHOR)


def best(scores, at, coverage):
    count = -int(-(coverage * len(at) - 1e-9) // 1)
    return sorted(at[scores.argsort(descending=True)[:count]].tolist())


@pytest.mark.parametrize("w", [1, 2, 3])  # at layer 0 a chunk's KV depends on nothing before it
def test_kv_dev_selects_what_a_plain_computation_selects(model, source, w):
    job = several_chunks(model, source, 21, 0.2)
    _, trace = run(model, source, [job], Signal.KV_DEV, w, 1)
    exact = model.project(w, Hidden(hidden_states(model, job.token_ids)[w]))
    k, v, at = stored_rotated(model, source, job, w)
    fresh_k = model.rotate(w, at, exact.k[at])
    deviation = (fresh_k - k).square().sum((1, 2)) + (exact.v[at] - v).square().sum((1, 2))
    assert trace.selected[0].tolist() == best(deviation, at, 0.2)


def plain_mass(q, k):
    """Attention of q [queries, heads, dim] onto k [keys, kv_heads, dim] alone, summed."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    return scores.softmax(-1).sum((0, 1))


@pytest.mark.parametrize("w", [0, 1, 3])
def test_qci_selects_what_a_plain_computation_selects(model, source, w):
    job = several_chunks(model, source, 22, 0.2)
    _, trace = run(model, source, [job], Signal.QCI, w, 1)
    positions = torch.arange(len(job.token_ids) - 3, len(job.token_ids))
    query = model.project(w, Hidden(hidden_states(model, job.token_ids)[w][positions])).q
    k, _, at = stored_rotated(model, source, job, w)
    mass = plain_mass(model.rotate(w, positions, query), k)
    assert trace.selected[0].tolist() == best(mass, at, 0.2)


def test_qci_final_selects_what_a_plain_computation_selects(model, source):
    job = several_chunks(model, source, 23, 0.2)
    _, trace = run(model, source, [job], Signal.QCI_FINAL, 0, 0)
    positions = torch.arange(len(job.token_ids) - 3, len(job.token_ids))
    alone = hidden_states(model, job.token_ids[-3:], position_ids=positions[None])
    last = model.num_layers - 1
    query = model.project(last, Hidden(alone[last])).q
    k, _, at = stored_rotated(model, source, job, last)
    mass = plain_mass(model.rotate(last, positions, query), k)
    assert trace.selected[0].tolist() == best(mass, at, 0.2)


def test_position_selects_the_first_tokens_of_every_chunk_but_the_first(model, source):
    chunks = [[7] * 10, [8] * 3, [9] * 12]

    def selected(tokens_per_chunk):
        config = replace(STATIC_POLICIES["epic"], tokens_per_chunk=tokens_per_chunk)
        coverage = config.for_chunks([10, 3, 12]).coverage
        job = make_job(model, source, [], chunks, [1], coverage=coverage, anchor=ANCHOR)
        _, trace = run(model, source, [job], Signal.POSITION, 0, 0)
        return trace.selected[0].tolist()

    assert selected(0) == []
    assert selected(2) == [10, 11, 13, 14]
    assert selected(5) == [10, 11, 12, 13, 14, 15, 16, 17]
    assert selected(16) == list(range(10, 25))  # more than these chunks have


@pytest.mark.parametrize("policy", sorted(STATIC_POLICIES))
def test_every_baseline_runs(model, source, policy):
    config = STATIC_POLICIES[policy].for_chunks([10, 3, 12])
    w, p = config.depths(model.num_layers)
    job = several_chunks(model, source, 24, config.coverage)
    (kv,), trace = run(model, source, [job], config.signal, w, p)
    assert all(k.isfinite().all() and v.isfinite().all() for k, v in kv)
    if policy == "full_prefill":
        assert worst_difference(kv, full_kv(model, job.token_ids)) < TOLERANCE
    if policy == "full_reuse":
        assert trace.num_selected == [0]


@pytest.mark.parametrize("signal", SIGNALS)
def test_chunk_order_permuted_and_back_gives_the_same_kv(model, source, signal):
    rng = random.Random(11)
    prefix, suffix = random_tokens(rng, 2, 4), random_tokens(rng, 3, 5)
    chunks = [random_tokens(rng, 5, 15) for _ in range(4)]

    def kv_of(order):
        job = make_job(
            model, source, prefix, [chunks[i] for i in order], suffix, coverage=0.4, anchor=ANCHOR
        )
        return run(model, source, [job], signal, 1, 1)[0][0]

    first = kv_of([0, 1, 2, 3])
    kv_of([2, 0, 3, 1])
    assert worst_difference(first, kv_of([0, 1, 2, 3])) == 0.0


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize(("w", "p"), [(0, 2), (1, 1), (2, 2)])
@pytest.mark.parametrize("missing", [{0}, {2}, {0, 1}, {0, 1, 2}])
def test_missing_chunks_are_recomputed(model, source, signal, w, p, missing):
    rng = random.Random(12)
    chunks = [random_tokens(rng, 4, 12) for _ in range(3)]
    job = make_job(
        model, source, [9], chunks, [1, 2], coverage=1.0, anchor=ANCHOR, missing=frozenset(missing)
    )
    (kv,), _ = run(model, source, [job], signal, w, p)
    assert worst_difference(kv, full_kv(model, job.token_ids)) < TOLERANCE
    # nothing stored at all: full prefill, whatever the coverage
    job = make_job(
        model,
        source,
        [9],
        chunks,
        [1, 2],
        coverage=0.1,
        anchor=ANCHOR,
        missing=frozenset({0, 1, 2}),
    )
    (kv,), _ = run(model, source, [job], signal, w, p)
    assert worst_difference(kv, full_kv(model, job.token_ids)) < TOLERANCE


@pytest.mark.parametrize("signal", SIGNALS)
def test_odd_prompts(model, source, signal):
    rng = random.Random(13)
    chunk = random_tokens(rng, 6, 6)
    prompts = {
        "suffix of one token": ([1, 2], [chunk], [5]),
        "no context": ([1, 2, 3], [], [4, 5, 6]),
        "no prefix": ([], [chunk], [7, 8]),
        "one chunk many times": ([1], [chunk] * 6, [7, 8]),
        "chunks of one token": ([1], [[3], [4], [3]], [7, 8]),
        "two tokens": ([], [[3]], [4]),
    }
    for name, (prefix, chunks, suffix) in prompts.items():
        for coverage in (0.0, 0.3, 1.0):
            job = make_job(model, source, prefix, chunks, suffix, coverage=coverage, anchor=ANCHOR)
            (kv,), _ = run(model, source, [job], signal, 1, 1)
            if coverage == 1.0:
                exact = full_kv(model, job.token_ids)
                assert worst_difference(kv, exact) < TOLERANCE, name


def test_more_coverage_brings_the_kv_closer(model, source):
    """A sanity check of the ranking: not monotone for single tokens, but over wide steps."""
    rng = random.Random(14)
    chunks = [random_tokens(rng, 20, 30) for _ in range(4)]
    distances = []
    for coverage in (0.0, 0.5, 1.0):
        job = make_job(model, source, ANCHOR, chunks, [1, 2], coverage=coverage, anchor=ANCHOR)
        (kv,), _ = run(model, source, [job], Signal.KV_DEV, 1, 1)
        exact = full_kv(model, job.token_ids)
        distances.append(
            sum(float((a[0] - b[0]).square().sum()) for a, b in zip(kv, exact, strict=True))
        )
    assert distances[0] > distances[1] > distances[2]


def test_an_unreadable_chunk_is_reported_for_its_request_alone(model, source):
    rng = random.Random(15)
    jobs = [random_request(model, source, rng, 0.5, request_id=str(i)) for i in range(3)]
    clean, _ = run(model, source, jobs, Signal.KV_DEV, 1, 1)
    source.broken.add(jobs[1].segments[0].location.key)
    kvs, trace = run(model, source, jobs, Signal.KV_DEV, 1, 1)
    assert trace.failed == {1}
    for i in (0, 2):
        assert worst_difference(clean[i], kvs[i]) < TOLERANCE


def test_kv_of_other_values_than_finite_is_recomputed_first(model, source):
    rng = random.Random(16)
    job = make_job(
        model, source, ANCHOR, [random_tokens(rng, 20, 20)], [1, 2], coverage=0.1, anchor=ANCHOR
    )
    stored = source.values[job.segments[0].location.key]
    poisoned = stored[1][0].clone()
    poisoned[5] = torch.nan
    stored[1] = (poisoned, stored[1][1])
    _, trace = run(model, source, [job], Signal.KV_DEV, 1, 1)
    assert len(ANCHOR) + 5 in trace.selected[0].tolist()


def test_impossible_depths_are_refused(model, source):
    job = random_request(model, source, random.Random(17), 0.5)
    with pytest.raises(ValueError, match="warmup_depth 5"):
        run(model, source, [job], Signal.KV_DEV, 5, 0)
    with pytest.raises(ValueError, match="probe_len 4"):
        run(model, source, [job], Signal.KV_DEV, 1, 4)


def test_harness_models_differ_between_prompts(model):
    """The oracle itself can tell prompts apart."""
    a = last_log_probs(model, full_kv(model, [1, 2, 3, 4]), [1, 2, 3, 4])
    b = last_log_probs(model, full_kv(model, [2, 1, 3, 4]), [2, 1, 3, 4])
    assert float((a - b).abs().max()) > 0.1
    assert model.model.config.vocab_size == harness.VOCAB


@pytest.mark.parametrize("rope", ["default", *ROPES])
def test_the_fused_stitch_is_the_sweep(rope, monkeypatch):
    """The wiring of the kernel, with its plain reference in its place."""
    model = tiny_model("llama", **rope_options(rope))
    source, rng = MemorySource(), random.Random(rope)
    jobs = [
        random_request(model, source, rng, 0.3, missing=frozenset({i} if i else ()))
        for i in range(2)
    ]
    sweep, _ = run(model, source, jobs, Signal.KV_DEV, 1, 1)
    monkeypatch.setattr(walk, "fused_stitch", lambda device: stitch_rotated_ref)
    fused, _ = run(model, source, jobs, Signal.KV_DEV, 1, 1)
    for a, b in zip(sweep, fused, strict=True):
        assert worst_difference(a, b) < 1e-5
