"""Which plans does a running server make for short and long prompts, tight and loose objectives?

Starts the server, stores the documents of questions with known answers, and sends all questions
over HTTP, in random order and at random times: each at two objectives, which are shares of what
full prefill takes here. It does so once with stored KV in host memory and once for each
--bandwidth-mb-s, an emulated slower link. A row of the table is one kind of request: what was
planned, what ran, and which share met its objective (SLO), answered right, and did both (QSA).
Full prefill answers the same questions once: its row bounds what is right from above.

  cachesmith bench mixed-load
  cachesmith bench mixed-load --model FOLDER --bandwidth-mb-s 20 --rate 0.5
"""

import asyncio
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.quality.prompts import Endpoint
from benchmarks.quality.scoring import passes, score
from benchmarks.quality.suites import Suite, suite_of
from benchmarks.quality.types import Question
from benchmarks.report import argument_parser, print_json, print_table, say
from deploy.models import resolve_model
from deploy.server import running_server
from deploy.settings import Settings, load_settings

TASKS = {"english": "ref", "synthetic": "vt"}  # that tell good reuse from bad, by suite
RIGHT = 0.5  # a score from which on an answer counts as right
INGEST_BATCH = 4
FULL_PREFILL = "full_prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: a question at an objective, or by full prefill without one."""

    question: Question
    num_documents: int
    objective: str  # its name in the table
    slo_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    ask: Ask
    score: float
    report: dict[str, Any]  # the answer's `cachesmith` field


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("mixed-load", __doc__)
    parser.add_argument("--model", default="cachesmith-english", help="alias, folder or hub id")
    parser.add_argument("--config", type=Path, help="YAML file with the server's settings")
    parser.add_argument("--task", help="of the suite; default: one that needs some coverage")
    parser.add_argument("--documents", type=int, nargs="+", default=[6, 30], help="prompt sizes")
    parser.add_argument("--questions", type=int, default=8, help="of each size")
    parser.add_argument(
        "--objectives", type=float, nargs="+", default=[0.8, 2.0], help="of full prefill's time"
    )
    parser.add_argument(
        "--bandwidth-mb-s", type=float, nargs="*", default=[30.0], help="of emulated links"
    )
    parser.add_argument(
        "--rate", type=float, default=0.5, help="requests in the time of one full prefill"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if min(*args.documents, args.questions) < 1 or args.rate <= 0:
        parser.error("--documents, --questions and --rate must be more than 0")
    suite = suite_of(resolve_model(args.model))
    args.task = args.task or TASKS[suite.name]
    rows: list[dict[str, Any]] = []
    for bandwidth in (None, *args.bandwidth_mb_s):
        answers = _measure(args, suite, bandwidth)
        rows += _rows(answers, "host memory" if bandwidth is None else f"{bandwidth:g} MB/s")
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    print_json("mixed_load", seed=args.seed, results=rows)


def _measure(args: Any, suite: Suite, bandwidth_mb_s: float | None) -> list[Answer]:
    with tempfile.TemporaryDirectory(prefix="cachesmith-bench-", dir="/dev/shm") as folder:
        settings = _settings(args, Path(folder) / "tier", bandwidth_mb_s)
        with running_server(settings, progress=say) as server:
            client = _Client(server.url, server.model_name, suite)
            return asyncio.run(_load(args, suite, client))


def _settings(args: Any, tier: Path, bandwidth_mb_s: float | None) -> Settings:
    """The defaults, on a free port and with a chunk store of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    engine = {} if bandwidth_mb_s is None else {"load_bandwidth_mb_s": bandwidth_mb_s}
    return load_settings(
        config_file=args.config,
        overrides={
            "model": {"name_or_dir": args.model},
            "engine": engine,
            "http": {"port": port},
            "kv_tier": {"host": {"directory": str(tier), "capacity_bytes": "512MiB"}},
        },
    )


async def _load(args: Any, suite: Suite, client: "_Client") -> list[Answer]:
    sizes = {
        size: list(suite.questions(args.task, size, args.seed, args.questions))
        for size in args.documents
    }
    await client.store([d for own in sizes.values() for q in own for d in q.documents])
    say("full prefill answers each question once")
    answers, full_ms = [], {}
    for size, questions in sizes.items():
        own = [
            await client.ask(Ask(question=q, num_documents=size, objective="full prefill"))
            for q in questions
        ]
        full_ms[size] = statistics.median(answer.report["ttft_ms"] for answer in own)
        answers += own
    asks = [
        Ask(
            question=question,
            num_documents=size,
            objective=f"{share:.0%}",
            slo_ms=share * full_ms[size],
        )
        for size, questions in sizes.items()
        for question in questions
        for share in args.objectives
    ]
    rng = random.Random(args.seed)
    rng.shuffle(asks)
    between_s = statistics.mean(full_ms.values()) / args.rate / 1e3
    say(f"{len(asks)} requests, one in {between_s:.2f} s on average")
    tasks = []
    for ask in asks:
        tasks.append(asyncio.create_task(client.ask(ask)))
        await asyncio.sleep(rng.expovariate(1.0 / between_s))
    return [*answers, *await asyncio.gather(*tasks)]


class _Client:
    def __init__(self, url: str, model: str, suite: Suite) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=600.0)
        self._model = model
        self._is_chat = suite.form.endpoint is Endpoint.CHAT

    async def store(self, documents: Sequence[Any]) -> None:
        bodies = list(dict.fromkeys((d.title, d.text) for d in documents))
        started = time.monotonic()
        for first in range(0, len(bodies), INGEST_BATCH):
            some = [_document(*body) for body in bodies[first : first + INGEST_BATCH]]
            (await self._http.post("/v1/chunks", json={"documents": some})).raise_for_status()
        say(f"stored {len(bodies)} documents in {time.monotonic() - started:.0f} s")

    async def ask(self, ask: Ask) -> Answer:
        question = ask.question
        body: dict[str, Any] = {
            "model": self._model,
            "documents": [_document(d.title, d.text) for d in question.documents],
            "max_tokens": question.max_new_tokens,
            "temperature": 0.0,
        }
        if ask.slo_ms is None:
            body["cachesmith"] = {"policy": FULL_PREFILL}
        else:
            body["slo"] = {"ttft_ms": ask.slo_ms}
        if self._is_chat:
            body["messages"] = [{"role": "user", "content": question.question}]
        else:
            body["prompt"] = question.question
        path = "/v1/chat/completions" if self._is_chat else "/v1/completions"
        response = await self._http.post(path, json=body)
        response.raise_for_status()
        content = response.json()
        choice = content["choices"][0]
        text = choice["message"]["content"] if self._is_chat else choice["text"]
        return Answer(
            ask=ask,
            score=score(question.scorer, text, question.answers),
            report=content["cachesmith"],
        )


def _document(title: str | None, text: str) -> dict[str, str]:
    return {"text": text} if title is None else {"title": title, "text": text}


def _rows(answers: Sequence[Answer], store: str) -> list[dict[str, Any]]:
    kinds = dict.fromkeys((a.ask.num_documents, a.ask.objective) for a in answers)
    rows = []
    for num_documents, objective in sorted(kinds):
        kind = (num_documents, objective)
        own = [a for a in answers if (a.ask.num_documents, a.ask.objective) == kind]
        reports = [a.report for a in own]
        met = [a.ask.slo_ms is None or a.report["slo_met"] for a in own]
        right = [passes(a.score, RIGHT) for a in own]
        planned = [r for r in reports if not r["full_prefill"]]
        plans = sorted({(r["signal"], r["warmup_depth"], r["probe_len"]) for r in planned})
        rows.append(
            {
                "store": store,
                "documents": num_documents,
                "objective": objective,
                "requests": len(own),
                "tokens": round(_mean([r["num_context_tokens"] for r in reports])),
                "plans (S, w, p)": " ".join(f"{s},{w},{p}" for s, w, p in plans) or "-",
                "w+p": _mean([r["warmup_depth"] + r["probe_len"] for r in planned]),
                "r": _mean([r["coverage"] for r in planned]),
                "budget ms": _mean([r["budget_ms"] for r in planned]),
                "expected": _mean([r["expected_ms"] for r in planned]),
                "queue ms": _mean([r["queue_ms"] for r in reports]),
                "TTFT ms": statistics.median(r["ttft_ms"] for r in reports),
                "SLO": _mean(met),
                "right": _mean(right),
                "QSA": _mean([m and r for m, r in zip(met, right, strict=True)]),
            }
        )
    return rows


def _mean(values: Sequence[float]) -> float:
    return float(statistics.fmean(values)) if values else 0.0


if __name__ == "__main__":
    main()
