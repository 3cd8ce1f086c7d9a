"""The partial file, the progress line, and what a profile's report says and draws."""

import io
import json

import pytest

from benchmarks.profiling import report
from benchmarks.profiling.command import measured_rounds
from benchmarks.profiling.cost_grid import GridPoint, GridRequest, MeasuredPoint, PointTimes
from benchmarks.profiling.partial import PartialFile
from benchmarks.profiling.progress import Progress, duration
from benchmarks.quality.curves import bounds
from benchmarks.quality.suites import SYNTHETIC
from planner import CostModel, CostProfile, DemandProfile, PhaseFit, ServingProfile, Signal
from planner.demand_profile import DemandAnchor, DemandBucket
from planner.serving_profile import MeasuredPhase
from tests.benchmarks.profiling_answers import NUM_LAYERS, FakeAnswers
from tests.fakes.fake_clock import FakeClock

HEADER = {"fingerprint": "ab", "task": [["pr"]], "threads": None}


def point(coverage: float) -> GridPoint:
    return GridPoint(
        signal=Signal.QCI,
        warmup_depth=2,
        probe_len=1,
        coverage=coverage,
        requests=(GridRequest(chunks=(64, 64), num_always=8),),
    )


def times(patch_ms: float) -> MeasuredPoint:
    return MeasuredPoint(
        point=point(0.2), num_layers=4, runs=(PointTimes(patch_ms=patch_ms, load_ms=1.0),)
    )


def answers():
    question = next(SYNTHETIC.questions("pr", 8, 0, 1))
    return list(FakeAnswers().outcomes(question, bounds()))


# --- the partial file ----------------------------------------------------------------------------


def test_what_was_measured_is_there_again(tmp_path):
    path = tmp_path / "partial.jsonl"
    partial = PartialFile(path, HEADER)
    assert partial.is_empty
    partial.add_point(times(0.1 + 0.2))
    partial.add_answers("stage", answers())
    partial.close()
    again = PartialFile(path, HEADER)
    assert again.points == [times(0.1 + 0.2)] and not again.is_empty
    assert again.answers == {("stage", answers()[0].question_id): tuple(answers())}
    again.remove()
    assert not path.exists()


def test_a_line_that_was_cut_off_is_measured_again(tmp_path):
    path = tmp_path / "partial.jsonl"
    partial = PartialFile(path, HEADER)
    partial.add_point(times(1.0))
    partial.add_point(times(2.0))
    partial.close()
    path.write_bytes(path.read_bytes()[:-20])
    again = PartialFile(path, HEADER)
    assert again.points == [times(1.0)]
    again.add_point(times(3.0))
    again.close()
    assert PartialFile(path, HEADER).points == [times(1.0), times(3.0)]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"fingerprint": "cd"}, "fingerprint"),
        ({"task": [["vt"]]}, "task"),
        ({"threads": 2}, "threads"),
        ({"machine": "another"}, "machine"),
    ],
)
def test_what_another_run_measured_is_refused_and_kept(changes, name, tmp_path):
    path = tmp_path / "partial.jsonl"
    partial = PartialFile(path, HEADER)
    partial.add_point(times(1.0))
    partial.close()
    before = path.read_text()
    with pytest.raises(ValueError, match=f"begun with {name} = .*--restart"):
        PartialFile(path, {**HEADER, **changes})
    assert path.read_text() == before
    fresh = PartialFile(path, {**HEADER, **changes}, restart=True)
    assert fresh.is_empty


def test_a_run_that_measured_nothing_binds_no_other(tmp_path):
    path = tmp_path / "partial.jsonl"
    PartialFile(path, HEADER).close()
    other = {**HEADER, "threads": 2}
    partial = PartialFile(path, other)
    partial.add_point(times(1.0))
    partial.close()
    assert PartialFile(path, other).points == [times(1.0)]


@pytest.mark.parametrize("text", ["nonsense\n", "{}\n", "[]\n", "{", "\x00\n"])
def test_another_file_is_refused_and_kept(text, tmp_path):
    path = tmp_path / "partial.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a partial profile"):
        PartialFile(path, HEADER)
    assert path.read_text() == text


@pytest.mark.parametrize(
    "line",
    ['{"answers": [], "stage": "x"}', '{"point": 3}', "{", '{"point": null, "surprise": 1}'],
)
def test_a_damaged_line_is_named(line, tmp_path):
    path = tmp_path / "partial.jsonl"
    PartialFile(path, HEADER).close()
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        PartialFile(path, HEADER)


def test_two_runs_do_not_share_a_file(tmp_path):
    path = tmp_path / "partial.jsonl"
    first = PartialFile(path, HEADER)
    first.add_point(times(1.0))
    for restart in (False, True):
        with pytest.raises(ValueError, match="another run"):
            PartialFile(path, HEADER, restart=restart)
    first.close()
    assert PartialFile(path, HEADER).points == [times(1.0)]


# --- costs, in rounds ----------------------------------------------------------------------------


class FakeMachine:
    """Takes longer from run to run; stopped after so many runs."""

    def __init__(self, patience: int | None = None) -> None:
        self.runs: list[GridPoint] = []
        self._patience = patience

    async def measure(self, point: GridPoint) -> MeasuredPoint:
        if self._patience is not None and len(self.runs) >= self._patience:
            raise KeyboardInterrupt
        self.runs.append(point)
        run = PointTimes(patch_ms=100 * point.coverage + 1)
        return MeasuredPoint(point=point, num_layers=4, runs=(run,))


async def rounds(path, machine):
    partial = PartialFile(path, HEADER)
    try:
        return await measured_rounds(
            machine.measure,
            [point(0.1), point(0.2), point(0.3)],
            partial,
            Progress(io.StringIO()),
            num_rounds=2,
        )
    finally:
        partial.close()


@pytest.mark.parametrize("patience", [0, 2, 3, 5, 6])
async def test_interrupted_costs_end_as_those_that_were_not(patience, tmp_path):
    whole = await rounds(tmp_path / "whole.jsonl", FakeMachine())
    assert len(whole) == 6
    if patience < 6:
        with pytest.raises(KeyboardInterrupt):
            await rounds(tmp_path / "partial.jsonl", FakeMachine(patience))
    else:
        await rounds(tmp_path / "partial.jsonl", FakeMachine(patience))
    rest = FakeMachine()
    assert await rounds(tmp_path / "partial.jsonl", rest) == whole
    assert len(rest.runs) == 6 - patience


# --- progress ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_line_comes_every_twenty_seconds():
    clock, stream = FakeClock(), io.StringIO()
    progress = Progress(stream, clock=lambda: clock.now_ms() / 1e3)
    progress.start("costs", 10, done=4)
    for _ in range(6):
        clock.advance(9_000)
        progress.advance()
    progress.end()
    lines = stream.getvalue().splitlines()
    assert lines == [
        " 40%  4 of 10  costs",
        " 70%  7 of 10  costs  about 27 s left",
        "100%  10 of 10  costs",
    ]


def test_on_a_terminal_one_line_is_drawn_over():
    stream = Terminal()
    progress = Progress(stream, clock=lambda: 0.0)
    progress.start("costs", 2)
    progress.advance()
    progress.advance()
    progress.end()
    progress.end()
    text = stream.getvalue()
    assert text.count("\n") == 1 and text.endswith("\n")
    drawn = text.split("\r\033[K")
    assert drawn[2].startswith("[##########..........]   50%  1 of 2  costs")
    assert all(len(line.rstrip("\n")) < 80 for line in drawn)


def test_what_is_being_done_is_told_now_and_then_until_the_next_step():
    stream, now_s = io.StringIO(), [0.0]
    progress = Progress(stream, clock=lambda: now_s[0])
    progress.start("runs", 4)
    for now_s[0] in (1.0, 19.0, 21.0, 22.0):
        progress.note(f"at {now_s[0]:.0f}")
    now_s[0] = 50.0
    progress.advance()
    assert stream.getvalue().splitlines() == [
        "  0%  0 of 4  runs",
        "  0%  0 of 4  runs  at 21",
        " 25%  1 of 4  runs  about 2 min left",
    ]


def test_a_stage_of_nothing_is_done():
    stream = io.StringIO()
    Progress(stream).start("costs", 0)
    assert stream.getvalue() == "100%  0 of 0  costs\n"


def test_durations_in_words():
    assert [duration(s) for s in (3, 89, 600, 7200)] == ["3 s", "89 s", "10 min", "2.0 h"]


# --- report --------------------------------------------------------------------------------------


def anchor(signal: Signal, w: int, p: int, *enough: float) -> DemandAnchor:
    def bucket(limit: int | None) -> DemandBucket:
        return DemandBucket(
            max_context_tokens=limit,
            num_requests=32,
            coverages=(0.0, 0.1, 0.5, 1.0),
            enough=(*enough, 1.0),
        )

    return DemandAnchor(
        signal=signal, warmup_depth=w, probe_len=p, buckets=(bucket(300), bucket(None))
    )


def profile() -> ServingProfile:
    samples = [
        MeasuredPhase(
            phase=phase,
            signal=Signal.KV_DEV,
            warmup_depth=4,
            probe_len=3,
            coverage=0.2,
            num_requests=1,
            num_cached=512,
            num_always=64,
            measured_ms=measured,
            expected_ms=expected,
        )
        for phase, measured, expected in (("patch", 40.0, 42.0), ("warmup", 9.0, 9.5))
    ]
    costs = CostProfile(
        device="some processor",
        num_threads=2,
        tensor_parallel_size=1,
        dtype="bfloat16",
        cost=CostModel(
            num_layers=NUM_LAYERS,
            fixed_ms=4.0,
            row_ms=3e-3,
            pair_ms=1e-7,
            selected_pair_ms=0.0,
            reuse_ms=0.0,
        ),
        host_bytes_per_ms=2.5e6,
        fits=(
            PhaseFit(phase="warmup", num_samples=12, median_error=0.05, worst_error=0.31),
            PhaseFit(phase="patch", num_samples=11, median_error=0.06, worst_error=0.2),
        ),
        samples=tuple(samples),
    )
    demand = DemandProfile(
        model="tiny",
        task="pr",
        gate="the answer is right",
        anchors=(
            anchor(Signal.KV_DEV, 4, 3, 0.1, 0.9, 0.95),
            anchor(Signal.QCI, 0, 16, 0.0, 0.4, 0.6),
        ),
    )
    return ServingProfile(
        model="tiny", fingerprint="ab" * 32, num_layers=NUM_LAYERS, costs=costs, demand=demand
    )


def test_the_report_has_fits_prices_bandwidth_and_demand(capsys):
    report.print_report(profile())
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    assert ["warmup", "12", "5.0%", "31.0%"] in rows
    assert ["row", "3"] in rows and "2.50 GB/s" in text
    assert "some processor: 2 threads a rank, tensor parallelism 1, bfloat16" in text
    assert ["kv_dev", "w=4", "p=3", "1–300", "32", "0.10", "0.10", "0.10"] in rows
    assert ["qci", "w=0", "p=16", "over", "300", "32", "0.00", "0.50", "1.00"] in rows
    assert "the answer is right" in text


def test_the_report_says_what_is_missing_and_why(capsys):
    lacking = profile().model_copy(update={"demand": None, "demand_note": "3 of 64 right"})
    report.print_report(lacking)
    assert "3 of 64 right" in capsys.readouterr().out
    report.print_report(profile().model_copy(update={"costs": None}))
    assert "costs: not measured" in capsys.readouterr().out


def test_pictures_of_what_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    written = report.plot(profile(), tmp_path / "all")
    assert [path.name for path in written] == ["costs.png", "demand.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    costs = profile().without_samples().costs
    lean = profile().model_copy(update={"costs": costs, "demand": None})
    assert report.plot(lean, tmp_path / "none") == []


def test_a_profile_with_its_report_survives_the_file(tmp_path, capsys):
    path = tmp_path / "profile.json"
    profile().save(path)
    assert json.loads(path.read_text())["version"] == 1
    report.print_report(ServingProfile.load(path))
    loaded = capsys.readouterr().out
    report.print_report(profile())
    assert capsys.readouterr().out == loaded
