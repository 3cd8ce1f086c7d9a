"""The command line `cachesmith`."""

import argparse
import ast
import importlib
import importlib.util
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx

from deploy.models import ModelUnavailableError
from deploy.settings import SettingsError, load_settings

DEFAULT_URL = "http://127.0.0.1:8000"
_INGEST_BATCH = 8

_EPILOG = """\
examples:
  cachesmith serve                                 the small default model on port 8000
  cachesmith serve --model org/name --tp 2         a model from the hub, split over two ranks
  cachesmith serve --config server.yaml --port 9000
  cachesmith ingest --file corpus.jsonl            compute the documents' KV ahead
  cachesmith status
  cachesmith bench prefill                         what reuse saves on this machine

`cachesmith COMMAND --help` explains each command.
"""

_SERVE_EPILOG = """\
Every setting can stand in the YAML file of --config (sections model, engine, replicas, planner,
scheduler, kv_tier, prompt, http) and in the environment, as CACHESMITH_<SECTION>__<KEY>, such as
CACHESMITH_ENGINE__MAX_NUM_SEQS=32. The command line wins over the environment, the environment
over the file. Unknown keys are refused.

examples:
  cachesmith serve
  cachesmith serve --model ./my-model --port 9000
  cachesmith serve --model org/name --tp 2 --replicas 2 --config server.yaml
"""

_INGEST_EPILOG = """\
Each line of the file is a document: a JSON string, or an object {"id", "title", "text"} of which
only "text" is needed. Requests that use the same documents then find their KV.

example:
  cachesmith ingest --file corpus.jsonl --url http://127.0.0.1:8000
"""

_BENCH_EPILOG = """\
benchmarks:
{listing}

`cachesmith bench NAME --help` says what it compares with what, and lists its arguments.

examples:
  cachesmith bench prefill --tokens 2048 --phases
  cachesmith bench decode-gap --rounds 3
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    args = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except SettingsError as exc:
        return _fail(f"the settings can not be used:\n{exc}")
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cachesmith",
        description="RAG serving that reuses the KV of retrieved chunks under latency objectives.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP until Ctrl-C",
        description="Start Ray on this machine, load the model, and serve the OpenAI API.",
        epilog=_SERVE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings")
    serve.add_argument(
        "--model",
        metavar="DIR_OR_HUB_ID",
        help="model folder, Hugging Face id, or smollm2-135m-instruct (default)",
    )
    serve.add_argument("--tp", type=int, metavar="N", help="tensor-parallel ranks of a replica")
    serve.add_argument("--replicas", type=int, metavar="N", help="number of replicas")
    serve.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    serve.add_argument("--port", type=int, metavar="N", help="port to listen on (default: 8000)")
    serve.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="join this Ray cluster (`auto` for the one on this machine) and leave it running",
    )
    serve.add_argument("--engine-builder", help=argparse.SUPPRESS)  # for tests
    serve.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="warning",
        help="debug also shows what the replicas print (default: warning)",
    )
    serve.set_defaults(run=_serve)

    ingest = commands.add_parser(
        "ingest",
        help="compute documents' KV ahead",
        description="Send documents to a running server, which computes and stores their KV.",
        epilog=_INGEST_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ingest.add_argument(
        "--file", type=Path, required=True, metavar="JSONL", help="documents, one a line"
    )
    ingest.add_argument("--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    ingest.add_argument("--cache-salt", default=None, help="tenant that the chunks belong to")
    ingest.set_defaults(run=_ingest)

    status = commands.add_parser(
        "status",
        help="show what a running server does",
        description="Show health, replicas and request counts of a running server. "
        "Exit code 1 if it is not ready.",
        epilog="example:\n  cachesmith status --url http://127.0.0.1:8000\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    status.add_argument("--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    status.set_defaults(run=_status)

    names = _benchmarks()
    bench = commands.add_parser(
        "bench",
        help="run one of the benchmarks on this machine",
        description="Run a benchmark: it prints a table and one JSON line.",
        epilog=_BENCH_EPILOG.format(
            listing="\n".join(f"  {name:<12} {question}" for name, question in names.items())
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("name", choices=list(names), metavar="NAME", help="one of those below")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    bench.set_defaults(run=_bench)
    return parser


# --- serve ---------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    settings = load_settings(config_file=args.config, overrides=_overrides(args))
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("ray").setLevel(logging.WARNING)
    from deploy.server import ServerError, running_server

    stopping = _Stopping()
    served = False
    try:
        with running_server(
            settings,
            progress=_say,
            ray_address=args.ray_address,
            log_to_driver=args.log_level == "debug",
            engine_builder=args.engine_builder,
        ) as server:
            served = True
            stopping.install()  # again: Ray sets handlers of its own
            _say(_ready_text(server.url, server.model_name))
            stopping.wait()
    except ServerError as exc:
        return _fail(str(exc))
    except KeyboardInterrupt:
        return 0 if served else 130
    _say("stopped")
    return 0


class _Stopping:
    """Ctrl-C and SIGTERM as an event once the server is up, as KeyboardInterrupt before.

    While the server stops, further signals are ignored, so that everything is cleaned up.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._event.set())

    def wait(self) -> None:
        self._event.wait()


def _overrides(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What the command line says, in the settings' shape."""
    given: dict[str, dict[str, Any]] = {}
    for section, key, value in (
        ("model", "name_or_dir", args.model),
        ("engine", "tensor_parallel_size", args.tp),
        ("replicas", "num", args.replicas),
        ("http", "host", args.host),
        ("http", "port", args.port),
    ):
        if value is not None:
            given.setdefault(section, {})[key] = value
    return given


def _ready_text(url: str, model: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "When does the ferry leave?"}],
        "documents": [
            {"title": "Ferry", "text": "The ferry to Wend leaves at a quarter past six."}
        ],
        "max_tokens": 32,
    }
    return (
        f"\nserving {model} at {url}  (API: {url}/docs, Ctrl-C stops)\n\n"
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '\n"
        f"{json.dumps(body, indent=2)}'\n"
    )


# --- ingest and status ---------------------------------------------------------------------------


def _ingest(args: argparse.Namespace) -> int:
    try:
        documents = list(_documents(args.file))
    except (OSError, ValueError) as exc:
        return _fail(str(exc))
    counts: dict[str, int] = {}
    num_tokens = 0
    with httpx.Client(base_url=args.url, timeout=None) as client:
        for start in range(0, len(documents), _INGEST_BATCH):
            batch = documents[start : start + _INGEST_BATCH]
            body = {"documents": batch, "cache_salt": args.cache_salt}
            try:
                response = client.post("/v1/chunks", json=body)
            except httpx.HTTPError as exc:
                return _fail(f"{args.url} does not answer: {exc}")
            if response.status_code != 200:
                return _fail(f"{args.url} answered {response.status_code}: {response.text}")
            for chunk in response.json()["data"]:
                counts[chunk["status"]] = counts.get(chunk["status"], 0) + 1
                num_tokens += chunk["num_tokens"]
            _say(f"{min(start + _INGEST_BATCH, len(documents))} of {len(documents)} documents")
    summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    _say(f"{num_tokens} tokens in chunks: {summary or 'none'}")
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
        health = httpx.get(f"{args.url}/health", timeout=10.0)
        metrics = httpx.get(f"{args.url}/metrics", timeout=10.0)
    except httpx.HTTPError as exc:
        return _fail(f"{args.url} does not answer: {exc}")
    try:
        state = health.json()
    except ValueError:
        return _fail(f"{args.url} is not a CacheSmith server: it answered {health.text[:200]!r}")
    if health.status_code != 200:
        reason = state.get("reason") or state.get("error", {}).get("message")
        return _fail(f"{args.url} is not ready: {reason}")
    _say(f"{state['model']}: ready, {state['num_waiting']} requests wait")
    for replica in state["replicas"]:
        _say(
            f"  replica {replica['replica']}: {replica['num_running']} running, "
            f"{replica['num_resident_chunks']} chunks hot, "
            f"{replica['num_ingest_backlog']} to compute when idle"
        )
        if replica["reuse_refusal"]:
            _say(f"    chunk reuse is off: {replica['reuse_refusal']}")
    for line in metrics.text.splitlines():
        if line.startswith(("cachesmith_requests_total", "cachesmith_slo_total")):
            _say(f"  {line.removeprefix('cachesmith_')}")
    return 0


# --- bench ---------------------------------------------------------------------------------------


def _benchmarks() -> dict[str, str]:
    """Name → question, the first line of its file. Read, not imported: that would load torch."""
    package = importlib.util.find_spec("benchmarks")
    found = {}
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        for path in sorted(Path(folder).glob("bench_*.py")):
            doc = ast.get_docstring(ast.parse(path.read_text())) or ""
            found[path.stem.removeprefix("bench_").replace("_", "-")] = doc.partition("\n")[0]
    return found


def _bench(args: argparse.Namespace) -> int:
    module = importlib.import_module(f"benchmarks.bench_{args.name.replace('-', '_')}")
    try:
        module.main(args.arguments)
    except ModelUnavailableError as exc:
        return _fail(str(exc))
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


def _fail(text: str) -> int:
    print(f"cachesmith: {text}", file=sys.stderr, flush=True)
    return 1


def _version() -> str:
    try:
        return version("cachesmith")
    except PackageNotFoundError:
        return "0+unknown"


if __name__ == "__main__":
    sys.exit(main())
