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
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.profiling import command as profile
from deploy import cache_commands, client, deploy_command, explain, key_commands, simulate
from deploy.client import KEY_VARIABLE
from deploy.console import fail, say
from deploy.models import ModelUnavailableError
from deploy.settings import SettingsError, load_settings, overrides_of
from deploy.testbed import command as testbed

_EPILOG = """\
examples:
  cachesmith serve                                 the small default model on port 8000
  cachesmith serve --model org/name --tp 2         a model from the hub, split over two ranks
  cachesmith serve --config server.yaml --port 9000
  cachesmith deploy --config server.yaml           the same on a running Ray cluster
  cachesmith ingest --file corpus.jsonl            compute the documents' KV ahead
  cachesmith status
  cachesmith cache stats                           what is stored, and how to remove and check it
  cachesmith keys add --tenant team-a --file FILE  make an API key
  cachesmith trace --request ask.json              where one request's time goes, for Perfetto
  cachesmith explain --request ask.json            why its batch got its plan
  cachesmith profile --model DIR --out FILE        measure what the planner goes by
  cachesmith simulate --config FILE                compare policies in simulated settings
  cachesmith testbed                               a cluster on this machine, with faults
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
        return fail(f"the settings can not be used:\n{exc}")
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
        help="folder, Hugging Face id, cachesmith-english, smollm2-135m-instruct (default)",
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

    deploy_command.add_parser(commands)
    client.add_parsers(commands)
    cache_commands.add_parser(commands)
    key_commands.add_parser(commands)
    explain.add_parser(commands)
    profile.add_parser(commands)
    simulate.add_parser(commands)
    testbed.add_parser(commands)

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
    settings = load_settings(config_file=args.config, overrides=overrides_of(args))
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("ray").setLevel(logging.WARNING)
    from deploy.server import ServerError, running_server

    stopping = _Stopping()
    served = False
    try:
        with running_server(
            settings,
            progress=say,
            ray_address=args.ray_address,
            log_to_driver=args.log_level == "debug",
            engine_builder=args.engine_builder,
        ) as server:
            served = True
            stopping.install()  # again: Ray sets handlers of its own
            needs_key = settings.http.api_keys_file is not None
            say(_ready_text(server.url, server.model_name, needs_key=needs_key))
            stopping.wait()
    except ServerError as exc:
        return fail(str(exc))
    except KeyboardInterrupt:
        return 0 if served else 130
    say("stopped")
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


def _ready_text(url: str, model: str, *, needs_key: bool) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "When does the ferry leave?"}],
        "documents": [
            {"title": "Ferry", "text": "The ferry to Wend leaves at a quarter past six."}
        ],
        "max_tokens": 32,
    }
    key, schema = "", f"API: {url}/docs, "
    if needs_key:  # which a browser does not send
        key, schema = f' -H "Authorization: Bearer ${KEY_VARIABLE}"', ""
    return (
        f"\nserving {model} at {url}  ({schema}Ctrl-C stops)\n\n"
        f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '\n"
        f"{json.dumps(body, indent=2)}'\n"
    )


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
        return fail(str(exc))
    return 0


def _version() -> str:
    try:
        return version("cachesmith")
    except PackageNotFoundError:
        return "0+unknown"


if __name__ == "__main__":
    sys.exit(main())
