"""The values that travel through the system, each a frozen dataclass.

`RagRequest → RequestProfile → BatchPlan → Ticket → PrefillResult`: the ingress makes the first two,
the scheduler the plan and the ticket, the replica the result. They hold plain numbers and strings,
so that every process can import and pickle them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Signal(StrEnum):
    """What ranks context tokens for recomputation."""

    KV_DEV = "kv_dev"  # deviation of the reused from the exact keys and values (CacheBlend)
    QCI = "qci"  # attention mass from the suffix onto the context (query-context interaction)
    AUTO = "auto"  # one of the two above, by the entropy of the first Probe layer's QCI scores
    # of the baselines alone:
    QCI_FINAL = "qci_final"  # the suffix by itself to the last layer, onto its keys (FusionRAG)
    POSITION = "position"  # the first tokens of every chunk but the first (EPIC)


class Deviation(StrEnum):
    """What of a token's KV `kv_dev` compares; published implementations differ."""

    K = "k"
    V = "v"
    KV = "kv"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfig:
    """One static point (S, w, p, r) of the three-phase prefill.

    `warmup_depth` and `probe_len` are None where they mean "all layers of the model".
    `tokens_per_chunk` stands for the coverage that so many tokens of every chunk but the first are.
    """

    signal: Signal = Signal.KV_DEV
    warmup_depth: int | None = 1
    probe_len: int | None = 1
    coverage: float = 0.15
    deviation: Deviation = Deviation.KV
    tokens_per_chunk: int | None = None

    def __post_init__(self) -> None:
        if self.warmup_depth is not None and self.warmup_depth < 0:
            raise ValueError(f"warmup_depth must be 0 or more, got {self.warmup_depth}")
        if self.probe_len is not None and self.probe_len < 0:
            raise ValueError(f"probe_len must be 0 or more, got {self.probe_len}")
        if not 0.0 <= self.coverage <= 1.0:
            raise ValueError(f"coverage must be within 0 and 1, got {self.coverage}")
        if self.tokens_per_chunk is not None and self.tokens_per_chunk < 0:
            raise ValueError(f"tokens_per_chunk must be 0 or more, got {self.tokens_per_chunk}")

    def for_chunks(self, lengths: Sequence[int]) -> "RecomputeConfig":
        """With the coverage that it means for chunks of these lengths, in prompt order."""
        if self.tokens_per_chunk is None:
            return self
        picked = sum(min(self.tokens_per_chunk, length) for length in lengths[1:])
        coverage = picked / sum(lengths) if picked else 0.0
        return replace(self, coverage=coverage, tokens_per_chunk=None)

    def depths(self, num_layers: int) -> tuple[int, int]:
        """(w, p) for a model of `num_layers`: w <= L and w + p <= L."""
        w = num_layers if self.warmup_depth is None else min(self.warmup_depth, num_layers)
        p = num_layers if self.probe_len is None else self.probe_len
        return w, min(p, num_layers - w)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRef:
    """A chunk as the scheduler sees it: who it is and how long."""

    chunk_id: str
    num_tokens: int
    is_shared: bool = False  # every node can load its KV


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Decoding options of one request; vLLM's SamplingParams fields of the same names."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False  # of the sampled tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RagRequest:
    """A tokenised request: the prompt is prefix + chunks + suffix, each tokenised by itself."""

    request_id: str
    prefix_ids: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    suffix_ids: tuple[int, ...]
    ttft_slo_ms: float
    cache_salt: str = ""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    wants_timeline: bool = False

    @property
    def prompt_ids(self) -> list[int]:
        ids = list(self.prefix_ids)
        for chunk in self.chunks:
            ids.extend(chunk)
        ids.extend(self.suffix_ids)
        return ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prefix_ids) + sum(map(len, self.chunks)) + len(self.suffix_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProfile:
    """What the scheduler needs of a request: lengths, chunk identities, objective, policy."""

    request_id: str
    num_prefix_tokens: int
    chunks: tuple[ChunkRef, ...]
    num_suffix_tokens: int
    ttft_slo_ms: float
    elapsed_ms: float = 0.0  # spent since the request arrived over HTTP
    policy: str = "adaptive"
    config: RecomputeConfig | None = None  # set by every policy but `adaptive`
    wants_explanation: bool = False  # of the decision, with the ticket
    num_context_tokens: int = field(init=False)
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        num_context = sum([chunk.num_tokens for chunk in self.chunks])
        num_prompt = self.num_prefix_tokens + num_context + self.num_suffix_tokens
        object.__setattr__(self, "num_context_tokens", num_context)
        object.__setattr__(self, "num_prompt_tokens", num_prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """What one request is to do; (S, w, p) are those of its batch."""

    policy: str
    signal: Signal
    warmup_depth: int
    probe_len: int
    coverage: float
    expected_ms: float
    budget_ms: float
    deviation: Deviation = Deviation.KV
    band: tuple[float, float] | None = None  # the coverage may be solved again within; None: fixed
    target_ms: float = 0.0  # what a coverage that is solved again has to keep
    num_cached: int = 0  # stored chunk tokens that the plan counts on
    cost_scale: float = 1.0  # `CostModel.scale` that `expected_ms` was made with
    pass_probability: float = 0.0  # that the coverage is enough; 0 where nobody estimated it

    @classmethod
    def of_config(cls, policy: str, config: RecomputeConfig, *, num_layers: int) -> "RequestPlan":
        """A configuration as it is, of a request that nobody has planned."""
        warmup_depth, probe_len = config.depths(num_layers)
        return cls(
            policy=policy,
            signal=config.signal,
            warmup_depth=warmup_depth,
            probe_len=probe_len,
            coverage=config.coverage,
            deviation=config.deviation,
            expected_ms=0.0,
            budget_ms=0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A planned batch. Per-request plans stand in the order of the batch's requests."""

    requests: tuple[RequestPlan, ...]
    budget_ms: float
    expected_ms: float
    expected_passes: float = 0.0  # requests whose coverage is enough; counts if it ends in time


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The scheduler's answer to an admission: where to go, with whom, and what to do there."""

    replica_id: str
    batch_id: int
    batch_size: int
    plan: RequestPlan
    queue_ms: float
    explanation: str = ""  # why the batch and its plan were chosen, if the request asked


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTimings:
    """Where the prefill's time went, in milliseconds of the replica's clock (a GPU's own, there).

    load, warmup, probe, patch, write, fill, stall and pause add up to compute.
    """

    hold_ms: float = 0.0  # waiting for the other members of the batch and for KV blocks
    load_ms: float = 0.0  # reading stored KV and rotating it to its position
    warmup_ms: float = 0.0
    probe_ms: float = 0.0
    patch_ms: float = 0.0
    write_ms: float = 0.0  # finished KV into the paged cache, or a parked prompt's into host memory
    fill_ms: float = 0.0  # recomputing the context's front while stored KV was on its way
    stall_ms: float = 0.0  # idle: stored KV was on its way and there was nothing to recompute
    pause_ms: float = 0.0  # between slices, while other requests decoded
    compute_ms: float = 0.0  # from the first layer of the batch to its last
    first_token_ms: float = 0.0  # from the engine's queue to the first token: what plans expect
    block_wait_ms: float = 0.0  # of a parked prefill: from its first token to its KV blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """One phase in one layer, in milliseconds from the engine's queue."""

    phase: str
    layer: int
    start_ms: float
    duration_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """What the prefill of one request did. `coverage` is the share of context tokens recomputed."""

    policy: str
    signal: Signal
    warmup_depth: int
    probe_len: int
    coverage: float
    num_prompt_tokens: int
    num_context_tokens: int
    num_miss_tokens: int
    num_recomputed_tokens: int
    cached_tokens: dict[str, int]  # by tier
    batch_size: int
    timings: PrefillTimings
    num_filled_tokens: int = 0  # of those recomputed: while stored KV was on its way
    parked: bool = False  # prefilled without KV blocks, its layers kept in host memory
    recovered: bool = False  # stored KV failed in mid-prefill and everything was recomputed
    full_prefill: bool = False  # the engine's own prefill ran, without reuse
    timeline: tuple[PhaseSpan, ...] = ()  # if the request asked for it


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a replica's engine is, told to the scheduler once it serves."""

    model: str
    fingerprint: str
    num_layers: int
    max_model_len: int
    kv_capacity_tokens: int
    max_num_seqs: int
    parking_tokens: int = 0  # prompts that may be prefilled into host memory meanwhile
    tensor_parallel_size: int
    kv_token_bytes: float = 0.0  # stored KV of one token in one layer
    # the shape and the key of what it stores; no heads: nothing
    num_kv_heads: int = 0
    head_dim: int = 0
    kv_dtype: str = ""
    anchor_ids: tuple[int, ...] = ()
    cost_source: str = "measured at start"  # or "profile"
    reuse_refusal: str | None = None  # why chunk reuse is off for this model, if it is
    load_ms: float | None = None  # from the replica's start until it served, as measured


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """A replica's load at one moment."""

    num_running: int
    num_waiting: int
    num_ingest_backlog: int
    loaded_share: float = 1.0  # of stored tokens, those that come over the engine's link
    can_load: bool = True  # what every node can load
