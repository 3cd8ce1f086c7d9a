"""Sizing on a real Ray and Serve: up in a burst, down after it, to zero and back."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import ray

from cluster.config import AutoscalingSpec
from planner import LoadSignal, QueueLimits, ScalingConfig
from tests.cluster.harness import (
    Server,
    chat_body,
    running_cluster,
    wait_until,
)

pytestmark = pytest.mark.ray

MOST = 3
PREFILL_MS = 300.0
PATIENCE_S = 120.0  # a replica's process takes seconds to start, many of them on a busy machine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    scaling = ScalingConfig(max_replicas=MOST, down_after_s=2.0, scale_to_zero_after_s=4.0)
    limits = QueueLimits(max_waiting=256, max_batch_requests=1)
    with running_cluster(
        tmp_path_factory.mktemp("cluster"),
        num_replicas=1,
        autoscaling=AutoscalingSpec(scaling=scaling),
        limits=limits,
    ) as server:
        yield server


def signal(server: Server) -> LoadSignal:
    return ray.get(server.scheduler().signal.remote(), timeout=10)


def post(server: Server, **fields: object) -> httpx.Response:
    body = chat_body(max_tokens=2, slo={"ttft_ms": 1500}, **fields)
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)


class MostSeen:
    """Watches how many replicas the scheduler can use."""

    def __init__(self, server: Server) -> None:
        self.most = 0
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "MostSeen":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self.most = max(self.most, signal(self._server).num_ready)


def test_a_burst_is_met_with_more_replicas_which_leave_without_failing_a_request(server: Server):
    server.delays(prefill_ms=PREFILL_MS, token_ms=300, cost_ms=PREFILL_MS, start_ms=200)
    is_over = threading.Event()

    def ask_until_over() -> set[int]:
        codes = set()
        while not is_over.is_set():
            codes.add(post(server).status_code)
        return codes

    with MostSeen(server) as seen, ThreadPoolExecutor(16) as pool:
        burst = [pool.submit(ask_until_over) for _ in range(12)]
        try:
            wait_until(lambda: seen.most == MOST, timeout_s=PATIENCE_S, what="all are up")
        finally:
            is_over.set()
        assert set().union(*(codes.result() for codes in burst)) == {200}
        assert signal(server).load_ms is not None
        # a trickle, while the others drain and leave
        trickle = []
        deadline = time.monotonic() + PATIENCE_S
        while signal(server).num_ready > 1 or len(server.replica_pids()) > 1:
            assert time.monotonic() < deadline, "back to one"
            trickle.append(pool.submit(post, server))
            time.sleep(0.5)
        assert {future.result().status_code for future in trickle} == {200}
    assert server.num_events("cancelled") == 0


def test_the_last_replica_sleeps_and_a_request_wakes_one(server: Server):
    server.delays(prefill_ms=10, cost_ms=10, start_ms=500)
    assert post(server).status_code == 200
    wait_until(lambda: not server.replica_pids(), timeout_s=PATIENCE_S, what="nobody is up")
    assert server.health().status_code == 200  # or no balancer would ever send it a request
    assert server.health().json()["replicas"] == []
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: post(server), range(3)))
    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
    assert len(server.replica_pids()) == 1
