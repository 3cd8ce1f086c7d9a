"""Request bodies of the HTTP API. Unknown fields are refused by name, null means "not given"."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from planner import (
    ADAPTIVE,
    CUSTOM,
    STATIC_POLICIES,
    Deviation,
    RecomputeConfig,
    SamplingOptions,
    Signal,
    policy_names,
)

# Tags of unions in error locations: not fields, so they are cut out of an error's `param`.
UNION_TAGS = frozenset({"<text>", "<parts>", "<one>", "<many>", "<all>", "<number>"})


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _unicode(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("is not valid Unicode (a lone surrogate)") from None
    return value


Text = Annotated[str, BeforeValidator(_unicode)]


def _content_tag(value: Any) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


def _stop_tag(value: Any) -> str:
    return "<many>" if isinstance(value, list) else "<one>"


def _depth_tag(value: Any) -> str:
    return "<all>" if isinstance(value, str) else "<number>"


class TextPart(_Body):
    type: Literal["text"]
    text: Text


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[Text, Tag("<text>")] | Annotated[list[TextPart], Tag("<parts>")],
        Discriminator(_content_tag),
    ]
    name: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Clients send an answer back as they got it, with what it did not use as null."""
        if not isinstance(value, dict):
            return value
        known = cls.model_fields
        return {key: item for key, item in value.items() if item is not None or key in known}

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class Document(_Body):
    """A retrieved passage: a string, vLLM's `{id?, title?, text}` or Cohere's `{id?, data: {…}}`.

    Cohere's `data` may call the text `snippet`; its other fields do not reach the prompt.
    """

    id: Annotated[str | int | None, BeforeValidator(_unicode)] = None
    title: Text | None = None
    text: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"text": value}
        if not isinstance(value, dict) or "data" not in value:
            return value
        data = value["data"]
        if isinstance(data, str):
            data = {"text": data}
        if not isinstance(data, dict):
            raise ValueError("data must be a string or an object with text or snippet")
        rest = {key: item for key, item in value.items() if key != "data"}
        text = data.get("text", data.get("snippet"))
        if text is None and any(item for key, item in data.items() if key != "title"):
            raise ValueError("data needs a field text or snippet")
        return {**rest, "title": data.get("title"), "text": text}


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Slo(_Body):
    ttft_ms: float = Field(gt=0)


Depth = Annotated[
    Annotated[int, Field(ge=0), Tag("<number>")] | Annotated[Literal["all"], Tag("<all>")],
    Discriminator(_depth_tag),
]


class CachesmithOptions(_Body):
    """How to recompute: a policy by name, or any point (signal, w, p, r) spelled out.

    A field beside `policy` changes that point of the policy, which is then called "custom".
    """

    policy: str | None = None
    signal: Literal["kv_dev", "qci", "auto", "qci_final", "position"] | None = None
    deviation: Literal["k", "v", "kv"] | None = None
    warmup_depth: Depth | None = None
    probe_len: Depth | None = None
    coverage: float | None = Field(default=None, ge=0.0, le=1.0)
    timeline: bool | None = None  # the prefill's, in the answer

    @field_validator("policy")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and value not in policy_names():
            raise ValueError(f"must be one of {', '.join(policy_names())}")
        return value

    def resolve(self) -> tuple[str, RecomputeConfig | None]:
        """The policy's name and its config; no config for the adaptive policy."""
        policy = self.policy or ADAPTIVE
        base = STATIC_POLICIES.get(policy)
        given = (
            self.signal,
            self.deviation,
            self.warmup_depth,
            self.probe_len,
            self.coverage,
        )
        if all(value is None for value in given):
            return policy, base
        base = base or RecomputeConfig()
        return CUSTOM, RecomputeConfig(
            signal=base.signal if self.signal is None else Signal(self.signal),
            deviation=base.deviation if self.deviation is None else Deviation(self.deviation),
            warmup_depth=_depth(self.warmup_depth, base.warmup_depth),
            probe_len=_depth(self.probe_len, base.probe_len),
            coverage=base.coverage if self.coverage is None else self.coverage,
            tokens_per_chunk=base.tokens_per_chunk if self.coverage is None else None,
        )


def _depth(given: int | str | None, default: int | None) -> int | None:
    if given is None:
        return default
    return None if isinstance(given, str) else given


class GenerationRequest(_Body):
    """What chat and plain completions share."""

    model: str
    documents: list[Document] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(default=None, gt=0.0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: (
        Annotated[
            Annotated[Text, Tag("<one>")] | Annotated[list[Text], Tag("<many>")],
            Discriminator(_stop_tag),
        ]
        | None
    ) = None
    n: int | None = Field(default=None, ge=1, le=1)
    ignore_eos: bool | None = None
    cache_salt: Text | None = None
    slo: Slo | None = None
    cachesmith: CachesmithOptions | None = None

    # accepted because clients send them; they change nothing here
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    # known to OpenAI's API, not supported: only their "off" values
    logprobs: Literal[False] | None = None
    logit_bias: None = None
    response_format: None = None

    @field_validator("stream_options")
    @classmethod
    def _only_in_streams(
        cls, value: StreamOptions | None, info: ValidationInfo
    ) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("is only allowed when stream is true")
        return value

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    def sampling(self, max_tokens: int) -> SamplingOptions:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        if given.get("top_k") == -1:
            given["top_k"] = 0
        return SamplingOptions(
            max_tokens=max_tokens, stop=tuple(text for text in stop if text), **given
        )


_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
)


class ChatCompletionRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    top_logprobs: None = None
    tools: None = None
    tool_choice: None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(GenerationRequest):
    prompt: Text
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


class IngestRequest(_Body):
    """Documents whose chunks are to be computed ahead."""

    documents: list[Document] = Field(min_length=1)
    cache_salt: Text | None = None
