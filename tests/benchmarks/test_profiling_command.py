"""`cachesmith profile` as a command: what it writes, takes up again, and refuses."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.quality import walked_answers
from benchmarks.quality.suites import SYNTHETIC_MODEL
from deploy.cli import main
from deploy.profiles import find_profile
from kv_tier.keys import model_fingerprint
from planner import ServingProfile
from tests.benchmarks.profiling_answers import NUM_LAYERS, FakeAnswers
from tests.planner.test_serving_profile import costs

ASK = ["--demand-only", "--documents", "4", "8", "--requests", "20"]


@pytest.fixture
def serve_answers(monkeypatch):
    """Lets the command ask a fake instead of the model."""

    def serve(answers: FakeAnswers) -> FakeAnswers:
        @contextmanager
        def opened(*_, **__):
            yield answers

        monkeypatch.setattr(walked_answers, "walked_answers", opened)
        return answers

    return serve


def profiled(out: Path, *arguments: str) -> int:
    return main(["profile", "--model", str(SYNTHETIC_MODEL), "--out", str(out), *arguments])


def partial_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial.jsonl")


def existing(out: Path, **changes) -> ServingProfile:
    """A profile of the synthetic model with costs alone."""
    profile = ServingProfile(
        **{
            "model": "synthetic",
            "fingerprint": model_fingerprint(SYNTHETIC_MODEL),
            "num_layers": NUM_LAYERS,
            "kv_token_bytes": 512.0,
            "costs": costs(),
            "demand": None,
            **changes,
        }
    )
    profile.save(out)
    return profile


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["profile", "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert "cachesmith profile --show" in text
    assert all(f"--{name}" in text for name in ("quick", "restart", "demand-only", "plots"))


def test_the_demand_is_written_and_reported(serve_answers, tmp_path, capsys):
    serve_answers(FakeAnswers())
    out = tmp_path / "new" / "folder" / "profile.json"
    assert profiled(out, *ASK) == 0
    profile = ServingProfile.load(out)
    assert profile.fingerprint == model_fingerprint(SYNTHETIC_MODEL)
    assert profile.num_layers == NUM_LAYERS and profile.costs is None
    assert profile.demand is not None and len(profile.demand.anchors) == 6
    assert [path.name for path in out.parent.iterdir()] == [out.name]  # nothing is left beside it
    told = capsys.readouterr()
    assert "qci w=0 p=16" in told.out and f"wrote {out}" in told.out
    assert "40 of 40" in told.err
    assert main(["profile", "--show", str(out)]) == 0
    assert "qci w=0 p=16" in capsys.readouterr().out


def test_after_ctrl_c_the_same_command_goes_on(serve_answers, tmp_path, capsys):
    whole, out = tmp_path / "whole.json", tmp_path / "out.json"
    serve_answers(FakeAnswers())
    assert profiled(whole, *ASK) == 0
    serve_answers(FakeAnswers(patience=50))
    assert profiled(out, *ASK) == 130
    assert not out.exists() and partial_of(out).exists()
    assert "goes on" in capsys.readouterr().out
    rest = serve_answers(FakeAnswers())
    assert profiled(out, *ASK) == 0
    assert len(rest.asked) == 30
    assert out.read_text() == whole.read_text() and not partial_of(out).exists()


def test_other_options_do_not_go_on_unless_restarted(serve_answers, tmp_path, capsys):
    out = tmp_path / "out.json"
    serve_answers(FakeAnswers(patience=5))
    assert profiled(out, *ASK) == 130
    rest = serve_answers(FakeAnswers())
    assert profiled(out, *ASK, "--task", "vt") == 1
    error = capsys.readouterr().err
    assert "task" in error and "--restart" in error and not rest.asked
    assert profiled(out, *ASK, "--task", "vt", "--restart") == 0
    assert len(rest.asked) == 80
    assert ServingProfile.load(out).demand.task == "vt"


def test_one_half_is_measured_anew_the_other_stays(serve_answers, tmp_path):
    out = tmp_path / "out.json"
    old = existing(out)
    serve_answers(FakeAnswers())
    assert profiled(out, *ASK) == 0
    new = ServingProfile.load(out)
    assert new.costs == old.costs and new.kv_token_bytes == old.kv_token_bytes
    assert new.demand is not None


def test_without_a_qualified_task_the_costs_are_kept_and_the_reason_told(
    serve_answers, tmp_path, capsys
):
    out = tmp_path / "out.json"
    old = existing(out)
    serve_answers(FakeAnswers(is_right=lambda question: False))
    assert profiled(out, *ASK) == 0
    new = ServingProfile.load(out)
    assert new.demand is None and new.costs == old.costs
    assert "full prefill answered 0 of 21 requests of pr right" in new.demand_note
    assert new.demand_note in capsys.readouterr().out


def test_nothing_is_written_where_nothing_could_be_measured(serve_answers, tmp_path, capsys):
    out = tmp_path / "out.json"
    serve_answers(FakeAnswers(is_right=lambda question: False))
    assert profiled(out, *ASK) == 1
    assert "full prefill answered 0 of 21" in capsys.readouterr().err
    assert not out.exists()


def test_without_vllm_the_demand_alone_is_measured(serve_answers, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.profiling.command.find_spec", lambda name: None)
    serve_answers(FakeAnswers())
    out = tmp_path / "out.json"
    assert profiled(out, *ASK[1:]) == 0
    assert ServingProfile.load(out).costs is None
    assert "vLLM is not installed" in capsys.readouterr().out
    assert profiled(out, "--costs-only") == 1
    assert "not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--requests", "0"], "--requests"),
        (["--tp", "0"], "--tp"),
        (["--threads", "-1"], "--threads"),
        (["--documents", "8", "0"], "--documents"),
        (["--task", "fly"], "fly"),
        (["--task", "pr", "fly"], "fly"),
        (["--task", "vt", "--documents", "1"], "num_chunks"),
    ],
)
def test_arguments_that_make_no_sense(arguments, problem, tmp_path, capsys):
    assert profiled(tmp_path / "out.json", "--demand-only", *arguments) == 1
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--out", "x.json"],
        ["--model", "m", "--show", "x.json"],
        ["--model", "m", "--dtype", "int3"],
        ["--model", "m", "--costs-only", "--demand-only"],
    ],
)
def test_arguments_that_do_not_go_together(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["profile", *arguments])
    assert exit_.value.code == 2
    assert "usage: cachesmith profile" in capsys.readouterr().err


def test_a_place_that_can_not_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file" / "out.json"):
        assert profiled(out, "--demand-only") == 1
        error = capsys.readouterr().err
        assert str(tmp_path) in error and error.count("\n") == 1
    assert main(["profile", "--model", str(SYNTHETIC_MODEL)]) == 1
    assert "--out" in capsys.readouterr().err


def test_a_profile_is_not_overwritten_by_accident(serve_answers, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.profiling.command.find_spec", lambda name: None)
    out = tmp_path / "out.json"
    existing(out)
    before = out.read_text()
    assert profiled(out) == 1
    assert "--force" in capsys.readouterr().err and out.read_text() == before
    serve_answers(FakeAnswers())
    assert profiled(out, *ASK[1:], "--force") == 0
    assert ServingProfile.load(out).costs is None


def test_models_that_can_not_be_profiled(tmp_path, capsys):
    out = str(tmp_path / "out.json")
    empty, bare, other = (tmp_path / name for name in ("empty", "bare", "other"))
    empty.mkdir()
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    shutil.copytree(SYNTHETIC_MODEL, other)
    (other / "quality.json").write_text('{"suite": "latin"}')
    for model, problem in (
        (empty, "config.json"),
        ("no such model!", "no such model!"),
        (bare, "weight files"),
        (other, "suite must be one of"),
    ):
        assert main(["profile", "--model", str(model), "--out", out, "--demand-only"]) == 1
        error = capsys.readouterr().err
        assert problem in error and "Traceback" not in error


def test_half_of_another_models_profile_is_not_taken_over(tmp_path, capsys):
    out = tmp_path / "out.json"
    existing(out, fingerprint="cd" * 32)
    assert profiled(out, "--demand-only") == 1
    assert "fingerprint" in capsys.readouterr().err
    out.write_text("{}")
    assert profiled(out, "--demand-only") == 1
    assert "is not a profile" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [str(SYNTHETIC_MODEL), "cachesmith-english", "smollm2-135m-instruct"]
)
def test_shipped_profiles_are_found_and_shown(name, capsys):
    path = find_profile(name)
    assert path is not None
    assert main(["profile", "--show", str(path)]) == 0
    assert "worst error" in capsys.readouterr().out
    profile = ServingProfile.load(path)
    assert (profile.demand is None) == (name == "smollm2-135m-instruct")
    assert bool(profile.demand_note) == (profile.demand is None)
    if name == str(SYNTHETIC_MODEL):
        profile.check_model(model_fingerprint(SYNTHETIC_MODEL))


@pytest.mark.parametrize("text", [None, "{", json.dumps({"version": 7})])
def test_show_names_what_is_wrong_with_a_file(text, tmp_path, capsys):
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    assert main(["profile", "--show", str(path)]) == 1
    assert str(path) in capsys.readouterr().err


def test_show_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "profile.json"
    existing(path)
    assert main(["profile", "--show", str(path), "--plots", str(tmp_path / "pictures")]) == 0
    assert "drew" in capsys.readouterr().out
    assert (tmp_path / "pictures" / "costs.png").is_file()
    assert main(["profile", "--show", str(path), "--plots", str(path)]) == 1
    assert "can not draw" in capsys.readouterr().err
