"""The demand profile's file: read back as written, refused where it makes no sense."""

import json

import pytest
from pydantic import ValidationError

from planner.demand_profile import DemandAnchor, DemandBucket, DemandProfile
from planner.types import Signal


def bucket(limit: int | None = None, **changes) -> DemandBucket:
    values = {
        "max_context_tokens": limit,
        "num_requests": 20,
        "coverages": (0.0, 0.1, 0.5, 1.0),
        "enough": (0.1, 0.4, 0.9, 1.0),
    }
    return DemandBucket(**{**values, **changes})


def anchor(*buckets: DemandBucket) -> DemandAnchor:
    return DemandAnchor(
        signal=Signal.KV_DEV, warmup_depth=3, probe_len=1, buckets=buckets or (bucket(),)
    )


def profile() -> DemandProfile:
    return DemandProfile(
        model="tiny", task="pr", gate="as good", anchors=(anchor(bucket(100), bucket()),)
    )


def test_a_profile_is_read_back_as_written(tmp_path):
    path = tmp_path / "demand.json"
    profile().save(path)
    assert DemandProfile.load(path) == profile()
    assert profile().anchors[0].rank_depth == 4


def test_a_file_of_another_version_is_refused(tmp_path):
    path = tmp_path / "demand.json"
    path.write_text(json.dumps({**json.loads(profile().model_dump_json()), "version": 2}))
    with pytest.raises(ValidationError, match="version"):
        DemandProfile.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enough": (0.4, 0.1, 0.9, 1.0)}, "enough must not fall"),
        ({"coverages": (0.0, 0.5, 0.1, 1.0)}, "coverages must not fall"),
        ({"coverages": (0.1, 0.2, 0.5, 1.0)}, "from 0 to 1"),
        ({"enough": (0.1, 0.4, 0.9, 0.95)}, "enough for all"),
        ({"enough": (0.1, 1.0)}, "same length"),
        ({"num_requests": 0}, "num_requests"),
    ],
)
def test_a_bucket_that_is_no_distribution_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        bucket(**changes)


@pytest.mark.parametrize("limits", [(None, 100), (200, 100, None), (100, 100, None), (100,)])
def test_buckets_ascend_and_the_last_one_is_open(limits):
    with pytest.raises(ValidationError, match="max_context_tokens"):
        anchor(*(bucket(limit) for limit in limits))
