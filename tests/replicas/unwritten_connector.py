"""A connector that leaves vLLM's cache unwritten: the negative control of the exactness tests."""

import torch

from replicas import connector_worker
from replicas.vllm_connector import CacheSmithConnector

__all__ = ["CacheSmithConnector"]


class UnwrittenSink(connector_worker.PagedSink):
    def write(self, layer, k, v):
        super().write(layer, torch.zeros_like(k), torch.zeros_like(v))


connector_worker.PagedSink = UnwrittenSink
