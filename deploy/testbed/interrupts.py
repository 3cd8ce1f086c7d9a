"""Ctrl-C, SIGTERM and SIGHUP: each ends a run, none ends its cleaning up."""

import signal

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def take() -> None:
    """All of them as KeyboardInterrupt, in the way that asyncio knows."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))


def ignore() -> None:
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)
