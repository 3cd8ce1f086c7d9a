"""Answers that are decoded together are those of transformers' own greedy decoding."""

import random

import pytest
import torch

from benchmarks.quality.decoding import greedy_answers
from benchmarks.random_prefill import random_model, random_tokens, small_config
from benchmarks.walked_prefill import ChunkMemory, DeviceCache, run_phases, stored_job
from planner import Signal

MAX_NEW = 12


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request):
    config = small_config(request.param)
    return random_model(config, device=torch.device("cpu"), dtype=torch.float32, seed=2)


def prefilled(model, tokens: list[int]) -> DeviceCache:
    memory = ChunkMemory(model.device)
    job = stored_job(model, memory, tokens[:5], [], tokens[5:], coverage=1.0, anchor=[])
    return run_phases(model, memory, job, signal=Signal.KV_DEV, w=model.num_layers, p=0)


@torch.inference_mode()
def test_several_caches_of_one_length_give_their_own_answers(model):
    rng = random.Random(0)
    last = 7
    prompts = [[*random_tokens(rng, 20, 128), last] for _ in range(3)]
    plain = [
        model.model.generate(
            torch.tensor([tokens]), max_new_tokens=MAX_NEW, do_sample=False, eos_token_id=None
        )[0, len(tokens) :].tolist()
        for tokens in prompts
    ]
    caches = [prefilled(model, tokens) for tokens in prompts]
    found = greedy_answers(
        model.model, last, caches, num_tokens=20, max_new_tokens=MAX_NEW, eos=set()
    )
    assert found == plain
    end = plain[1][4]
    stopped = greedy_answers(
        model.model, last, caches, num_tokens=20, max_new_tokens=MAX_NEW, eos={end}
    )
    for answer, whole in zip(stopped, plain, strict=True):
        assert answer == (whole[: whole.index(end)] if end in whole else whole)
