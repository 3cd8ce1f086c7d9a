"""The load: requests at a fixed rate, whether earlier ones are answered or not."""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import count

from deploy.testbed.accounting import References, Way, is_answered, way_of
from deploy.testbed.client import Answer, Client
from deploy.testbed.errors import TestbedError
from deploy.testbed.prompts import Prompt, body_of

_FULL_PREFILL = {"policy": "full_prefill"}
_EXACT = {"coverage": 1.0}
_ADAPTIVE = {"policy": "adaptive"}


async def send(
    client: Client,
    prompts: Sequence[Prompt],
    *,
    model: str,
    rate: float,
    seconds: float,
    may_end: Callable[[], bool],
) -> list[Answer]:
    """Half of the requests with coverage 1, half adaptive; returns all, in the order of sending.

    rate: requests a second
    seconds: at least so long, and until it `may_end`
    """
    began_s = time.monotonic()
    asking: list[asyncio.Task[Answer]] = []
    async with asyncio.TaskGroup() as group:
        for index in count():
            if index >= rate * seconds and may_end():
                break
            await asyncio.sleep(max(0.0, began_s + index / rate - time.monotonic()))
            is_exact = index % 2 == 0
            prompt = prompts[index // 2 % len(prompts)]
            body = body_of(prompt, model=model, recompute=_EXACT if is_exact else _ADAPTIVE)
            ask = client.ask(body, index=index, prompt=prompt.index, is_exact=is_exact)
            asking.append(group.create_task(ask))
    return [task.result() for task in asking]


async def ask_whole(client: Client, prompts: Sequence[Prompt], *, model: str) -> References:
    """References of full prefill, which coverage 1 must give as well. Raises TestbedError."""
    texts: dict[int, str] = {}
    num_tokens = 0
    for prompt in prompts:
        plain = await _ask(client, prompt, model, _FULL_PREFILL)
        for _ in range(2):  # the first may still miss chunks
            exact = await _ask(client, prompt, model, _EXACT)
            if exact.text != plain.text:
                raise TestbedError(
                    f"before any fault, prompt {prompt.index} at coverage 1 gives {exact.text!r}, "
                    f"full prefill {plain.text!r}"
                )
        texts[prompt.index] = plain.text
        num_tokens = plain.num_tokens or 0
    return References(whole=texts, ways={}, num_tokens=num_tokens)


async def ask_ways(
    client: Client, prompts: Sequence[Prompt], ways: Sequence[Way], *, model: str
) -> dict[Way, str]:
    """The texts of requests that go these ways, once nothing is broken any more."""
    texts = {}
    for way in ways:
        answer = await _ask(client, prompts[way.prompt], model, way.recompute)
        if way_of(answer) == way:
            texts[way] = answer.text
    return texts


async def _ask(client: Client, prompt: Prompt, model: str, recompute: dict[str, object]) -> Answer:
    body = body_of(prompt, model=model, recompute=recompute)
    answer = await client.ask(body, index=-1, prompt=prompt.index, is_exact=False)
    if not is_answered(answer):
        raise TestbedError(f"with nothing broken, a request failed: {answer}")
    return answer
