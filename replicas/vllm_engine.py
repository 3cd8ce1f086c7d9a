"""A replica's engine: vLLM with our connector, the node's chunk store, and idle-time ingestion."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from kv_tier.arena_choice import arena_folder
from kv_tier.host_tier import HostTier, HostTierConfig
from kv_tier.keys import KeySpace, model_fingerprint
from kv_tier.redis.link import LinkLimit
from planner.clock import Clock, MonotonicClock
from planner.cost_model import CostModel
from planner.policies import FULL_PREFILL
from planner.serving_profile import CostProfile
from planner.timeline import Link
from planner.types import (
    EngineInfo,
    EngineLoad,
    PrefillResult,
    PrefillTimings,
    RagRequest,
    SamplingOptions,
    Ticket,
)
from replicas.batch import CoverageTerms, SegmentKind
from replicas.cache_admin import CacheAdmin
from replicas.cache_types import TierReport
from replicas.calibration import at_present_speed, measure_cost
from replicas.chunk_ingester import ChunkIngester, IngesterConfig, WantedChunk
from replicas.config import EngineConfig
from replicas.connector_scheduler import HOST_TIER
from replicas.connector_types import RequestParams, ResultParams, SegmentSpan
from replicas.cost_tracker import CostTracker
from replicas.interface import (
    EngineDeadError,
    GenerationDelta,
    PromptTooLongError,
    ResidencyUpdate,
    StoredChunk,
)
from replicas.kv_room import KvRoom
from replicas.parking import FirstTokenSampling, ParkOrder
from replicas.remote_chunks import HeldChunks, RemoteChunks
from replicas.vllm_args import (
    anchor_ids,
    chunk_reuse_args,
    engine_args,
    machine_facts,
    prepare_environment,
)
from replicas.vllm_requests import VllmRequests, delta_of

STAND_IN = [0, 0]  # vLLM's prompt of a prefill without KV blocks


class VllmEngine:
    """`RagEngine` on vLLM's AsyncLLM, in this process and the processes that it starts."""

    def __init__(self, config: EngineConfig, *, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or MonotonicClock()
        self._engine: Any = None
        self._tier: HostTier | None = None
        self._cache: CacheAdmin | None = None
        self._keys: KeySpace | None = None
        self._remote: RemoteChunks | None = None
        self._cost: CostTracker | None = None
        self._cursor = 0
        self._park_ids = count()
        self._prefilling = 0  # requests without their first token
        self._running = 0
        self._room = KvRoom()
        self._dropping: set[asyncio.Task[None]] = set()  # parked prefills whose request has gone
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
        layout = None
        if refusal is None:
            layout = layout_of(vllm_config)
            directory = Path(self._config.host_tier_dir)
            directory = arena_folder(directory, layout, self._config.host_tier_bytes)
            self._config = replace(self._config, host_tier_dir=str(directory))
            # opened before the workers start: they map an arena that must be there
            self._tier = HostTier(
                HostTierConfig(
                    directory=directory,
                    capacity_bytes=self._config.host_tier_bytes,
                    layout=layout,
                    eviction=self._config.host_tier_eviction,
                    low_watermark=self._config.host_tier_watermarks[0],
                    high_watermark=self._config.host_tier_watermarks[1],
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
        self._dtype = str(live.model_config.dtype).removeprefix("torch.")
        self._requests = VllmRequests(self._engine, self._max_model_len)
        token_bytes = layout.layer_bytes(1) * layout.num_layers if layout is not None else 0
        self._room = KvRoom(
            capacity_tokens=self._capacity_tokens,
            parking_tokens=self._config.parking_bytes // token_bytes if token_bytes else 0,
            block_size=live.cache_config.block_size,
        )
        if self._tier is not None and self._keys is not None:
            if self._config.redis is not None:
                self._remote = RemoteChunks(
                    self._config.redis,
                    self._tier,
                    self._keys,
                    self._clock,
                    max_lookups=self._config.max_num_seqs,
                )
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
                remote=self._remote,
            )
        costs = self._profiled_costs(fingerprint)
        if costs is not None:
            cost = await at_present_speed(self, costs.cost)
        else:
            cost = await measure_cost(self, num_layers=self._num_layers)
        self._cost = CostTracker(cost)
        if self._ingester is not None:
            self._ingesting = asyncio.create_task(self._ingester.run())
        return EngineInfo(
            model=self._config.model_name or Path(self._config.model_dir).name,
            fingerprint=fingerprint,
            num_layers=self._num_layers,
            max_model_len=self._max_model_len,
            kv_capacity_tokens=self._capacity_tokens,
            parking_tokens=self._room.parking_tokens,
            max_num_seqs=self._config.max_num_seqs,
            tensor_parallel_size=self._config.tensor_parallel_size,
            kv_token_bytes=layout.layer_bytes(1) if layout is not None else 0.0,
            num_kv_heads=layout.num_kv_heads if layout is not None else 0,
            head_dim=layout.head_dim if layout is not None else 0,
            kv_dtype=layout.dtype if layout is not None else "",
            anchor_ids=self._keys.anchor_ids if self._keys is not None else (),
            reuse_refusal=refusal,
            cost_source="profile" if costs else "measured at start",
        )

    def _profiled_costs(self, fingerprint: str) -> CostProfile | None:
        """The profile's costs, if they are of this machine.

        Raises ValueError for a profile of another model.
        """
        profile = self._config.profile
        if profile is None:
            return None
        profile.check_model(fingerprint)
        costs = profile.costs
        is_ours = costs is not None and costs.machine == tuple(self.machine.values())
        return costs if is_ours and self.reuses_chunks else None

    async def close(self) -> None:
        if self._ingesting is not None:
            self._ingesting.cancel()
        if self._ingester is not None:
            await self._ingester.close()
        if self._remote is not None and self._config.handover_ms > 0.0:
            await asyncio.to_thread(self._remote.hand_over, self._config.handover_ms)
        if self._engine is not None:
            if self._engine.output_handler is not None:
                self._engine.output_handler.cancel()  # it would log our shutdown as a failure
            await asyncio.to_thread(self._engine.shutdown)
            self._engine = None
        if self._remote is not None:
            await asyncio.to_thread(self._remote.close)
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
        return self._cost.cost

    @property
    def link(self) -> Link | None:
        """Stored KV is in this node's memory, unless there is Redis, or a link is emulated."""
        if self._remote is not None:
            return self._remote.link
        limit_mb_s = self._config.load_bandwidth_mb_s
        return None if limit_mb_s is None else Link(bytes_per_ms=limit_mb_s * 1e3)

    def emulate_link(self, limit: LinkLimit | None) -> None:
        """From now on another link to Redis, for experiments. Raises ValueError without Redis."""
        if self._remote is None:
            raise ValueError("there is no Redis, and so no link")
        self._remote.tier.emulate(limit)

    @property
    def machine(self) -> dict[str, Any]:
        """What the cost of a prefill depends on, besides the model; as in `CostProfile`."""
        return machine_facts(self._config, dtype=self._dtype)

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
        num_prompt = request.num_prompt_tokens
        if num_prompt >= self._max_model_len:
            raise PromptTooLongError(
                f"the prompt has {num_prompt} tokens, the model takes at most "
                f"{self._max_model_len} with its answer"
            )
        params = self._params(request, ticket)
        watch = _FirstTokenWatch(self._clock)
        self._begin()
        try:
            if params is not None and self._remote is not None:
                params, watch.held = await self._remote.bring(params, request.prompt_ids)
                watch.brought_ms = watch.elapsed_ms()
            deltas = (
                self._generate_parked(request, ticket, params, watch)
                if params is not None and self._has_to_park(request)
                else self._generate_resident(request, ticket, params, watch)
            )
            async with aclosing(deltas):
                async for delta in deltas:
                    yield delta
        finally:
            watch.held.release(is_wanted=False)
            self._end(had_first_token=watch.first_ms is not None)

    def _params(self, request: RagRequest, ticket: Ticket) -> RequestParams | None:
        """What the connector is to do; None leaves the prompt to vLLM's own prefill."""
        plan = ticket.plan
        if not self.reuses_chunks or plan.policy == FULL_PREFILL or not request.chunks:
            return None
        terms = None
        if plan.band is not None:
            terms = CoverageTerms(deadline_ms=self._clock.now_ms() + plan.target_ms, cost=self.cost)
        return RequestParams(
            segments=_spans(request),
            cache_salt=request.cache_salt,
            policy=plan.policy,
            signal=plan.signal,
            warmup_depth=min(plan.warmup_depth, self._num_layers),
            probe_len=min(plan.probe_len, max(0, self._num_layers - plan.warmup_depth)),
            coverage=plan.coverage,
            deviation=plan.deviation,
            band=plan.band,
            terms=terms,
            wants_timeline=request.wants_timeline,
            batch_id=ticket.batch_id,
            batch_size=ticket.batch_size,
        )

    async def _generate_resident(
        self,
        request: RagRequest,
        ticket: Ticket,
        params: RequestParams | None,
        watch: "_FirstTokenWatch",
    ) -> AsyncGenerator[GenerationDelta, None]:
        """Prefill into KV blocks, wait for them if need be, and decode."""
        num_prompt, num_generated = request.num_prompt_tokens, 0
        outputs = self._requests.run(request.prompt_ids, request.sampling, params)
        with self._room.resident(num_prompt) as held:
            async with aclosing(outputs):
                async for out in outputs:
                    self._saw_token(watch)
                    num_generated += len(out.outputs[0].token_ids)
                    held.grow_to(num_prompt + num_generated)
                    result = None
                    if out.finished:
                        answer = ResultParams.from_wire(out.kv_transfer_params)
                        result = self._result(request, ticket, answer, watch)
                    yield delta_of(out, num_generated, result)

    # ---- prompts that do not fit ----

    def _has_to_park(self, request: RagRequest) -> bool:
        """No KV blocks for it now, but host memory; and a first token that we can sample."""
        options = request.sampling
        is_plain = (
            options.presence_penalty == options.frequency_penalty == 0.0
            and options.repetition_penalty == 1.0
            and options.seed is None
            and not options.stop
        )
        return is_plain and self._room.has_to_park(request.num_prompt_tokens)

    async def _generate_parked(
        self, request: RagRequest, ticket: Ticket, params: RequestParams, watch: "_FirstTokenWatch"
    ) -> AsyncGenerator[GenerationDelta, None]:
        """Prefill into host memory, serve the first token, decode when blocks are free.

        To vLLM these are two requests: a stand-in whose prefill is ours alone, and the prompt with
        its first token.
        """
        options, prompt_ids = request.sampling, request.prompt_ids
        park_id = f"park-{next(self._park_ids)}"
        is_parked = True
        try:
            with ExitStack() as parking:
                parking.enter_context(self._room.parked(request.num_prompt_tokens))
                answer = await self._prefill_parked(request, params, park_id)
                if answer is None or answer.first_token is None:  # stored KV can not be read
                    parking.close()
                    resident = self._generate_resident(request, ticket, None, watch)
                    async with aclosing(resident):
                        async for delta in resident:
                            yield delta
                    return
                self._saw_token(watch)
                result = self._result(request, ticket, answer, watch)
                first = answer.first_token
                finish_reason = self._requests.finish_reason(answer, options)
                is_text = finish_reason != "stop"  # else a token that ends the answer
                yield GenerationDelta(
                    text=self._requests.text_of(prompt_ids, first) if is_text else "",
                    num_generated=1,
                    token_ids=(first,),
                    logprobs=(answer.first_logprob,) if options.logprobs else None,
                    finish_reason=finish_reason,
                    result=result if finish_reason else None,
                )
                if finish_reason:
                    return
                rest = replace(options, max_tokens=options.max_tokens - 1)
                outputs = self._requests.run(
                    [*prompt_ids, first], rest, RequestParams(restore_id=park_id)
                )
                num_generated = 1
                with self._room.resident(request.num_prompt_tokens) as held:
                    async with aclosing(outputs):
                        async for out in outputs:
                            if is_parked:
                                is_parked = False
                                parking.close()
                                result = _with_block_wait(result, watch)
                            num_generated += len(out.outputs[0].token_ids)
                            held.grow_to(request.num_prompt_tokens + num_generated)
                            yield delta_of(out, num_generated, result if out.finished else None)
        finally:
            if is_parked:
                self._drop_parked(park_id)

    def _drop_parked(self, park_id: str) -> None:
        """Tell the ranks; not awaited, since the request may have been cancelled."""

        async def drop() -> None:
            with suppress(Exception):  # an engine that has ended holds nothing
                await self._engine.collective_rpc("drop_parked", args=(park_id,))

        task = asyncio.create_task(drop())
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def _prefill_parked(
        self, request: RagRequest, params: RequestParams, park_id: str
    ) -> ResultParams | None:
        options = request.sampling
        sampling = FirstTokenSampling(
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
        )
        order = replace(
            params,
            park=ParkOrder(park_id=park_id, sampling=sampling),
            park_token_ids=request.prompt_ids,
        )
        stand_in = SamplingOptions(max_tokens=1, temperature=0.0)
        answer = None
        outputs = self._requests.run(STAND_IN, stand_in, order, priority=-1)
        async with aclosing(outputs):
            async for out in outputs:
                answer = ResultParams.from_wire(out.kv_transfer_params)
        return answer

    def load(self) -> EngineLoad:
        return EngineLoad(
            num_running=self._running - self._prefilling,
            num_waiting=self._prefilling,
            num_ingest_backlog=self._ingester.num_open if self._ingester else 0,
            loaded_share=self._remote.loaded_share if self._remote is not None else 1.0,
            can_load=self._remote is None or self._remote.can_load,
        )

    # ---- chunks ----

    async def ingest(self, token_ids: tuple[int, ...], *, cache_salt: str = "") -> StoredChunk:
        if self._ingester is None:
            raise ValueError("chunk reuse is off for this model")
        return await self._ingester.ingest(WantedChunk(token_ids=token_ids, cache_salt=cache_salt))

    def find_chunk(self, chunk_id: str) -> StoredChunk | None:
        for entry in self._tier.find(chunk_id) if self._tier else []:
            return StoredChunk(
                chunk_id=chunk_id, num_tokens=entry.num_tokens, nbytes=entry.nbytes, tier=HOST_TIER
            )
        return None

    def delete_chunk(self, chunk_id: str) -> bool:
        entries = self._tier.find(chunk_id) if self._tier else []
        discarded = [self._tier.discard(e.key) for e in entries] if self._tier else []
        if self._remote is not None:
            self._remote.tier.cancel_writes(chunk_id)
            self._remote.discard(entry.key for entry in entries)
        return any(discarded)

    @property
    def cache(self) -> CacheAdmin:
        if self._cache is None:
            remote = None if self._remote is None else self._remote.tier
            self._cache = CacheAdmin(self._tier, remote, forget=self._forget_missed)
        return self._cache

    def _forget_missed(self, chunk_id: str | None) -> None:
        if self._ingester is not None:
            self._ingester.forget(chunk_id)

    def tier_report(self) -> TierReport:
        return self.cache.report()

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
        async for out in self._requests.run(token_ids, SamplingOptions(max_tokens=1), params):
            result = ResultParams.from_wire(out.kv_transfer_params)
        return self._clock.now_ms() - started_ms, result

    # ---- parts ----

    def _result(
        self,
        request: RagRequest,
        ticket: Ticket,
        answer: ResultParams | None,
        watch: "_FirstTokenWatch",
    ) -> PrefillResult:
        """What the connector says, or a plain account of vLLM's own prefill."""
        assert watch.first_ms is not None
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
                timings=PrefillTimings(compute_ms=watch.first_ms, first_token_ms=watch.first_ms),
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
        assert self._cost is not None
        self._cost.observe(
            ticket,
            answer.result,
            watch.first_ms - watch.brought_ms,
            has_link=self.link is not None,
        )
        if self._remote is not None:
            self._remote.observe(answer.result)
            self._remote.discard(key for key in answer.damaged if key in watch.held.keys)
        return replace(
            answer.result,
            timings=replace(answer.result.timings, first_token_ms=watch.first_ms),
            timeline=tuple(
                replace(span, start_ms=span.start_ms - watch.started_ms)
                for span in answer.result.timeline
            ),
        )

    def _saw_token(self, watch: "_FirstTokenWatch") -> None:
        if watch.first_ms is None:
            watch.first_ms = watch.elapsed_ms()
            watch.held.release()
            self._first_token()

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
        return self.cost.row_ms * self._num_layers * num_tokens


class _FirstTokenWatch:
    """Since when a request is in the engine, and when it had its first token."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.started_ms = clock.now_ms()
        self.first_ms: float | None = None  # from then
        self.held = HeldChunks()  # until then
        self.brought_ms = 0.0  # spent on what is fetched from Redis, before the engine had it

    def elapsed_ms(self) -> float:
        return self._clock.now_ms() - self.started_ms


def _with_block_wait(result: PrefillResult, watch: _FirstTokenWatch) -> PrefillResult:
    assert watch.first_ms is not None
    waited_ms = watch.elapsed_ms() - watch.first_ms
    return replace(result, timings=replace(result.timings, block_wait_ms=waited_ms))


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
