"""What Ray Serve itself takes: the hops of our path, and nothing done at any of them."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.actor import ActorHandle
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

_LOGGING = LoggingConfig(enable_access_log=False)  # as ours
_api = FastAPI()


class BareScheduler:
    async def admit(self, num_bytes: int) -> int:
        return num_bytes


class BareReplica:
    async def generate(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """As the instant engine: the time of the call, then empty deltas."""
        yield str(time.monotonic_ns())
        for _ in range(body["max_tokens"] - 1):
            yield ""


async def _events(deltas: AsyncIterator[str]) -> AsyncIterator[str]:
    async for text in deltas:
        yield f'data: {{"choices":[{{"delta":{{"content":"{text}"}}}}]}}\n\n'


@serve.ingress(_api)
class BareIngress:
    def __init__(self, scheduler: ActorHandle[Any], replicas: DeploymentHandle) -> None:
        self._scheduler = scheduler
        self._replicas = replicas.options(stream=True)

    @_api.post("/v1/chat/completions")
    async def chat(self, request: Request) -> StreamingResponse:
        raw = await request.body()
        await self._scheduler.admit.remote(len(raw))
        deltas = self._replicas.generate.remote(json.loads(raw))
        return StreamingResponse(_events(deltas), media_type="text/event-stream")


def bare_app(*, num_replicas: int, scheduler: ActorHandle[Any]) -> Application:
    """scheduler: of a BareScheduler"""
    replicas = serve.deployment(
        BareReplica,
        name="BareReplica",
        num_replicas=num_replicas,
        max_ongoing_requests=256,
        logging_config=_LOGGING,
        ray_actor_options={"num_cpus": 0.1},
    ).bind()
    ingress = serve.deployment(
        BareIngress,
        name="BareIngress",
        max_ongoing_requests=512,
        logging_config=_LOGGING,
        ray_actor_options={"num_cpus": 0.1},
    )
    return ingress.bind(scheduler, replicas)
