"""The profile's file: read back as written, refused with the field's name where it is wrong."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from planner import CostModel, CostProfile, DemandProfile, PhaseFit, ServingProfile, Signal
from planner.demand_profile import DemandAnchor, DemandBucket
from planner.serving_profile import MeasuredPhase

NUM_LAYERS = 16


def costs() -> CostProfile:
    return CostProfile(
        device="some processor",
        num_threads=2,
        tensor_parallel_size=1,
        dtype="bfloat16",
        cost=CostModel(
            num_layers=NUM_LAYERS,
            fixed_ms=4.0,
            row_ms=1e-3,
            pair_ms=1e-7,
            selected_pair_ms=2e-7,
            reuse_ms=1e-4,
        ),
        host_bytes_per_ms=1e6,
        fits=(PhaseFit(phase="patch", num_samples=3, median_error=0.05, worst_error=0.2),),
        samples=(
            MeasuredPhase(
                phase="patch",
                signal=Signal.KV_DEV,
                warmup_depth=4,
                probe_len=3,
                coverage=0.2,
                num_requests=2,
                num_cached=512,
                num_always=64,
                measured_ms=40.0,
                expected_ms=42.0,
            ),
        ),
    )


def demand() -> DemandProfile:
    bucket = DemandBucket(
        max_context_tokens=None,
        num_requests=20,
        coverages=(0.0, 0.1, 0.5, 1.0),
        enough=(0.1, 0.4, 0.9, 1.0),
    )
    anchor = DemandAnchor(signal=Signal.KV_DEV, warmup_depth=4, probe_len=3, buckets=(bucket,))
    return DemandProfile(model="tiny", task="pr", gate="right", anchors=(anchor,))


def profile(**changes: Any) -> ServingProfile:
    values: dict[str, Any] = {
        "model": "tiny",
        "fingerprint": "ab" * 32,
        "num_layers": NUM_LAYERS,
        "kv_token_bytes": 512.0,
        "costs": costs(),
        "demand": demand(),
    }
    return ServingProfile(**{**values, **changes})


def test_a_profile_is_read_back_as_written(tmp_path):
    path = tmp_path / "profile.json"
    for one in (profile(), profile(costs=None), profile(demand=None, demand_note="too few")):
        one.save(path)
        assert ServingProfile.load(path) == one


def test_one_of_another_model_is_refused():
    profile().check_model("ab" * 32)
    with pytest.raises(ValueError, match="cachesmith profile"):
        profile().check_model("cd" * 32)


def test_a_server_gets_it_without_the_samples():
    lean = profile().without_samples()
    assert lean.costs is not None and lean.costs.samples == ()
    assert lean.demand == demand()
    assert profile(costs=None).without_samples() == profile(costs=None)


def _set(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


def _drop(*path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return change


NAN, INFINITY = float("nan"), float("inf")
ANCHOR = ("demand", "anchors", 0)
BUCKET = (*ANCHOR, "buckets", 0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_set("version", value=2), "version"),
        (_set("surprise", value=1), "surprise"),
        (_drop("fingerprint"), "fingerprint"),
        (_set("fingerprint", value=""), "fingerprint"),
        (_set("num_layers", value=0), "num_layers"),
        (_set("num_layers", value=12), "num_layers"),
        (_set("kv_token_bytes", value=-1.0), "kv_token_bytes"),
        (_set("costs", "surprise", value=1), "costs.surprise"),
        (_set("costs", "device", value=""), "costs.device"),
        (_set("costs", "num_threads", value=0), "costs.num_threads"),
        (_set("costs", "tensor_parallel_size", value=0), "costs.tensor_parallel_size"),
        (_set("costs", "host_bytes_per_ms", value=0.0), "costs.host_bytes_per_ms"),
        (_set("costs", "host_bytes_per_ms", value=NAN), "costs.host_bytes_per_ms"),
        (_set("costs", "host_bytes_per_ms", value=INFINITY), "costs.host_bytes_per_ms"),
        (_set("costs", "cost", "row_ms", value=-1.0), "row_ms"),
        (_set("costs", "cost", "row_ms", value=NAN), "row_ms"),
        (_set("costs", "cost", "scale", value=2.0), "cost.scale"),
        (_drop("costs", "cost", "row_ms"), "costs.cost.row_ms"),
        (_set("costs", "cost", value=None), "costs.cost"),
        (_set("costs", "fits", value=[]), "costs.fits"),
        (_set("costs", "fits", 0, "phase", value="sleep"), "costs.fits.0.phase"),
        (_set("costs", "fits", 0, "worst_error", value=-0.1), "costs.fits.0.worst_error"),
        (_set("costs", "samples", 0, "measured_ms", value=NAN), "costs.samples.0.measured_ms"),
        (_set("demand", "version", value=2), "demand.version"),
        (_set("demand", "anchors", value=[]), "demand.anchors"),
        (_drop("demand", "anchors"), "demand.anchors"),
        (_set(*ANCHOR, "signal", value="gut"), "demand.anchors.0.signal"),
        (_set(*ANCHOR, "warmup_depth", value=-1), "demand.anchors.0.warmup_depth"),
        (_set(*ANCHOR, "probe_len", value=NUM_LAYERS), "demand.anchors.0"),
        (_set(*ANCHOR, "buckets", value=[]), "demand.anchors.0.buckets"),
        (_set(*BUCKET, "enough", value=[0.4, 0.1, 0.9, 1.0]), "demand.anchors.0.buckets.0"),
        (_set(*BUCKET, "enough", 1, value=NAN), "demand.anchors.0.buckets.0.enough.1"),
        (_set(*BUCKET, "num_requests", value=0), "demand.anchors.0.buckets.0.num_requests"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_by_the_field(change, field, tmp_path):
    path = tmp_path / "profile.json"
    content = json.loads(profile().model_dump_json())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - whatever it says, it names the field
        ServingProfile.load(path)
    assert field in str(caught.value) and str(path) in str(caught.value)


def test_a_profile_of_nothing_is_refused():
    with pytest.raises(ValueError, match="neither costs nor demand"):
        profile(costs=None, demand=None)


@pytest.mark.parametrize("text", ["", "{", "[]", '"profile"', "\x00"])
def test_a_file_that_is_no_profile_at_all_is_refused(text, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a profile"):
        ServingProfile.load(path)
