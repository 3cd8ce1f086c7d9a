"""`cachesmith simulate`, from a file to tables, JSON and pictures."""

import argparse
import json

import pytest
import yaml

from deploy import simulate

EXPERIMENT = {
    "name": "small",
    "seeds": [1, 2],
    "base": {"num_requests": 30, "tasks": "mhqa"},
    "sweep": [
        {
            "name": "slo",
            "values": [
                {"label": "short", "set": {"slo.times_full_prefill": 1.0}},
                {"label": "long", "set": {"slo.times_full_prefill": 3.0}},
            ],
        }
    ],
    "policies": ["cachesmith", "fcfs1/cacheblend"],
    "quick": {"num_requests": 10, "values": 1},
}


@pytest.fixture
def command(tmp_path):
    parser = argparse.ArgumentParser()
    simulate.add_parser(parser.add_subparsers())

    def run(*args, experiment=EXPERIMENT):
        path = tmp_path / "experiment.yaml"
        path.write_text(experiment if isinstance(experiment, str) else yaml.safe_dump(experiment))
        parsed = parser.parse_args(["simulate", "--config", str(path), *map(str, args)])
        return parsed.run(parsed)

    return run


def test_tables_and_json_say_that_they_are_simulated(command, capsys, tmp_path):
    out = tmp_path / "out.json"
    assert command("--out", out) == 0
    text = capsys.readouterr().out
    assert "demand of requests assumed" in text
    assert "SIMULATED" in text and "short (simulated)" in text and "fcfs1/cacheblend" in text
    assert "means over 2 settings (simulated)" in text and "QSA by slo (simulated)" in text
    result = json.loads(out.read_text())
    assert result["simulated"] is True and len(result["settings"]) == 2
    first = result["settings"][0]
    assert first["labels"] == {"slo": "short"} and set(first["by_seed"]) == {"1", "2"}
    by_seed = [run["cachesmith"]["qsa"] for run in first["by_seed"].values()]
    assert first["means"]["cachesmith"]["qsa"] == pytest.approx(sum(by_seed) / 2)


def test_the_same_command_writes_the_same_file(command, tmp_path):
    outs = [tmp_path / name for name in ("a", "b")]
    for out in outs:
        assert command("--quick", "--seed", 7, "--out", out) == 0
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert json.loads(outs[0].read_text())["experiment"]["seeds"] == [7]


def test_gains_over_best_static_are_told(command, capsys):
    changes = {"policies": ["cachesmith", "best_static"], "best_static_by": ["slo"]}
    assert command("--quick", experiment={**EXPERIMENT, **changes}) == 0
    text = capsys.readouterr().out
    assert "cachesmith over best_static (simulated): above in" in text


def test_pictures_are_drawn(command, tmp_path):
    pytest.importorskip("matplotlib")
    assert command("--plots", tmp_path / "plots") == 0
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert names == ["small-qsa.png", "small-slo-qsa.png", "small-slo-stall_share.png"]


@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        ({**EXPERIMENT, "base": {"num_request": 1, "tasks": "pr"}}, "base.num_request: Extra"),
        ({**EXPERIMENT, "policy": 1}, "policy: Extra inputs"),
        ("a: [", "is not YAML"),
        ("", "dictionary"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(command, capsys, experiment, words):
    assert command(experiment=experiment) == 1
    assert words in capsys.readouterr().err


def test_a_file_that_is_not_there_is_told(command, capsys, tmp_path):
    parser = argparse.ArgumentParser()
    simulate.add_parser(parser.add_subparsers())
    args = parser.parse_args(["simulate", "--config", str(tmp_path / "no.yaml")])
    assert args.run(args) == 1
    assert "no.yaml" in capsys.readouterr().err
