"""`cachesmith explain` plans as a server would, from a profile alone."""

from pathlib import Path

import pytest

from deploy.cli import main
from deploy.profiles import PROFILE_FILE, describe, find_profile
from tests.fakes.profiles import profile


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    profile().save(path)
    return path


def rows(out: str) -> list[list[str]]:
    """The table's rows, from the star or the signal on."""
    return [line.split() for line in out.splitlines() if "kv_dev" in line]


def is_full_prefill(row: list[str]) -> bool:
    return row[row.index("kv_dev") + 1] == "12"


def test_a_batch_is_planned_and_its_plan_is_marked(saved, capsys):
    argv = ["explain", "--profile", str(saved), "--tokens", "500", "2000", "--budget-ms", "150"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "some-model, a processor, demand of pr" in out and "2 requests, budget 150.0 ms" in out
    found = rows(out)
    assert len(found) > 1 and [row[0] for row in found].count("*") == 1


def test_a_slow_link_shows_as_stalls(saved, capsys):
    argv = ["explain", "--profile", str(saved), "--tokens", "2000", "--budget-ms", "150"]
    assert main([*argv, "--bandwidth-mb-s", "100000"]) == 0
    assert all(float(row[-3]) < 1.0 for row in rows(capsys.readouterr().out))
    assert main([*argv, "--bandwidth-mb-s", "50"]) == 0
    found = rows(capsys.readouterr().out)
    stalls = {is_full_prefill(row): float(row[-3]) for row in found}
    assert stalls[True] == 0.0 and stalls[False] > 100.0


def test_without_a_measured_demand_it_says_so(tmp_path, capsys):
    path = tmp_path / "profile.json"
    profile(demand=None, demand_note="full prefill answered 3 of 64").save(path)
    assert main(["explain", "--profile", str(path), "--tokens", "500"]) == 0
    assert "demand assumed, not measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--tokens", "0"], "--tokens"),
        (["--tokens", "500", "--stored", "1.5"], "--stored"),
        (["--tokens", "500", "--suffix", "0"], "--suffix"),
        (["--tokens", "500", "--budget-ms", "nan"], "budget_ms"),
        (["--tokens", "500", "--bandwidth-mb-s", "0"], "bytes_per_ms"),
    ],
)
def test_wrong_arguments_are_named(argv, named, saved, capsys):
    assert main(["explain", "--profile", str(saved), *argv]) == 1
    assert named in capsys.readouterr().err


def test_files_that_are_no_profile(tmp_path, capsys):
    path = tmp_path / "profile.json"
    path.write_text('{"version": 2}')
    for given in (path, tmp_path / "none.json"):
        assert main(["explain", "--profile", str(given), "--tokens", "500"]) == 1
        assert "planner.profile" in capsys.readouterr().err
    assert main(["explain", "--model", str(tmp_path), "--tokens", "500"]) == 1
    assert "there is no profile" in capsys.readouterr().err


def test_a_models_folder_may_hold_its_profile(tmp_path):
    assert find_profile(str(tmp_path)) is None
    profile().save(tmp_path / PROFILE_FILE)
    assert find_profile(str(tmp_path)) == tmp_path / PROFILE_FILE


def test_what_is_missing_is_said():
    assert "assumed" in describe(None)
    assert "demand of pr" in describe(profile())
    without = profile(demand=None, demand_note="full prefill answered 3 of 64")
    assert "3 of 64" in describe(without) and "assumed" in describe(without)
