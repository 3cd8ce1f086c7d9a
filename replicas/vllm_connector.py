"""The vLLM V1 KV connector: vLLM's calls in, ours out. Loaded by module path, vLLM unpatched.

Everything is asynchronous in vLLM's sense: a request waits for its external tokens while the engine
goes on stepping, and each step advances the prefill by some layers.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from kv_tier.arena_view import ArenaView
from kv_tier.host_tier import HostTier, HostTierConfig
from kv_tier.keys import KeySpace
from kv_tier.layout import KvLayout
from kv_tier.page_lock import PageLock
from planner.auto_signal import AutoRule
from planner.clock import MonotonicClock
from replicas.connector_scheduler import SchedulerSide, SliceConfig
from replicas.connector_types import RequestParams, StepMeta, WorkerReport
from replicas.connector_worker import WorkerSettings, WorkerSide
from replicas.parent_watch import end_with_parent
from replicas.vllm_model import VllmModel

logger = logging.getLogger(__name__)

# what travels is ours and free of vLLM, so that it can be tested without it
KVConnectorMetadata.register(StepMeta)
KVConnectorWorkerMetadata.register(WorkerReport)


def layout_of(config: VllmConfig) -> KvLayout:
    """The shape of the served model's stored KV: all heads, whatever the tensor parallelism."""
    model = config.model_config
    return KvLayout(
        num_layers=model.get_num_layers(config.parallel_config),
        num_kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        dtype=str(model.dtype).removeprefix("torch."),
    )


class CacheSmithConnector(KVConnectorBase_V1):
    """One of two sides, by `role`. Settings come in vLLM's `kv_connector_extra_config`:

    arena_dir, arena_bytes, arena_eviction, arena_watermarks (low, high): the node's host tier
    fingerprint, anchor_ids: the fields of the chunk key that vLLM does not know
    slice_layers, idle_slice_layers, hold_ms: see `SliceConfig`
    auto_rule: the fields of `AutoRule`; load_bandwidth_mb_s: of an emulated link, or None
    fill_stalls: whether waits for stored KV recompute
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._layout = layout_of(vllm_config)
        self._directory = Path(extra["arena_dir"])
        self._worker: WorkerSide | None = None
        self._page_lock: PageLock | None = None
        self._scheduler: SchedulerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            end_with_parent()  # this is the engine core's process; its workers end with it
            keys = KeySpace(
                fingerprint=extra["fingerprint"],
                kv_dtype=self._layout.dtype,
                anchor_ids=tuple(extra["anchor_ids"]),
            )
            tier = HostTierConfig(
                directory=self._directory,
                capacity_bytes=extra["arena_bytes"],
                layout=self._layout,
                eviction=extra["arena_eviction"],
                high_watermark=extra["arena_watermarks"][1],
                low_watermark=extra["arena_watermarks"][0],
            )
            slices = SliceConfig(
                decoding=extra["slice_layers"],
                idle=extra["idle_slice_layers"],
                hold_ms=extra["hold_ms"],
            )
            self._scheduler = SchedulerSide(HostTier(tier), keys, slices, MonotonicClock())

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # whatever is not delivered, vLLM computes

    # ---- scheduler side ----

    def on_new_request(self, request: Any) -> None:
        params = RequestParams.from_wire(request.kv_transfer_params)
        self._scheduling.arrived(
            request.request_id, params, num_prompt_tokens=request.num_prompt_tokens
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduling.external_tokens(request.request_id, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            (block_ids,) = blocks.get_block_ids()
            self._scheduling.allocated(
                request.request_id, request.prompt_token_ids, list(block_ids)
            )

    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        return self._scheduling.step(decoding=scheduler_output.total_num_scheduled_tokens > 0)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        assert report is None or isinstance(report, WorkerReport)
        self._scheduling.received(connector_output.finished_recving or set(), report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        result = self._scheduling.finished(request.request_id)
        return False, None if result is None else result.to_wire()

    # ---- worker side ----

    def bind_model_runner(self, runner: Any) -> None:
        """Called by our worker class once the model and its cache are in place."""
        model = VllmModel(
            runner.get_model(),
            total_num_kv_heads=self._layout.num_kv_heads,
            max_rows=self._vllm_config.scheduler_config.max_num_batched_tokens,
        )
        for layer in range(model.num_layers):
            if not hasattr(model.attention_layer(layer).impl, "do_kv_cache_update"):
                raise RuntimeError(
                    f"attention backend {model.attention_layer(layer).attn_backend.get_name()} "
                    "cannot write its KV cache apart from attention: choose another attention "
                    "backend, or serve without chunk reuse"
                )
        extra = self._vllm_config.kv_transfer_config.kv_connector_extra_config
        bandwidth = extra["load_bandwidth_mb_s"]
        settings = WorkerSettings(
            block_size=self._vllm_config.cache_config.block_size,
            auto_rule=AutoRule(**extra["auto_rule"]),
            load_bytes_per_ms=None if bandwidth is None else bandwidth * 1e3,
            fill_stalls=extra["fill_stalls"],
        )
        arena = ArenaView(self._directory, self._layout)
        if model.device.type == "cuda":  # copies to the GPU are faster from page-locked memory
            self._page_lock = PageLock(arena.mapping, device_idx=model.device.index or 0)
            if self._page_lock.problem:
                logger.warning("the arena is not page-locked: %s", self._page_lock.problem)
        self._worker = WorkerSide(arena, model, settings, MonotonicClock())

    def drop_parked(self, park_id: str) -> None:
        if self._worker is not None:
            self._worker.drop_parked(park_id)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is None:
            return  # vLLM's warm-up steps
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMeta)
        self._worker.run_step(meta)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        return None, self._worker.take_finished(finished_req_ids) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks() if self._worker else set()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._worker.take_report() if self._worker else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled when all of its layers are in place."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """vLLM's own prefill and decode are never stored: their KV saw other chunks."""

    def wait_for_save(self) -> None:
        """Nothing is saved behind vLLM's back."""

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._page_lock is not None:
            self._page_lock.close()

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "called on the worker side"
        return self._scheduler
