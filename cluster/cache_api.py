"""The administrators' routes: what the tiers hold and did, and how to empty and check them."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query
from pydantic import BaseModel, ConfigDict

from cluster.cache_service import CacheService, Cleared, ReplicaStats, TierChoice, Verified
from replicas.cache_types import CacheEntry, EntryPage, Tier, VerifyReport

MAX_LIMIT = 10_000

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT)]


class VerifyRequest(BaseModel):
    """Which tiers to check, and whether to remove what is damaged."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tier: TierChoice
    repair: bool = False


def add_cache_routes(
    app: FastAPI, cache: Callable[[], CacheService], guard: Callable[..., Awaitable[None]]
) -> None:
    """cache: asked for at each request; guard: a dependency that lets administrators pass"""
    guarded = [Depends(guard)]

    @app.get("/v1/cache", dependencies=guarded)
    async def show_cache(redis_keys: bool = False) -> dict[str, Any]:
        """What the tiers hold and did. `redis_keys` scans Redis, which takes time."""
        return stats_body(await cache().stats(redis_keys=redis_keys))

    @app.get("/v1/cache/chunks", dependencies=guarded)
    async def list_cache(tier: Tier = "host", limit: Limit = 100) -> dict[str, Any]:
        """Entries of a tier, at most `limit` of each node."""
        return entries_body(tier, await cache().entries(tier, limit))

    @app.delete("/v1/cache", dependencies=guarded)
    async def clear_cache(tier: TierChoice) -> dict[str, Any]:
        """Remove everything from a tier, or from all."""
        return cleared_body(await cache().clear(tier))

    @app.post("/v1/cache/verify", dependencies=guarded)
    async def verify_cache(body: VerifyRequest) -> dict[str, Any]:
        """Check all checksums, and remove what is damaged if `repair` says so."""
        found = await cache().verify(body.tier, repair=body.repair)
        return verified_body(found, repair=body.repair)


def stats_body(replicas: list[ReplicaStats]) -> dict[str, Any]:
    nodes: dict[str, Any] = {}
    redis: dict[str, Any] = {}
    keys = None
    for replica in replicas:
        stats = replica.stats
        node = nodes.setdefault(replica.node_id, {"host": None, "verifying": None})
        node["host"] = node["host"] or (stats.tiers.host and asdict(stats.tiers.host))
        node["verifying"] = node["verifying"] or (stats.verifying and asdict(stats.verifying))
        if stats.tiers.redis is not None:
            redis[replica.replica_id] = asdict(stats.tiers.redis)
        if stats.keys is not None:
            keys = asdict(stats.keys)
    has_redis = bool(redis) or keys is not None
    return {
        "object": "cache",
        "nodes": nodes,
        "redis": {"replicas": redis, "keys": keys} if has_redis else None,
    }


def entries_body(tier: Tier, pages: dict[str, EntryPage]) -> dict[str, Any]:
    return {
        "object": "list",
        "tier": tier,
        "has_more": any(page.has_more for page in pages.values()),
        "data": [
            _entry_body(entry, node_id or None)
            for node_id, page in pages.items()
            for entry in page.entries
        ],
    }


def cleared_body(cleared: Cleared) -> dict[str, Any]:
    return {
        "object": "cache",
        "deleted": True,
        "nodes": cleared.entries_by_node,
        "redis": None if cleared.num_redis_keys is None else {"num_keys": cleared.num_redis_keys},
    }


def verified_body(found: Verified, *, repair: bool) -> dict[str, Any]:
    nodes = found.by_node
    status: Literal["sound", "repaired", "damaged"] = "sound"
    if any(report.damaged or report.index_problems for report in found.reports):
        is_left = any(
            report.num_removed < len(report.damaged) or report.index_problems
            for report in found.reports
        )
        status = "damaged" if is_left else "repaired"
    return {
        "object": "cache.verification",
        "status": status,
        "repair": repair,
        "nodes": None if nodes is None else {n: _report_body(nodes[n]) for n in nodes},
        "redis": None if found.redis is None else _report_body(found.redis),
    }


def _entry_body(entry: CacheEntry, node_id: str | None) -> dict[str, Any]:
    fields = asdict(entry)
    return {"id": fields.pop("content_id") or None, "object": "chunk", **fields, "node": node_id}


def _report_body(report: VerifyReport) -> dict[str, Any]:
    body = asdict(report)
    for damaged in body["damaged"]:
        damaged["id"] = damaged.pop("content_id") or None
    return body
