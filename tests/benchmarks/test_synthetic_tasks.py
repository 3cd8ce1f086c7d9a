"""Questions for the synthetic model: the layout of training batches, held-out and right answers."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.quality.synthetic_tasks import (
    FILLERS,
    NAMES,
    NUMBERS,
    PrTask,
    VtTask,
    permute_documents,
    pr_question,
    questions,
    solve,
    vt_question,
)
from benchmarks.quality.types import Question, RetrievedDocument, Scorer
from benchmarks.training.synthetic_batches import (
    ANSWER,
    HELPER,
    NO_TARGET,
    PrLevel,
    VtLevel,
    pr_batch,
    vt_batch,
)
from benchmarks.training.synthetic_words import (
    BOS,
    EQUALS,
    FIRST_FILLER,
    FIRST_NAME,
    FIRST_NUMBER,
    HERE,
    ID,
    NEXT,
    NUM_NAMES,
    NUM_NUMBERS,
    PASSAGE,
    SEMICOLON,
    UNKNOWN,
    VALUE,
    WHICH,
    build_tokenizer,
    is_held_out,
    vocabulary,
)

WORDS = vocabulary()
SEEDS = range(5)
CHUNK = (20, 45)
VT_TASKS = [
    VtTask(num_chunks=1, chunk_tokens=CHUNK, num_chains=1, hops=0, other_hops=(0, 0)),
    VtTask(num_chunks=6, chunk_tokens=CHUNK, num_chains=4, hops=3, other_hops=(0, 4)),
    VtTask(num_chunks=16, chunk_tokens=(64, 64), num_chains=6, hops=4, other_hops=(4, 4)),
]
PR_TASKS = [
    PrTask(num_chunks=2, chunk_tokens=(11, 30), num_names=2),
    PrTask(num_chunks=12, chunk_tokens=(27, 60), num_names=6),
    PrTask(num_chunks=40, chunk_tokens=(15, 40), num_names=3),
]
TASKS = VT_TASKS + PR_TASKS


def make(task, seed, count=8):
    return list(questions(task, seed, count))


def task_ids(task):
    return task.name


def words(ids):
    return " ".join(WORDS[i] for i in ids)


def as_question(documents, question, answer="?"):
    return Question(
        question_id="row",
        task="row",
        documents=tuple(RetrievedDocument(text=words(ids)) for ids in documents),
        question=words(question),
        answers=(answer,),
        scorer=Scorer.EXACT,
        max_new_tokens=1,
    )


def statements_of(question):
    """Document, left and right side of each statement, in order."""
    found = []
    for index, document in enumerate(question.documents):
        text = document.text.split()
        found += [(index, text[i - 1], text[i + 1]) for i, w in enumerate(text) if w == "="]
    return found


def holders_of(question):
    """The indices of the passages that hold all asked names."""
    asked = set(question.question.split()[1:-1])
    return [i for i, d in enumerate(question.documents) if asked <= set(d.text.split())]


# --- what a prompt looks like, of a question or of a row in training


def tokenised(question):
    """Token ids of each document and of the question, the whole prompt read as one text."""
    texts = [*(document.text for document in question.documents), question.question]
    ids = build_tokenizer().encode(" ".join(texts)).ids
    assert ids[0] == BOS and UNKNOWN not in ids
    parts, at = [], 1
    for text in texts:
        parts.append(ids[at : at + len(text.split())])
        at += len(parts[-1])
    assert at == len(ids)
    return parts[:-1], parts[-1]


def is_name(token):
    return FIRST_NAME <= token < FIRST_NAME + NUM_NAMES


def is_number(token):
    return FIRST_NUMBER <= token < FIRST_NUMBER + NUM_NUMBERS


def kind(token):
    """One sign for a token: itself where it is a fixed word, else N, # or a dot."""
    fixed = {EQUALS: "=", SEMICOLON: ";", PASSAGE: "p", NEXT: "n", HERE: "h"}
    fixed |= {VALUE: "v", WHICH: "w", ID: "i"}
    if token in fixed:
        return fixed[token]
    if is_name(token):
        return "N"
    assert is_number(token) or token >= FIRST_FILLER
    return "#" if is_number(token) else "."


def check_vt_chunk(chunk):
    """Statements stand at multiples of 4 from an offset of at most 3; all else is filler."""
    signs = "".join(map(kind, chunk))
    at = [i - 1 for i, sign in enumerate(signs) if sign == "="]
    assert all(start >= 0 and signs[start : start + 4] in ("N=#;", "N=N;") for start in at)
    assert len({start % 4 for start in at}) <= 1
    assert signs.count(".") == len(signs) - 4 * len(at)


def check_pr_passage(chunk, num_names):
    signs = "".join(map(kind, chunk))
    assert signs[0] == "p" and signs[-2:] == "n#"
    at = [i - 1 for i, sign in enumerate(signs) if sign == "="]
    assert len(at) == num_names
    assert all(start >= 1 and signs[start : start + 4] == "N=h;" for start in at)
    assert len({start % 4 for start in at}) == 1
    assert len({chunk[start] for start in at}) == num_names
    assert signs.count(".") == len(signs) - 3 - 4 * num_names


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("task", VT_TASKS, ids=task_ids)
def test_a_variable_question_is_laid_out_as_in_training(task, seed):
    for question in make(task, seed):
        documents, asked = tokenised(question)
        assert len(documents) == task.num_chunks
        for chunk in documents:
            assert task.chunk_tokens[0] <= len(chunk) <= task.chunk_tokens[1]
            check_vt_chunk(chunk)
        assert "".join(map(kind, asked)) == "vN"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("task", PR_TASKS, ids=task_ids)
def test_a_passage_question_is_laid_out_as_in_training(task, seed):
    for question in make(task, seed):
        documents, asked = tokenised(question)
        assert len(documents) == task.num_chunks
        for chunk in documents:
            assert task.chunk_tokens[0] <= len(chunk) <= task.chunk_tokens[1]
            check_pr_passage(chunk, task.num_names)
        assert "".join(map(kind, asked)) == "wNNNi"


# --- rows of training batches, read by the same eyes and answered by the same solver


def vt_rows(seed, scrambled=0.5, length=24):
    level = VtLevel(
        num_chunks=5,
        shortest=length,
        longest=length,
        num_chains=4,
        min_hops=0,
        max_hops=3,
        num_questions=4,
        scrambled=scrambled,
    )
    return level, vt_batch(np.random.default_rng(seed), level, 600)


def pr_rows(seed, num_names=4, length=30):
    level = PrLevel(
        num_chunks=6, shortest=length, longest=length, num_names=num_names, num_questions=3
    )
    return level, pr_batch(np.random.default_rng(seed), level, 2000)


def chunks_of(row, level):
    return [
        list(row[start : start + level.shortest])
        for start in range(1, 1 + level.num_chunks * level.shortest, level.shortest)
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_solver_answers_rows_of_variable_tracking(seed):
    level, batch = vt_rows(seed)
    answered = 0
    for row, targets, kinds in zip(batch.ids, batch.targets, batch.kinds, strict=True):
        documents = chunks_of(row, level)
        for chunk in documents:
            check_vt_chunk(chunk)
        for at in np.nonzero(kinds == ANSWER)[0]:
            question = as_question(documents, row[at - 1 : at + 1])
            assert solve(question) == WORDS[targets[at]]
            answered += 1
    assert answered > 10


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_names", [2, 4])
def test_the_solver_answers_rows_of_passage_retrieval(seed, num_names):
    level, batch = pr_rows(seed, num_names)
    answered = 0
    for row, targets, kinds in zip(batch.ids, batch.targets, batch.kinds, strict=True):
        documents = chunks_of(row, level)
        for chunk in documents:
            check_pr_passage(chunk, num_names)
        for at in np.nonzero(kinds == ANSWER)[0]:
            question = as_question(documents, row[at - 4 : at + 1])
            if len(holders_of(question)) == 1:  # which training does not ensure
                assert solve(question) == WORDS[targets[at]]
                answered += 1
    assert answered > 5


@pytest.mark.parametrize("seed", range(10))
def test_training_has_no_held_out_pair_as_a_target(seed):
    """Each seed: 30 batches of each task; every target that is a number, but for those that only
    begin a passage, belongs to names near it."""
    for batch_seed in range(30 * seed, 30 * seed + 30):
        _, batch = vt_rows(batch_seed)
        for row, at in zip(
            *np.nonzero((batch.kinds == ANSWER) | (batch.kinds == HELPER)), strict=True
        ):
            # a question ends with the name; a value stands two tokens after it
            name = batch.ids[row, at if batch.kinds[row, at] == ANSWER else at - 2]
            assert is_name(name)
            assert not is_held_out(name - FIRST_NAME, batch.targets[row, at] - FIRST_NUMBER)
        _, batch = pr_rows(batch_seed)
        for row, at in zip(*np.nonzero(batch.targets != NO_TARGET), strict=True):
            target, here = batch.targets[row, at], batch.ids[row, at]
            if not is_number(target) or here == PASSAGE:
                continue
            if here == HERE:
                names = [batch.ids[row, at - 2]]
            else:
                ids = list(batch.ids[row])
                which = max(i for i in range(at) if ids[i] == WHICH)
                names = ids[which + 1 : which + 4]
            assert all(map(is_name, names))
            assert not any(is_held_out(n - FIRST_NAME, target - FIRST_NUMBER) for n in names)


# --- the questions themselves


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("task", TASKS, ids=task_ids)
def test_the_answer_is_what_the_documents_say(task, seed):
    for question in make(task, seed):
        assert question.answers == (solve(question),)
        assert question.scorer is Scorer.EXACT and question.max_new_tokens == 1
        num_words = sum(len(document.text.split()) for document in question.documents)
        assert question.facts["num_documents"] == task.num_chunks == len(question.documents)
        assert question.facts["context_tokens"] == num_words


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("task", TASKS, ids=task_ids)
def test_what_is_asked_is_held_out(task, seed):
    for question in make(task, seed):
        number = NUMBERS.index(question.answers[0])
        names = [NAMES.index(word) for word in question.question.split() if word in NAMES]
        assert any(is_held_out(name, number) for name in names)


@pytest.mark.parametrize("task", VT_TASKS, ids=task_ids)
def test_the_last_variable_of_a_chain_is_asked(task):
    for question in make(task, seed=0, count=20):
        statements = {name: source for _, name, source in statements_of(question)}
        assert len(statements) == len(statements_of(question))  # a variable is set once
        name, hops = question.question.split()[1], 0
        assert name not in statements.values()
        while statements[name] in NAMES:
            name, hops = statements[name], hops + 1
        assert hops == task.hops == question.facts["hops"]
        assert statements[name] == question.answers[0]
        numbers = [source for source in statements.values() if source in NUMBERS]
        assert len(set(numbers)) == len(numbers) == task.num_chains


def test_a_share_of_the_other_chains_is_out_of_order():
    def shares(scrambled):
        task = VtTask(
            num_chunks=8,
            chunk_tokens=CHUNK,
            num_chains=5,
            hops=1,
            other_hops=(1, 1),
            scrambled=scrambled,
        )
        unresolved = 0
        for question in make(task, seed=1, count=100):
            known = set()
            for _, name, source in statements_of(question):
                if source in NUMBERS or source in known:
                    known.add(name)
                else:
                    unresolved += 1
        return unresolved / 400

    assert shares(0.0) == 0.0
    assert shares(1.0) == 1.0
    assert 0.2 < shares(0.3) < 0.4


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("task", PR_TASKS, ids=task_ids)
def test_one_passage_is_meant_and_it_is_not_the_first(task, seed):
    for question in make(task, seed):
        holders = holders_of(question)
        assert len(holders) == 1 and holders[0] > 0
        numbers = [document.text.split()[-1] for document in question.documents]
        assert len(set(numbers)) == len(numbers)
        assert question.answers[0] == numbers[holders[0] - 1]


@pytest.mark.parametrize("task", TASKS, ids=task_ids)
def test_a_question_depends_on_task_seed_and_index_alone(task):
    one = vt_question if isinstance(task, VtTask) else pr_question
    assert make(task, 4, count=6) == make(task, 4, count=9)[:6]
    assert make(task, 4)[5] == one(task, 4, 5)
    assert make(task, 4)[5].documents != make(task, 5)[5].documents
    ids = [question.question_id for question in make(task, 4)]
    assert ids == [f"{task.name}/{i}" for i in range(8)]


def test_ids_say_the_size():
    assert [task.name for task in TASKS[:2]] == ["vt-c1-h0", "vt-c6-h3"]
    assert [task.name for task in PR_TASKS[:2]] == ["pr-c2-n2", "pr-c12-n6"]


def test_a_seed_gives_the_same_text_on_every_machine():
    task = VtTask(num_chunks=1, chunk_tokens=(11, 11), num_chains=1, hops=1, other_hops=(0, 0))
    assert (
        vt_question(task, 0, 0).documents[0].text == "HBYCP = 33 ; XFAFN = HBYCP ; zesnas fasa lora"
    )
    task = PrTask(num_chunks=2, chunk_tokens=(11, 11), num_names=2)
    assert (
        pr_question(task, 0, 0).documents[1].text == "passage UOWFW = here ; ZALRN = here ; next 62"
    )


# --- other orders of the documents


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("task", TASKS, ids=task_ids)
def test_permuted_documents_are_the_same_and_answer_right(task, seed):
    for question in make(task, seed):
        permuted = permute_documents(question, seed)
        assert permuted.question_id == f"{question.question_id}/permuted"
        assert Counter(permuted.documents) == Counter(question.documents)
        assert permuted.question == question.question
        assert permuted.answers == (solve(permuted),)
        assert permuted == permute_documents(question, seed)
        if task.num_chunks > 5:
            assert permuted.documents != question.documents
            assert permuted.documents != permute_documents(question, seed + 1).documents


def test_a_chain_keeps_its_order_and_its_answer():
    for question in make(VT_TASKS[2], seed=2, count=20):
        permuted = permute_documents(question, 7)
        assert permuted.answers == question.answers
        statements = {name: (i, source) for i, name, source in statements_of(permuted)}
        name, places = question.question.split()[1], []
        while name in statements:
            place, name = statements[name]
            places.append(place)
        assert len(places) == 5 and places == sorted(places, reverse=True)
        assert len(set(places)) == permuted.facts["num_chain_documents"]


def test_every_allowed_order_comes_up():
    task = PrTask(num_chunks=3, chunk_tokens=(11, 30), num_names=2)
    question = pr_question(task, 0, 0)
    orders = Counter()
    for seed in range(400):
        permuted = permute_documents(question, seed)
        orders[tuple(question.documents.index(d) for d in permuted.documents)] += 1
    [asked] = holders_of(question)
    # of six orders two begin with the asked passage, and one is the old one
    assert len(orders) == 3
    assert all(order[0] != asked for order in orders)
    assert min(orders.values()) > 90


def test_another_passage_before_the_asked_one_gives_another_answer():
    changed = [
        permute_documents(q, 0).answers != q.answers for q in make(PR_TASKS[1], seed=0, count=30)
    ]
    assert sum(changed) > 20


def test_where_only_one_order_is_allowed_it_stays():
    question = make(PR_TASKS[0], seed=0)[0]
    assert permute_documents(question, 0).documents == question.documents
    question = make(VT_TASKS[0], seed=0)[0]
    assert permute_documents(question, 0).documents == question.documents


# --- the solver and the configs


@pytest.mark.parametrize(
    ("texts", "question", "error"),
    [
        (["A = B ;", "B = 17 ;"], "value A", "give A no value"),
        (["B = 17 ;"], "value A", "give A no value"),
        (["passage A = here ; next 17", "passage next 18"], "which A id", "first passage"),
        (["passage next 17", "passage next 18"], "which A id", "0 passages"),
        (["passage A = here ; next 17", "passage A = here ; next 18"], "which A id", "2 passages"),
        (["B = 17 ;"], "who is A", "not a question"),
    ],
)
def test_the_solver_says_why_it_has_no_answer(texts, question, error):
    asked = Question(
        question_id="q",
        task="vt",
        documents=tuple(RetrievedDocument(text=text) for text in texts),
        question=question,
        answers=("?",),
        scorer=Scorer.EXACT,
        max_new_tokens=1,
    )
    with pytest.raises(ValueError, match=error):
        solve(asked)


VT_OK = {"num_chunks": 4, "chunk_tokens": (20, 30), "num_chains": 2, "hops": 2}
PR_OK = {"num_chunks": 4, "chunk_tokens": (20, 30), "num_names": 3}


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_chunks": 0},
        {"chunk_tokens": (30, 20)},
        {"chunk_tokens": (3, 20)},
        {"num_chains": 0},
        {"hops": -1},
        {"other_hops": (2, 1)},
        {"scrambled": 1.5},
        {"num_chains": 12},  # more statements than the chunks have room for
        {"num_chunks": 60, "num_chains": 30},  # more than there are names
    ],
)
def test_variable_tracking_that_does_not_fit_is_refused(wrong):
    with pytest.raises(ValueError, match=r"need|must|statements"):
        VtTask(**{"other_hops": (0, 2), **VT_OK, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_chunks": 1},
        {"num_chunks": 64},  # a number for each passage
        {"num_names": 1},
        {"num_names": 5},  # 23 tokens
        {"chunk_tokens": (30, 20)},
    ],
)
def test_passage_retrieval_that_does_not_fit_is_refused(wrong):
    with pytest.raises(ValueError, match="need"):
        PrTask(**{**PR_OK, **wrong})


def test_passages_that_share_too_many_names_are_refused():
    task = PrTask(num_chunks=3, chunk_tokens=(260, 260), num_names=64)
    with pytest.raises(ValueError, match="no question about one passage alone"):
        pr_question(task, 0, 0)


def test_words_of_each_kind_are_apart():
    assert len({*NAMES, *NUMBERS, *FILLERS}) == len(NAMES) + len(NUMBERS) + len(FILLERS)
    assert all(number.isdigit() for number in NUMBERS)
    assert not any(word.isdigit() for word in NAMES + FILLERS)
