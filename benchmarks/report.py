"""What every benchmark prints: a table, then one JSON line that says where it ran."""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def argument_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """With the benchmark's question, and below the arguments what it says about itself."""
    question, _, rest = (doc or "").partition("\n")
    return argparse.ArgumentParser(
        prog=f"cachesmith bench {name}",
        description=question,
        epilog=rest.strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def say(text: str) -> None:
    """A sign of life on stderr, so that stdout is the tables and the JSON line."""
    print(text, file=sys.stderr, flush=True)


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    cells = [list(map(str, header)), *[list(map(_text, row)) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def print_json(benchmark: str, *, seed: int, results: list[dict[str, Any]]) -> None:
    print(
        json.dumps(
            {
                "benchmark": benchmark,
                "commit": _commit(),
                "device": _device(),
                "seed": seed,
                "results": results,
            }
        )
    )


def _text(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {len(os.sched_getaffinity(0))} cores"
