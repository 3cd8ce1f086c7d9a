"""The commands that talk to a running server: ingest, status, trace."""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from deploy.console import fail, say

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "CACHESMITH_API_KEY"
_INGEST_BATCH = 8

_INGEST_EPILOG = """\
Each line of the file is a document: a JSON string, or an object {"id", "title", "text"} of which
only "text" is needed. Requests that use the same documents then find their KV.

example:
  cachesmith ingest --file corpus.jsonl --url http://127.0.0.1:8000
"""

_TRACE_EPILOG = """\
The file holds the body of a /v1/chat/completions or /v1/completions request. The answer's timeline
is written as Trace Event JSON: open it at ui.perfetto.dev or chrome://tracing.

example:
  cachesmith trace --request ask.json --output trace.json
"""


def add_parsers(commands: Any) -> None:
    def add_command(name: str, **texts: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = commands.add_parser(
            name, formatter_class=argparse.RawDescriptionHelpFormatter, **texts
        )
        parser.add_argument(
            "--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})"
        )
        add_api_key(parser)
        return parser

    ingest = add_command(
        "ingest",
        help="compute documents' KV ahead",
        description="Send documents to a running server, which computes and stores their KV.",
        epilog=_INGEST_EPILOG,
    )
    ingest.add_argument(
        "--file", type=Path, required=True, metavar="JSONL", help="documents, one a line"
    )
    ingest.add_argument("--cache-salt", default=None, help="tenant that the chunks belong to")
    ingest.set_defaults(run=_ingest)

    status = add_command(
        "status",
        help="show what a running server does",
        description="Show health, replicas and request counts of a running server. "
        "Exit code 1 if it is not ready.",
        epilog="example:\n  cachesmith status --url http://127.0.0.1:8000\n",
    )
    status.set_defaults(run=_status)

    trace = add_command(
        "trace",
        help="see where one request's time goes",
        description="Send a request to a running server and save the timeline of its prefill.",
        epilog=_TRACE_EPILOG,
    )
    trace.add_argument(
        "--request", type=Path, required=True, metavar="JSON", help="file with the request's body"
    )
    trace.add_argument(
        "--output",
        type=Path,
        default=Path("trace.json"),
        metavar="FILE",
        help="where the trace goes (default: trace.json)",
    )
    trace.set_defaults(run=_trace)


def add_api_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"where the server asks for one (default: {KEY_VARIABLE} in the environment, where no "
        "list of processes shows it)",
    )


def _client(args: argparse.Namespace, *, timeout_s: float | None = None) -> httpx.Client:
    """For the server that the command line names, with its key if there is one."""
    key = (args.api_key or os.environ.get(KEY_VARIABLE, "")).strip()
    headers = {"Authorization": f"Bearer {key}".encode()} if key else {}
    return httpx.Client(base_url=args.url, headers=headers, timeout=timeout_s)


def _ingest(args: argparse.Namespace) -> int:
    try:
        documents = list(_documents(args.file))
    except (OSError, ValueError) as exc:
        return fail(str(exc))
    counts: dict[str, int] = {}
    num_tokens = 0
    with _client(args) as client:
        for start in range(0, len(documents), _INGEST_BATCH):
            batch = documents[start : start + _INGEST_BATCH]
            body = {"documents": batch, "cache_salt": args.cache_salt}
            try:
                response = client.post("/v1/chunks", json=body)
            except httpx.HTTPError as exc:
                return fail(f"{args.url} does not answer: {exc}")
            if response.status_code != 200:
                return fail(f"{args.url} answered {response.status_code}: {response.text}")
            for chunk in response.json()["data"]:
                counts[chunk["status"]] = counts.get(chunk["status"], 0) + 1
                num_tokens += chunk["num_tokens"]
            say(f"{min(start + _INGEST_BATCH, len(documents))} of {len(documents)} documents")
    summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    say(f"{num_tokens} tokens in chunks: {summary or 'none'}")
    return 1 if counts.get("failed") else 0


def _documents(path: Path) -> Iterator[Any]:
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as exc:
            raise ValueError(f"{path}, line {number} is not JSON: {exc}") from None


def _status(args: argparse.Namespace) -> int:
    try:
        with _client(args, timeout_s=10.0) as client:
            health, metrics = client.get("/health"), client.get("/metrics")
    except httpx.HTTPError as exc:
        return fail(f"{args.url} does not answer: {exc}")
    try:
        state = health.json()
    except ValueError:
        return fail(f"{args.url} is not a CacheSmith server: it answered {health.text[:200]!r}")
    if health.status_code != 200:
        reason = state.get("reason") or state.get("error", {}).get("message")
        return fail(f"{args.url} is not ready: {reason}")
    if "model" not in state:
        say(f"{args.url} is ready; what it does it tells to an API key alone")
        return 0
    say(f"{state['model']}: ready, {state['num_waiting']} requests wait")
    for replica in state["replicas"]:
        say(
            f"  replica {replica['replica']}: {replica['num_running']} running, "
            f"{replica['num_resident_chunks']} chunks hot, "
            f"{replica['num_ingest_backlog']} to compute when idle"
        )
        say(f"    costs: {replica['cost_source']}, prefills now take {replica['cost_drift']:.2f}x")
        if replica["reuse_refusal"]:
            say(f"    chunk reuse is off: {replica['reuse_refusal']}")
    for line in metrics.text.splitlines():
        if line.startswith(("cachesmith_requests_total", "cachesmith_slo_total")):
            say(f"  {line.removeprefix('cachesmith_')}")
    return 0


def ask_with_timeline(args: argparse.Namespace) -> dict[str, Any] | str:
    """Send the request in the file; the answer's `cachesmith` field, or what is wrong."""
    url, request = args.url, args.request
    try:
        body = json.loads(request.read_text())
    except OSError as exc:
        return f"can not read {request}: {exc.strerror}"
    except ValueError as exc:
        return f"{request} is not JSON: {exc}"
    if not isinstance(body, dict):
        return f"{request} must hold a request's body, a JSON object"
    options = body.get("cachesmith") or {}
    if not isinstance(options, dict):
        return f"{request}: cachesmith must be an object"
    body = {**body, "stream": False, "cachesmith": {**options, "timeline": True}}
    body.pop("stream_options", None)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    try:
        with _client(args) as client:
            response = client.post(path, json=body)
    except httpx.HTTPError as exc:
        return f"{url} does not answer: {exc}"
    if response.status_code != 200:
        return f"{url} answered {response.status_code}: {response.text}"
    report: dict[str, Any] = response.json()["cachesmith"]
    return report


def _trace(args: argparse.Namespace) -> int:
    report = ask_with_timeline(args)
    if isinstance(report, str):
        return fail(report)
    report.pop("explanation")
    try:
        args.output.write_text(json.dumps(report.pop("timeline")))
    except OSError as exc:
        return fail(f"can not write {args.output}: {exc.strerror}")
    for name, value in report.items():
        say(f"{name:>22}  {value}")
    say(f"the timeline is in {args.output}: open it at ui.perfetto.dev")
    return 0
