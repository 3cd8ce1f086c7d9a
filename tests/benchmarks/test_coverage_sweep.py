"""A sweep's KV is that of the phases run for one coverage alone."""

import random
from dataclasses import replace

import pytest
import torch

from benchmarks.quality.coverage_sweep import CoverageSweep
from benchmarks.quality.curves import Curve, kv_dev, qci, random_choice, static_policy
from benchmarks.random_prefill import random_model, random_tokens, small_config
from benchmarks.walked_prefill import ChunkMemory, run_phases, stored_job
from planner import STATIC_POLICIES, Deviation

COVERAGES = (0.0, 0.1, 0.35, 0.8, 1.0)
CURVES = [
    *(static_policy(name) for name in STATIC_POLICIES if name != "epic"),
    kv_dev(2, deviation=Deviation.V),
    kv_dev(1, 3),
    kv_dev(0, 1),
    qci(0, 1),
    qci(1, 2),
    qci(0, 4),
]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def model():
    config = small_config("qwen3")
    return random_model(config, device=torch.device("cpu"), dtype=torch.float32, seed=1)


def prompt(model, memory: ChunkMemory, seed: int):
    rng = random.Random(seed)

    def tokens(low, high):
        return random_tokens(rng, rng.randint(low, high), 128)

    chunks = [tokens(1, 30) for _ in range(rng.randint(1, 5))]
    return stored_job(model, memory, tokens(1, 4), chunks, tokens(2, 6), coverage=1.0, anchor=[1])


def plain(model, memory, job, curve: Curve, coverage: float):
    w, p = curve.config.depths(model.num_layers)
    return run_phases(
        model,
        memory,
        replace(job, coverage=coverage),
        signal=curve.config.signal,
        w=w,
        p=p,
        deviation=curve.config.deviation,
    )


def same(a, b) -> bool:
    count = a.k.shape[1] - 1  # the engine computes the last token itself
    return torch.equal(a.k[:, :count], b.k[:, :count]) and torch.equal(
        a.v[:, :count], b.v[:, :count]
    )


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
def test_a_sweep_computes_what_the_phases_alone_compute(model, curve, seed):
    memory = ChunkMemory(model.device)
    job = prompt(model, memory, seed)
    sweep = CoverageSweep(model, memory, job, curve, seed="0")
    found = [sweep.cache(coverage) for coverage in COVERAGES]
    for coverage, cache in zip(COVERAGES, found, strict=True):
        assert same(cache, plain(model, memory, job, curve, coverage)), coverage
    assert same(sweep.cache(COVERAGES[1]), found[1])  # nothing of a larger one is left


def test_a_lot_is_the_same_for_the_same_seed_and_grows_with_the_coverage(model):
    memory = ChunkMemory(model.device)
    job = prompt(model, memory, 3)

    def recomputed(seed: str, coverage: float) -> set[int]:
        """Rows that differ from those without any recomputation."""
        sweep = CoverageSweep(model, memory, job, random_choice(), seed=seed)
        nothing, some = sweep.cache(0.0), sweep.cache(coverage)
        return set((nothing.v != some.v).any(dim=(0, 2, 3)).nonzero()[:, 0].tolist())

    assert recomputed("a", 0.3) == recomputed("a", 0.3)
    assert recomputed("a", 0.3) != recomputed("b", 0.3)
    assert recomputed("a", 0.3) < recomputed("a", 0.6)


def test_without_filtering_a_later_layer_can_bring_a_candidate_back(model):
    memory = ChunkMemory(model.device)
    differ = []
    for seed in range(4):
        job = prompt(model, memory, 10 + seed)
        kept = CoverageSweep(model, memory, job, kv_dev(0, 3, filters=False), seed="0")
        dropped = CoverageSweep(model, memory, job, kv_dev(0, 3), seed="0")
        differ.append(not same(kept.cache(0.2), dropped.cache(0.2)))
    assert any(differ)


def test_fresh_kv_of_the_probe_is_left_out_where_a_curve_says_so(model):
    memory = ChunkMemory(model.device)
    job = prompt(model, memory, 5)
    kept = CoverageSweep(model, memory, job, kv_dev(1), seed="0").cache(0.2)
    left = CoverageSweep(model, memory, job, kv_dev(1, keeps_fresh=False), seed="0").cache(0.2)
    count = kept.k.shape[1] - 1
    differs = (kept.v[:, :count] != left.v[:, :count]).any(dim=(2, 3))
    assert not differs[0].any()
    assert differs[1].float().mean() > 0.5  # the layer that the Probe computed


def test_the_entropy_is_that_of_the_first_probe_layer(model):
    memory = ChunkMemory(model.device)
    job = prompt(model, memory, 6)
    for curve, has_one in ((qci(1, 1), True), (qci(1, 2), False), (kv_dev(1), False)):
        sweep = CoverageSweep(model, memory, job, curve, seed="0")
        sweep.cache(0.3)
        assert (sweep.entropy is not None) is has_one
        if has_one:
            assert 0.0 < sweep.entropy <= 1.0
