"""Imports go one way: deploy → cluster → replicas → kv_tier → planner."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = ["planner", "kv_tier", "replicas", "cluster", "deploy"]


def imported_roots(path: Path) -> set[str]:
    roots = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            roots.add(node.module.split(".")[0])
    return roots


@pytest.mark.parametrize("package", ORDER)
def test_packages_import_only_what_is_below_them(package):
    above = set(ORDER[ORDER.index(package) + 1 :])
    for path in (ROOT / package).rglob("*.py"):
        assert not imported_roots(path) & above, path


@pytest.mark.parametrize("package", ["planner", "kv_tier", "replicas"])
def test_ray_stays_in_its_shells(package):
    for path in (ROOT / package).rglob("*.py"):
        assert "ray" not in imported_roots(path), path


def test_the_planner_imports_neither_torch_nor_ray_nor_redis_nor_cupy_nor_yet_numba():
    code = "import planner, sys; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded = set(done.stdout.split())
    assert "planner.scheduler" in loaded
    assert not loaded & {"torch", "ray", "redis", "cupy", "vllm", "transformers", "numba"}
