"""All requests of a run as columns, drawn before it starts, so that every policy gets the same."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.simulator.arrivals import TraceArrivals, arrival_times_ms
from planner.simulator.hardware import Machine
from planner.simulator.random_streams import Purpose, stream
from planner.simulator.scenario import Scenario
from planner.simulator.tasks import TaskSpec
from planner.simulator.traces import TracedRequest, read_trace
from planner.types import ChunkRef

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

ROWS_AT_ONCE = 20_000
OVERSAMPLING = 2  # draws for each chunk: a request has no chunk twice


@dataclass(frozen=True, slots=True)
class Workload:
    """Columns [num_requests]. Chunks of request i: `picks[starts[i]:starts[i + 1]]` of `corpus`.

    difficulty, taste, vote: draws between 0 and 1; popular: places in the corpus, the chunks that
    are used most first.
    """

    arrival_ms: Floats
    slo_ms: Floats
    task: NDArray[np.int8]
    model: NDArray[np.int8]
    difficulty: Floats
    taste: Floats
    vote: Floats
    prefix: Ints
    suffix: Ints
    output: Ints
    starts: NDArray[np.int64]
    picks: Ints
    corpus: tuple[ChunkRef, ...]
    popular: Ints

    def __len__(self) -> int:
        return len(self.arrival_ms)

    def chunks(self, idx: int) -> tuple[ChunkRef, ...]:
        corpus = self.corpus
        picks = self.picks[self.starts[idx] : self.starts[idx + 1]].tolist()
        return tuple([corpus[pick] for pick in picks])


def make_workload(scenario: Scenario, machines: list[Machine], *, seed: int) -> Workload:
    """machines: of the models, in their order. Raises ValueError for a trace that is none."""
    arrivals, count = scenario.arrivals, scenario.num_requests
    traced: list[TracedRequest] = []
    if isinstance(arrivals, TraceArrivals):
        traced = read_trace(arrivals.format, arrivals.path, limit=count)
        count = len(traced)
    rng = stream(seed, Purpose.REQUESTS)
    specs, models = scenario.task_specs, scenario.models
    draws = rng.random((5, count))
    task = _pick(draws[0], [spec.weight for spec in specs])
    model = _pick(draws[1], [spec.share for spec in models])
    parts = [_draw_task(spec, int((task == i).sum()), rng) for i, spec in enumerate(specs)]
    corpus, firsts = _corpus(specs, seed)
    prefix = np.array([spec.prefix_tokens for spec in specs], np.int32)[task]
    suffix, output, sizes = (np.empty(count, np.int32) for _ in range(3))
    for i, part in enumerate(parts):
        for column, values in zip((suffix, output, sizes), part, strict=True):
            column[task == i] = values
    popular = _by_popularity(specs, firsts)
    if traced and isinstance(arrivals, TraceArrivals) and arrivals.lengths == "trace":
        prefix = np.array([request.prefix_tokens for request in traced], np.int32)
        suffix = np.array([request.suffix_tokens for request in traced], np.int32)
        output = np.array([request.output_tokens for request in traced], np.int32)
        if any(request.chunks for request in traced):
            corpus, popular, sizes, picks = _traced_chunks(traced)
        else:
            mean = np.array([sum(spec.chunk_tokens) / 2 for spec in specs])[task]
            limit = np.array([spec.corpus_chunks for spec in specs])[task]
            wanted = np.rint(np.array([r.context_tokens for r in traced]) / mean)
            sizes = np.clip(wanted, 1, limit).astype(np.int32)
            picks = _draw_chunks(specs, task, sizes, firsts, rng)
    else:
        picks = _draw_chunks(specs, task, sizes, firsts, rng)
    starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    mean_tokens = np.array([spec.mean_prompt_tokens for spec in specs])[task]
    if traced and isinstance(arrivals, TraceArrivals) and arrivals.lengths == "trace":
        tokens = np.array([chunk.num_tokens for chunk in corpus])[picks]
        context = np.diff(np.concatenate([[0], np.cumsum(tokens)])[starts])
        mean_tokens = np.full(count, round(float((prefix + context + suffix).mean())))
    full_ms = _full_prefill_ms(machines, model, mean_tokens)
    slo = scenario.slo
    return Workload(
        arrival_ms=_times_ms(
            scenario, traced, count, _capacity_per_s(scenario, model, full_ms), seed
        ),
        slo_ms=np.full(count, slo.ms) if slo.ms else (slo.times_full_prefill or 1.0) * full_ms,
        task=task,
        model=model,
        difficulty=draws[2],
        taste=draws[3],
        vote=draws[4],
        prefix=prefix,
        suffix=suffix,
        output=output,
        starts=starts,
        picks=picks,
        corpus=corpus,
        popular=popular,
    )


def _full_prefill_ms(
    machines: list[Machine], model: NDArray[np.int8], num_tokens: NDArray[np.int64]
) -> Floats:
    """Of a prompt of so many tokens, alone on each request's machine, [num_requests]."""
    full_ms = np.empty(len(model))
    for number, machine in enumerate(machines):
        for tokens in np.unique(num_tokens[model == number]).tolist():
            full_ms[(model == number) & (num_tokens == tokens)] = machine.full_prefill_ms(tokens)
    return full_ms


def _capacity_per_s(scenario: Scenario, model: NDArray[np.int8], full_ms: Floats) -> float:
    """Requests that full prefill alone could take, by the model whose replicas are busiest."""
    return min(
        1e3 * spec.fleet.replicas * len(model) / float(full_ms[model == number].sum())
        for number, spec in enumerate(scenario.models)
        if (model == number).any()
    )


def _times_ms(
    scenario: Scenario, traced: list[TracedRequest], count: int, capacity_per_s: float, seed: int
) -> Floats:
    load, arrivals = scenario.load, scenario.arrivals
    rate_per_s = load.rate_per_s or (load.of_full_prefill or 1.0) * capacity_per_s
    if not isinstance(arrivals, TraceArrivals):
        rng = stream(seed, Purpose.ARRIVALS)
        return arrival_times_ms(arrivals, count=count, rate_per_s=rate_per_s, rng=rng)
    times = np.array([request.at_ms for request in traced])
    if arrivals.keep_rate or times[-1] == 0.0:
        return times
    return np.asarray(times * (count * 1e3 / rate_per_s / times[-1]), np.float64)


def _pick(draws: Floats, weights: list[float]) -> NDArray[np.int8]:
    ends = np.cumsum(weights) / sum(weights)
    ends[-1] = 1.0
    return np.searchsorted(ends, draws, side="right").astype(np.int8)


def _draw_task(spec: TaskSpec, count: int, rng: np.random.Generator) -> tuple[Ints, ...]:
    """Suffix tokens, output tokens, number of chunks."""
    ranges = (spec.suffix_tokens, spec.output_tokens, spec.num_chunks)
    return tuple(
        rng.integers(low, high, count, dtype=np.int32, endpoint=True) for low, high in ranges
    )


def _corpus(specs: tuple[TaskSpec, ...], seed: int) -> tuple[tuple[ChunkRef, ...], list[int]]:
    """The chunks of all tasks, each task's most popular first, and where each task's begin."""
    rng = stream(seed, Purpose.CORPUS)
    chunks: list[ChunkRef] = []
    firsts: list[int] = []
    for spec in specs:
        firsts.append(len(chunks))
        low, high = spec.chunk_tokens
        lengths = rng.integers(low, high, spec.corpus_chunks, endpoint=True).tolist()
        chunks += [
            ChunkRef(chunk_id=f"{spec.name}-{i}", num_tokens=n) for i, n in enumerate(lengths)
        ]
    return tuple(chunks), firsts


def _by_popularity(specs: tuple[TaskSpec, ...], firsts: list[int]) -> Ints:
    ranks = np.concatenate([np.arange(spec.corpus_chunks) for spec in specs])
    owners = np.repeat(firsts, [spec.corpus_chunks for spec in specs])
    places: Ints = (ranks + owners)[np.argsort(ranks, kind="stable")].astype(np.int32)
    return places


def _draw_chunks(
    specs: tuple[TaskSpec, ...],
    task: NDArray[np.int8],
    sizes: Ints,
    firsts: list[int],
    rng: np.random.Generator,
) -> Ints:
    """Zipf's law over each task's corpus, without repeats within a request."""
    starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    picks = np.empty(int(starts[-1]), np.int32)
    for i, spec in enumerate(specs):
        weights = np.arange(1, spec.corpus_chunks + 1) ** -spec.zipf
        ends = np.cumsum(weights / weights.sum())
        ends[-1] = 1.0
        rows = (task == i).nonzero()[0]
        for begin in range(0, len(rows), ROWS_AT_ONCE):
            block = rows[begin : begin + ROWS_AT_ONCE]
            width = int(sizes[block].max())
            drawn = np.searchsorted(ends, rng.random((len(block), OVERSAMPLING * width)))
            for row, candidates in zip(block.tolist(), drawn.tolist(), strict=True):
                size = int(sizes[row])
                chosen = list(dict.fromkeys(candidates))[:size]
                _fill_up(chosen, size, spec.corpus_chunks)
                picks[starts[row] : starts[row + 1]] = np.array(chosen) + firsts[i]
    return picks


def _fill_up(chosen: list[int], size: int, corpus_chunks: int) -> None:
    """With the neighbours of the last one, where too many draws were the same."""
    known = set(chosen)
    candidate = chosen[-1]
    while len(chosen) < size:
        candidate = (candidate + 1) % corpus_chunks
        if candidate not in known:
            known.add(candidate)
            chosen.append(candidate)


def _traced_chunks(
    traced: list[TracedRequest],
) -> tuple[tuple[ChunkRef, ...], Ints, Ints, Ints]:
    """Corpus, its places by use, number of chunks of each request, and which."""
    places: dict[str, int] = {}
    refs: list[ChunkRef] = []
    uses: list[int] = []
    picks: list[int] = []
    for request in traced:
        for name, num_tokens in request.chunks:
            if name not in places:
                places[name] = len(refs)
                refs.append(ChunkRef(chunk_id=name, num_tokens=num_tokens))
                uses.append(0)
            uses[places[name]] += 1
            picks.append(places[name])
    popular = np.argsort(-np.array(uses), kind="stable").astype(np.int32)
    sizes = np.array([len(request.chunks) for request in traced], np.int32)
    return tuple(refs), popular, sizes, np.array(picks, np.int32)
