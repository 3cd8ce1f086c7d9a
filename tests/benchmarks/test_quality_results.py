"""From answers to tables: the results file, accuracies, needs, and the planner's profile."""

import random
from collections.abc import Iterator, Sequence

import pytest

from benchmarks.bench_quality import main, measured
from benchmarks.quality.curves import (
    Curve,
    bounds,
    kv_dev,
    named,
    standard,
)
from benchmarks.quality.demand import demand_profile
from benchmarks.quality.outcomes import Outcome, ResultsFile
from benchmarks.quality.report import PERMUTED, as_json, plot, print_qualification, print_report
from benchmarks.quality.stats import (
    NEVER,
    accuracies,
    grouped,
    least_share,
    quantile,
    sufficient_coverages,
    wilson_interval,
)
from benchmarks.quality.suites import (
    ENGLISH,
    SYNTHETIC,
    SYNTHETIC_MODEL,
    NoOtherOrderError,
    suite_of,
)
from benchmarks.quality.synthetic_tasks import solve
from benchmarks.quality.types import Question
from planner import Signal
from planner.demand_profile import DemandProfile

CURVE = kv_dev(2, coverages=(0.1, 0.2, 0.4))


def outcome(question: int, curve: str, point: str, gold: float, **changes) -> Outcome:
    values = {
        "question_id": f"q{question}",
        "task": "vt",
        "curve": curve,
        "point": point,
        "text": "x",
        "gold": gold,
        "coverage": float(point.removeprefix("r=")),
        "share": float(point.removeprefix("r=")),
        "num_context_tokens": 100,
        "num_documents": 8,
    }
    return Outcome(**{**values, **changes})


def answered(question: int, full: float, *golds: float, **changes) -> list[Outcome]:
    points = [f"r={coverage:g}" for coverage in CURVE.coverages]
    swept = [
        outcome(question, CURVE.name, point, gold, **changes)
        for point, gold in zip(points, golds, strict=True)
    ]
    return [outcome(question, "full_prefill", "r=1", full, **changes), *swept]


class Fake:
    """Answers right from some coverage on, and counts what it is asked."""

    num_layers = 8

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def outcomes(self, question: Question, curves: Sequence[Curve]) -> Iterator[Outcome]:
        for curve in curves:
            for point in curve.points():
                self.asked.append((question.question_id, curve.name))
                yield outcome(0, curve.name, point.label, 1.0).model_copy(
                    update={"question_id": question.question_id}
                )


# ---- the results file ----


def test_a_run_is_taken_up_where_it_ended(tmp_path):
    questions = list(SYNTHETIC.questions("vt", 4, 0, 3))
    curves = [*bounds(), CURVE]
    path = tmp_path / "results.jsonl"
    first = Fake()
    measured(first, questions[:2], curves, ResultsFile(path, "{}"))
    cut = path.read_text()[:-20]  # a crash in the middle of a line
    path.write_text(cut)
    second = Fake()
    found = measured(second, questions, curves, ResultsFile(path, "{}"))
    asked = {name for name, _ in second.asked}
    assert asked == {q.question_id for q in questions[1:]}  # the cut one, and the one not asked
    assert [curve for name, curve in second.asked if name == questions[1].question_id] == (
        [CURVE.name] * 3
    )
    keys = {o.key for o in found}
    assert len(keys) == len(found) == 3 * 5
    assert keys == set(ResultsFile(path, "{}").outcomes)


def test_results_of_another_run_are_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    ResultsFile(path, '{"model": "a"}')
    with pytest.raises(ValueError, match="another run"):
        ResultsFile(path, '{"model": "b"}')


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "results.jsonl"
    ResultsFile(path, "{}").add([outcome(0, "a", "r=1", 1.0)])
    path.write_text(path.read_text().replace('"gold":1.0', '"gold":"?"') + "{}\n")
    with pytest.raises(ValueError, match="line 2"):
        ResultsFile(path, "{}")


# ---- statistics ----


def test_the_relative_gate_asks_for_what_full_prefill_gives():
    outcomes = answered(0, 1.0, 0.0, 1.0, 1.0) + answered(1, 0.0, 0.0, 0.0, 1.0)
    found = accuracies(outcomes)
    assert found[CURVE.name, "r=0.1"].gold == 0.0
    assert found[CURVE.name, "r=0.1"].kept == 0.5  # the second is no worse
    assert found[CURVE.name, "r=0.4"].gold == 1.0
    assert found["full_prefill", "r=1"].gold == 0.5


def test_sufficient_is_a_coverage_from_which_on_all_pass():
    outcomes = (
        answered(0, 1.0, 1.0, 0.0, 1.0)  # lucky at the smallest one
        + answered(1, 1.0, 1.0, 1.0, 1.0)
        + answered(2, 1.0, 1.0, 1.0, 0.0)
        + answered(3, 0.0, 0.0, 0.0, 0.0)  # as bad as full prefill
    )
    demands = sufficient_coverages(outcomes, CURVE.name)
    assert demands == {"q0": 0.4, "q1": 0.1, "q2": 1.0, "q3": 0.1}


def test_sufficient_coverages_agree_with_trying_all():
    rng = random.Random(0)
    for _ in range(200):
        golds = [float(rng.random() < 0.6) for _ in range(3)]
        full = float(rng.random() < 0.8)
        [demand] = sufficient_coverages(answered(0, full, *golds), CURVE.name).values()
        candidates = [
            r for i, r in enumerate(CURVE.coverages) if all(gold >= full for gold in golds[i:])
        ]
        assert demand == min(candidates, default=1.0)


def test_the_least_work_keeps_a_share_of_full_prefills_accuracy():
    outcomes = [o for q in range(20) for o in answered(q, 1.0, 0.0, float(q > 0), 1.0)]
    points = {p: a for (curve, p), a in accuracies(outcomes).items() if curve == CURVE.name}
    assert least_share(points, 1.0, 0.95) == pytest.approx(0.2)
    assert least_share(points, 1.0, 0.96) == pytest.approx(0.4)
    assert least_share(points, 2.0, 0.96) == NEVER


@pytest.mark.parametrize(("share", "count"), [(0.0, 5), (1.0, 5), (0.5, 10), (0.93, 200)])
def test_the_interval_holds_the_share_and_narrows(share, count):
    low, high = wilson_interval(share, count)
    assert 0.0 <= low <= share <= high <= 1.0
    narrow_low, narrow_high = wilson_interval(share, 100 * count)
    assert narrow_high - narrow_low < high - low


def test_a_known_interval():
    low, high = wilson_interval(0.5, 100)
    assert (round(low, 3), round(high, 3)) == (0.404, 0.596)


def test_quantiles_are_values():
    assert quantile([3, 1, 2, 4], 0.5) == 2
    assert quantile([3, 1, 2, 4], 0.9) == 4
    assert quantile([3], 0.1) == 3


# ---- the planner's profile ----


def test_demands_become_a_profile_with_buckets_by_length(tmp_path):
    rng = random.Random(1)
    outcomes = []
    for size, tokens in ((8, 100), (16, 300), (32, 900)):
        for q in range(20):
            needs = rng.choice([0, 1, 2, 3])
            golds = [float(i >= needs) for i in range(3)]
            outcomes += answered(
                1000 * size + q, 1.0, *golds, num_documents=size, num_context_tokens=tokens
            )
    profile = demand_profile(outcomes, [*bounds(), CURVE], model="m", task="vt", num_layers=8)
    path = tmp_path / "profile.json"
    profile.save(path)
    [anchor] = DemandProfile.load(path).anchors
    assert (anchor.signal, anchor.warmup_depth, anchor.probe_len) == (Signal.KV_DEV, 2, 1)
    assert [bucket.max_context_tokens for bucket in anchor.buckets] == [200, 600, None]
    for bucket, (_, some) in zip(anchor.buckets, grouped(outcomes).items(), strict=True):
        demands = sufficient_coverages(some, CURVE.name).values()
        assert bucket.coverages == (0.0, 0.1, 0.2, 0.4, 1.0)
        assert bucket.num_requests == len(demands) == 20
        for coverage, enough in zip(bucket.coverages, bucket.enough, strict=True):
            assert enough == sum(d <= coverage for d in demands) / 20


def test_a_profile_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no curve"):
        demand_profile(answered(0, 1.0, 1, 1, 1), bounds(), model="m", task="vt", num_layers=8)


# ---- curves and suites ----


@pytest.mark.parametrize("num_layers", [4, 8, 16, 30, 64])
def test_every_curve_fits_the_model_and_has_a_name_of_its_own(num_layers):
    curves = standard(num_layers)
    assert len({curve.name for curve in curves}) == len(curves)
    for curve in curves:
        w, p = curve.config.depths(num_layers)
        assert 0 <= w <= w + p <= num_layers
        assert list(curve.points())


def test_curves_are_chosen_by_how_their_names_start():
    curves = standard(16)
    chosen = named(curves, ["epic", "qci w=1"])
    assert [c.name for c in chosen][:2] == ["full_prefill", "epic"]
    assert all(c.name.startswith("qci w=1") for c in chosen[2:])
    with pytest.raises(ValueError, match="nothing"):
        named(curves, ["nothing"])


@pytest.mark.parametrize("size", [4, 6, 8, 16, 32])
@pytest.mark.parametrize("task", ["vt", "pr", "PR+VT", "MIX"])
def test_synthetic_questions_have_their_size_and_the_answer_of_their_text(task, size):
    questions = list(SYNTHETIC.questions(task, size, 3, 12))
    assert len({q.question_id for q in questions}) == 12
    for question in questions:
        assert len(question.documents) == size
        assert solve(question) == question.answers[0]
    assert questions == list(SYNTHETIC.questions(task, size, 3, 12))
    assert questions[:5] != list(SYNTHETIC.questions(task, size, 4, 5))


@pytest.mark.parametrize("task", [*ENGLISH.tasks, "MIX"])
def test_english_questions_keep_their_answer_in_another_order(task):
    for question in ENGLISH.questions(task, 8, 0, 12):
        assert len(question.documents) == 8
        assert any(question.answers[0] in f"{d.title} {d.text}" for d in question.documents)
        if task == "ref":
            with pytest.raises(NoOtherOrderError):
                ENGLISH.permute(question, 0)
            continue
        moved = ENGLISH.permute(question, 0)
        assert sorted(d.text for d in moved.documents) == sorted(d.text for d in question.documents)
        assert moved.answers == question.answers
        assert moved.question_id != question.question_id


def test_a_task_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no task 'nothing'"):
        list(SYNTHETIC.questions("nothing", 8, 0, 1))


def test_a_model_names_its_suite(tmp_path):
    assert suite_of(tmp_path) is ENGLISH
    (tmp_path / "quality.json").write_text('{"suite": "synthetic"}')
    assert suite_of(tmp_path) is SYNTHETIC
    (tmp_path / "quality.json").write_text('{"suite": "other"}')
    with pytest.raises(ValueError, match="other"):
        suite_of(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "nothing"], "no task 'nothing'"),
        (["--count", "0"], "must be 1 or more"),
        (["--coverages", "0.1", "2"], "within 0 and 1"),
        (["--questions", "missing.jsonl", "--format", "multi-hop"], "missing.jsonl"),
        (["--questions", "missing.jsonl"], "go together"),
        (["--out", "{folder}/other.jsonl"], "another run"),
        (["--tasks", "vt", "--documents", "4", "--curves", "nothing"], "no curve is called"),
    ],
)
def test_wrong_arguments_are_named_without_a_trace(tmp_path, capsys, arguments, message):
    (tmp_path / "other.jsonl").write_text("{}\n")
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    with pytest.raises(SystemExit):
        main(["--model", str(SYNTHETIC_MODEL), *arguments])
    assert message in capsys.readouterr().err


# ---- what is printed ----


def test_the_report_shows_accuracy_work_and_needs(capsys):
    outcomes = [o for q in range(10) for o in answered(q, 1.0, 0.0, float(q > 4), 1.0)]
    print_report(outcomes)
    shown = capsys.readouterr().out
    assert "vt, 8 documents, about 100 context tokens, 10 requests: full prefill 1.00" in shown
    assert ["kv_dev", "w=2", "p=1", "0.00", "0.50", "1.00"] in [
        line.split() for line in shown.splitlines()
    ]
    assert ["kv_dev", "w=2", "p=1", "0.40", "0.20", "0.20", "0.40"] in [
        line.split() for line in shown.splitlines()
    ]


def test_the_best_within_some_work_is_named(capsys):
    outcomes = [o for q in range(4) for o in answered(q, 1.0, 0.0, 1.0, 1.0)]
    for q in range(4):
        outcomes.append(outcome(q, "qci w=0 p=4", "r=0.1", 0.5))
        outcomes.append(outcome(q, "qci w=2 p=2", "r=0.3", 0.8))
    print_report(outcomes)
    lines = capsys.readouterr().out.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if "best within work" in line) :]
    kv_dev_row = next(line for line in table if line.strip().startswith("kv_dev"))
    assert "0.00 (w=2 p=1 r=0.1)" in kv_dev_row
    assert "1.00 (w=2 p=1 r=0.2)" in kv_dev_row
    assert any("0.50 (p=4 r=0.1)" in line for line in table)
    assert any("0.80 (w=2 p=2 r=0.3)" in line for line in table)


def test_qualification_says_which_tasks_can_be_used(capsys):
    outcomes = []
    for q in range(50):
        for task, full, reuse in (("vt", 1.0, 0.0), ("pr", 1.0, 1.0), ("ref", 0.5, 0.0)):
            outcomes += [
                outcome(q, "full_prefill", "r=1", full, task=task, question_id=f"{task}{q}"),
                outcome(q, "full_reuse", "r=0", reuse, task=task, question_id=f"{task}{q}"),
            ]
        moved = {"task": "vt" + PERMUTED, "question_id": f"moved{q}"}
        outcomes.append(outcome(q, "full_prefill", "r=1", float(q % 2), **moved))
    print_qualification(outcomes)
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert (rows["vt"][-1], rows["vt"][-2]) == ("yes", "0.50")
    assert rows["pr"][-1] == "no"  # needs no attention across documents
    assert rows["ref"][-1] == "no"  # the model can not do it


def test_json_and_pictures(tmp_path):
    outcomes = [o for q in range(4) for o in answered(q, 1.0, 0.0, 1.0, 1.0)]
    found = as_json(outcomes)
    assert len(found) == 4
    assert {row["curve"] for row in found} == {"full_prefill", CURVE.name}
    pytest.importorskip("matplotlib", reason="pictures are optional")
    [path] = plot(outcomes, tmp_path)
    assert path.name == "vt-8.png"
    assert path.stat().st_size > 1000
