"""What the command line says, and how it fails."""

import sys


def say(text: str) -> None:
    print(text, flush=True)


def fail(text: str) -> int:
    print(f"cachesmith: {text}", file=sys.stderr, flush=True)
    return 1


def note(text: str) -> None:
    """Beside the output, for somebody who waits: it does not get into a pipe."""
    print(text, file=sys.stderr, flush=True)
