"""`cachesmith cache`: what the chunk store holds, and how to empty and check it."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from deploy import cache_tables
from deploy.cache_access import (
    TOKEN_VARIABLE,
    CacheAccess,
    CacheCommandError,
    ServerCache,
    redis_cache,
)
from deploy.client import DEFAULT_URL
from deploy.console import fail, note, say

Body = dict[str, Any]
Lines = Callable[[Body], Iterator[str]]

DAMAGED = 3  # exit code of `verify`
_DEFAULT_LIMIT = 50

_EPILOG = """\
The store has two tiers: each node's host tier, in shared memory, and Redis, which the nodes share
where one is configured. The commands ask a running server (--url), or, where none runs, Redis
itself (--redis).

examples:
  cachesmith cache stats
  cachesmith cache ls --tier redis --limit 20
  cachesmith cache rm e58cd0
  cachesmith cache verify --repair
  cachesmith cache clear --tier redis --redis redis://cache:6379 --yes

`cachesmith cache COMMAND --help` explains each command.
"""

_EXIT_CODES = """\
exit codes: 0 done, 1 it could not be done, 2 wrong arguments"""

_STATS_EPILOG = f"""\
Counts of the host tier are since its arena was made, those of Redis since the replica started.

{_EXIT_CODES}

examples:
  cachesmith cache stats
  cachesmith cache stats --redis-keys --json
  cachesmith cache stats --redis redis://cache:6379
"""

_LS_EPILOG = f"""\
In the host tier the entries used last come first, node by node; Redis has no order. An entry
without an id is a prompt's prefix, which is nobody's chunk: it is shown by its key.

{_EXIT_CODES}

examples:
  cachesmith cache ls
  cachesmith cache ls --tier redis --limit 1000 --json
"""

_RM_EPILOG = f"""\
The id is the one that /v1/chunks and `cachesmith cache ls` show, whole. A chunk in use is removed
when its last reader is done. With --redis only Redis is asked: a server that has the chunk in a
host tier goes on using it.

{_EXIT_CODES}; 1 also where nobody has the chunk

examples:
  cachesmith cache rm e58cd0
"""

_CLEAR_EPILOG = f"""\
In Redis only keys below the prefix are removed. Requests go on, and compute what they miss.

{_EXIT_CODES}

examples:
  cachesmith cache clear --tier all
  cachesmith cache clear --tier redis --redis redis://cache:6379 --key-prefix team-a --yes
"""

_VERIFY_EPILOG = f"""\
Every entry is read, so it takes as long as that takes, beside serving. A damaged entry is only a
miss to whoever reads it; --repair removes it, so that it is computed again. In Redis a chunk that
is being written at the moment counts as damaged.

{_EXIT_CODES}, {DAMAGED} damage was found and is still there

examples:
  cachesmith cache verify --tier host
  cachesmith cache verify --repair --json
"""


def add_parser(commands: Any) -> None:
    cache = commands.add_parser(
        "cache",
        help="look into the chunk store, empty it, check it",
        description="Show, remove and verify what is stored in the tiers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = cache.add_subparsers(metavar="COMMAND", required=True)

    stats = _add_command(parts, "stats", "how full the tiers are, and what they did", _STATS_EPILOG)
    stats.add_argument(
        "--redis-keys", action="store_true", help="count what is in Redis, by scanning its keys"
    )
    stats.set_defaults(work=_stats)

    ls = _add_command(parts, "ls", "list stored chunks", _LS_EPILOG)
    _add_tier(ls, ["host", "redis"], "host, or redis with --redis")
    ls.add_argument(
        "--limit",
        type=_limit,
        default=_DEFAULT_LIMIT,
        metavar="N",
        help=f"list so many of each node (default: {_DEFAULT_LIMIT})",
    )
    ls.set_defaults(work=_ls)

    rm = _add_command(parts, "rm", "remove a chunk from every node and from Redis", _RM_EPILOG)
    rm.add_argument("chunk_id", metavar="CHUNK_ID", help="the chunk's id, whole")
    rm.set_defaults(work=_rm)

    clear = _add_command(parts, "clear", "remove everything from a tier", _CLEAR_EPILOG)
    _add_tier(clear, ["host", "redis", "all"], "all")
    clear.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    clear.set_defaults(work=_clear)

    verify = _add_command(parts, "verify", "check every stored byte's checksum", _VERIFY_EPILOG)
    _add_tier(verify, ["host", "redis", "all"], "all")
    verify.add_argument("--repair", action="store_true", help="remove what is damaged")
    verify.set_defaults(work=_verify)


def _add_command(parts: Any, name: str, text: str, epilog: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = parts.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument(
        "--token",
        metavar="TOKEN",
        help=f"the server's http.admin_token (default: {TOKEN_VARIABLE} in the environment, "
        "where no list of processes shows it)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    redis = parser.add_argument_group("Redis itself, where no server runs")
    redis.add_argument(
        "--redis",
        metavar="URL",
        help="redis://, rediss:// or unix://, with user, password and database in it; for a "
        "Sentinel the host is the service",
    )
    redis.add_argument(
        "--key-prefix", default="cachesmith", help="what our keys start with (default: cachesmith)"
    )
    redis.add_argument(
        "--mode",
        choices=["standalone", "sentinel", "cluster"],
        default="standalone",
        help="what kind of Redis (default: standalone)",
    )
    redis.add_argument(
        "--nodes",
        metavar="HOST:PORT,...",
        default="",
        help="the Sentinels, or further start nodes of the cluster",
    )
    redis.add_argument("--sentinel-password", metavar="PASSWORD", help="of the Sentinels")
    parser.set_defaults(run=_run)
    return parser


def _add_tier(parser: argparse.ArgumentParser, choices: list[str], default: str) -> None:
    parser.add_argument("--tier", choices=choices, help=f"which tier (default: {default})")


def _limit(text: str) -> int:
    limit = int(text)
    if limit < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return limit


def _run(args: argparse.Namespace) -> int:
    try:
        work: Callable[[argparse.Namespace, CacheAccess], int] = args.work
        return work(args, _access(args))
    except CacheCommandError as exc:
        return fail(str(exc))


def _access(args: argparse.Namespace) -> CacheAccess:
    if args.redis is None:
        token = args.token or os.environ.get(TOKEN_VARIABLE)
        return ServerCache((args.url or DEFAULT_URL).rstrip("/"), token)
    if args.url is not None:
        raise CacheCommandError("give --url for a running server, or --redis, not both")
    if getattr(args, "tier", None) == "host":
        raise CacheCommandError("--redis reaches Redis alone: a host tier needs its server (--url)")
    return redis_cache(
        args.redis,
        key_prefix=args.key_prefix,
        mode=args.mode,
        nodes=tuple(filter(None, args.nodes.split(","))),
        sentinel_password=args.sentinel_password,
    )


def _tier(args: argparse.Namespace, default: str) -> str:
    return args.tier or ("redis" if args.redis is not None else default)


def _stats(args: argparse.Namespace, access: CacheAccess) -> int:
    _print(args, access.stats(redis_keys=args.redis_keys), cache_tables.stats_lines)
    return 0


def _ls(args: argparse.Namespace, access: CacheAccess) -> int:
    _print(args, access.entries(_tier(args, "host"), args.limit), cache_tables.entries_lines)
    return 0


def _rm(args: argparse.Namespace, access: CacheAccess) -> int:
    if not access.remove(args.chunk_id):
        return fail(f"{access.name} has no chunk {args.chunk_id!r}")
    body = {"id": args.chunk_id, "object": "chunk", "deleted": True}
    _print(args, body, lambda _: iter([f"{args.chunk_id} is removed"]))
    return 0


def _clear(args: argparse.Namespace, access: CacheAccess) -> int:
    tier = _tier(args, "all")
    what = {
        "host": "every host tier",
        "redis": "Redis",
        "all": "every host tier and Redis",
    }[tier]
    if args.redis is not None:
        what = f"keys that start with {args.key_prefix}:"
    if not args.yes and not _confirmed(f"Remove everything from {what} ({access.name})?"):
        return fail("nothing was removed")
    _print(args, access.clear(tier), cache_tables.cleared_lines)
    return 0


def _verify(args: argparse.Namespace, access: CacheAccess) -> int:
    body = access.verify(_tier(args, "all"), repair=args.repair, progress=note)
    _print(args, body, cache_tables.verified_lines)
    return DAMAGED if body["status"] == "damaged" else 0


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise CacheCommandError("nobody is there to confirm it: give --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _print(args: argparse.Namespace, body: Body, lines: Lines) -> None:
    if args.json:
        say(json.dumps(body))
        return
    for line in lines(body):
        say(line)
