"""Training batches of the synthetic model: rows of equal layout, made with array operations.

Every row has its own content; all rows of a batch share the chunks' lengths and the number of
hops of each chain, so that one mask and one loss index serve all.
"""

from dataclasses import dataclass

import numpy as np

from benchmarks.training.synthetic_words import (
    BOS,
    EQUALS,
    FIRST_FILLER,
    FIRST_NAME,
    FIRST_NUMBER,
    HERE,
    ID,
    NEXT,
    NUM_FILLERS,
    NUM_NAMES,
    NUM_NUMBERS,
    PASSAGE,
    SEMICOLON,
    VALUE,
    WHICH,
    is_held_out,
)

NO_TARGET = -100
STATEMENT_TOKENS = 4
MIN_ROWS = 2  # however long they are
NUM_ASKED_NAMES = 3  # names in a question about a passage

ANSWER, HELPER, BINDING = 1, 2, 3  # kinds of targets


@dataclass(frozen=True, slots=True, kw_only=True)
class VtLevel:
    """How hard variable tracking is: ranges are closed, lengths in tokens of a chunk."""

    num_chunks: int
    shortest: int
    longest: int
    num_chains: int
    min_hops: int
    max_hops: int
    num_questions: int
    scrambled: float = 0.0  # share of chains whose statements stand in any order
    hop_weight: float = 0.0  # how much more each hop makes a question count, and be asked


@dataclass(frozen=True, slots=True, kw_only=True)
class PrLevel:
    num_chunks: int
    shortest: int
    longest: int
    num_names: int  # in each passage
    num_questions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """All arrays are [rows, tokens]."""

    ids: np.ndarray  # int64
    targets: np.ndarray  # int64: the token to predict at a position, or NO_TARGET
    weights: np.ndarray  # float32, of the targets in the loss
    kinds: np.ndarray  # int8: ANSWER, HELPER or BINDING where there is a target
    hops: np.ndarray  # int8: statements between a value and the target


def vt_batch(rng: np.random.Generator, level: VtLevel, max_tokens: int) -> Batch:
    """Variable tracking: chains of assignments spread over chunks of filler words.

    Chunks may come in any order, so a share of the chains is scrambled: a statement that stands
    before the one it refers to has no value. Only what can be resolved in order is asked. At each
    resolvable statement the value itself is a target too, and so is the statement's own name:
    without these helpers the task is not learned at this size.
    """
    lengths = rng.integers(level.shortest, level.longest + 1, size=level.num_chunks)
    hops = rng.integers(level.min_hops, level.max_hops + 1, size=level.num_chains)
    num_statements = int((hops + 1).sum())
    num_questions = min(level.num_questions, num_statements)
    starts = 1 + np.concatenate([[0], np.cumsum(lengths)[:-1]])
    end = 1 + int(lengths.sum())
    num_tokens = end + 3 * num_questions
    rows = max(MIN_ROWS, max_tokens // num_tokens)
    slots = []
    for start, length in zip(starts, lengths, strict=True):
        offset = rng.integers(0, STATEMENT_TOKENS)
        slots += range(start + offset, start + length - STATEMENT_TOKENS + 1, STATEMENT_TOKENS)
    if len(slots) < num_statements:
        raise ValueError(f"{num_statements} statements do not fit into {end - 1} tokens")

    batch = _empty_batch(rng, rows, num_tokens)
    every = np.arange(rows)[:, None]
    at = np.array(slots)[np.sort(_choices(rng, rows, len(slots), num_statements), axis=1)]
    chain_of = np.repeat(np.arange(level.num_chains), hops + 1)
    chain = chain_of[_choices(rng, rows, num_statements, num_statements)]
    hop, resolvable = _hop_order(rng, chain, hops, level.scrambled)
    first = np.concatenate([[0], np.cumsum(hops + 1)[:-1]])
    which = first[chain] + hop
    names = _choices(rng, rows, NUM_NAMES, num_statements)
    numbers = _choices(rng, rows, NUM_NUMBERS, level.num_chains)
    name, number = names[every, which], numbers[every, chain]
    source = np.where(
        hop == 0, FIRST_NUMBER + number, FIRST_NAME + names[every, np.maximum(which - 1, 0)]
    )
    batch.ids[every, at] = FIRST_NAME + name
    batch.ids[every, at + 1] = EQUALS
    batch.ids[every, at + 2] = source
    batch.ids[every, at + 3] = SEMICOLON
    taught = resolvable & ~is_held_out(name, number)

    row, nth = np.nonzero(taught & (hop > 0))
    value_at = (row, at[row, nth] + 2)
    _target(batch, value_at, FIRST_NUMBER + number[row, nth], 1.0, HELPER, hop[row, nth])
    _target(batch, (every, at + 3), FIRST_NAME + name, 0.3, BINDING, 0)
    row, nth = np.nonzero(hop == 0)
    name_at = (row, at[row, nth] + 2)
    _target(batch, name_at, FIRST_NAME + name[row, nth], 0.3, BINDING, 0)

    # what can not be resolved, or is held out, stands last in a random order: asked only where
    # a row has too little else, and then without a target
    lots = rng.random(taught.shape) / (1.0 + level.hop_weight * hop)
    asked = np.argsort(lots + ~taught, axis=1)[:, :num_questions]
    question_at = end + 3 * np.arange(num_questions)[None]
    batch.ids[:, end::3] = VALUE
    batch.ids[every, question_at + 1] = FIRST_NAME + name[every, asked]
    batch.ids[every, question_at + 2] = FIRST_NUMBER + number[every, asked]
    row, nth = np.nonzero(taught[every, asked])
    question = asked[row, nth]
    answer_at = (row, end + 1 + 3 * nth)
    weight = 1.0 + level.hop_weight * hop[row, question]
    target = FIRST_NUMBER + number[row, question]
    _target(batch, answer_at, target, weight, ANSWER, hop[row, question])
    return batch


def pr_batch(rng: np.random.Generator, level: PrLevel, max_tokens: int) -> Batch:
    """Passage retrieval: which passage holds these names? Its id ends the passage before it.

    The first passage has no id, and is never asked for.
    """
    lengths = rng.integers(level.shortest, level.longest + 1, size=level.num_chunks)
    starts = 1 + np.concatenate([[0], np.cumsum(lengths)[:-1]])
    end = 1 + int(lengths.sum())
    question_tokens = NUM_ASKED_NAMES + 3
    num_tokens = end + question_tokens * level.num_questions
    rows = max(MIN_ROWS, max_tokens // num_tokens)
    batch = _empty_batch(rng, rows, num_tokens)
    every = np.arange(rows)[:, None]
    ids = _choices(rng, rows, NUM_NUMBERS, level.num_chunks + 1)  # of each passage; one follows
    names = np.stack(
        [_choices(rng, rows, NUM_NAMES, level.num_names) for _ in range(level.num_chunks)], axis=1
    )
    for chunk, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        room = length - 3
        offset = rng.integers(0, max(1, min(4, room - STATEMENT_TOKENS * level.num_names + 1)))
        num_slots = (room - offset) // STATEMENT_TOKENS
        at = np.sort(_choices(rng, rows, num_slots, level.num_names), axis=1)
        at = start + 1 + offset + STATEMENT_TOKENS * at
        own, name = ids[:, chunk : chunk + 1], names[:, chunk]
        batch.ids[:, start] = PASSAGE
        batch.ids[:, start + length - 2] = NEXT
        batch.ids[:, start + length - 1] = FIRST_NUMBER + ids[:, chunk + 1]
        batch.ids[every, at] = FIRST_NAME + name
        batch.ids[every, at + 1] = EQUALS
        batch.ids[every, at + 2] = HERE
        batch.ids[every, at + 3] = SEMICOLON
        _target(batch, (every, at + 3), FIRST_NAME + name, 0.3, BINDING, 0)
        if chunk == 0:
            continue
        batch.targets[:, start], batch.weights[:, start] = FIRST_NUMBER + own[:, 0], 0.3
        batch.kinds[:, start] = HELPER
        row, nth = np.nonzero(~is_held_out(name, own))
        _target(batch, (row, at[row, nth] + 2), FIRST_NUMBER + own[row, 0], 1.0, HELPER, 1)

    rows_1d = np.arange(rows)
    asked = rng.integers(1, level.num_chunks, (rows, level.num_questions))
    for question in range(level.num_questions):
        start = end + question_tokens * question
        passage = asked[:, question]
        some = _choices(rng, rows, level.num_names, min(NUM_ASKED_NAMES, level.num_names))
        name = names[rows_1d, passage][every, some]
        if name.shape[1] < NUM_ASKED_NAMES:  # small passages: the first name again
            name = np.concatenate([name, name[:, :1]], axis=1)[:, :NUM_ASKED_NAMES]
        number = ids[rows_1d, passage]
        batch.ids[:, start] = WHICH
        batch.ids[:, start + 1 : start + 1 + NUM_ASKED_NAMES] = FIRST_NAME + name
        batch.ids[:, start + 1 + NUM_ASKED_NAMES] = ID
        batch.ids[:, start + 2 + NUM_ASKED_NAMES] = FIRST_NUMBER + number
        taught = np.nonzero(~is_held_out(name, number[:, None]).any(axis=1))[0]
        target = FIRST_NUMBER + number[taught]
        for offset in range(NUM_ASKED_NAMES):
            _target(batch, (taught, start + 1 + offset), target, 0.5, HELPER, 2)
        _target(batch, (taught, start + 1 + NUM_ASKED_NAMES), target, 1.5, ANSWER, 0)
    return batch


def _hop_order(
    rng: np.random.Generator, chain: np.ndarray, hops: np.ndarray, scrambled: float
) -> tuple[np.ndarray, np.ndarray]:
    """The hop of each statement in its chain, and whether all it leads back to stands before it."""
    hop = np.zeros_like(chain)
    resolvable = np.zeros(chain.shape, dtype=bool)
    rows = len(chain)
    for index, last in enumerate(hops):
        mine = chain == index
        nth = (mine.cumsum(axis=1) - 1)[mine].reshape(rows, last + 1)
        order = np.broadcast_to(np.arange(last + 1), (rows, last + 1)).copy()
        mixed = rng.random(rows) < scrambled
        order[mixed] = rng.permuted(order[mixed], axis=1)
        place = order.argsort(axis=1)  # of hop 0, 1, …
        in_order = np.ones((rows, last + 1), dtype=bool)
        in_order[:, 1:] = np.logical_and.accumulate(np.diff(place, axis=1) > 0, axis=1)
        hop[mine] = np.take_along_axis(order, nth, axis=1).reshape(-1)
        known = np.take_along_axis(in_order, np.take_along_axis(order, nth, axis=1), axis=1)
        resolvable[mine] = known.reshape(-1)
    return hop, resolvable


def _empty_batch(rng: np.random.Generator, rows: int, num_tokens: int) -> Batch:
    shape = (rows, num_tokens)
    ids = FIRST_FILLER + rng.integers(0, NUM_FILLERS, shape)
    ids[:, 0] = BOS
    return Batch(
        ids=ids,
        targets=np.full(shape, NO_TARGET, dtype=np.int64),
        weights=np.zeros(shape, dtype=np.float32),
        kinds=np.zeros(shape, dtype=np.int8),
        hops=np.zeros(shape, dtype=np.int8),
    )


def _target(batch: Batch, at, token, weight, kind: int, hops) -> None:
    batch.targets[at], batch.weights[at] = token, weight
    batch.kinds[at], batch.hops[at] = kind, hops


def _choices(rng: np.random.Generator, rows: int, total: int, count: int) -> np.ndarray:
    """[rows, count]: for each row a random order of `count` numbers below `total`."""
    return rng.random((rows, total)).argsort(axis=1)[:, :count]
