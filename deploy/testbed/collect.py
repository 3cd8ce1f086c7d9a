"""Brings what the hosts wrote to the output folder, before the hosts are gone."""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.testbed.hosts import Host

_MAX_LOG_BYTES = 4_000_000


def collect_logs(hosts: Sequence[Host], folder: Path) -> int:
    """Copy Ray's and Serve's logs, those of crashed lives too. Returns how many files."""
    num_files = 0
    for host in hosts:
        # not by the link to the latest: it leads into the host
        for logs in host.path("/tmp/ray").glob("session_2*/logs"):
            for source in sorted(logs.rglob("*")):
                if source.is_symlink() or not source.is_file() or not source.stat().st_size:
                    continue
                target = folder / host.name / logs.parent.name / source.relative_to(logs)
                target.parent.mkdir(parents=True, exist_ok=True)
                _copy_end(source, target)
                num_files += 1
    return num_files


def write_lines(path: Path, values: Sequence[Any]) -> None:
    """Dataclasses as JSON, one a line."""
    with path.open("w") as file:
        for value in values:
            file.write(json.dumps(dataclasses.asdict(value), default=_plain) + "\n")


def _copy_end(source: Path, target: Path) -> None:
    with source.open("rb") as file, target.open("wb") as output:
        file.seek(max(0, source.stat().st_size - _MAX_LOG_BYTES))
        shutil.copyfileobj(file, output)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else str(value)
