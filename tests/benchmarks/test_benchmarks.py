"""The benchmarks' pure parts: what they count, and what they make of their numbers."""

import importlib
import inspect
import json
import random

import pytest

from benchmarks.bench_decode_gap import gaps_ms, step_share, ways
from benchmarks.bench_prefill import CONFIGS, share_of_full
from benchmarks.report import print_json, print_table
from benchmarks.timing import interleaved_ms, percentile, spread
from benchmarks.work import PromptShape, token_layers
from deploy.cli import _benchmarks
from planner import RecomputeConfig, Signal
from tests.replicas.harness import MemorySource, make_job, random_tokens, run, tiny_model

NUM_LAYERS = 5
POINTS = {
    **CONFIGS,
    "two probes": RecomputeConfig(warmup_depth=2, probe_len=2, coverage=0.2),
    "three probes": RecomputeConfig(warmup_depth=0, probe_len=3, coverage=0.1),
    "qci": RecomputeConfig(signal=Signal.QCI, warmup_depth=1, probe_len=3, coverage=0.3),
    "all but the prefix": RecomputeConfig(coverage=1.0),
    "no probe": RecomputeConfig(probe_len=0, coverage=0.4),
}


class CountingModel:
    """A model that counts the rows of its matrix products."""

    def __init__(self, model) -> None:
        self._model = model
        self.projected = self.finished = 0

    def __getattr__(self, name):
        return getattr(self._model, name)

    def project(self, layer, hidden):
        self.projected += hidden.states.shape[0]
        return self._model.project(layer, hidden)

    def finish(self, layer, residual, attention):
        self.finished += attention.shape[0]
        return self._model.finish(layer, residual, attention)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", POINTS)
def test_the_counted_work_is_the_walks(name, seed):
    rng = random.Random(seed)
    model, source = tiny_model(num_layers=NUM_LAYERS), MemorySource()
    prefix, suffix = random_tokens(rng, 2, 4), random_tokens(rng, 2, 6)
    chunks = [random_tokens(rng, 5, 20) for _ in range(3)]
    config = POINTS[name].for_chunks([len(c) for c in chunks])
    job = make_job(
        model,
        source,
        prefix,
        chunks,
        suffix,
        coverage=config.coverage,
        anchor=[1],
        cached_prefix=True,
    )
    counting = CountingModel(model)
    run(counting, source, [job], config.signal, *config.depths(NUM_LAYERS))
    shape = PromptShape(
        num_prefix=len(prefix), num_context=sum(map(len, chunks)), num_suffix=len(suffix)
    )

    def counted(projection_share: float) -> float:
        return token_layers(config, shape, num_layers=NUM_LAYERS, projection_share=projection_share)

    # the engine's own step for the last token comes on top
    assert counted(1.0) == pytest.approx(counting.projected + NUM_LAYERS)
    assert counted(0.0) == pytest.approx(counting.finished + NUM_LAYERS)
    assert counted(0.25) == pytest.approx(0.25 * counted(1.0) + 0.75 * counted(0.0))


def test_shares_are_between_nothing_and_full_prefill():
    shape = PromptShape(num_prefix=16, num_context=2048, num_suffix=32)
    lengths = [256] * 8
    shares = {
        name: share_of_full(name, c.for_chunks(lengths), shape, num_layers=30, projected=0.16)
        for name, c in CONFIGS.items()
    }
    assert shares.pop("full_prefill") == 1.0
    assert all(0.0 < share < 0.5 for share in shares.values())
    assert min(shares, key=shares.__getitem__) == "full_reuse"
    assert shares["w1 p1 r.05"] < shares["cacheblend"] < shares["w1 p1 r.30"]


def test_gaps_are_those_that_overlap_the_window():
    times = [[0.0, 1.0, 3.0, 4.0], [0.5, 2.5]]
    assert gaps_ms(times, start=1.5, end=2.0) == [2000.0, 2000.0]
    assert gaps_ms(times, start=1.0, end=3.0) == [2000.0, 2000.0]
    assert gaps_ms(times, start=0.0, end=2.0, whole=True) == [1000.0]
    assert gaps_ms(times, start=5.0, end=6.0) == []
    assert gaps_ms([[1.0]], start=0.0, end=2.0) == []


def test_plain_is_the_first_way_and_shares_follow_the_slices():
    found = ways([4, 1], [512])
    assert [way.name for way in found] == [
        "plain",
        "plain 512 a step",
        "unsliced",
        "slice 4",
        "slice 1",
    ]
    shares = [step_share(way, num_layers=30, num_tokens=2048) for way in found]
    assert shares == pytest.approx([1.0, 0.25, 1.0, 4 / 30, 1 / 30])
    assert [way.reuse for way in found] == [False, False, True, True, True]


@pytest.mark.parametrize("seed", range(3))
def test_a_percentile_is_a_value_that_the_share_does_not_exceed(seed):
    rng = random.Random(seed)
    values = [rng.random() for _ in range(rng.randint(1, 300))]
    for share in (0.01, 0.5, 0.99, 1.0):
        found = percentile(values, share)
        assert found in values
        assert sum(v <= found for v in values) >= share * len(values)
        assert sum(v < found for v in values) < share * len(values)
    with pytest.raises(ValueError, match="share"):
        percentile([], 0.5)


def test_spread_names_its_fields():
    assert spread("x_ms", [3.0, 1.0, 2.0]) == {"x_ms": 2.0, "x_ms_min": 1.0, "x_ms_max": 3.0}


def test_candidates_take_turns():
    calls = []
    times = interleaved_ms({n: lambda n=n: calls.append(n) for n in "ab"}, rounds=2)
    assert "".join(calls) == "ababab" and [len(v) for v in times.values()] == [2, 2]


def test_a_table_lines_up_and_the_json_line_says_where_it_ran(capsys):
    print_table(["name", "ms"], [("a", 1.23456), ("b", 5432.1), ("longer", None)])
    lines = capsys.readouterr().out.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [line.split()[-1] for line in lines] == ["ms", "1.23", "5432", "None"]
    print_json("subject", seed=3, results=[{"x": 1.5}])
    found = json.loads(capsys.readouterr().out)
    assert found["benchmark"] == "subject" and found["seed"] == 3 and found["device"]
    assert found["results"] == [{"x": 1.5}]


@pytest.mark.parametrize("name", _benchmarks())
def test_every_benchmark_asks_a_question_and_takes_arguments(name, capsys):
    question = _benchmarks()[name]
    assert question.endswith("?")
    module = importlib.import_module(f"benchmarks.bench_{name.replace('-', '_')}")
    assert list(inspect.signature(module.main).parameters) == ["argv"]
    with pytest.raises(SystemExit) as exit_:
        module.main(["--help"])
    assert exit_.value.code == 0
    assert question.split()[0] in capsys.readouterr().out
