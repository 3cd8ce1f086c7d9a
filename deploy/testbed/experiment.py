"""The load with its faults on a running cluster, and what was seen of it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from deploy.testbed import load
from deploy.testbed.accounting import References, is_answered, is_whole, way_of
from deploy.testbed.application import MODEL_NAME
from deploy.testbed.client import Answer, Client
from deploy.testbed.errors import TestbedError
from deploy.testbed.fault_plan import REPAIRS, FaultPlan
from deploy.testbed.faults import Faults, Struck
from deploy.testbed.prompts import Prompt
from deploy.testbed.ray_cluster import RayCluster
from deploy.testbed.recovery import Whole
from deploy.testbed.watch import Sample, Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Times are seconds since the watch began, a moment before the load."""

    answers: Sequence[Answer]
    struck: Sequence[Struck]
    samples: Sequence[Sample]
    references: References
    is_whole: bool  # whether everything was there again at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    cluster: RayCluster
    faults: Faults
    prompts: tuple[Prompt, ...]
    whole: Whole
    progress: Callable[[str], None]
    recovery_timeout_s: float

    async def run(self, plan: FaultPlan, *, rate: float, seconds: float) -> Observed:
        """rate: requests a second. Raises TestbedError when it can not begin, or a fault fails."""
        async with self._watched() as (client, watch):
            if not await self._becomes_whole(watch):
                raise TestbedError(f"the cluster is not complete: {watch.samples[-1]}")
            references = await load.ask_whole(client, self.prompts, model=MODEL_NAME)
        async with self._watched() as (client, watch):
            striking = asyncio.create_task(self._strike(plan, watch))
            try:
                answers = await load.send(
                    client,
                    self.prompts,
                    model=MODEL_NAME,
                    rate=rate,
                    seconds=seconds,
                    may_end=striking.done,
                )
                struck = await striking
            finally:
                striking.cancel()
            is_whole_again = await self._becomes_whole(watch)
        if is_whole_again:
            async with self._watched() as (client, _):
                ways = sorted({w for a in answers if is_answered(a) and (w := _partial_way(a))})
                self.progress(f"asking again for {len(ways)} plans that were seen")
                texts = await load.ask_ways(client, self.prompts, ways, model=MODEL_NAME)
                references = replace(references, ways=texts)
        return Observed(
            answers=answers,
            struck=struck,
            samples=watch.samples,
            references=references,
            is_whole=is_whole_again,
        )

    async def _strike(self, plan: FaultPlan, watch: Watch) -> list[Struck]:
        """Returns early when something is not mended in time."""
        struck: list[Struck] = []
        load_began_s = time.monotonic()
        for fault in plan.faults:
            await asyncio.sleep(max(0.0, load_began_s + fault.at_s - time.monotonic()))
            if plan.waits and fault.kind not in REPAIRS:
                waiting_s = time.monotonic()
                if not await self._becomes_whole(watch):
                    break
                load_began_s += time.monotonic() - waiting_s
            at_s = time.monotonic() - watch.began_s
            host = await self.faults.strike(fault)
            self.progress(f"{at_s:5.0f} s  {fault.kind} on {host}")
            struck.append(Struck(fault=fault, at_s=at_s, host=host))
        if plan.waits:
            await self._becomes_whole(watch)
        return struck

    async def _becomes_whole(self, watch: Watch) -> bool:
        """Wait for it. The looks that were taken before do not count."""
        num_seen = len(watch.samples)
        with suppress(TimeoutError):
            async with asyncio.timeout(self.recovery_timeout_s):
                while not any(map(self.whole.is_met, watch.samples[num_seen:])):
                    await asyncio.sleep(0.1)
                return True
        return False

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[tuple[Client, Watch]]:
        """A client and the watch that tells it the proxies, which has had its first look."""
        began_s = time.monotonic()
        watch = Watch(self.cluster, began_s)
        client = Client(lambda: watch.proxies, began_s=began_s)
        watching = asyncio.create_task(watch.run())
        try:
            while not watch.samples and not watching.done():
                await asyncio.sleep(0.05)
            yield client, watch
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await client.close()


def _partial_way(answer: Answer) -> object:
    """The way of an answer whose text full prefill does not tell."""
    assert answer.did is not None
    return None if is_whole(answer.did) else way_of(answer)
