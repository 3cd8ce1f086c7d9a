"""Membership, residency, reports, metrics: the small pure parts of the cluster."""

import asyncio
from pathlib import Path

import pytest

from cluster.membership import Membership
from cluster.messages import ReplicaSummary, ReportAck, RequestOutcome, SchedulerStatus
from cluster.metrics import ServerMetrics
from cluster.replica_reporter import ReplicaReporter
from cluster.residency import NodeResidency
from kv_tier import TierStats
from replicas.cache_types import RedisReport, TierReport
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


def test_tiers_are_told_when_they_have_changed(tmp_path: Path):
    engine, reporter = make_reporter(tmp_path)
    first = reporter.build([]).tiers
    assert first == engine.tier_report()
    reporter.acknowledged(ReportAck(epoch="e1"))
    assert reporter.build([]).tiers is None
    store(engine, 1)
    changed = reporter.build([]).tiers
    assert changed is not None and changed != first
    assert reporter.build([]).tiers is None
    reporter.lost()
    assert reporter.build([]).tiers == changed


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
            recovered=True, num_retries=1, load_ms=4, stall_ms=2.5,
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
        "cachesmith_load_ms_total 4.0",
        "cachesmith_stall_ms_total 2.5",
        "cachesmith_recovered_requests_total 1.0",
        "cachesmith_retries_total 1.0",
    ):
        assert line in text


def host_stats(**changes: int) -> TierStats:
    values = {
        "capacity_bytes": 1000, "used_bytes": 300, "largest_free_bytes": 700, "num_entries": 3,
        "num_leases": 1, "num_reservations": 2, "num_retired": 0, "num_owners": 2,
        "hits": 7, "misses": 5, "collisions": 1, "evictions": 4, "refused": 6,
    }  # fmt: skip
    return TierStats(**{**values, **changes})


REDIS = RedisReport(
    counts={
        "lookup_hits": 9, "chunks_read": 8, "read_ms": 64, "bytes_read": 800, "chunks_written": 6,
        "bytes_written": 600, "writes_dropped": 3, "writes_failed": 1, "chunks_removed": 2,
    },
    misses={"absent": 4, "deadline": 1},
    bytes_per_ms=2e6, latency_ms=0.5, backlog_bytes=77, num_backlog=2,
    nodes_unavailable=("redis",), breaker_openings=5,
)  # fmt: skip


def status_with(*tiers: tuple[str, str, TierReport]) -> SchedulerStatus:
    """(replica, node, what it reports)"""
    summaries = tuple(
        ReplicaSummary(
            replica_id=replica_id, node_id=node_id, ready=True, num_running=0, num_waiting=0,
            num_ingest_backlog=0, num_leases=0, in_prefill=False, num_resident_chunks=0,
            info=None, tiers=report,
        )
        for replica_id, node_id, report in tiers
    )  # fmt: skip
    return SchedulerStatus(epoch="e", num_waiting=0, replicas=summaries)


def test_metrics_show_the_tiers_as_they_are_reported():
    metrics = ServerMetrics()
    status = status_with(("r1", "n1", TierReport(host=host_stats(), redis=REDIS)))
    text = metrics.render(status).decode()
    for line in (
        "# TYPE cachesmith_host_hits_total counter",
        "# TYPE cachesmith_host_entries gauge",
        'cachesmith_host_hits_total{node="n1"} 7.0',
        'cachesmith_host_misses_total{node="n1"} 5.0',
        'cachesmith_host_collisions_total{node="n1"} 1.0',
        'cachesmith_host_evictions_total{node="n1"} 4.0',
        'cachesmith_host_refused_total{node="n1"} 6.0',
        'cachesmith_host_capacity_bytes{node="n1"} 1000.0',
        'cachesmith_host_used_bytes{node="n1"} 300.0',
        'cachesmith_host_largest_free_bytes{node="n1"} 700.0',
        'cachesmith_host_entries{node="n1"} 3.0',
        'cachesmith_host_leases{node="n1"} 1.0',
        'cachesmith_host_reservations{node="n1"} 2.0',
        "# TYPE cachesmith_redis_misses_total counter",
        'cachesmith_redis_lookup_hits_total{replica="r1"} 9.0',
        'cachesmith_redis_misses_total{reason="absent",replica="r1"} 4.0',
        'cachesmith_redis_misses_total{reason="deadline",replica="r1"} 1.0',
        'cachesmith_redis_chunks_read_total{replica="r1"} 8.0',
        'cachesmith_redis_read_ms_total{replica="r1"} 64.0',
        'cachesmith_redis_read_bytes_total{replica="r1"} 800.0',
        'cachesmith_redis_chunks_written_total{replica="r1"} 6.0',
        'cachesmith_redis_written_bytes_total{replica="r1"} 600.0',
        'cachesmith_redis_writes_lost_total{reason="dropped",replica="r1"} 3.0',
        'cachesmith_redis_writes_lost_total{reason="refused",replica="r1"} 0.0',
        'cachesmith_redis_writes_lost_total{reason="failed",replica="r1"} 1.0',
        'cachesmith_redis_chunks_removed_total{replica="r1"} 2.0',
        'cachesmith_redis_breaker_openings_total{replica="r1"} 5.0',
        'cachesmith_redis_breakers_open{replica="r1"} 1.0',
        'cachesmith_redis_backlog_bytes{replica="r1"} 77.0',
        'cachesmith_redis_bytes_per_ms{replica="r1"} 2e+06',
        'cachesmith_redis_latency_ms{replica="r1"} 0.5',
    ):
        assert f"\n{line}\n" in text, line


def test_a_nodes_store_is_shown_once_and_by_who_has_seen_most_of_it():
    metrics = ServerMetrics()
    status = status_with(
        ("r1", "n1", TierReport(host=host_stats(hits=10))),
        ("r2", "n1", TierReport(host=host_stats(hits=12))),
        ("r3", "n2", TierReport(host=host_stats(hits=3))),
        ("r4", "n3", TierReport()),
    )
    text = metrics.render(status).decode()
    shown = [line for line in text.splitlines() if line.startswith("cachesmith_host_hits_total{")]
    assert sorted(shown) == [
        'cachesmith_host_hits_total{node="n1"} 12.0',
        'cachesmith_host_hits_total{node="n2"} 3.0',
    ]
    gone = metrics.render(SchedulerStatus(epoch="e", num_waiting=0, replicas=())).decode()
    assert 'node="n1"' not in gone
