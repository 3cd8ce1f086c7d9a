"""What a fault plan may say, and that it is told by the key what it may not."""

from pathlib import Path

import pytest

from deploy.testbed.errors import TestbedError
from deploy.testbed.fault_plan import PLANS, FaultKind, load_plan


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_plans_can_be_used(path: Path):
    plan = load_plan(path)
    assert plan.faults
    plan.check_hosts(3)


def test_the_default_plan_breaks_everything_but_the_cable():
    kinds = {fault.kind for fault in load_plan(PLANS / "default.yaml").faults}
    assert kinds == set(FaultKind) - {FaultKind.CUT_HOST, FaultKind.REJOIN_HOST}


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ("[{at_s: 1, kind: explode}]", "faults.0.kind: "),
        ("[{at_s: -1, kind: kill_rank}]", "faults.0.at_s: "),
        ("[{kind: kill_rank}]", "faults.0.at_s: "),
        ("[{at_s: 1, kind: kill_rank, node: 2}]", "faults.0.node: unknown key"),
        ("[{at_s: 1, kind: kill_rank, host: 0}]", "faults.0.host: "),
        ("[{at_s: 1, kind: cut_host}]", "faults.0: host: cut_host needs one"),
        ("[{at_s: 1, kind: stop_redis, host: 2}]", "faults.0: host: stop_redis takes none"),
        ("[{at_s: 1, kind: crash_host, host: 1}]", "faults.0: host: 1 is the head"),
        (
            "[{at_s: 2, kind: kill_rank}, {at_s: 1, kind: kill_rank}]",
            "faults.1.at_s: 1.0 is before the one above it",
        ),
        (
            "[{at_s: 1, kind: boot_host, host: 2}]",
            "faults.0.kind: there is no crash_host to mend before it",
        ),
        ("[{at_s: 1, kind: stop_redis}]", "faults: nothing mends stop_redis"),
    ],
)
def test_a_wrong_plan_names_the_key(tmp_path: Path, faults: str, told: str):
    with pytest.raises(TestbedError) as error:
        load_plan(written(tmp_path, f"faults: {faults}"))
    assert told in str(error.value)


def test_an_unknown_section_is_refused(tmp_path: Path):
    with pytest.raises(TestbedError, match="fault: unknown key"):
        load_plan(written(tmp_path, "fault: []"))


def test_a_host_that_there_is_not_is_named(tmp_path: Path):
    plan = load_plan(written(tmp_path, "faults: [{at_s: 1, kind: kill_replica, host: 4}]"))
    plan.check_hosts(4)
    with pytest.raises(TestbedError, match=r"faults\.0\.host: there are 3 hosts, got 4"):
        plan.check_hosts(3)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(TestbedError, match="can not read"):
        load_plan(tmp_path / "none.yaml")


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path):
    with pytest.raises(TestbedError, match="not valid YAML"):
        load_plan(written(tmp_path, "faults: ["))
