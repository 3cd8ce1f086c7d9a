"""The training forward is transformers' Qwen3, and a few steps of it learn."""

import argparse

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.training.schedule import learning_rate
from benchmarks.training.synthetic_batches import (
    ANSWER,
    NO_TARGET,
    PrLevel,
    VtLevel,
    pr_batch,
    vt_batch,
)
from benchmarks.training.synthetic_network import new_model, synthetic_config, target_logits
from benchmarks.training.synthetic_words import BOS, VOCAB_SIZE, save_tokenizer, vocabulary
from benchmarks.training.train_synthetic import (
    LEVEL_UP_WINDOW,
    PR_LEVELS,
    VT_LEVELS,
    Mixing,
    Task,
    train,
)

EASY = VtLevel(
    num_chunks=2,
    shortest=8,
    longest=12,
    num_chains=2,
    min_hops=0,
    max_hops=1,
    num_questions=2,
    scrambled=0.5,
)
EASY_PR = PrLevel(num_chunks=3, shortest=14, longest=18, num_names=2, num_questions=2)


def test_the_training_forward_is_that_of_transformers():
    config = synthetic_config(num_layers=3)
    model = new_model(config, seed=3)
    with torch.no_grad():  # norms start as ones: a wrong place would not show
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(mean=1.0, std=0.3)
    ids = torch.randint(0, VOCAB_SIZE, (3, 37), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 5, 36, 37, 80, 110])
    weights = dict(model.named_parameters())
    with torch.no_grad():
        mine = target_logits(weights, config, ids, positions)
        theirs = model(ids).logits.reshape(-1, VOCAB_SIZE)[positions]
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [(vt_batch, EASY), (pr_batch, EASY_PR)], ids=["vt", "pr"])
def test_batches_are_those_of_their_seed(make):
    function, level = make
    first, same, other = (function(np.random.default_rng(s), level, 500) for s in (1, 1, 2))
    for name in ("ids", "targets", "weights", "kinds", "hops"):
        assert np.array_equal(getattr(first, name), getattr(same, name))
    assert not np.array_equal(first.ids, other.ids)


@pytest.mark.parametrize(
    ("function", "level"),
    [(vt_batch, level) for level in VT_LEVELS] + [(pr_batch, level) for level in PR_LEVELS],
)
def test_every_level_makes_answers_and_no_question_stands_in_its_own_target(function, level):
    batch = function(np.random.default_rng(0), level, 3000)
    answers = batch.kinds == ANSWER
    assert answers.any()
    assert (batch.ids[:, 0] == BOS).all()
    assert ((batch.targets == NO_TARGET) == (batch.weights == 0)).all()
    rows, at = np.nonzero(answers)
    # what follows the question is its answer, as in a prompt that goes on
    assert (batch.ids[rows, at + 1] == batch.targets[rows, at]).all()


def test_statements_too_many_for_the_chunks_are_refused():
    level = VtLevel(
        num_chunks=1,
        shortest=8,
        longest=8,
        num_chains=4,
        min_hops=2,
        max_hops=2,
        num_questions=1,
    )
    with pytest.raises(ValueError, match="12 statements do not fit"):
        vt_batch(np.random.default_rng(0), level, 100)


def test_the_tokenizer_takes_words_apart_and_puts_them_together(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    words = vocabulary()
    assert len(set(words)) == VOCAB_SIZE == len(tokenizer)
    text = " ".join([words[20], "=", words[90], ";", words[200]])
    assert tokenizer.encode(text) == [BOS, 20, 2, 90, 3, 200]
    assert tokenizer.decode([20, 2, 90]) == f"{words[20]} = {words[90]}"
    for one, other in ((text, f"{text} {words[21]}"),):  # a chunk's ids do not depend on others
        ids = tokenizer.encode(other, add_special_tokens=False)
        assert ids[: len(ids) - 1] == tokenizer.encode(one, add_special_tokens=False)


def test_a_task_rises_after_good_batches_only():
    task = Task("vt", vt_batch, VT_LEVELS, 0, Mixing())
    for _ in range(LEVEL_UP_WINDOW - 1):
        task.note(1.0)
    assert not task.rise()
    task.note(0.8)
    task.note(0.0)
    assert not task.rise()  # 0.92 on average, 0.93 is needed
    for _ in range(LEVEL_UP_WINDOW):
        task.note(0.95)
    assert task.rise()
    assert task.level == 1
    assert not task.rise()


def test_the_learning_rate_rises_stays_and_falls():
    rates = [learning_rate(step, 1000, warmup_steps=30, decay=0.25) for step in range(1, 1001)]
    assert rates[0] < rates[10] < 1.0
    assert all(rate == 1.0 for rate in rates[40:700])
    assert rates[760] > rates[900] > rates[-1] > 0


@pytest.mark.slow
def test_a_short_training_learns_and_leaves_a_model_folder(tmp_path):
    args = {"steps": 60, "layers": 2, "seed": 0, "tokens": 600, "pr_every": 2}
    args |= {"harder_from": 5, "easier": 0.25, "hop_weight": 1.0, "decay": 0.25}
    train(
        argparse.Namespace(
            out=tmp_path / "m", init=None, stop_at=None, vt_level=0, pr_level=0, **args
        )
    )
    log = (tmp_path / "m" / "training.log").read_text()
    assert "done step 60" in log
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    batch = vt_batch(np.random.default_rng(9), VT_LEVELS[0], 600)
    with torch.no_grad():
        logits = model(torch.from_numpy(batch.ids)).logits
    asked = torch.from_numpy(batch.targets)
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), asked.flatten(), ignore_index=NO_TARGET
    )
    assert losses < 0.9 * np.log(VOCAB_SIZE)  # of a model that knows nothing
    again = train(
        argparse.Namespace(
            out=tmp_path / "n", init=tmp_path / "m", stop_at=1, vt_level=1, pr_level=0, **args
        )
    )
    assert again is None
    assert "done step 1 " in (tmp_path / "n" / "training.log").read_text()
