"""What do spinning OpenMP threads cost when other processes want the cores too?

A chain of bf16 matrix products in a process of its own, with libgomp's default and with
OMP_WAIT_POLICY=PASSIVE, in turns, on the idle machine and beside as many busy processes as there
are cores. Ceiling: beside that load, half of the idle rate.

    cachesmith bench threads
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from statistics import median

from benchmarks.report import argument_parser, print_json, print_table

CHAIN = """
import time, torch
x, a, b = torch.randn(500, 576), torch.randn(1728, 576), torch.randn(576, 1728)
x, a, b = x.bfloat16(), a.bfloat16(), b.bfloat16()
def chain():
    y = x
    for _ in range(30):
        y = torch.nn.functional.silu(y @ a.T) @ b.T * 0.01
chain()
times = []
for _ in range(15):
    started = time.perf_counter(); chain(); times.append(time.perf_counter() - started)
print(sorted(times)[len(times) // 2] * 1e3)
"""
BUSY = "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end: pass"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("threads", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    results = []
    for load in (0, len(os.sched_getaffinity(0))):
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(load)]
        try:
            times: dict[str, list[float]] = {"default": [], "PASSIVE": []}
            for _ in range(args.rounds):
                for policy, values in times.items():
                    values.append(_chain_ms(policy))
        finally:
            for process in busy:
                process.kill()
                process.wait()
        for policy, values in times.items():
            results.append(
                {"busy_processes": load, "wait_policy": policy, "median_ms": median(values)}
            )
    print_table(
        ["busy processes", "wait policy", "median ms"],
        [[r["busy_processes"], r["wait_policy"], r["median_ms"]] for r in results],
    )
    print_json("threads", seed=0, results=results)


def _chain_ms(policy: str) -> float:
    env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    if policy != "default":
        env["OMP_WAIT_POLICY"] = policy
    done = subprocess.run(
        [sys.executable, "-c", CHAIN], env=env, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


if __name__ == "__main__":
    main()
