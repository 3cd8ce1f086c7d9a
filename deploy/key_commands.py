"""`cachesmith keys`: make, list and remove the API keys in a key file."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.key_file import ApiKey, KeyFile, KeyFileError, key_hash, new_key
from deploy.console import fail, note, say

_EPILOG = """\
The server reads the file that its setting http.api_keys_file names, and follows it: a key counts,
or does not, from the next request on. The file holds SHA-256 hashes of the keys, and one secret
that parts the tenants' stored KV: copy it to every node that runs an ingress, and keep it.

To replace a key, add another for the same tenant, give it out, then remove the old one. What the
tenant has stored stays.

examples:
  cachesmith keys add --file /etc/cachesmith/keys.yaml --tenant team-a
  cachesmith keys add --file /etc/cachesmith/keys.yaml --tenant team-a --name team-a-2027
  cachesmith keys list --file /etc/cachesmith/keys.yaml
  cachesmith keys remove --file /etc/cachesmith/keys.yaml --name team-a
"""


def add_parser(commands: Any) -> None:
    keys = commands.add_parser(
        "keys",
        help="make and remove API keys",
        description="Make, list and remove the API keys in a key file.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = keys.add_subparsers(metavar="COMMAND", required=True)

    add = _add_command(parts, "add", "make a key and print it, once", _add)
    add.add_argument("--tenant", required=True, help="whom it belongs to, and whose KV it finds")
    add.add_argument("--name", help="what the key is called in the file (default: the tenant)")

    _add_command(parts, "list", "show the keys' names and tenants", _list)

    remove = _add_command(parts, "remove", "make a key invalid", _remove)
    remove.add_argument("--name", required=True, help="of the key")


def _add_command(
    parts: Any, name: str, text: str, work: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = parts.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}."
    )
    parser.add_argument("--file", type=Path, required=True, help="the key file")
    parser.set_defaults(run=_run, work=work)
    return parser


def _run(args: argparse.Namespace) -> int:
    work: Callable[[argparse.Namespace], int] = args.work
    try:
        return work(args)
    except KeyFileError as exc:
        return fail(str(exc))
    except OSError as exc:
        return fail(f"can not write {args.file}: {exc.strerror}")


def _add(args: argparse.Namespace) -> int:
    file = KeyFile.load(args.file) if args.file.exists() else KeyFile()
    key = new_key()
    try:
        made = ApiKey(
            name=args.name or args.tenant, tenant=args.tenant, sha256=key_hash(key.encode())
        )
    except ValueError:
        return fail("a name is 1 to 64 letters, digits and ._-, and begins with one of the former")
    if made.name in {held.name for held in file.keys}:
        return fail(f"there is a key {made.name} already: give another --name")
    file.with_keys((*file.keys, made)).save(args.file)
    note(f"this is the only time that the key {made.name} of {made.tenant} is shown")
    say(key)
    return 0


def _list(args: argparse.Namespace) -> int:
    for key in KeyFile.load(args.file).keys:
        say(f"{key.name}  tenant {key.tenant}  sha256 {key.sha256[:12]}…")
    return 0


def _remove(args: argparse.Namespace) -> int:
    file = KeyFile.load(args.file)
    left = tuple(key for key in file.keys if key.name != args.name)
    if len(left) == len(file.keys):
        return fail(f"{args.file} has no key {args.name}")
    file.with_keys(left).save(args.file)
    say(f"{args.name} is removed")
    return 0
