"""`cachesmith deploy` on a Ray of two nodes: new, changed under load, several, removed."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster
from ray.exceptions import RayError

from cluster import scheduler_actor
from cluster.config import scheduler_address
from cluster.messages import SchedulerStatus
from deploy.cli import main
from tests.cluster.harness import MODEL, REPO, Server, chat_body, free_port, wait_until
from tests.fakes.byte_tokenizer import write_model_dir

pytestmark = pytest.mark.cluster

BUILDER = "tests.fakes.apps:build"
LOOPBACK = "127.0.0.1"


@dataclass
class Deployed:
    """A cluster, and a folder of state for each application."""

    dashboard: str
    port: int
    tmp: Path
    model_dir: Path

    def server(self, name: str, route_prefix: str = "") -> Server:
        url = f"http://{LOOPBACK}:{self.port}{route_prefix}"
        return Server(url=url, state_dir=self.tmp / name, model_dir=self.model_dir)

    def deploy(self, name: str, *options: str, route_prefix: str = "/", **sections: dict) -> int:
        settings = {
            "model": {"name_or_dir": str(self.model_dir), "served_name": MODEL},
            "kv_tier": {"host": {"directory": str(self.tmp / name)}},
            **sections,
        }
        config = self.tmp / f"{name}.yaml"
        config.write_text(yaml.safe_dump(settings))
        argv = ["deploy", "--config", str(config), "--name", name, "--route-prefix", route_prefix]
        return main([*argv, "--address", self.dashboard, "--import-path", BUILDER, *options])

    def remove(self, name: str) -> int:
        return main(["deploy", "--remove", name, "--address", self.dashboard])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    tmp = tmp_path_factory.mktemp("deployed")
    port, dashboard_port = free_port(), free_port()
    node = {"num_cpus": 4, "object_store_memory": 100 * 1024 * 1024, "node_ip_address": LOOPBACK}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPO))  # of all that the nodes start
        nodes = Cluster(
            initialize_head=True,
            head_node_args={
                **node,
                "include_dashboard": True,
                "dashboard_host": LOOPBACK,
                "dashboard_port": dashboard_port,
            },
        )
        nodes.add_node(**node)
        try:
            ray.init(address=nodes.address, log_to_driver=False)
            serve.start(http_options={"host": LOOPBACK, "port": port}, proxy_location="HeadOnly")
            yield Deployed(
                dashboard=f"http://{LOOPBACK}:{dashboard_port}",
                port=port,
                tmp=tmp,
                model_dir=write_model_dir(tmp / "model"),
            )
        finally:
            serve.shutdown()
            ray.shutdown()
            nodes.shutdown()


def post(server: Server) -> httpx.Response:
    url, body = f"{server.url}/v1/chat/completions", chat_body(max_tokens=5)
    return httpx.post(url, json=body, timeout=120.0)


@contextmanager
def load(server: Server, num_clients: int = 3) -> Iterator[list[httpx.Response]]:
    """Requests, one after the other from each client, until the block ends; their answers."""
    answers: list[httpx.Response] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answers.append(post(server))
            time.sleep(0.05)

    with ThreadPoolExecutor(num_clients) as pool:
        clients = [pool.submit(ask) for _ in range(num_clients)]
        try:
            yield answers
        finally:
            stop.set()
        for client in clients:
            client.result()


def status_of(app: str) -> SchedulerStatus | None:
    """None while the scheduler restarts."""
    try:
        return ray.get(scheduler_actor.find(scheduler_address(app)).status.remote())
    except RayError:
        return None


def has_scheduler(app: str) -> bool:
    try:
        scheduler_actor.find(scheduler_address(app))
    except ValueError:
        return False
    return True


def nodes_of(app: str, deployment: str) -> list[str]:
    found = serve.context._get_global_client().get_serve_details()
    replicas = found["applications"][app]["deployments"][deployment]["replicas"]
    return [r["node_id"] for r in replicas if r["state"] == "RUNNING"]


def test_an_application_comes_changes_under_load_and_goes(cluster: Deployed, capsys):
    http = {"ingress_replicas": 2}
    assert cluster.deploy("one", "--replicas", "2", http=http) == 0
    out = capsys.readouterr().out
    assert "one is new" in out and "one runs: " in out
    server = cluster.server("one")
    wait_until(lambda: server.num_ready() == 2, timeout_s=60, what="two replicas")
    assert len(set(nodes_of("one", "Ingress"))) == 2
    server.delays(prefill_ms=50, token_ms=20)
    before = set(server.replica_pids())

    with load(server) as answers:
        wait_until(lambda: len(answers) > 5, timeout_s=60, what="load")
        # more replicas: nothing restarts
        assert cluster.deploy("one", "--replicas", "3", http=http) == 0
        assert "no replica restarts" in capsys.readouterr().out
        wait_until(lambda: server.num_ready() == 3, timeout_s=60, what="three replicas")
        assert before < set(server.replica_pids())
        middle = set(server.replica_pids())
        # another policy: every replica and ingress is replaced
        policy = {"policy": "edf", "gather_ms": 1.0}
        assert cluster.deploy("one", "--replicas", "3", http=http, scheduler=policy) == 0
        out = capsys.readouterr().out
        assert 'scheduler.policy: default -> "edf"' in out and "replaced" in out
        wait_until(
            lambda: server.num_ready() == 3 and not middle & set(server.replica_pids()),
            timeout_s=120,
            what="all are replaced",
        )
        num = len(answers)
        wait_until(lambda: len(answers) > num + 10, timeout_s=60, what="more load")
        # fewer replicas: those that stay are the same
        late = set(server.replica_pids())
        assert cluster.deploy("one", "--replicas", "2", http=http, scheduler=policy) == 0
        wait_until(lambda: server.num_ready() == 2, timeout_s=60, what="two replicas")
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {200}, [a.text for a in answers if a.status_code != 200]
    wait_until(lambda: set(server.replica_pids()) < late, timeout_s=60, what="one has ended")

    # Ray restarts the scheduler with the config of its start: the ingresses bring it up to date
    before_kill = status_of("one")
    assert before_kill is not None and before_kill.generation > 0
    ray.kill(scheduler_actor.find(scheduler_address("one")), no_restart=False)
    wait_until(
        lambda: (
            (s := status_of("one")) is not None
            and s.epoch != before_kill.epoch
            and s.generation == before_kill.generation
            and len(s.ready) == 2
        ),
        timeout_s=60,
        what="the restarted scheduler is the newest deployment's",
    )
    assert cluster.remove("one") == 0
    assert "one is removed" in capsys.readouterr().out


def test_a_lone_replica_and_ingress_change_without_a_gap(cluster: Deployed, capsys):
    replicas = {"max_surge": 1.0}
    assert cluster.deploy("lone", replicas=replicas) == 0
    server = cluster.server("lone")
    wait_until(lambda: server.num_ready() == 1, timeout_s=60, what="a replica")
    server.delays(prefill_ms=20, token_ms=10)
    (first,) = server.replica_pids()
    with load(server, num_clients=2) as answers:
        wait_until(lambda: len(answers) > 5, timeout_s=60, what="load")
        assert cluster.deploy("lone", replicas=replicas, scheduler={"gather_ms": 1.0}) == 0
        wait_until(lambda: first not in server.replica_pids(), timeout_s=120, what="it is replaced")
        num = len(answers)
        wait_until(lambda: len(answers) > num + 5, timeout_s=60, what="more load")
    assert {answer.status_code for answer in answers} == {200}
    # the new one was there before the first ended
    events = server.events()
    starts = [i for i, event in enumerate(events) if event.startswith("pid ")]
    assert len(starts) == 2 and starts[1] < events.index("closed")

    # what can not start says why, and the old replica serves
    (server.state_dir / "broken").touch()
    assert cluster.deploy("lone", replicas=replicas, scheduler={"gather_ms": 2.0}) == 1
    error = capsys.readouterr().err
    assert "lone failed to start" in error and "told to be broken" in error
    assert post(server).status_code == 200
    (server.state_dir / "broken").unlink()
    assert cluster.remove("lone") == 0


def test_applications_live_beside_each_other(cluster: Deployed, capsys):
    assert cluster.deploy("two", route_prefix="/two") == 0
    assert cluster.deploy("three", route_prefix="/two") == 1
    assert "--route-prefix: /two is that of the application two" in capsys.readouterr().err
    two = cluster.server("two", "/two")
    pids = two.replica_pids()
    assert cluster.deploy("three", route_prefix="/three") == 0
    three = cluster.server("three", "/three")
    for server in (two, three):
        wait_until(lambda server=server: server.num_ready() == 1, timeout_s=60, what="ready")
        assert post(server).status_code == 200
        assert main(["status", "--url", server.url]) == 0
    assert two.replica_pids() == pids
    wait_until(
        lambda: two.num_events("done") == three.num_events("done") == 1,
        timeout_s=30,
        what="each has answered its own request",
    )
    # gone with its scheduler, and the other stays
    assert cluster.remove("three") == 0
    assert cluster.remove("three") == 1
    assert post(two).status_code == 200 and two.replica_pids() == pids
    wait_until(lambda: not has_scheduler("three"), timeout_s=180, what="its scheduler has ended")
    assert has_scheduler("two") and cluster.remove("two") == 0
