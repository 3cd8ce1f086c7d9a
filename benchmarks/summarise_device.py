"""Collects what `device.sh` ran: one file with every part's JSON line, and a short table.

Exits with 1 if a part failed, was out of time, or lacked a module.

    python -m benchmarks.summarise_device LOGS OUT.json
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import print_table

TIMED_OUT = ("124", "137")  # statuses of timeout(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", type=Path, help="parts.tsv, and a log for each part")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    parts = []
    for line in (args.logs / "parts.tsv").read_text().splitlines():
        name, status, seconds = line.split("\t")
        log = (args.logs / f"{name}.log").read_text(errors="replace").splitlines()
        parts.append(
            {
                "part": name,
                "outcome": _outcome(status),
                "seconds": int(seconds),
                "result": _json_line(log),
                "last_lines": log[-20:] if status != "0" else [],
            }
        )
    args.out.write_text(json.dumps(parts, indent=1) + "\n")
    print_table(
        ["part", "outcome", "seconds", "in short"],
        [[p["part"], p["outcome"], p["seconds"], _in_short(p)] for p in parts],
    )
    print(f"all of it: {args.out}")
    if any(p["outcome"] != "ok" for p in parts):
        sys.exit(1)


def _outcome(status: str) -> str:
    if status == "0":
        return "ok"
    if status == "missing":
        return "module missing"
    return "out of time" if status in TIMED_OUT else f"failed ({status})"


def _json_line(log: list[str]) -> dict[str, Any] | None:
    """The last line that a benchmark printed, `report.print_json`'s."""
    for line in reversed(log):
        if line.startswith('{"benchmark"'):
            return json.loads(line)
    return None


def _in_short(part: dict[str, Any]) -> str:
    """The one thing that somebody wants to know first."""
    if part["result"] is None:
        return part["last_lines"][-1][:80] if part["last_lines"] else ""
    results = part["result"]["results"]
    if not results:
        return "no results"
    match part["result"]["benchmark"]:
        case "gpu_exactness":
            exact = [r for r in results if r["dtype"] == "float32" and r["case"] != "control"]
            worst = max(r["log_prob_difference"] for r in exact)
            return f"worst float32 log-prob difference {worst:.2g}"
        case "attention" | "attention_tiles":
            ours = [r for r in results if not r["path"].startswith("sdpa") and r["coverage"] > 0]
            longest = max(r["num_tokens"] for r in ours)
            best = max(
                (r for r in ours if r["num_tokens"] == longest), key=lambda r: r["rate_share"]
            )
            where = f"{best['path']}, {best['shape']}, {longest} tokens, r {best['coverage']:g}"
            return f"best {best['rate_share']:.2f} of SDPA's rate: {where}"
        case "gpu_prefill":
            fastest = max(results, key=lambda r: (r["num_tokens"], r["speedup"]))
            return (
                f"{fastest['num_tokens']} tokens, {fastest['config']}: {fastest['speedup']:.1f}× "
                f"faster than full prefill, {fastest['times_ideal']:.2f}× ideal"
            )
        case "copy":
            pinned = max(r["gb_per_s"] for r in results if r["what"] == "pinned")
            return f"page-locked {pinned:.0f} GB/s"
    return ""


if __name__ == "__main__":
    main()
