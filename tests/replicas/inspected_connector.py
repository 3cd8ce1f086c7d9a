"""Our connector, in an engine that can be asked what it holds: for tests that look for leaks.

vLLM imports this module in the engine's core process, and in its workers. It adds methods to their
classes: AsyncLLM's utility calls and `collective_rpc` go by a method's name. They are answered
between two engine steps.
"""

from collections import Counter

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.engine.core import EngineCore

from replicas import vllm_connector
from replicas.connector_scheduler import SchedulerSide
from replicas.connector_types import ResultParams
from replicas.vllm_connector import CacheSmithConnector
from replicas.vllm_worker import CacheSmithWorker

__all__ = ["CacheSmithConnector"]


class CountingSide(SchedulerSide):
    """Counts in which state requests end; one that is not aborted is DONE by then."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.ended: Counter[str] = Counter()

    def finished(self, request_id: str) -> ResultParams | None:
        job = self._jobs.get(request_id)
        if job is not None:
            self.ended[job.state.name] += 1
        return super().finished(request_id)


def ended(core: EngineCore) -> dict[str, int]:
    return dict(core.scheduler.connector._scheduler.ended)


def held_by_scheduler(core: EngineCore) -> dict[str, int]:
    """What vLLM's scheduler and our scheduler side hold now."""
    scheduler, pool = core.scheduler, core.scheduler.kv_cache_manager.block_pool
    side = scheduler.connector._scheduler
    return {
        "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),  # one is vLLM's own
        "requests": len(scheduler.requests),
        "preempted": sum(r.num_preemptions > 0 for r in scheduler.requests.values()),
        "jobs": len(side._jobs),
        "gathering": len(side._gathering),
        "allocated": len(side._allocated) + len(side._restores),
    }


def held_by_worker(worker: CacheSmithWorker) -> dict[str, int]:
    """What one rank's lanes hold now."""
    side = get_kv_transfer_group()._worker
    lanes = side._requests, side._ingests
    return {
        "running": sum(lane.running is not None for lane in lanes),
        "queued": sum(len(lane.queue) for lane in lanes),
        "parked": len(side._parking),
        "unreported": len(side._finished) + len(side._reports) + len(side._failed_blocks),
    }


vllm_connector.SchedulerSide = CountingSide
EngineCore.ended = ended
EngineCore.held_by_scheduler = held_by_scheduler
CacheSmithWorker.held_by_worker = held_by_worker
