"""`cachesmith deploy`: put an application on a running Ray cluster, or take one away."""

import argparse
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from deploy.console import fail, say
from deploy.settings import Settings, SettingsError, load_settings, overrides_of

if TYPE_CHECKING:
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
ADDRESS_NAMES = ("RAY_DASHBOARD_ADDRESS", "RAY_API_SERVER_ADDRESS")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_POLL_S = 0.5
_REPORT_EVERY_S = 10.0

_EPILOG = """\
The settings are those of `cachesmith serve`: files (of several, the later wins key by key), the
environment (CACHESMITH_<SECTION>__<KEY>) over them, --model, --tp and --replicas over both. They
are checked here, where unknown keys are refused, and sent to the cluster. The model, and a profile
that planner.profile names, must be found on every node.

What a changed application was, and what restarts, is printed first. Replicas are replaced one after
the other while the rest serve; a number of replicas alone changes without a restart. Other
applications on the cluster stay as they are.

With RAY_AUTH_MODE=token the cluster's token is sent: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, or the
file ~/.ray/auth_token.

examples:
  cachesmith deploy --config server.yaml --address http://head:8265
  cachesmith deploy --config common.yaml --config qwen.yaml --name qwen --route-prefix /qwen
  cachesmith deploy --config server.yaml --replicas 4 --dry-run
  cachesmith deploy --remove qwen
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "deploy",
        help="put an application on a running Ray cluster, change it, or remove it",
        description="Submit the application to a Ray cluster through the head's dashboard, and "
        "wait until it runs. Exit code 1 if it does not.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file with settings; may be given several times",
    )
    parser.add_argument("--model", metavar="DIR_OR_HUB_ID", help="as in `cachesmith serve`")
    parser.add_argument("--tp", type=int, metavar="N", help="tensor-parallel ranks of a replica")
    parser.add_argument("--replicas", type=int, metavar="N", help="number of replicas")
    parser.add_argument(
        "--name",
        default="cachesmith",
        metavar="APP",
        help="name of the application, one for each model (default: cachesmith)",
    )
    parser.add_argument(
        "--route-prefix",
        default="/",
        metavar="PATH",
        help="where its API is: /NAME for /NAME/v1/chat/completions (default: /)",
    )
    parser.add_argument(
        "--address",
        metavar="URL",
        help="the head's dashboard (default: RAY_DASHBOARD_ADDRESS, RAY_API_SERVER_ADDRESS, or "
        f"{DEFAULT_ADDRESS})",
    )
    parser.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="wait until the application runs, or is gone (default: yes)",
    )
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="wait no longer (default: for ever)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would change and change nothing"
    )
    parser.add_argument("--remove", metavar="APP", help="remove this application instead")
    parser.add_argument("--import-path", help=argparse.SUPPRESS)  # for tests
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    address = args.address or _address_from_environment()
    try:
        if args.remove is not None:
            return _remove(args, address)
        return _deploy(args, address)
    except (ConnectionError, RuntimeError, OSError, ValueError) as exc:  # the client's errors
        return fail(f"{address}: {exc}")


def _deploy(args: argparse.Namespace, address: str) -> int:
    settings = _settings(args)
    from deploy import serve_config

    app = serve_config.application(
        settings,
        name=args.name,
        route_prefix=args.route_prefix,
        import_path=args.import_path or serve_config.IMPORT_PATH,
    )
    client = _client(address)
    details = client.get_serve_details()
    config = serve_config.with_application(details, app, settings)
    _say_changes(args.name, serve_config.changes(details, app))
    if args.dry_run:
        say(yaml.safe_dump(serve_config.shown(app), sort_keys=False))
        return 0
    client.deploy_applications(config)
    say(f"{args.name} is submitted to {address}")
    return _wait(client, args, _is_running) if args.wait else 0


def _remove(args: argparse.Namespace, address: str) -> int:
    from deploy import serve_config

    client = _client(address)
    config = serve_config.without_application(client.get_serve_details(), args.remove)
    if args.dry_run:
        say(f"would remove {args.remove}")
        return 0
    client.deploy_applications(config)
    say(f"removing {args.remove}")
    args.name = args.remove
    return _wait(client, args, _is_gone) if args.wait else 0


def _settings(args: argparse.Namespace) -> Settings:
    """Raises SettingsError for whatever the cluster would refuse of the settings themselves."""
    if not _NAME.fullmatch(args.name):
        raise SettingsError(f"--name: letters, digits, - and _, 63 at most, got {args.name!r}")
    route = args.route_prefix
    if not route.startswith("/") or (route != "/" and route.endswith("/")) or "{" in route:
        raise SettingsError(f"--route-prefix: must start with / and not end with it, got {route!r}")
    settings = load_settings(config_file=args.config, overrides=overrides_of(args))
    from deploy.app import engine_config, policy_config

    engine_config(settings)
    policy_config(settings)
    return settings


def _say_changes(name: str, changes: Any) -> None:
    if changes.is_new:
        say(f"{name} is new")
    elif changes.restarting:
        say(f"{name} changes, and its replicas are replaced one after the other:")
    elif changes.in_place:
        say(f"{name} changes, and no replica restarts:")
    else:
        say(f"{name} does not change")
    for change in (*changes.restarting, *changes.in_place):
        say(f"  {change}")


def _client(address: str) -> "ServeSubmissionClient":
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    return ServeSubmissionClient(address)


def _address_from_environment() -> str:
    found = (os.environ.get(name) for name in ADDRESS_NAMES)
    return next((address for address in found if address), DEFAULT_ADDRESS)


def _wait(
    client: "ServeSubmissionClient",
    args: argparse.Namespace,
    is_done: Callable[[str, Any], int | None],
) -> int:
    """Ask until `is_done` (the application's name and state) gives an exit code."""
    from ray.serve.schema import ServeInstanceDetails

    from deploy.application_status import failure_of, progress_of

    started = reported = time.monotonic()
    while True:
        # as `serve status` does it
        status = ServeInstanceDetails(**client.get_serve_details())._get_status()
        overview = status.applications.get(args.name)
        code = is_done(args.name, overview)
        if code is not None:
            return code
        now = time.monotonic()
        if args.timeout is not None and now - started > args.timeout:
            why = failure_of(overview) if overview is not None else ""
            return fail(f"{args.name} is not done after {args.timeout:.0f} s, and goes on\n{why}")
        if now - reported > _REPORT_EVERY_S and overview is not None:
            reported = now
            say(f"  {now - started:.0f} s: {progress_of(overview)}")
        time.sleep(_POLL_S)


def _is_running(name: str, overview: Any) -> int | None:
    from deploy.application_status import failure_of, progress_of

    status = overview.status.value if overview is not None else "NOT_STARTED"
    if status == "DEPLOY_FAILED":
        return fail(f"{name} failed to start\n{failure_of(overview)}")
    if status != "RUNNING":
        return None
    say(f"{name} runs: {progress_of(overview)}")
    return 0


def _is_gone(name: str, overview: Any) -> int | None:
    if overview is not None:
        return None
    say(f"{name} is removed")
    return 0
