"""The worker class given to vLLM: its own worker, which hands its model to the connector."""

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from replicas.core_pinning import PIN_CORES, pin_to_gpu
from replicas.vllm_connector import CacheSmithConnector

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker


class CacheSmithWorker(BaseWorker):
    def init_device(self) -> None:
        if current_platform.is_cpu() and hasattr(torch.cpu, "_init_amx"):
            # ask the kernel for the AMX tiles: vLLM's CPU kernels use them without asking and die
            torch.cpu._init_amx()
        super().init_device()
        if self.vllm_config.additional_config.get(PIN_CORES):
            pin_to_gpu(self.local_rank)

    def initialize_from_config(self, kv_cache_config: object) -> None:
        super().initialize_from_config(kv_cache_config)
        if has_kv_transfer_group():
            connector = get_kv_transfer_group()
            assert isinstance(connector, CacheSmithConnector)
            connector.bind_model_runner(self.model_runner)

    def drop_parked(self, park_id: str) -> None:
        """Called through the engine, between two steps."""
        get_kv_transfer_group().drop_parked(park_id)
