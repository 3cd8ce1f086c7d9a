"""What the scheduler tells of its load, and what the policy makes of it in Serve's controller."""

import gc
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import pytest
from ray.serve.config import AutoscalingConfig

from cluster.autoscaling import serve_config
from cluster.autoscaling_policy import STALE_AFTER_S, SignalReader, SloPolicy
from cluster.config import AutoscalingSpec, ClusterConfig, scheduler_address
from planner import LoadSignal, ScalingConfig
from replicas.interface import ResidencyUpdate
from tests.cluster.harness import wait_until
from tests.cluster.test_scheduler_service import COST, Bench, info, report, scenario

SCALING = ScalingConfig(max_replicas=4)
BUSY = LoadSignal(epoch="e", at_ms=0.0, waiting=((1_000.0, 500.0),) * 6, num_ready=1, load_ms=100.0)


@dataclass
class Context:
    """What the policy reads of Serve's."""

    target_num_replicas: int = 1


class Source:
    """A scheduler that answers, fails or hangs as the test says."""

    def __init__(self, signal: LoadSignal) -> None:
        self.signal = signal
        self.fails = False
        self.go = threading.Event()
        self.go.set()
        self.num_asked = 0

    def __call__(self) -> LoadSignal:
        self.num_asked += 1
        self.go.wait()
        if self.fails:
            raise RuntimeError("the scheduler is gone")
        return self.signal


def policy(read: Callable[[], LoadSignal], *, stale_after_s: float = STALE_AFTER_S) -> SloPolicy:
    scheduler = {"name": "s", "namespace": "n"}
    return SloPolicy(
        scheduler=scheduler, scaling=asdict(SCALING), read=read, stale_after_s=stale_after_s
    )


def call_until(policy: SloPolicy, state: str, context: Context) -> int:
    decided: list[int] = []

    def is_so() -> bool:
        wanted, told = policy(context)
        decided.append(wanted)
        return told["signal"] == state

    wait_until(is_so, timeout_s=30, what=state)
    return decided[-1]


def test_the_policy_does_not_wait_for_a_scheduler_that_hangs():
    source = Source(BUSY)
    source.go.clear()
    asked = policy(source)
    for _ in range(50):  # it would hang here
        wanted, told = asked(Context(target_num_replicas=3))
        assert wanted == 3 and told["signal"] == "stale" and told["error"] == "no signal yet"
    assert source.num_asked <= 1
    source.go.set()
    assert call_until(asked, "fresh", Context()) == 4


def test_the_state_says_why():
    asked = policy(Source(BUSY))
    call_until(asked, "fresh", Context())
    _, told = asked(Context())
    assert told["num_waiting"] == 6 and told["work_ms"] == 3_000.0
    assert told["tightest_slack_ms"] == 1_000.0 and told["load_ms"] == 100.0
    assert told["deadlines"] == pytest.approx(1.0 + 2_000.0 / 900.0)


def test_a_signal_that_has_grown_old_leaves_the_number():
    source = Source(BUSY)
    asked = policy(source, stale_after_s=1.0)
    call_until(asked, "fresh", Context())
    source.fails = True
    assert call_until(asked, "stale", Context(target_num_replicas=2)) == 2
    wait_until(lambda: "gone" in asked(Context())[1]["error"], timeout_s=30, what="it says why")
    source.fails = False
    assert call_until(asked, "fresh", Context()) == 4


def test_a_rule_that_fails_leaves_the_number_and_the_controller_alive():
    asked = policy(Source(replace(BUSY, waiting=None)))  # type: ignore[arg-type]
    assert call_until(asked, "failed", Context(target_num_replicas=2)) == 2


def test_the_thread_ends_with_its_policy():
    source = Source(BUSY)
    asked = policy(source)
    call_until(asked, "fresh", Context())
    threads = [t for t in threading.enumerate() if t.name == "load-signal"]
    del asked
    gc.collect()
    wait_until(lambda: not any(t.is_alive() for t in threads), timeout_s=30, what="it ends")


def test_a_reader_starts_nothing_before_it_is_asked():
    source = Source(BUSY)
    reader = SignalReader(source)
    assert source.num_asked == 0
    reader.latest()
    wait_until(lambda: source.num_asked > 0, timeout_s=30, what="it is read")
    reader.stop()


def test_serve_imports_the_policy_with_what_it_is_told():
    spec = AutoscalingSpec(scaling=replace(SCALING, min_replicas=2, down_after_s=7.0))
    told = serve_config(spec, scheduler_address("app"))
    assert (told.min_replicas, told.initial_replicas, told.max_replicas) == (2, 2, 4)
    assert told.upscale_delay_s == told.downscale_delay_s == told.downscale_to_zero_delay_s == 0.0
    # as it goes to the controller
    again = AutoscalingConfig(**told.model_dump())
    again.policy.set_serialized_policy_def(told.policy.get_serialized_policy_def())
    made = again.policy.get_policy()(**again.policy.policy_kwargs)
    assert made.__class__.__name__ == "SloPolicy"


def test_sleeping_is_told_to_serve_and_its_own_policy_can_not():
    awake = AutoscalingSpec(scaling=replace(SCALING, scale_to_zero_after_s=9.0))
    told = serve_config(awake, scheduler_address("app"))
    assert (told.min_replicas, told.initial_replicas) == (0, 1)
    with pytest.raises(ValueError, match="scale_to_zero_after_s"):
        replace(awake, policy="ongoing")
    plain = AutoscalingSpec(
        scaling=SCALING, policy="ongoing", ongoing={"target_ongoing_requests": 3.0}
    )
    told = serve_config(plain, scheduler_address("app"))
    assert told.policy.is_default_policy_function() and told.target_ongoing_requests == 3.0


def test_the_ingress_has_room_for_all_replicas_that_there_may_be():
    spec = AutoscalingSpec(scaling=SCALING)
    config = ClusterConfig(ingress=None, replica=None, autoscaling=spec)  # type: ignore[arg-type]
    assert config.max_replicas == 4
    assert replace(config, autoscaling=None, num_replicas=2).max_replicas == 2


def test_the_controller_does_not_import_torch_for_it():
    code = (
        "import sys, cluster.autoscaling_policy;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'redis', 'vllm', 'numba')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- the scheduler's signal ----------------------------------------------------------------------


def test_the_signal_of_a_scheduler_that_nobody_has_spoken_to():
    async def test(bench: Bench) -> None:
        seen = bench.service.signal()
        assert seen == pickle.loads(pickle.dumps(seen))
        assert (seen.num_ready, seen.num_active, seen.waiting) == (0, 0, ())
        assert seen.load_ms is None and seen.arrived.count == 0

    scenario(test)


def test_what_waits_has_its_slack_and_its_work():
    async def test(bench: Bench) -> None:
        await bench.ask("a", num_tokens=640, slo_ms=1_000.0)
        seen = bench.service.signal()
        assert seen.waiting == ((1_000.0, 0.0),)  # nobody has said what it costs
        assert seen.arrived.count == 1 and seen.arrived.num_sized == 0
        bench.clock.advance(300.0)
        bench.service.sync_replicas("router", ["r1"])
        bench.service.report(report("r1", info=info(load_ms=4_000.0)))
        ((slack_ms, floor_ms),) = bench.service.signal().waiting
        # without documents there is nothing to leave out: 1 ms and 0.01 ms a token and layer
        assert slack_ms == 700.0 and floor_ms == pytest.approx(1.0 + 0.01 * 640 * 4)
        seen = bench.service.signal()
        assert seen.arrived.num_sized == 1 and seen.arrived.floor_ms == pytest.approx(floor_ms)
        assert seen.arrived.objective_ms == 1_000.0
        assert seen.load_ms == 4_000.0 and seen.num_ready == 1

    scenario(test)


def test_a_ticket_is_no_waiting_work_but_work_in_prefill():
    async def test(bench: Bench) -> None:
        bench.add("r1")
        await bench.ask("a", num_tokens=640)
        await bench.tick()
        seen = bench.service.signal()
        assert seen.waiting == () and seen.num_active == 1
        assert seen.prefill_ms == pytest.approx(1.0 + 0.01 * 640 * 4, rel=0.01)
        bench.clock.advance(10.0)
        assert bench.service.signal().prefill_ms == pytest.approx(seen.prefill_ms - 10.0)
        bench.clock.advance(1e3)
        assert bench.service.signal().prefill_ms == 0.0  # late, not less than nothing
        bench.service.first_token("r1", "a")
        assert bench.service.signal().num_active == 1
        bench.service.finished("a")
        assert bench.service.signal().num_active == 0

    scenario(test)


def test_stored_chunks_make_the_floor_cheaper_than_the_saturation():
    async def test(bench: Bench) -> None:
        chunks = tuple(f"c{i}" for i in range(8))
        bench.add("r1")
        await bench.ask("a", num_tokens=64, chunks=chunks)
        cold = bench.service.signal().arrived
        assert cold.floor_ms == cold.saturation_ms
        hot = ResidencyUpdate(added=chunks, reset=True)
        bench.service.report(report("r1", residency=hot))
        await bench.ask("b", num_tokens=64, chunks=chunks)
        both = bench.service.signal().arrived
        floor_ms = both.floor_ms - cold.floor_ms
        assert floor_ms < both.saturation_ms - cold.saturation_ms < cold.floor_ms

    scenario(test)


def test_refused_requests_count_as_arrivals_and_costs_outlive_their_replica():
    async def test(bench: Bench) -> None:
        bench.add("r1")
        bench.service.signal()
        bench.service.sync_replicas("router", [])
        bench.clock.advance(10_000.0)
        await bench.tick()
        tasks = [await bench.ask(f"q{i}", num_tokens=640) for i in range(6)]  # 4 may wait
        seen = bench.service.signal()
        assert seen.num_ready == 0 and len(seen.waiting) == 4 and seen.arrived.count == 6
        assert all(floor_ms > 0.0 for _, floor_ms in seen.waiting)
        for task in tasks:
            task.cancel()

    scenario(test)


def test_on_a_slower_machine_the_next_request_is_more_work():
    async def test(bench: Bench) -> None:
        bench.add("r1")
        await bench.ask("a", num_tokens=640)
        before = bench.service.signal().waiting[0][1]
        bench.service.report(report("r1", cost=replace(COST, scale=2.0)))
        bench.service.signal()
        await bench.ask("b", num_tokens=640)
        assert bench.service.signal().waiting[1][1] == pytest.approx(2.0 * before)

    scenario(test)
