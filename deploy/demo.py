"""`make demo`: the main job on this machine, over HTTP, in a few minutes.

Serves SmolLM2-135M-Instruct, stores the sample corpus, and asks each sample question twice with
the `openai` client: once by full prefill, once with chunk reuse under a time-to-first-token
objective. The model is small and weak: the demo shows the path and the time, not quality.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from deploy.local_ray import free_port
from deploy.server import ServerError, running_server
from deploy.settings import Settings, load_settings

DATA = Path(__file__).with_name("demo")
OBJECTIVE_SHARE = 0.4  # of the measured full prefill: what each question may take
LONG_PROMPT_TOKENS = 2500
MAX_TOKENS = 32
ANSWER_WIDTH = 46


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One streamed answer as the client saw it."""

    text: str
    ttft_ms: float
    num_prompt_tokens: int
    num_cached_tokens: int
    details: dict[str, Any]  # the response's `cachesmith` field


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    num_documents: int
    objective_ms: float
    full: Timed
    reused: Timed

    @property
    def ratio(self) -> float:
        return self.full.ttft_ms / self.reused.ttft_ms


def main() -> int:
    corpus = {d["id"]: d for d in _read_jsonl(DATA / "corpus.jsonl")}
    questions = _read_jsonl(DATA / "questions.jsonl")
    try:
        with tempfile.TemporaryDirectory(prefix="cachesmith-demo-", dir=_shared_memory()) as folder:
            settings = _settings(Path(folder) / "tier")
            with running_server(settings, progress=_say) as server:
                _ingest(server.url, list(corpus.values()))
                rows = _ask_all(server.url, server.model_name, corpus, questions)
    except ServerError as exc:
        print(f"the demo could not run: {exc}", file=sys.stderr)
        return 1
    _print_table(rows)
    missed = [i for i, row in enumerate(rows, 1) if row.reused.num_cached_tokens == 0]
    if missed:
        print(f"questions without a cached token: {missed}", file=sys.stderr)
        return 1
    return 0


def _settings(tier: Path) -> Settings:
    """The defaults, on a free port and with a chunk store of its own."""
    return load_settings(
        overrides={
            "http": {"port": free_port()},
            "kv_tier": {"host": {"directory": str(tier), "capacity_bytes": "512MiB"}},
        }
    )


def _ingest(url: str, documents: Sequence[dict[str, str]]) -> None:
    started = time.monotonic()
    stored = 0
    for first in range(0, len(documents), 4):
        some = documents[first : first + 4]
        answer = httpx.post(f"{url}/v1/chunks", json={"documents": some}, timeout=300.0)
        answer.raise_for_status()
        stored += len(some)
        _say(f"stored {stored} of {len(documents)} documents ({time.monotonic() - started:.0f} s)")


def _ask_all(
    url: str, model: str, corpus: dict[str, Any], questions: Sequence[dict[str, Any]]
) -> list[Row]:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300.0)
    warm_up = [corpus[i] for i in questions[-1]["document_ids"][:3]]
    for policy in ("full_prefill", "adaptive"):  # first calls of a process are slow
        _ask(client, model, "What is this about?", warm_up, policy=policy)
    rows = []
    for number, question in enumerate(questions, 1):
        documents = [corpus[i] for i in question["document_ids"]]
        full = _ask(client, model, question["question"], documents, policy="full_prefill")
        objective_ms = OBJECTIVE_SHARE * full.ttft_ms
        reused = _ask(
            client, model, question["question"], documents, policy="adaptive", slo_ms=objective_ms
        )
        rows.append(
            Row(num_documents=len(documents), objective_ms=objective_ms, full=full, reused=reused)
        )
        _say(f"question {number} of {len(questions)}: {question['question']}")
    return rows


def _ask(
    client: OpenAI,
    model: str,
    question: str,
    documents: Sequence[dict[str, str]],
    *,
    policy: str,
    slo_ms: float | None = None,
) -> Timed:
    extra: dict[str, Any] = {"documents": list(documents), "cachesmith": {"policy": policy}}
    if slo_ms is not None:
        extra["slo"] = {"ttft_ms": slo_ms}
    started = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra,
    )
    ttft_ms, text, details, usage = 0.0, "", {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        details = getattr(chunk, "cachesmith", None) or details
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            ttft_ms = ttft_ms or (time.perf_counter() - started) * 1e3
            text += piece
    assert usage is not None
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return Timed(
        text=" ".join(text.split()),
        ttft_ms=ttft_ms or (time.perf_counter() - started) * 1e3,
        num_prompt_tokens=usage.prompt_tokens,
        num_cached_tokens=cached or 0,
        details=details,
    )


def _print_table(rows: Sequence[Row]) -> None:
    print()
    print(
        f"{'':>2} {'docs':>4} {'prompt':>6} {'cached':>6}  {'plan (signal, w, p, r)':<22} "
        f"{'objective':>9} {'TTFT':>8} {'full':>8} {'ratio':>6}  answer begins"
    )
    for number, row in enumerate(rows, 1):
        made = row.reused.details
        plan = (
            f"{made['signal']}, {made['warmup_depth']}, {made['probe_len']}, {made['coverage']:.2f}"
        )
        print(
            f"{number:>2} {row.num_documents:>4} {row.reused.num_prompt_tokens:>6} "
            f"{row.reused.num_cached_tokens:>6}  {plan:<22} {row.objective_ms:>6.0f} ms "
            f"{row.reused.ttft_ms:>5.0f} ms {row.full.ttft_ms:>5.0f} ms {row.ratio:>5.1f}x  "
            f"{row.reused.text[:ANSWER_WIDTH]}"
        )
    met = sum(row.reused.ttft_ms <= row.objective_ms for row in rows)
    print()
    print(f"objective ({OBJECTIVE_SHARE:.0%} of full prefill's time) met: {met} of {len(rows)}")
    print(f"median ratio, all prompts: {statistics.median(r.ratio for r in rows):.1f}")
    long = [r.ratio for r in rows if r.full.num_prompt_tokens >= LONG_PROMPT_TOKENS]
    if long:
        print(
            f"median ratio, {LONG_PROMPT_TOKENS:,} tokens and more: {statistics.median(long):.1f}"
        )
    print("TTFT: time to the first token, by the client's clock; full: the same request without")
    print("reuse. The plan's r is the share of document tokens that were recomputed.")


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def _shared_memory() -> str | None:
    """Where shared memory lives as files; None for the system's temporary folder."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
