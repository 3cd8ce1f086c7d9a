"""What the ingress does with one request, step by step: rows of the benchmark's table."""

import json
import pickle
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from ray import cloudpickle

from benchmarks.control_plane.prompts import Prompts
from cluster.api_types import ChatCompletionRequest
from cluster.config import PromptConfig
from cluster.prompt import Prompt, PromptBuilder
from cluster.tokenizer import HfTokenizer
from deploy.models import resolve_model
from kv_tier.keys import content_id
from planner import ChunkRef, RagRequest, RequestProfile

REPEATS = 30


def step_rows(args: Any) -> list[dict[str, Any]]:
    tokenizer = HfTokenizer.load(resolve_model(args.model))
    prompts = Prompts(args.seed)
    return [
        {"part": "steps", "documents": documents, "step": step, "CPU ms": ms}
        for documents in args.documents
        for step, ms in _steps(tokenizer, prompts.bodies(documents, 1)[0]).items()
    ]


def _steps(tokenizer: HfTokenizer, body: bytes) -> dict[str, float]:
    fields = json.loads(body)
    request = ChatCompletionRequest.model_validate(fields)
    asked = request.messages, request.documents or []
    caching = PromptBuilder(tokenizer, PromptConfig())
    forgetful = PromptBuilder(tokenizer, PromptConfig(token_cache_tokens=0))
    prompt = caching.chat(*asked)
    profile, call = _profile(prompt), _call(prompt)
    pickled_profile, pickled_call = cloudpickle.dumps(profile), cloudpickle.dumps(call)
    steps: dict[str, Callable[[], object]] = {
        "parse JSON": lambda: json.loads(body),
        "validate": lambda: ChatCompletionRequest.model_validate(fields),
        "template and tokens, documents new": lambda: forgetful.chat(*asked),
        "template and tokens, documents known": lambda: caching.chat(*asked),
        "chunk ids and profile": lambda: _profile(prompt),
        "pickle the profile": lambda: cloudpickle.dumps(profile),
        "unpickle it": lambda: pickle.loads(pickled_profile),
        "pickle the request": lambda: cloudpickle.dumps(call),
        "unpickle it there": lambda: pickle.loads(pickled_call),
    }
    return {name: _cpu_ms(step) for name, step in steps.items()}


def _cpu_ms(step: Callable[[], object]) -> float:
    """Median over repeats, of all threads: the tokenizer has its own."""
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        step()
        times.append((time.process_time() - started) * 1e3)
    return median(times)


def _profile(prompt: Prompt) -> RequestProfile:
    return RequestProfile(
        request_id=f"{random.getrandbits(128):x}",
        num_prefix_tokens=len(prompt.prefix_ids),
        chunks=tuple(
            ChunkRef(chunk_id=content_id(ids), num_tokens=len(ids)) for ids in prompt.chunks
        ),
        num_suffix_tokens=len(prompt.suffix_ids),
        ttft_slo_ms=2_000.0,
    )


def _call(prompt: Prompt) -> RagRequest:
    return RagRequest(
        request_id=f"{random.getrandbits(128):x}",
        prefix_ids=prompt.prefix_ids,
        chunks=prompt.chunks,
        suffix_ids=prompt.suffix_ids,
        ttft_slo_ms=2_000.0,
    )
