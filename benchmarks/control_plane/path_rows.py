"""Requests over HTTP, ours and the bare application's in turns: rows of the benchmark's table."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.control_plane.open_loop import Client, Sample
from benchmarks.control_plane.process_cpu import descendants_cpu_s
from benchmarks.control_plane.prompts import Prompts
from benchmarks.control_plane.serving import BARE, serving
from benchmarks.report import say
from benchmarks.timing import percentile
from cluster.config import SchedulerConfig
from deploy.models import resolve_model

IDLE_S = 3.0


def path_rows(args: Any) -> list[dict[str, Any]]:
    model_dir = resolve_model(args.model)
    num_layers = int(json.loads((model_dir / "config.json").read_text())["num_hidden_layers"])
    schedulers = {"gather0": SchedulerConfig(gather_ms=0.0), "gather5": SchedulerConfig()}
    say("starting the applications")
    with serving(model_dir, schedulers, num_layers=num_layers, num_replicas=2) as urls:
        return asyncio.run(_paths(args, urls))


async def _paths(args: Any, urls: dict[str, str]) -> list[dict[str, Any]]:
    prompts, rng = Prompts(args.seed), random.Random(args.seed)
    rows = []
    async with Client() as client:
        for url in urls.values():  # all documents once: later ones are known
            await client.load(_chat(url), prompts.all_documents(), rate_per_s=10.0, rng=rng)
        for rate in args.rates:
            for documents in args.documents:
                say(f"{rate:g} requests/s, {documents} documents")
                idle = await _idle_share()
                rounds = []
                for _ in range(args.rounds):
                    bodies = prompts.bodies(documents, args.requests)
                    rounds.append(await _round(client, urls, bodies, rate, rng, idle))
                rows += [_path_row(name, rate, documents, rounds) for name in urls]
    return rows


async def _round(
    client: Client,
    urls: dict[str, str],
    bodies: Sequence[bytes],
    rate: float,
    rng: random.Random,
    idle_share: float,
) -> dict[str, tuple[list[Sample], float]]:
    """Each application in turn, in random order; its samples, and CPU ms a request."""
    found = {}
    for name in rng.sample(list(urls), len(urls)):
        before, started = descendants_cpu_s(), time.monotonic()
        samples = await client.load(_chat(urls[name]), bodies, rate_per_s=rate, rng=rng)
        cpu_s = _spent_s(before) - idle_share * (time.monotonic() - started)
        found[name] = samples, cpu_s / len(bodies) * 1e3
    return found


async def _idle_share() -> float:
    """Of one core, taken by all applications together while no request comes."""
    before, started = descendants_cpu_s(), time.monotonic()
    await asyncio.sleep(IDLE_S)
    return _spent_s(before) / (time.monotonic() - started)


def _path_row(
    name: str, rate: float, documents: int, rounds: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "part": "path",
        "requests/s": rate,
        "documents": documents,
        "application": name,
        "requests": sum(len(found[name][0]) for found in rounds),
    }
    for field in ("to_replica_ms", "to_first_byte_ms"):
        for label, share in (("P50", 0.5), ("P99", 0.99)):
            what = f"{field.removesuffix('_ms').replace('_', ' ')} {label}"
            pooled = [getattr(sample, field) for found in rounds for sample in found[name][0]]
            base = [getattr(sample, field) for found in rounds for sample in found[BARE][0]]
            row[f"{what} ms"] = percentile(pooled, share)
            row[f"{what} ratio"] = percentile(pooled, share) / percentile(base, share)
            if label == "P50":
                each = [
                    _percentile_of(found[name][0], field, share)
                    / _percentile_of(found[BARE][0], field, share)
                    for found in rounds
                ]
                row[f"{what} ratio of rounds"] = (
                    f"{median(each):.2f} ({min(each):.2f}–{max(each):.2f})"
                )
    row["CPU ms"] = median(found[name][1] for found in rounds)
    row["CPU ratio"] = row["CPU ms"] / median(found[BARE][1] for found in rounds)
    return row


def _percentile_of(samples: Sequence[Sample], field: str, share: float) -> float:
    return percentile([getattr(sample, field) for sample in samples], share)


def _spent_s(before: dict[str, float]) -> float:
    return sum(descendants_cpu_s().values()) - sum(before.values())


def _chat(url: str) -> str:
    return f"{url}/v1/chat/completions"
