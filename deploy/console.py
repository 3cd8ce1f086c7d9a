"""What the command line says, and how it fails."""

import sys


def say(text: str) -> None:
    print(text, flush=True)


def fail(text: str) -> int:
    print(f"cachesmith: {text}", file=sys.stderr, flush=True)
    return 1
