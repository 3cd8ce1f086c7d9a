"""Membership, residency, reports, metrics: the small pure parts of the cluster."""

import asyncio
from pathlib import Path

import pytest

from cluster.membership import Membership
from cluster.messages import ReportAck, RequestOutcome, SchedulerStatus
from cluster.metrics import ServerMetrics
from cluster.replica_reporter import ReplicaReporter
from cluster.residency import NodeResidency
from replicas.interface import ResidencyUpdate
from tests.fakes.fake_engine import FakeEngine, FakeEngineConfig
from tests.fakes.fake_ports import ready_status


def test_a_replica_runs_while_every_live_router_lists_it():
    members = Membership(router_ttl_ms=1000)
    assert members.running(now_ms=0) == frozenset()
    members.sync("a", ["r1", "r2"], now_ms=0)
    members.sync("b", ["r2", "r3"], now_ms=500)
    assert members.running(now_ms=600) == {"r2"}
    assert members.running(now_ms=1400) == {"r2", "r3"}  # router a has gone silent
    assert members.running(now_ms=1600) == frozenset()


def test_suspects_come_back():
    members = Membership(router_ttl_ms=1000)
    members.sync("a", ["r1"], now_ms=0)
    members.suspect("r1", until_ms=100)
    assert members.running(now_ms=50) == frozenset()
    assert members.running(now_ms=100) == {"r1"}


def test_residency_belongs_to_the_node():
    nodes = NodeResidency()
    nodes.apply("n1", ResidencyUpdate(added=("a", "b")))
    nodes.apply("n1", ResidencyUpdate(added=("c",), removed=("a",)))
    assert nodes.of("n1") == {"b", "c"} and nodes.of("n2") == set()
    nodes.apply("n1", ResidencyUpdate(added=("d",), reset=True))
    assert nodes.of("n1") == {"d"}
    nodes.keep_nodes({"n2"})
    assert nodes.of("n1") == set()


def make_reporter(tmp_path: Path) -> tuple[FakeEngine, ReplicaReporter]:
    engine = FakeEngine(FakeEngineConfig(state_dir=str(tmp_path)))
    info = asyncio.run(engine.start())
    return engine, ReplicaReporter(engine, info, replica_id="r1", node_id="n1")


def store(engine: FakeEngine, token: int) -> str:
    return asyncio.run(engine.ingest((token,))).chunk_id


def test_reports_are_complete_once_and_then_changes(tmp_path: Path):
    engine, reporter = make_reporter(tmp_path)
    first = store(engine, 1)
    report = reporter.build([])
    assert report.info and report.residency == ResidencyUpdate(added=(first,), reset=True)
    assert not reporter.acknowledged(ReportAck(epoch="e1"))
    second = store(engine, 2)
    report = reporter.build([])
    assert report.info is None and report.residency == ResidencyUpdate(added=(second,))


@pytest.mark.parametrize(
    "ack", [ReportAck(epoch="e2"), ReportAck(epoch="e1", needs_full=True), None]
)
def test_a_scheduler_that_does_not_know_us_gets_all_again(tmp_path: Path, ack: ReportAck | None):
    engine, reporter = make_reporter(tmp_path)
    chunk_id = store(engine, 1)
    reporter.build([])
    reporter.acknowledged(ReportAck(epoch="e1"))
    reporter.build([])
    if ack is None:
        reporter.lost()
    else:
        assert reporter.acknowledged(ack)
    report = reporter.build([])
    assert report.info and report.residency == ResidencyUpdate(added=(chunk_id,), reset=True)


def test_status_names_one_replica_a_node(tmp_path: Path):
    _, reporter = make_reporter(tmp_path)
    info = reporter.build([]).info
    assert info is not None
    status = ready_status(info, replica_ids=("r1", "r2"))
    assert status.one_per_node() == {"node-of-r1": "r1", "node-of-r2": "r2"}
    assert status.max_model_len == info.max_model_len
    assert SchedulerStatus(epoch="e", num_waiting=0, replicas=()).max_model_len is None


def test_metrics_count_outcomes():
    metrics = ServerMetrics()
    metrics.record(
        RequestOutcome(
            outcome="ok", policy="adaptive", queue_ms=3, ttft_ms=40, slo_met=True, coverage=0.2,
            expected_ms=10, prefill_ms=12, num_prompt_tokens=100, num_generated_tokens=5,
            cached_tokens={"host": 60}, num_miss_tokens=20, num_recomputed_tokens=30,
            recovered=True, num_retries=1,
        )
    )  # fmt: skip
    text = metrics.render(SchedulerStatus(epoch="e", num_waiting=0, replicas=())).decode()
    for line in (
        'cachesmith_requests_total{outcome="ok",policy="adaptive"} 1.0',
        'cachesmith_ttft_ms_bucket{le="50.0",policy="adaptive"} 1.0',
        'cachesmith_queue_ms_count{policy="adaptive"} 1.0',
        'cachesmith_coverage_sum{policy="adaptive"} 0.2',
        'cachesmith_slo_total{met="true"} 1.0',
        'cachesmith_cached_tokens_total{tier="host"} 60.0',
        "cachesmith_prompt_tokens_total 100.0",
        "cachesmith_miss_tokens_total 20.0",
        "cachesmith_recomputed_tokens_total 30.0",
        "cachesmith_prefill_expected_ms_total 10.0",
        "cachesmith_prefill_actual_ms_total 12.0",
        "cachesmith_recovered_requests_total 1.0",
        "cachesmith_retries_total 1.0",
    ):
        assert line in text
