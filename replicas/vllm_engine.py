"""A replica's engine: vLLM with our connector, the node's chunk store, and idle-time ingestion."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from kv_tier.host_tier import HostTier, HostTierConfig
from kv_tier.keys import KeySpace, model_fingerprint
from planner.clock import Clock, MonotonicClock
from planner.cost_model import CostModel
from planner.policies import FULL_PREFILL
from planner.types import (
    EngineInfo,
    EngineLoad,
    PrefillResult,
    PrefillTimings,
    RagRequest,
    SamplingOptions,
    Ticket,
)
from replicas.batch import SegmentKind
from replicas.calibration import measure_cost
from replicas.chunk_ingester import TIER, ChunkIngester, IngesterConfig, WantedChunk
from replicas.config import EngineConfig
from replicas.connector_types import RequestParams, ResultParams, SegmentSpan
from replicas.interface import (
    EngineDeadError,
    GenerationDelta,
    PromptTooLongError,
    ResidencyUpdate,
    StoredChunk,
)
from replicas.vllm_args import anchor_ids, chunk_reuse_args, engine_args, prepare_environment

OBSERVATION_WEIGHT = 0.2  # of one batch in the running cost


class VllmEngine:
    """`RagEngine` on vLLM's AsyncLLM, in this process and the processes that it starts."""

    def __init__(self, config: EngineConfig, *, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or MonotonicClock()
        self._engine: Any = None
        self._tier: HostTier | None = None
        self._keys: KeySpace | None = None
        self._cost: CostModel | None = None
        self._cursor = 0
        self._serial = count()
        self._prefilling = 0  # requests without their first token
        self._running = 0
        self._ingester: ChunkIngester | None = None
        self._ingesting: asyncio.Task[None] | None = None

    # ---- life ----

    async def start(self) -> EngineInfo:
        prepare_environment(self._config)
        from vllm.v1.engine.async_llm import AsyncLLM

        from replicas.vllm_connector import layout_of
        from replicas.vllm_model import reuse_refusal

        args = engine_args(self._config)
        vllm_config = await asyncio.to_thread(args.create_engine_config)
        refusal = reuse_refusal(vllm_config.model_config.hf_config, vllm_config)
        if refusal is None and not self._config.host_tier_dir:
            refusal = "no host tier is configured"
        fingerprint = await asyncio.to_thread(model_fingerprint, Path(self._config.model_dir))
        if refusal is None:
            layout = layout_of(vllm_config)
            # opened before the workers start: they map an arena that must be there
            self._tier = HostTier(
                HostTierConfig(
                    directory=Path(self._config.host_tier_dir),
                    capacity_bytes=self._config.host_tier_bytes,
                    layout=layout,
                )
            )
            self._keys = KeySpace(
                fingerprint=fingerprint,
                kv_dtype=layout.dtype,
                anchor_ids=anchor_ids(self._config),
            )
            args = chunk_reuse_args(self._config, self._keys)
        self._engine = AsyncLLM.from_engine_args(args)
        live = self._engine.vllm_config
        self._max_model_len = live.model_config.max_model_len
        self._num_layers = live.model_config.get_num_layers(live.parallel_config)
        self._capacity_tokens = live.cache_config.num_gpu_blocks * live.cache_config.block_size
        self._vocab_size = live.model_config.get_vocab_size()
        if self._tier is not None and self._keys is not None:
            self._ingester = ChunkIngester(
                self._tier,
                self._keys,
                self._prefill_chunk,
                IngesterConfig(
                    num_layers=self._num_layers,
                    max_model_len=self._max_model_len,
                    max_backlog=self._config.max_ingest_backlog,
                ),
                recompute_ms=self._recompute_ms,
            )
        self._cost = await measure_cost(self, num_layers=self._num_layers)
        if self._ingester is not None:
            self._ingesting = asyncio.create_task(self._ingester.run())
        return EngineInfo(
            model=self._config.model_name or Path(self._config.model_dir).name,
            fingerprint=fingerprint,
            num_layers=self._num_layers,
            max_model_len=self._max_model_len,
            kv_capacity_tokens=self._capacity_tokens,
            max_num_seqs=self._config.max_num_seqs,
            tensor_parallel_size=self._config.tensor_parallel_size,
            reuse_refusal=refusal,
        )

    async def close(self) -> None:
        if self._ingesting is not None:
            self._ingesting.cancel()
        if self._ingester is not None:
            await self._ingester.close()
        if self._engine is not None:
            if self._engine.output_handler is not None:
                self._engine.output_handler.cancel()  # it would log our shutdown as a failure
            await asyncio.to_thread(self._engine.shutdown)
            self._engine = None
        if self._tier is not None:
            self._tier.close()

    async def check_health(self) -> None:
        if self._engine is None or self._engine.errored:
            raise EngineDeadError("the vLLM engine has ended")
        try:
            await self._engine.check_health()
        except Exception as exc:
            raise EngineDeadError(str(exc)) from exc

    # ---- requests ----

    @property
    def cost(self) -> CostModel:
        assert self._cost is not None, "start() has not finished"
        return self._cost

    @property
    def reuses_chunks(self) -> bool:
        return self._keys is not None

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    async def generate(self, request: RagRequest, ticket: Ticket) -> AsyncIterator[GenerationDelta]:
        num_prompt, plan = request.num_prompt_tokens, ticket.plan
        if num_prompt >= self._max_model_len:
            raise PromptTooLongError(
                f"the prompt has {num_prompt} tokens, the model takes at most "
                f"{self._max_model_len} with its answer"
            )
        params: RequestParams | None = None
        if self.reuses_chunks and plan.policy != FULL_PREFILL and request.chunks:
            params = RequestParams(
                segments=_spans(request),
                cache_salt=request.cache_salt,
                policy=plan.policy,
                signal=plan.signal,
                warmup_depth=min(plan.warmup_depth, self._num_layers),
                probe_len=min(plan.probe_len, max(0, self._num_layers - plan.warmup_depth)),
                coverage=plan.coverage,
                batch_id=ticket.batch_id,
                batch_size=ticket.batch_size,
            )
        started_ms = self._clock.now_ms()
        is_first, num_generated = True, 0
        self._begin()
        try:
            async for out in self._run(request.prompt_ids, request.sampling, params):
                if is_first:
                    is_first = False
                    self._first_token()
                    first_ms = self._clock.now_ms() - started_ms
                (completion,) = out.outputs
                num_generated += len(completion.token_ids)
                result = None
                if out.finished:
                    result = self._result(request, ticket, out.kv_transfer_params, first_ms)
                yield GenerationDelta(
                    text=completion.text,
                    num_generated=num_generated,
                    token_ids=tuple(completion.token_ids),
                    logprobs=_logprobs(completion),
                    finish_reason=completion.finish_reason if out.finished else None,
                    result=result,
                )
        finally:
            self._end(had_first_token=not is_first)

    def load(self) -> EngineLoad:
        return EngineLoad(
            num_running=self._running - self._prefilling,
            num_waiting=self._prefilling,
            num_ingest_backlog=self._ingester.num_open if self._ingester else 0,
        )

    # ---- chunks ----

    async def ingest(self, token_ids: tuple[int, ...], *, cache_salt: str = "") -> StoredChunk:
        if self._ingester is None:
            raise ValueError("chunk reuse is off for this model")
        return await self._ingester.ingest(WantedChunk(token_ids=token_ids, cache_salt=cache_salt))

    def find_chunk(self, chunk_id: str) -> StoredChunk | None:
        for entry in self._tier.find(chunk_id) if self._tier else []:
            return StoredChunk(
                chunk_id=chunk_id, num_tokens=entry.num_tokens, nbytes=entry.nbytes, tier=TIER
            )
        return None

    def delete_chunk(self, chunk_id: str) -> bool:
        entries = self._tier.find(chunk_id) if self._tier else []
        discarded = [self._tier.discard(e.key) for e in entries] if self._tier else []
        return any(discarded)

    def residency_update(self) -> ResidencyUpdate:
        if self._tier is None:
            return ResidencyUpdate()
        delta = self._tier.resident_since(self._cursor)
        self._cursor = delta.cursor
        return ResidencyUpdate(added=delta.added, removed=delta.removed, reset=delta.is_full)

    async def prefill_ms(
        self, token_ids: list[int], params: RequestParams | None
    ) -> tuple[float, ResultParams | None]:
        """Time to the first token of one request alone, and what its prefill did."""
        started_ms = self._clock.now_ms()
        result = None
        async for out in self._run(token_ids, SamplingOptions(max_tokens=1), params):
            result = ResultParams.from_wire(out.kv_transfer_params)
        return self._clock.now_ms() - started_ms, result

    # ---- parts ----

    async def _run(
        self, token_ids: list[int], sampling: SamplingOptions, params: RequestParams | None
    ) -> AsyncIterator[Any]:
        """vLLM's outputs of one request. Ending the iteration early aborts it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

        serial = next(self._serial)
        prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
        extra: dict[str, Any] | None = None
        if params is not None:
            extra = {"kv_transfer_params": params.to_wire()}
            # KV with reused parts must never enter vLLM's prefix cache under the plain tokens
            prompt["cache_salt"] = f"cachesmith-{os.getpid()}-{serial}"
        options = SamplingParams(
            max_tokens=max(1, min(sampling.max_tokens, self._max_model_len - len(token_ids))),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
            stop=list(sampling.stop),
            ignore_eos=sampling.ignore_eos,
            logprobs=0 if sampling.logprobs else None,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra,
        )
        outputs = self._engine.generate(prompt, options, request_id=f"cs-{serial}")
        try:
            async for out in outputs:
                yield out
        except VllmEngineDeadError as exc:
            raise EngineDeadError("the vLLM engine ended during the request") from exc
        finally:
            await outputs.aclose()

    def _result(
        self, request: RagRequest, ticket: Ticket, wire: dict[str, Any] | None, first_ms: float
    ) -> PrefillResult:
        """What the connector says, or a plain account of vLLM's own prefill."""
        answer = ResultParams.from_wire(wire)
        if answer is None:
            num_context = sum(map(len, request.chunks))
            return PrefillResult(
                policy=ticket.plan.policy,
                signal=ticket.plan.signal,
                warmup_depth=self._num_layers,
                probe_len=0,
                coverage=1.0 if num_context else 0.0,
                num_prompt_tokens=request.num_prompt_tokens,
                num_context_tokens=num_context,
                num_miss_tokens=num_context,
                num_recomputed_tokens=request.num_prompt_tokens,
                cached_tokens={},
                batch_size=1,
                timings=PrefillTimings(compute_ms=first_ms, first_token_ms=first_ms),
                full_prefill=True,
            )
        spans, prompt_ids = _spans(request), request.prompt_ids
        for idx in answer.missing:
            span = spans[idx]
            assert self._ingester is not None
            self._ingester.remember(
                WantedChunk(
                    token_ids=tuple(prompt_ids[span.start : span.end]),
                    cache_salt=request.cache_salt,
                    kind=span.kind,
                )
            )
        self._observe(ticket, answer.result, first_ms)
        timings = replace(answer.result.timings, first_token_ms=first_ms)
        return replace(answer.result, timings=timings)

    def _observe(self, ticket: Ticket, result: PrefillResult, first_ms: float) -> None:
        """Let the cost follow a prefill that went as it was planned."""
        plan, num_hit = ticket.plan, result.num_context_tokens - result.num_miss_tokens
        if (
            not result.recovered
            and result.batch_size == ticket.batch_size
            and num_hit == plan.num_cached
        ):
            self._cost = self.cost.observed(
                plan.expected_ms,
                first_ms,
                plan_scale=plan.cost_scale,
                weight=OBSERVATION_WEIGHT / ticket.batch_size,
            )

    def _begin(self) -> None:
        self._running += 1
        self._prefilling += 1
        self._tell_ingester()

    def _first_token(self) -> None:
        self._prefilling -= 1
        self._tell_ingester()

    def _end(self, *, had_first_token: bool) -> None:
        self._running -= 1
        if not had_first_token:
            self._first_token()

    def _tell_ingester(self) -> None:
        if self._ingester is not None:
            self._ingester.set_idle(self._prefilling == 0)

    async def _prefill_chunk(
        self, token_ids: list[int], params: RequestParams
    ) -> ResultParams | None:
        _, result = await self.prefill_ms(token_ids, params)
        return result

    def _recompute_ms(self, num_tokens: int) -> float:
        if self._cost is None:  # while the cost is being measured
            return float(num_tokens)
        return self._cost.row_ms * self._num_layers * num_tokens


def _logprobs(completion: Any) -> tuple[float, ...] | None:
    """Of the new tokens of one vLLM output."""
    if not completion.logprobs:
        return None
    new = completion.logprobs[-len(completion.token_ids) :]
    return tuple(at[token].logprob for token, at in zip(completion.token_ids, new, strict=True))


def _spans(request: RagRequest) -> list[SegmentSpan]:
    """The parts of the prompt that the store may hold: its prefix and its chunks.

    A prefix of one token is not worth an entry. At least the prompt's last token is never reused:
    without a suffix, the last chunk stands for it.
    """
    spans = []
    end = len(request.prefix_ids)
    if end > 1:
        spans.append(SegmentSpan(kind=SegmentKind.PREFIX, start=0, end=end))
    for chunk in request.chunks:
        if chunk:
            spans.append(SegmentSpan(kind=SegmentKind.CHUNK, start=end, end=end + len(chunk)))
            end += len(chunk)
    return spans if request.suffix_ids else spans[:-1]
