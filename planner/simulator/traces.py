"""Recorded arrivals: RAGPulse, Azure LLM inference 2023, Mooncake.

A trace becomes columns: when each request came, how long its parts were, and which chunks it had
where the trace tells. Requests are sorted by time; the first one comes at 0.
"""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

MOONCAKE_BLOCK_TOKENS = 512  # what one of its hash ids stands for


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """chunks: (name, tokens); empty where the trace knows lengths alone: `context_tokens` then."""

    at_ms: float
    prefix_tokens: int
    chunks: tuple[tuple[str, int], ...]
    context_tokens: int
    suffix_tokens: int
    output_tokens: int


def read_trace(kind: str, path: Path, *, limit: int | None = None) -> list[TracedRequest]:
    """kind: ragpulse (a folder), azure (a CSV file) or mooncake (JSON lines).

    limit: the first so many. Raises ValueError, with file and line, for what is not of the format.
    """
    readers: dict[str, Callable[[Path], Iterator[TracedRequest]]] = {
        "ragpulse": _ragpulse,
        "azure": _azure,
        "mooncake": _mooncake,
    }
    requests = sorted(readers[kind](path), key=lambda request: request.at_ms)[:limit]
    if not requests:
        raise ValueError(f"{path}: the trace is empty")
    first = requests[0].at_ms
    return [_shifted(request, first) for request in requests]


def _shifted(request: TracedRequest, by_ms: float) -> TracedRequest:
    return TracedRequest(
        request.at_ms - by_ms,
        request.prefix_tokens,
        request.chunks,
        request.context_tokens,
        request.suffix_tokens,
        request.output_tokens,
    )


def _ragpulse(folder: Path) -> Iterator[TracedRequest]:
    """System prompt: the prefix; passages and web pages: chunks; history and question: suffix.

    A request without either kind of document has no context. A zero-length part counts as none.
    """
    lengths: dict[str, dict[int, int]] = {}
    for file, kind, id_name in (
        ("1_sys_prompt.jsonl", "sys_prompt", "sys_prompt_id"),
        ("2_passages.jsonl", "passages_ids", "passage_id"),
        ("3_history.jsonl", "history", "history_id"),
        ("4_user_input.jsonl", "user_input", "user_input_id"),
        ("5_web_search.jsonl", "web_search", "web_search_id"),
    ):
        lengths[kind] = {}
        for line, row in _json_lines(folder / file):
            with _Blame(folder / file, line):
                lengths[kind][int(row[id_name])] = int(row["token_length"])
    path = folder / "0_trace.jsonl"
    for line, row in _json_lines(path):
        with _Blame(path, line):
            ids = row["hash_ids"]
            chunks = tuple(
                (f"{kind[0]}{each}", lengths[kind][each])
                for kind in ("passages_ids", "web_search")
                for each in dict.fromkeys(ids.get(kind, ()))
                if lengths[kind][each] > 0
            )
            yield TracedRequest(
                at_ms=float(row["timestamp"]) * 1e3,
                prefix_tokens=_total(lengths, ids, "sys_prompt"),
                chunks=chunks,
                context_tokens=sum(tokens for _, tokens in chunks),
                suffix_tokens=max(1, _total(lengths, ids, "history", "user_input")),
                output_tokens=int(row["output_length"]),
            )


def _total(lengths: dict[str, dict[int, int]], ids: dict[str, list[int]], *kinds: str) -> int:
    return sum(lengths[kind][each] for kind in kinds for each in ids.get(kind, ()))


def _azure(path: Path) -> Iterator[TracedRequest]:
    with path.open(newline="") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            with _Blame(path, line):
                # seven digits of a second; datetime reads six
                moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
                yield TracedRequest(
                    at_ms=moment.timestamp() * 1e3,
                    prefix_tokens=0,
                    chunks=(),
                    context_tokens=int(row["ContextTokens"]),
                    suffix_tokens=1,
                    output_tokens=int(row["GeneratedTokens"]),
                )


def _mooncake(path: Path) -> Iterator[TracedRequest]:
    """All full blocks but what the last one shares with the question are chunks."""
    for line, row in _json_lines(path):
        with _Blame(path, line):
            length = int(row["input_length"])
            num_full = min(len(row["hash_ids"]), max(0, length - 1) // MOONCAKE_BLOCK_TOKENS)
            names = dict.fromkeys(f"b{each}" for each in row["hash_ids"][:num_full])
            chunks = tuple((name, MOONCAKE_BLOCK_TOKENS) for name in names)
            context = MOONCAKE_BLOCK_TOKENS * len(chunks)
            yield TracedRequest(
                at_ms=float(row["timestamp"]),
                prefix_tokens=0,
                chunks=chunks,
                context_tokens=context,
                suffix_tokens=max(1, length - context),
                output_tokens=int(row["output_length"]),
            )


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                with _Blame(path, number):
                    row = json.loads(line)
                yield number, row


class _Blame:
    """Says which line of a file is not as it should be."""

    def __init__(self, path: Path, line: int) -> None:
        self._path, self._line = path, line

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, KeyError):
            raise ValueError(f"{self._path}, line {self._line}: {error} is missing") from None
        if isinstance(error, (ValueError, TypeError)):
            raise ValueError(f"{self._path}, line {self._line}: {error}") from None
