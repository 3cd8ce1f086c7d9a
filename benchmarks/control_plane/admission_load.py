"""A load on scheduler actors: callers that admit, and emulated replicas that report."""

import asyncio
import itertools
import os
import random
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle

from benchmarks.control_plane.instant_engine import InstantEngine, InstantEngineConfig
from cluster.messages import Refusal, RequestOutcome
from cluster.outbox import Outbox
from cluster.replica_reporter import ReplicaReporter
from cluster.scheduler_actor import Message, tell
from planner import ADAPTIVE, ChunkRef, RequestProfile, Ticket

NUM_LAYERS = 32
CHUNKS_PER_REQUEST = 8
TOKENS_PER_CHUNK = 512
NUM_CHUNKS = 2_000
_SYNC_PERIOD_S = 0.5  # as cluster/router.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Admissions:
    """What one process of callers saw."""

    num: int
    elapsed_s: float
    latencies_ms: list[float]


class EmulatedReplicas:
    """A Ray actor: reports of many replicas, as their processes would send them, and a router."""

    def __init__(self, scheduler: ActorHandle[Any], num: int) -> None:
        self._scheduler = scheduler
        self._ids = [f"r{i:03d}" for i in range(num)]
        self._reporting: list[asyncio.Task[None]] = []

    async def start(self, period_s: float) -> None:
        """period_s: between two reports of one replica; returns when all are known"""
        await self.stop()
        await self._scheduler.sync_replicas.remote("router", self._ids)
        reporters = [await _reporter(replica_id) for replica_id in self._ids]
        for reporter in reporters:
            ack = await self._scheduler.report.remote(reporter.build(()))
            reporter.acknowledged(ack)
        loops = [self._report_for_ever(reporter, period_s) for reporter in reporters]
        self._reporting = [asyncio.create_task(loop) for loop in (self._sync_for_ever(), *loops)]

    async def stop(self) -> None:
        for task in self._reporting:
            task.cancel()
        await asyncio.gather(*self._reporting, return_exceptions=True)
        self._reporting = []

    async def _sync_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_PERIOD_S)
            await self._scheduler.sync_replicas.remote("router", self._ids)

    async def _report_for_ever(self, reporter: ReplicaReporter, period_s: float) -> None:
        await asyncio.sleep(random.uniform(0.0, period_s))
        while True:
            reporter.acknowledged(await self._scheduler.report.remote(reporter.build(())))
            await asyncio.sleep(period_s)


async def _reporter(replica_id: str) -> ReplicaReporter:
    """Of a replica of one big node, where every chunk is hot."""
    engine = InstantEngine(InstantEngineConfig(num_layers=NUM_LAYERS))
    for i in range(NUM_CHUNKS):
        engine.keep(f"c{i:063d}")
    info = await engine.start()
    return ReplicaReporter(engine, info, replica_id=replica_id, node_id="node")


class Callers:
    """A Ray actor: admissions in a closed loop, each followed by what a served request tells."""

    def __init__(self, scheduler: ActorHandle[Any], seed: int) -> None:
        self._scheduler = scheduler
        self._ingress_id = f"callers-{seed}"
        self._ingress = Outbox(self._tell)
        self._replicas: dict[str, Outbox[Message]] = defaultdict(lambda: Outbox(self._tell))
        self._rng = random.Random(seed)
        self._numbers = itertools.count()

    async def run(self, num_callers: int, seconds: float) -> Admissions:
        """Each of the callers has one admission under way at any time."""
        latencies: list[float] = []
        started = time.monotonic()
        calls = [self._call_until(started + seconds, latencies) for _ in range(num_callers)]
        await asyncio.gather(*calls)
        return Admissions(
            num=len(latencies), elapsed_s=time.monotonic() - started, latencies_ms=latencies
        )

    async def call(self, actor: ActorHandle[Any], seconds: float) -> list[float]:
        """One call after the other of a BareScheduler, in ms."""
        latencies: list[float] = []
        end_s = time.monotonic() + seconds
        while (sent := time.monotonic()) < end_s:
            await actor.admit.remote(0)
            latencies.append((time.monotonic() - sent) * 1e3)
        return latencies

    async def _call_until(self, end_s: float, latencies: list[float]) -> None:
        scheduler = self._scheduler
        while (sent := time.monotonic()) < end_s:
            profile = self._profile()
            ticket = await scheduler.admit.remote(profile, self._ingress_id)
            if isinstance(ticket, Refusal):
                raise RuntimeError(ticket.message)
            latencies.append((time.monotonic() - sent) * 1e3)
            self._replicas[ticket.replica_id].put(
                ("first_token", ticket.replica_id, profile.request_id)
            )
            self._replicas[ticket.replica_id].put(("finished", profile.request_id))
            self._ingress.put(("record", _outcome(profile, ticket)), can_wait=True)

    async def _tell(self, messages: list[Message]) -> None:
        await tell(self._scheduler, messages)

    def _profile(self) -> RequestProfile:
        chunks = tuple(
            ChunkRef(
                chunk_id=f"c{self._rng.randrange(NUM_CHUNKS):063d}", num_tokens=TOKENS_PER_CHUNK
            )
            for _ in range(CHUNKS_PER_REQUEST)
        )
        return RequestProfile(
            request_id=f"{os.getpid():x}-{next(self._numbers)}",
            num_prefix_tokens=20,
            chunks=chunks,
            num_suffix_tokens=40,
            ttft_slo_ms=self._rng.uniform(500.0, 5_000.0),
        )


def _outcome(profile: RequestProfile, ticket: Ticket) -> RequestOutcome:
    return RequestOutcome(
        outcome="ok",
        policy=ADAPTIVE,
        queue_ms=ticket.queue_ms,
        ttft_ms=ticket.queue_ms,
        slo_met=True,
        coverage=ticket.plan.coverage,
        expected_ms=ticket.plan.expected_ms,
        prefill_ms=ticket.plan.expected_ms,
        num_prompt_tokens=profile.num_prompt_tokens,
        cached_tokens={"host": 0},
    )


def cpu_s(actor: ActorHandle[Any]) -> float:
    """CPU time of the actor's process, all threads."""
    return ray.get(actor.__ray_call__.remote(_process_time))


def decision_ms(scheduler: ActorHandle[Any]) -> tuple[int, float]:
    """How many batches it has formed, and how long that took in all."""
    text = ray.get(scheduler.metrics_text.remote()).decode()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    count, total = (float(samples[f"cachesmith_decision_ms_{end}"]) for end in ("count", "sum"))
    return int(count), total


def _process_time(_: Any) -> float:
    return time.process_time()
