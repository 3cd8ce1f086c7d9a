"""Answers and samples for the testbed's own tests."""

from typing import Any

from deploy.testbed.accounting import References, Way
from deploy.testbed.client import Answer
from deploy.testbed.watch import Sample

WAY = Way(prompt=0, signal="qci", warmup_depth=1, probe_len=1, num_chosen=7, num_context=60)
REFERENCES = References(whole={0: "one two", 1: "three four"}, ways={WAY: "one six"}, num_tokens=2)


def did(**fields: Any) -> dict[str, Any]:
    """A `cachesmith` field of an answer that goes `WAY`."""
    return {
        "signal": "qci",
        "warmup_depth": 1,
        "probe_len": 1,
        "coverage": 0.1167,
        "num_context_tokens": 60,
        "num_miss_tokens": 0,
        "num_filled_tokens": 0,
        "full_prefill": False,
        "recovered": False,
        **fields,
    }


def answer(**fields: Any) -> Answer:
    """A right one at coverage 1."""
    values: dict[str, Any] = {
        "index": 0,
        "prompt": 0,
        "is_exact": True,
        "started_s": 0.0,
        "ended_s": 0.5,
        "host": "10.0.0.1",
        "status": 200,
        "ttft_ms": 50.0,
        "is_closed": True,
        "num_ends": 1,
        "num_tokens": 2,
        "text": "one two",
        "did": did(coverage=1.0),
    }
    return Answer(**{**values, **fields})


def sample(at_s: float, **fields: Any) -> Sample:
    """A look at a cluster of two nodes and replicas, one ingress, with nothing broken."""
    values: dict[str, Any] = {
        "proxies": ("10.0.0.1", "10.0.0.2"),
        "nodes": frozenset({"n1", "n2"}),
        "replicas": frozenset({"r1", "r2"}),
        "ingresses": frozenset({"i1"}),
        "ready": frozenset({"r1", "r2"}),
        "num_waiting": 0,
        "scheduler": "s/1",
        "breakers_open": 0,
        "num_ok": 0,
    }
    return Sample(at_s=at_s, **{**values, **fields})
