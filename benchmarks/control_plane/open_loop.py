"""An open-loop HTTP load whose answers say when their call reached the replica."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request, in ms from when the client began to send it."""

    to_replica_ms: float
    to_first_byte_ms: float


class Client:
    """A context. Raises RuntimeError for an answer that is not a stream with a stamp."""

    async def __aenter__(self) -> "Client":
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=120)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def ask(self, url: str, body: bytes) -> Sample:
        started_ns = time.monotonic_ns()
        headers = {"Content-Type": "application/json"}
        async with self._http.post(url, data=body, headers=headers) as response:
            first = await response.content.readany()
            first_byte_ns = time.monotonic_ns()
            content = first + await response.content.read()
            if response.status != 200:
                raise RuntimeError(f"{url} answered {response.status}: {content[:300]!r}")
        return Sample(
            to_replica_ms=(_stamp_ns(content) - started_ns) / 1e6,
            to_first_byte_ms=(first_byte_ns - started_ns) / 1e6,
        )

    async def load(
        self, url: str, bodies: Sequence[bytes], *, rate_per_s: float, rng: random.Random
    ) -> list[Sample]:
        """Send all bodies at Poisson times, however long answers take."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        asking = []
        for body in bodies:
            due_s += rng.expovariate(rate_per_s)
            await asyncio.sleep(due_s - loop.time())
            asking.append(asyncio.create_task(self.ask(url, body)))
        return await asyncio.gather(*asking)


def _stamp_ns(content: bytes) -> int:
    """The first text of the stream."""
    for line in content.splitlines():
        if line.startswith(b"data: {"):
            choices = json.loads(line.removeprefix(b"data: ")).get("choices") or [{}]
            if text := choices[0].get("delta", {}).get("content"):
                return int(text)
    raise RuntimeError(f"no stamp in {content[:300]!r}")
