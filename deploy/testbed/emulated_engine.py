"""A RagEngine without a model, for machines that can not hold the load with real ones.

What is real: its ranks are child processes, which every token needs, and the engine is dead when
one of them is. What is not: time passes as a formula says, nothing is stored, and the text is
made of the hash of the prompt's tokens, so that it is the same on every replica.
"""

import asyncio
import hashlib
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from deploy.testbed import emulated_rank
from planner import CostModel, EngineInfo, PrefillResult, PrefillTimings, RagRequest, Ticket
from replicas.config import EngineConfig
from replicas.emulation import EmulatedEngine, planned_result
from replicas.interface import EngineDeadError, GenerationDelta, PromptTooLongError

_NUM_LAYERS = 4
_TOKEN_MS = 4.0
_MAX_MODEL_LEN = 8192
_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet", "jetty")


class RankedEngine(EmulatedEngine):
    """One replica's engine. Every chunk is a miss."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._config = config
        self._ranks: list[_Rank] = []

    async def start(self) -> EngineInfo:
        for index in range(self._config.tensor_parallel_size):
            self._ranks.append(await _Rank.start(index))
        return EngineInfo(
            model=self._config.model_name,
            fingerprint="emulated",
            num_layers=_NUM_LAYERS,
            max_model_len=self._config.max_model_len or _MAX_MODEL_LEN,
            kv_capacity_tokens=1 << 20,
            max_num_seqs=self._config.max_num_seqs,
            tensor_parallel_size=self._config.tensor_parallel_size,
            reuse_refusal="the engine is emulated",
        )

    @property
    def cost(self) -> CostModel:
        return CostModel(
            num_layers=_NUM_LAYERS,
            fixed_ms=1.0,
            row_ms=0.02,
            pair_ms=0.0,
            selected_pair_ms=0.0,
            reuse_ms=0.0,
        )

    async def generate(self, request: RagRequest, ticket: Ticket) -> AsyncIterator[GenerationDelta]:
        max_tokens = request.sampling.max_tokens
        limit = self._config.max_model_len or _MAX_MODEL_LEN
        if request.num_prompt_tokens + max_tokens > limit:
            raise PromptTooLongError(f"{request.num_prompt_tokens} and {max_tokens} do not fit")
        prompt = _digest(request)
        self.num_running += 1
        try:
            prefill_ms = _NUM_LAYERS * (1.0 + 0.02 * request.num_prompt_tokens)
            await asyncio.sleep(prefill_ms / 1e3)
            for index in range(max_tokens):
                word = await self._word(prompt, index)
                is_last = index == max_tokens - 1
                yield GenerationDelta(
                    text=word if index == 0 else f" {word}",
                    num_generated=index + 1,
                    finish_reason="length" if is_last else None,
                    result=_result(request, ticket, prefill_ms) if is_last else None,
                )
                await asyncio.sleep(_TOKEN_MS / 1e3)
        finally:
            self.num_running -= 1

    async def check_health(self) -> None:
        for rank in self._ranks:
            rank.raise_if_dead()

    async def close(self) -> None:
        for rank in self._ranks:
            await rank.stop()

    async def _word(self, prompt: str, index: int) -> str:
        shares = await asyncio.gather(*(rank.ask(f"{prompt} {index}") for rank in self._ranks))
        return _WORDS[sum(shares) % len(_WORDS)]


class _Rank:
    """A child process and the answers that it owes."""

    def __init__(self, index: int, process: asyncio.subprocess.Process) -> None:
        self._index = index
        self._process = process
        self._owed: deque[asyncio.Future[int]] = deque()
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def start(cls, index: int) -> "_Rank":
        # as a file: as a module it would bring the package, and Ray with it
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(emulated_rank.__file__)),
            str(index),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return cls(index, process)

    async def ask(self, line: str) -> int:
        """The rank's share. Raises EngineDeadError."""
        self.raise_if_dead()
        assert self._process.stdin is not None
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._owed.append(answer)
        with suppress(OSError):  # its end is told by `_read`
            self._process.stdin.write(f"{line}\n".encode())
        return await answer

    def raise_if_dead(self) -> None:
        if self._reading.done():
            raise EngineDeadError(f"rank {self._index} ended")

    async def stop(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            answer = self._owed.popleft()
            if not answer.done():
                answer.set_result(int(line))
        for answer in self._owed:
            if not answer.done():
                answer.set_exception(EngineDeadError(f"rank {self._index} ended"))


def _digest(request: RagRequest) -> str:
    parts = (request.prefix_ids, *request.chunks, request.suffix_ids)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _result(request: RagRequest, ticket: Ticket, prefill_ms: float) -> PrefillResult:
    num_context = sum(map(len, request.chunks))
    return planned_result(
        request,
        ticket,
        warmup_depth=_NUM_LAYERS,
        probe_len=0,
        coverage=1.0 if num_context else 0.0,
        num_miss_tokens=num_context,
        num_recomputed_tokens=request.num_prompt_tokens,
        cached_tokens={},
        timings=PrefillTimings(compute_ms=prefill_ms, first_token_ms=prefill_ms),
        full_prefill=True,
    )
