"""The ways on a real Ray Serve: HTTP, scheduler, router, replicas around an emulated engine."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tokenizers import Tokenizer

from benchmarks.burst.emulated_engine import EmulatedConfig
from benchmarks.burst.setting import (
    CHUNK_TOKENS,
    CORPUS_CHUNKS,
    DEMAND,
    MODEL_DIR,
    SUFFIX_TOKENS,
    Burst,
    Outcome,
    Way,
    scenario_of,
)
from cluster.api_types import Document
from cluster.config import (
    AutoscalingSpec,
    ClusterConfig,
    IngressConfig,
    PromptConfig,
    ReplicaConfig,
    SchedulerConfig,
    scheduler_address,
)
from cluster.prompt import PromptBuilder
from cluster.tokenizer import HfTokenizer
from deploy.local_ray import prepare_environment
from kv_tier.keys import content_id
from planner import DemandProfile, RequestPlan, ScalingConfig, Signal
from planner.simulator import Prepared, prepare
from planner.simulator.autoscaling import OngoingSizing, SloSizing
from planner.simulator.gate import is_enough
from planner.simulator.replica import SimRequest
from planner.types import ChunkRef, RequestProfile

APP = "burst"
REPO = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0
METRICS_PUSH_S = "1"  # of Serve, so that its policy sees what it can; 10 s as it comes
# the synthetic model reads words, and nothing around them
PROMPT = PromptConfig(intro="", untitled_template="{text} ")


@contextmanager
def served_cluster(
    burst: Burst, *, stretch: float, seed: int
) -> Iterator[Callable[[Way], Outcome]]:
    """A Ray and Serve on loopback. Yields what serves the load with one way after another.

    stretch: real seconds in a second of the load
    """
    prepare_environment()
    from benchmarks.own_serve import own_ray, own_serve

    env = {
        "PYTHONPATH": str(REPO),
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": METRICS_PUSH_S,
        "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": METRICS_PUSH_S,
    }
    with own_ray(num_cpus=burst.max_replicas + 4, env=env), own_serve() as url:
        yield _Run(burst, stretch=stretch, seed=seed, url=url)


class _Run:
    def __init__(self, burst: Burst, *, stretch: float, seed: int, url: str) -> None:
        self._burst = burst
        self._stretch = stretch
        self._url = url
        self._seed = seed
        self._texts = _texts(seed)

    def __call__(self, way: Way) -> Outcome:
        from ray import serve

        from benchmarks.own_serve import wait_until_ready
        from cluster import scheduler_actor

        prepared = prepare(scenario_of(self._burst, way), seed=self._seed)
        serve.run(self._application(prepared, way), name=APP, route_prefix="/")
        try:
            wait_until_ready(self._url, way.num, timeout_s=PATIENCE_S)
            with ReplicaSeconds() as paid:
                answers = asyncio.run(self._load(prepared))
        finally:
            serve.delete(APP)
            scheduler_actor.stop(scheduler_address(APP))
        ttfts = [answer.ttft_ms for answer in answers if answer.ttft_ms is not None]
        return Outcome(
            way=way.name,
            is_fixed=way.is_fixed,
            qsa=sum(answer.passed for answer in answers) / len(answers),
            replica_s=paid.replica_s / self._stretch,
            p99_ttft_ms=float(np.quantile(ttfts, 0.99)) if ttfts else None,
            errors=sum(answer.ttft_ms is None for answer in answers),
            most_replicas=paid.most,
        )

    async def _load(self, prepared: Prepared) -> list["_Answer"]:
        """Every request at its time, whatever became of those before."""
        workload = prepared.workload
        started_s = time.monotonic()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:

            async def ask(idx: int) -> _Answer:
                at_s = started_s + float(workload.arrival_ms[idx]) * self._stretch / 1e3
                await asyncio.sleep(max(0.0, at_s - time.monotonic()))
                return await self._ask(client, prepared, idx)

            return await asyncio.gather(*(ask(idx) for idx in range(len(workload))))

    async def _ask(self, client: httpx.AsyncClient, prepared: Prepared, idx: int) -> "_Answer":
        workload = prepared.workload
        picks = workload.picks[workload.starts[idx] : workload.starts[idx + 1]].tolist()
        slo_ms = float(workload.slo_ms[idx]) * self._stretch
        body = {
            "model": "synthetic",
            "messages": [{"role": "user", "content": self._texts.question}],
            "documents": [self._texts.chunks[pick] for pick in picks],
            "max_tokens": 1,
            "slo": {"ttft_ms": slo_ms},
        }
        try:
            response = await client.post(f"{self._url}/v1/chat/completions", json=body)
        except httpx.HTTPError:
            return _Answer()
        if response.status_code != 200:
            return _Answer()
        info = response.json()["cachesmith"]
        is_timely = info["ttft_ms"] <= slo_ms
        return _Answer(
            ttft_ms=info["ttft_ms"] / self._stretch,
            passed=is_timely and _is_enough(info, prepared, idx),
        )

    def _application(self, prepared: Prepared, way: Way) -> Any:
        from cluster.deployments import cluster_app

        sizing = prepared.scenario.models[0].fleet.sizing
        autoscaling = None
        if isinstance(sizing, SloSizing):
            autoscaling = AutoscalingSpec(scaling=_stretched(sizing, self._stretch))
        elif isinstance(sizing, OngoingSizing):
            autoscaling = AutoscalingSpec(
                scaling=ScalingConfig(max_replicas=sizing.max_replicas),
                policy="ongoing",
                ongoing={
                    "look_back_period_s": sizing.look_back_s * self._stretch,
                    "upscale_delay_s": sizing.upscale_delay_s * self._stretch,
                    "downscale_delay_s": sizing.downscale_delay_s * self._stretch,
                },
            )
        engine = EmulatedConfig(
            cost=replace(prepared.machines[0].cost, scale=self._stretch),
            load_s=self._burst.load_s * self._stretch,
            chunk_ids=self._texts.chunk_ids,
        )
        return cluster_app(
            ClusterConfig(
                app_name=APP,
                ingress=IngressConfig(
                    model=str(MODEL_DIR),
                    model_name="synthetic",
                    scheduler=SchedulerConfig(demand=DemandProfile.load(DEMAND)),
                    prompt=PROMPT,
                ),
                replica=ReplicaConfig(
                    builder="benchmarks.burst.emulated_engine:build", engine=engine
                ),
                num_replicas=way.num,
                autoscaling=autoscaling,
                health_check_timeout_s=60.0,  # a busy machine is no failure here
            )
        )


def _stretched(sizing: SloSizing, stretch: float) -> ScalingConfig:
    """All times of the rule, as everything else's."""
    config = sizing.config
    return replace(
        config,
        down_after_s=config.down_after_s * stretch,
        level_s=config.level_s * stretch,
        trend_s=config.trend_s * stretch,
        mean_s=config.mean_s * stretch,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """ttft_ms: unstretched; None: an error"""

    ttft_ms: float | None = None
    passed: bool = False


def _is_enough(info: dict[str, Any], prepared: Prepared, idx: int) -> bool:
    """By the simulator's gate."""
    workload, num_layers = prepared.workload, prepared.machines[0].cost.num_layers
    num_context = info["num_context_tokens"]
    request = SimRequest(
        idx=idx,
        profile=RequestProfile(
            request_id=str(idx),
            num_prefix_tokens=0,
            chunks=(ChunkRef(chunk_id="", num_tokens=num_context),),
            num_suffix_tokens=0,
            ttft_slo_ms=1.0,
        ),
        output_tokens=1,
        truth=prepared.truths[0][0],
        difficulty=float(workload.difficulty[idx]),
        taste=float(workload.taste[idx]),
        vote=float(workload.vote[idx]),
    )
    plan = RequestPlan(
        policy=info["policy"],
        signal=Signal(info["signal"]),
        warmup_depth=info["warmup_depth"],
        probe_len=info["probe_len"],
        coverage=info["coverage"],
        expected_ms=0.0,
        budget_ms=0.0,
    )
    return is_enough(
        request,
        plan,
        signal=plan.signal,
        coverage=info["coverage"],
        num_cached=num_context - info["num_miss_tokens"],
        num_layers=num_layers,
    )


class ReplicaSeconds:
    """Replicas over time, as Serve lists them: those that start and those that drain are paid."""

    def __init__(self) -> None:
        self.replica_s = 0.0
        self.most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "ReplicaSeconds":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        looked_s, number = time.monotonic(), _num_replicas()
        while not self._over.wait(0.5):
            now_s = time.monotonic()
            self.replica_s += number * (now_s - looked_s)
            looked_s, number = now_s, _num_replicas()
            self.most = max(self.most, number)
        self.replica_s += number * (time.monotonic() - looked_s)


def _num_replicas() -> int:
    from ray import serve

    deployment = serve.status().applications[APP].deployments["Replica"]
    return sum(deployment.replica_states.values())


@dataclass(frozen=True, slots=True)
class _Texts:
    chunks: list[str]
    chunk_ids: tuple[str, ...]
    question: str


def _texts(seed: int) -> _Texts:
    """A corpus of words that are one token each, and the ids that its chunks get."""
    vocabulary = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).get_vocab()
    words = sorted(word for word in vocabulary if word.isalnum())
    rng = random.Random(seed)
    chunks = [" ".join(rng.choices(words, k=CHUNK_TOKENS)) for _ in range(CORPUS_CHUNKS)]
    prompts = PromptBuilder(HfTokenizer.load(MODEL_DIR), PROMPT)
    documents = prompts.document_chunks([Document(text=text) for text in chunks])
    ids = [content_id(pieces[0], cache_salt="") for pieces in documents]
    return _Texts(chunks, tuple(ids), " ".join(rng.choices(words, k=SUFFIX_TOKENS)))
