"""A run from nothing to nothing: hosts, `ray up`, application, load with faults, `ray down`."""

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deploy.testbed import application, interrupts
from deploy.testbed.accounting import by_second, tally
from deploy.testbed.application import MODEL_NAME
from deploy.testbed.collect import collect_logs, write_lines
from deploy.testbed.errors import TestbedError
from deploy.testbed.experiment import Experiment, Observed
from deploy.testbed.fault_plan import FaultPlan
from deploy.testbed.faults import Faults
from deploy.testbed.hosts import SOURCE_ROOT, Host, check_prerequisites, running_hosts
from deploy.testbed.processes import Process
from deploy.testbed.prompts import make_prompts
from deploy.testbed.ray_cluster import start_cluster
from deploy.testbed.recovery import Whole, fault_results, num_served
from deploy.testbed.redis_server import HostRedis
from deploy.testbed.report import RunResult
from deploy.testbed.slots import take_slot

Progress = Callable[[str], None]

_GCS_REDIS_PORT, _KV_REDIS_PORT = 6380, 6381
_NUM_PROMPTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Raises TestbedError for values that do not go together."""

    num_hosts: int
    plan: FaultPlan
    rate: float  # requests a second
    seconds: float
    engine: str
    out: Path
    settings: Path | None = None
    ready_timeout_s: float = 900.0
    recovery_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.num_hosts < 2:
            raise TestbedError(f"--hosts: must be 2 or more, got {self.num_hosts}")
        for name in ("rate", "seconds"):
            if getattr(self, name) <= 0:
                raise TestbedError(f"--{name}: must be more than 0, got {getattr(self, name)}")
        if self.plan.end_s >= self.seconds:
            raise TestbedError(
                f"--seconds: must be more than {self.plan.end_s:g}, when the last fault comes, "
                f"got {self.seconds:g}"
            )
        self.plan.check_hosts(self.num_hosts)


@dataclass(slots=True)
class _Steps:
    """Says which step runs, and keeps how long each took."""

    progress: Progress
    took_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.progress(name)
        began_s = time.monotonic()
        yield
        self.took_s[name] = time.monotonic() - began_s


def run(options: RunOptions, progress: Progress) -> RunResult:
    """Raises TestbedError. Whatever ends it, nothing of the cluster is left."""
    check_prerequisites()
    options.out.mkdir(parents=True, exist_ok=True)
    steps = _Steps(progress)
    with take_slot() as slot:
        folder = slot.folder / "run"
        folder.mkdir()
        with steps("model"):
            model_dir = _make_model(folder / MODEL_NAME)
        with steps("hosts"):
            running = running_hosts(slot, options.num_hosts)
        with running as hosts:
            progress(f"{slot.name}: {', '.join(host.address for host in hosts)}")
            try:
                observed, whole, left = _on_hosts(
                    options, steps, hosts, folder, name=slot.name, model_dir=model_dir
                )
            except KeyboardInterrupt:
                interrupts.ignore()
                raise
            finally:
                num_files = collect_logs(hosts, options.out / "logs")
                for log in folder.glob("*.log"):
                    (options.out / log.name).write_bytes(log.read_bytes())
                progress(f"{num_files} log files of the hosts are in {options.out / 'logs'}")
    write_lines(options.out / "answers.jsonl", observed.answers)
    write_lines(options.out / "samples.jsonl", observed.samples)
    return RunResult(
        commit=_commit(),
        engine=options.engine,
        num_hosts=options.num_hosts,
        rate=options.rate,
        seconds=len(observed.answers) / options.rate,
        tally=tally(observed.answers, observed.references),
        served=num_served(observed.samples),
        faults=tuple(fault_results(observed.struck, observed.samples, observed.answers, whole)),
        is_whole=observed.is_whole,
        left_processes={
            name: tuple(process.title for process in processes) for name, processes in left.items()
        },
        steps_s=steps.took_s,
        by_second=tuple(by_second(observed.answers)),
    )


def _on_hosts(
    options: RunOptions,
    steps: _Steps,
    hosts: list[Host],
    folder: Path,
    *,
    name: str,
    model_dir: Path,
) -> tuple[Observed, Whole, dict[str, list[Process]]]:
    """What was seen, what was to be there, and what `ray down` left."""
    gcs_redis = HostRedis(hosts[0], _GCS_REDIS_PORT, folder)
    kv_redis = HostRedis(hosts[0], _KV_REDIS_PORT, folder)
    settings = application.application_settings(
        options.settings, model_dir=model_dir, redis_url=kv_redis.url
    )
    whole = Whole(
        num_nodes=options.num_hosts,
        num_replicas=settings.replicas.num,
        num_ingresses=settings.http.ingress_replicas,
        max_waiting=options.rate,  # a second's worth
    )
    prompts = make_prompts(_NUM_PROMPTS)
    gcs_redis.start()
    kv_redis.start()
    with steps("ray up"):
        cluster = start_cluster(hosts, folder, name=name, gcs_redis=gcs_redis)
    with steps("deploy"):
        application.deploy(cluster, settings, engine=options.engine)
        application.wait_ready(
            cluster, num_replicas=whole.num_replicas, timeout_s=options.ready_timeout_s
        )
        application.store_documents(cluster, prompts)
    experiment = Experiment(
        cluster=cluster,
        faults=Faults(cluster, kv_redis),
        prompts=prompts,
        whole=whole,
        progress=steps.progress,
        recovery_timeout_s=options.recovery_timeout_s,
    )
    with steps("load"):
        observed = asyncio.run(
            experiment.run(options.plan, rate=options.rate, seconds=options.seconds)
        )
    kv_redis.stop()
    with steps("ray down"):
        left = cluster.down(beside=gcs_redis)
    gcs_redis.stop()
    return observed, whole, left


def _make_model(directory: Path) -> Path:
    from transformers.utils.logging import disable_progress_bar

    from deploy.tiny_models import make_tiny_qwen3  # brings torch

    disable_progress_bar()
    return make_tiny_qwen3(directory, num_layers=4, max_position_embeddings=4096)


def _commit() -> str:
    done = subprocess.run(
        ["git", "-C", str(SOURCE_ROOT), "rev-parse", "HEAD"],
        check=False,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "unknown"
