"""The answers of `cachesmith cache`, as tables for people."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Body = dict[str, Any]

_ID_CHARS = 12  # of node, replica and store key: enough to tell them apart
_MOST_DAMAGED = 20


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of aligned columns: the first and words to the left, numbers to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    is_text = [i == 0 or any(line[i][:1].isalpha() for line in lines[1:]) for i in range(len(head))]
    for line in lines:
        cells = [
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_text, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def size(num_bytes: float) -> str:
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} TiB"


def stats_lines(body: Body) -> Iterator[str]:
    parts = [_host_lines(body["nodes"])]
    redis = body["redis"]
    if redis is None:
        parts.append(["no Redis tier"])
    else:
        parts += [list(_redis_lines(redis["replicas"])), list(_keys_lines(redis["keys"]))]
    for index, lines in enumerate(part for part in parts if part):
        if index:
            yield ""
        yield from lines


def _host_lines(nodes: dict[str, Body]) -> list[str]:
    hosts = {node[:_ID_CHARS]: state["host"] for node, state in nodes.items() if state["host"]}
    if nodes and not hosts:
        return ["no node has a host tier: chunk reuse is off"]
    if not hosts:
        return []
    now = [
        [
            node,
            size(host["used_bytes"]),
            size(host["capacity_bytes"]),
            size(host["largest_free_bytes"]),
            f"{host['num_entries']:,}",
            f"{host['num_leases']:,}",
            f"{host['num_reservations']:,}",
            f"{host['num_retired']:,}",
        ]
        for node, host in hosts.items()
    ]
    so_far = [
        [
            node,
            f"{host['hits']:,}",
            f"{host['misses']:,}",
            _share(host["hits"], host["hits"] + host["misses"]),
            f"{host['collisions']:,}",
            f"{host['evictions']:,}",
            f"{host['refused']:,}",
            f"{host['num_owners']:,}",
        ]
        for node, host in hosts.items()
    ]
    head = ["node", "used", "capacity", "free run", "entries", "leases", "writing", "discarded"]
    lines = ["host tier, by node", *table(head, now), ""]
    head = [
        "node",
        "hits",
        "misses",
        "hit share",
        "collisions",
        "evictions",
        "refused",
        "processes",
    ]
    lines += table(head, so_far)
    for node, state in nodes.items():
        if at := state["verifying"]:
            checked = f"{at['num_checked']:,} of {at['num_entries']:,} entries"
            lines.append(f"node {node[:_ID_CHARS]}: a verification runs, {at['tier']}, {checked}")
    return lines


def _keys_lines(keys: Body | None) -> Iterator[str]:
    if keys is None:
        return
    yield "below the prefix in Redis"
    row = [
        f"{keys['num_chunks']:,}",
        f"{keys['num_tokens']:,}",
        f"{keys['num_keys']:,}",
        size(keys["nbytes"]),
    ]
    yield from table(["chunks", "tokens", "keys", "memory"], [row])


def _redis_lines(replicas: dict[str, Body]) -> Iterator[str]:
    if not replicas:
        return
    yield "Redis tier, by replica"
    rows = []
    for replica, report in replicas.items():
        counts = report["counts"]
        lost = ("writes_dropped", "writes_refused", "writes_failed", "writes_damaged")
        rows.append(
            [
                replica[:_ID_CHARS],
                f"{counts.get('lookup_hits', 0):,}",
                f"{sum(report['misses'].values()):,}",
                f"{counts.get('chunks_read', 0):,}",
                size(counts.get("bytes_read", 0)),
                f"{counts.get('chunks_written', 0):,}",
                size(counts.get("bytes_written", 0)),
                f"{sum(counts.get(name, 0) for name in lost):,}",
                size(report["backlog_bytes"]),
                f"{report['bytes_per_ms'] / 1e6:.2f}",
                f"{report['latency_ms']:.2f}",
                f"{report['breaker_openings']:,}",
            ]
        )
    head = ["replica", "hits", "misses", "chunks read", "read", "chunks written", "written"]
    yield from table([*head, "lost", "backlog", "GB/s", "ms", "given up"], rows)
    for replica, report in replicas.items():
        reasons = {reason: number for reason, number in report["misses"].items() if number}
        if reasons:
            listed = ", ".join(f"{reason} {number:,}" for reason, number in reasons.items())
            yield f"{replica[:_ID_CHARS]} misses: {listed}"
        if report["nodes_unavailable"]:
            yield f"{replica[:_ID_CHARS]} asks nobody at: {', '.join(report['nodes_unavailable'])}"


def entries_lines(body: Body) -> Iterator[str]:
    entries = body["data"]
    if not entries:
        yield f"nothing is stored in the {body['tier']} tier"
        return
    if body["tier"] == "host":
        head = ["chunk id", "tokens", "size", "uses", "leases", "recompute ms", "node"]
        rows = [
            [
                _name(entry),
                f"{entry['num_tokens']:,}",
                size(entry["nbytes"]),
                f"{entry['uses']:,}",
                f"{entry['num_leases']:,}",
                f"{entry['recompute_ms']:.1f}",
                entry["node"][:_ID_CHARS],
            ]
            for entry in entries
        ]
    else:
        head = ["chunk id", "tokens", "size", "recompute ms", "TTL s", "state"]
        rows = [
            [
                _name(entry),
                f"{entry['num_tokens']:,}",
                size(entry["nbytes"]),
                f"{entry['recompute_ms']:.1f}",
                "-" if entry["ttl_s"] is None else f"{entry['ttl_s']:.0f}",
                "whole" if entry["is_whole"] else "layers missing",
            ]
            for entry in entries
        ]
    yield from table(head, rows)
    if body["has_more"]:
        yield "there are more: see --limit"


def cleared_lines(body: Body) -> Iterator[str]:
    for node, num_entries in (body["nodes"] or {}).items():
        yield f"node {node[:_ID_CHARS]}: {num_entries:,} entries removed from the host tier"
    if body["redis"] is not None:
        yield f"Redis: {body['redis']['num_keys']:,} keys removed"


def verified_lines(body: Body) -> Iterator[str]:
    reports = {f"node {node[:_ID_CHARS]}": found for node, found in (body["nodes"] or {}).items()}
    if body["redis"] is not None:
        reports["Redis"] = body["redis"]
    for where, report in reports.items():
        damaged = report["damaged"]
        line = f"{where}: {report['num_checked']:,} entries checked, {len(damaged):,} damaged"
        yield f"{line}, {report['num_removed']:,} removed" if damaged else line
        yield from (f"  index: {problem}" for problem in report["index_problems"])
        if damaged:
            shown = damaged[:_MOST_DAMAGED]
            place = ["header" if d["layer"] is None else f"layer {d['layer']}" for d in shown]
            rows = [
                [_name(entry), entry["reason"], where_in_it]
                for entry, where_in_it in zip(shown, place, strict=True)
            ]
            yield from (f"  {line}" for line in table(["chunk id", "reason", "place"], rows))
            if len(damaged) > _MOST_DAMAGED:
                yield f"  and {len(damaged) - _MOST_DAMAGED:,} more: see --json"


def _name(entry: Body) -> str:
    """The chunk's id, whole, as `rm` takes it; else what can be said of the entry."""
    return entry["id"] or f"(key {entry['key'][:_ID_CHARS]})"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"
