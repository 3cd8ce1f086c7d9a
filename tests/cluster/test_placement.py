"""Where Serve puts replicas and ingresses, on nodes whose GPUs are numbers in Ray's book."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from cluster import scheduler_actor
from cluster.config import (
    ClusterConfig,
    IngressConfig,
    ReplicaConfig,
    SchedulerAddress,
    SchedulerConfig,
    scheduler_address,
)
from cluster.deployments import cluster_app
from deploy.app import ingresses_per_node
from tests.cluster.harness import APP, MODEL, REPO, Server, free_port, wait_until
from tests.fakes.byte_tokenizer import write_model_dir
from tests.fakes.fake_engine import FakeEngineConfig

pytestmark = pytest.mark.cluster

NODE = {
    "num_cpus": 4,
    "num_gpus": 1,
    "object_store_memory": 100 * 1024 * 1024,
    "node_ip_address": "127.0.0.1",
}


@dataclass
class Nodes:
    cluster: Cluster
    server: Server
    num_single: int = 1

    def have_single(self, num: int) -> None:
        """So many nodes with one GPU."""
        while self.num_single < num:
            self.cluster.add_node(**NODE)
            self.num_single += 1

    def run(self, **config: Any) -> None:
        server = self.server
        base = ClusterConfig(
            app_name=APP,
            ingress=IngressConfig(model=str(server.model_dir), model_name=MODEL),
            replica=ReplicaConfig(
                builder="tests.fakes.fake_engine:build",
                engine=FakeEngineConfig(state_dir=str(server.state_dir)),
            ),
            graceful_shutdown_s=1.0,
        )
        target = serve.RunTarget(
            target=cluster_app(replace(base, **config)), name=APP, route_prefix="/"
        )
        serve.run_many([target], wait_for_applications_running=False)

    def nodes_of(self, deployment: str) -> list[str]:
        details = serve.context._get_global_client().get_serve_details()
        found = details["applications"][APP]["deployments"].get(deployment, {"replicas": []})
        return [r["node_id"] for r in found["replicas"] if r["state"] == "RUNNING"]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """One node with a GPU; tests add others."""
    tmp = tmp_path_factory.mktemp("placed")
    (tmp / "state").mkdir()
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPO))  # of all that the nodes start
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            ray.init(address=cluster.address, log_to_driver=False)
            serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
            server = Server(
                url=f"http://127.0.0.1:{port}",
                state_dir=tmp / "state",
                model_dir=write_model_dir(tmp / "model"),
            )
            yield Nodes(cluster, server)
        finally:
            serve.shutdown()
            scheduler_actor.stop(scheduler_address(APP))
            ray.shutdown()
            cluster.shutdown()


def test_ingresses_spread_over_nodes_and_start_on_one(nodes: Nodes):
    nodes.run(num_ingresses=2, max_ingresses_per_node=ingresses_per_node(2, 1))
    wait_until(lambda: len(nodes.nodes_of("Ingress")) == 2, timeout_s=120, what="two ingresses")
    assert len(set(nodes.nodes_of("Ingress"))) == 1
    nodes.have_single(2)
    nodes.run(num_ingresses=2, max_ingresses_per_node=ingresses_per_node(2, 2))
    wait_until(
        lambda: len(set(nodes.nodes_of("Ingress"))) == 2, timeout_s=120, what="one on each node"
    )
    serve.delete(APP)


def test_replicas_go_where_all_gpus_of_their_ranks_are(nodes: Nodes):
    nodes.have_single(2)
    two = nodes.cluster.add_node(**{**NODE, "num_gpus": 2})
    nodes.run(num_replicas=2, gpus_per_replica=2.0)
    wait_until(lambda: nodes.nodes_of("Replica"), timeout_s=120, what="the first replica")
    assert nodes.nodes_of("Replica") == [two.node_id]
    # two GPUs are free, on two nodes: they are none for a replica
    wait_until(lambda: ray.available_resources().get("GPU") == 2, timeout_s=60, what="two are free")
    time.sleep(2.0)
    assert nodes.nodes_of("Replica") == [two.node_id]
    three = nodes.cluster.add_node(**{**NODE, "num_gpus": 3})
    wait_until(lambda: len(nodes.nodes_of("Replica")) == 2, timeout_s=120, what="the second one")
    assert set(nodes.nodes_of("Replica")) == {two.node_id, three.node_id}
    seen = nodes.server.gpus()
    assert len(seen) == 2
    for ids in seen.values():
        assert len(set(ids)) == 2 and set(ids) <= {"0", "1", "2"}


def test_a_scheduler_that_no_ingress_asks_ends_for_good(nodes: Nodes):
    address = SchedulerAddress(name="unused")
    config = SchedulerConfig(unused_s=3.0).for_model(4)
    handle = scheduler_actor.join(address, config)
    ray.get(handle.adopt.remote(replace(config, generation=5)))
    ray.get(scheduler_actor.join(address, replace(config, generation=4)).status.remote())
    assert ray.get(handle.status.remote()).generation == 5

    def is_gone() -> bool:
        try:
            scheduler_actor.find(address)
        except ValueError:
            return True
        return False

    wait_until(is_gone, timeout_s=60, what="it has ended")
    # who needs one again gets one
    assert ray.get(scheduler_actor.join(address, config).status.remote()).generation == 0
    scheduler_actor.stop(address)
