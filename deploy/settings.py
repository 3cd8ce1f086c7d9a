"""All settings, from the command line, the environment, a YAML file and defaults, in that order.

This module alone reads the environment and the file. Unknown keys and impossible values are
refused with the key's name.
"""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

if TYPE_CHECKING:
    from kv_tier.redis import RedisTierConfig

ENV_PREFIX = "CACHESMITH_"
MIN_HOST_TIER_BYTES = 1 << 20

Positive = Annotated[int, Field(ge=1)]


def _secret(value: Any) -> Any:
    """Read what `{file: PATH}` or `{env: NAME}` stands for, so that a config holds no secret."""
    if not isinstance(value, dict):
        return value
    (source, where), *rest = value.items() or [("", "")]
    if source not in ("file", "env") or not isinstance(where, str) or rest:
        raise ValueError("must be a text, {file: PATH} or {env: NAME}")
    if source == "env":
        if where not in os.environ:
            raise ValueError(f"the environment has no {where}")
        return os.environ[where]
    try:
        return Path(where).expanduser().read_text().strip()
    except OSError as exc:
        raise ValueError(f"can not read {where}: {exc.strerror}") from None
    except UnicodeError:
        raise ValueError(f"{where} is not text") from None


Secret = Annotated[SecretStr, BeforeValidator(_secret)]


def _absolute(value: str) -> str:
    """Every process of the node must mean the same file."""
    path = Path(value).expanduser()
    if value and not path.is_absolute():
        raise ValueError(f"must be an absolute path, got {value!r}")
    return str(path) if value else value


AbsolutePath = Annotated[str, AfterValidator(_absolute)]


class SettingsError(Exception):
    """The settings can not be used. The message has a line for each wrong key."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(_Section):
    """What is served."""

    name_or_dir: str = Field(default="smollm2-135m-instruct", min_length=1)
    served_name: str | None = None  # what clients call it; unset: the hub id or the folder's name
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: Positive | None = None  # the model's own if unset


class EngineSection(_Section):
    """One replica's vLLM engine."""

    tensor_parallel_size: Positive = 1
    max_num_seqs: Positive = 16
    kv_cache_memory_bytes: ByteSize | None = None  # "4GiB"; unset: 1 GiB on a CPU, else vLLM's
    cpu_threads: Positive | None = None  # of each rank, without a GPU
    slice_layers: Positive = 4
    batch_hold_ms: float = Field(default=50.0, ge=0)
    parking_bytes: ByteSize = ByteSize(1 << 28)  # "256MiB"
    load_bandwidth_mb_s: float | None = Field(default=None, gt=0)
    fill_stalls: bool = True
    anchor_text: str | None = None
    max_ingest_backlog: int = Field(default=1024, ge=0)
    pin_cores: Literal["auto", "off"] = "auto"
    vllm: dict[str, Any] = Field(default_factory=dict)  # passed to vLLM's engine as they are


class AutoscalingSection(_Section):
    """The number of replicas follows the load between two bounds; without a `max` it is fixed."""

    min: Positive = 1
    max: Positive | None = None
    target_utilisation: float = Field(default=0.7, gt=0, le=1)
    down_after_s: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    scale_to_zero_after_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    policy: Literal["slo", "ongoing"] = "slo"

    @field_validator("max")
    @classmethod
    def _not_below_min(cls, value: int | None, info: ValidationInfo) -> int | None:
        low = info.data.get("min")
        if value is not None and low is not None and value < low:
            raise ValueError(f"must not be less than min ({low}), got {value}")
        return value

    @field_validator("policy")
    @classmethod
    def _can_wake(cls, value: str, info: ValidationInfo) -> str:
        if value == "ongoing" and info.data.get("scale_to_zero_after_s") is not None:
            raise ValueError("can not be ongoing with scale_to_zero_after_s: nothing would wake it")
        return value


class ReplicasSection(_Section):
    num: Positive = 1
    autoscaling: AutoscalingSection = AutoscalingSection()
    cpus_per_replica: float = Field(default=1.0, gt=0)
    gpus_per_rank: float | None = Field(default=None, ge=0, le=1)  # unset: 1 where there are GPUs
    max_ongoing_requests: Positive | None = None  # unset: four times max_num_seqs
    graceful_shutdown_s: float = Field(default=20.0, ge=0)
    max_surge: float = Field(default=0.0, ge=0, le=1)

    @property
    def most(self) -> int:
        """That there may be at a time."""
        return self.num if self.autoscaling.max is None else self.autoscaling.max

    @property
    def at_start(self) -> int:
        return self.num if self.autoscaling.max is None else self.autoscaling.min


class PlannerSection(_Section):
    profile: str | None = None  # a file, or "none"; unset: the one that comes with the model
    signal: Literal["best", "kv_dev", "qci", "auto"] = "best"
    deviation: Literal["k", "v", "kv"] = "kv"
    auto_threshold: float = Field(default=0.85, ge=0, le=1)
    auto_qci_when: Literal["peaked", "flat"] = "peaked"
    floor: float = Field(default=0.05, ge=0, le=1)
    saturation: float = Field(default=0.50, ge=0, le=1)
    reserve: float = Field(default=0.15, ge=0, lt=1)
    resolve: bool = True

    @field_validator("saturation")
    @classmethod
    def _over_the_floor(cls, value: float, info: ValidationInfo) -> float:
        floor = info.data.get("floor")
        if floor is not None and floor >= value:
            raise ValueError(f"must be more than floor ({floor}), got {value}")
        return value


class SchedulerSection(_Section):
    policy: Literal["cachesmith", "fcfs", "edf", "cachesmith-static"] = "cachesmith"
    static_config: Literal["prophetkv", "cacheblend", "fusionrag", "full_reuse"] = "prophetkv"
    refuse_hopeless: bool = False
    max_batch_requests: Positive = 8
    max_batch_tokens: Positive = 16_384
    max_waiting: Positive = 256
    gather_ms: float = Field(default=5.0, ge=0)
    max_wait_ms: float = Field(default=120_000.0, gt=0)
    default_ttft_slo_ms: float = Field(default=2_000.0, gt=0)
    default_max_tokens: Positive = 256


class HostTierSection(_Section):
    directory: AbsolutePath = ""  # unset: /dev/shm/cachesmith-<uid>
    capacity_bytes: ByteSize = ByteSize(1 << 30)  # "1GiB"
    eviction: Literal["cost", "lru"] = "cost"
    low_watermark: float = Field(default=0.93, gt=0, le=1)
    high_watermark: float = Field(default=0.97, gt=0, le=1)
    keep_on_exit: bool = False

    @field_validator("high_watermark")
    @classmethod
    def _not_below_the_low_one(cls, value: float, info: ValidationInfo) -> float:
        low = info.data.get("low_watermark")
        if low is not None and value < low:
            raise ValueError(f"must not be less than low_watermark ({low}), got {value}")
        return value

    @field_validator("capacity_bytes")
    @classmethod
    def _holds_something(cls, value: ByteSize) -> ByteSize:
        if value < MIN_HOST_TIER_BYTES:
            raise ValueError(f"must be at least {MIN_HOST_TIER_BYTES} bytes, got {int(value)}")
        return value

    @property
    def path(self) -> Path:
        return Path(self.directory or f"/dev/shm/cachesmith-{os.getuid()}")


class RedisSection(_Section):
    """The second level, shared by the nodes; without a url there is none."""

    url: Secret | None = None  # redis://user:password@host:port/db, rediss://, unix://
    mode: Literal["standalone", "sentinel", "cluster"] = "standalone"
    nodes: tuple[str, ...] = ()
    sentinel_password: Secret | None = None
    key_prefix: str = "cachesmith"
    ttl_s: float | None = Field(default=None, gt=0)
    encoding: Literal["raw", "fp8", "int8"] = "raw"
    num_connections: Positive = 3
    depth: Positive = 2
    lookup_deadline_ms: float = Field(default=50.0, gt=0)
    value_deadline_ms: float = Field(default=500.0, gt=0)
    fetch_deadline_ms: float = Field(default=5_000.0, gt=0)
    write_deadline_ms: float = Field(default=1_000.0, gt=0)
    connect_deadline_ms: float = Field(default=500.0, gt=0)
    breaker_failures: Positive = 3
    probe_interval_ms: float = Field(default=500.0, gt=0)
    write_backlog_bytes: ByteSize | None = None  # unset: a quarter of the host tier
    limit_gb_per_s: float | None = Field(default=None, gt=0)
    limit_latency_ms: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _can_be_used(self) -> "RedisSection":
        self.config()
        return self

    def config(self) -> "RedisTierConfig | None":
        """Raises ValueError for values that do not go together."""
        if self.url is None:
            return None
        from kv_tier.redis import Encoding, LinkLimit, RedisTierConfig  # brings torch

        values = self.model_dump(exclude={"limit_gb_per_s", "limit_latency_ms"}, exclude_none=True)
        password = self.sentinel_password
        limit = None
        if self.limit_gb_per_s is not None or self.limit_latency_ms:
            limit = LinkLimit(
                bytes_per_ms=(self.limit_gb_per_s or math.inf) * 1e6,
                latency_ms=self.limit_latency_ms,
            )
        return RedisTierConfig(
            **{
                **values,
                "url": self.url.get_secret_value(),
                "sentinel_password": None if password is None else password.get_secret_value(),
                "encoding": Encoding(self.encoding),
                "limit": limit,
            }
        )


class KvTierSection(_Section):
    host: HostTierSection = HostTierSection()
    redis: RedisSection = RedisSection()


class PromptSection(_Section):
    intro: str = "Answer the question from the documents.\n\n"
    document_template: str = "{title}\n{text}\n\n"
    untitled_template: str = "{text}\n\n"
    question_template: str = "{question}"
    max_chunk_tokens: Positive = 2048
    token_cache_tokens: int = Field(default=1 << 20, ge=0)

    @field_validator("document_template", "untitled_template", "question_template")
    @classmethod
    def _has_its_placeholder(cls, value: str, info: ValidationInfo) -> str:
        needed = "{question}" if info.field_name == "question_template" else "{text}"
        if value.count(needed) != 1:
            raise ValueError(f"must hold {needed} exactly once")
        if info.field_name == "untitled_template" and "{title}" in value:
            raise ValueError("must not hold {title}: it is for documents without one")
        return value


class HttpSection(_Section):
    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=1, le=65535)
    ingress_replicas: Positive = 1
    api_keys_file: AbsolutePath | None = None  # of `cachesmith keys`; unset: no key is needed
    admin_token: Secret | None = None  # both unset: the routes for administrators are open
    max_body_bytes: ByteSize = Field(default=ByteSize(16 << 20), ge=1)  # "16MiB"
    ssl_certfile: AbsolutePath | None = None  # with ssl_keyfile: HTTPS
    ssl_keyfile: AbsolutePath | None = None

    @model_validator(mode="after")
    def _has_a_key_for_its_certificate(self) -> "HttpSection":
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile go together")
        return self

    @field_validator("admin_token")
    @classmethod
    def _fits_a_header(cls, value: SecretStr | None) -> SecretStr | None:
        token = "x" if value is None else value.get_secret_value()
        if not (token.isascii() and token.isprintable() and token.split() == [token]):
            raise ValueError("must be ASCII characters without spaces, one at least")
        return value


class Settings(BaseSettings):
    """The root. Construct it with `load_settings`, which says what is wrong in plain words."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,  # it may be a secret
    )

    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    replicas: ReplicasSection = ReplicasSection()
    planner: PlannerSection = PlannerSection()
    scheduler: SchedulerSection = SchedulerSection()
    kv_tier: KvTierSection = KvTierSection()
    prompt: PromptSection = PromptSection()
    http: HttpSection = HttpSection()

    @property
    def served_name(self) -> str:
        name = self.model.name_or_dir
        if self.model.served_name:
            return self.model.served_name
        return Path(name).expanduser().resolve().name if name.startswith(("/", ".", "~")) else name


def load_settings(
    *,
    config_file: Path | Sequence[Path] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> Settings:
    """The settings that hold: `overrides` (the command line) over environment over file.

    Of several files the later wins, key by key. Raises SettingsError.
    """
    files = [config_file] if isinstance(config_file, Path) else list(config_file or ())

    class Loaded(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            if not files:
                return init_settings, env_settings
            from_files = YamlConfigSettingsSource(settings_cls, yaml_file=files, deep_merge=True)
            return init_settings, env_settings, from_files

    for file in files:
        _check_file(file)
    _check_environment()
    try:
        loaded = Loaded(**(overrides or {}))
    except ValidationError as exc:
        raise SettingsError(readable_errors(exc)) from None
    return Settings.model_construct(
        **{name: getattr(loaded, name) for name in Settings.model_fields}
    )


def overrides_of(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What a command's options say, in the settings' shape; it need not have all of them."""
    given: dict[str, dict[str, Any]] = {}
    for option, section, key in (
        ("model", "model", "name_or_dir"),
        ("tp", "engine", "tensor_parallel_size"),
        ("replicas", "replicas", "num"),
        ("host", "http", "host"),
        ("port", "http", "port"),
    ):
        if (value := getattr(args, option, None)) is not None:
            given.setdefault(section, {})[key] = value
    return given


def _check_file(config_file: Path) -> None:
    try:
        content = yaml.safe_load(config_file.read_text())
    except OSError as exc:
        raise SettingsError(f"can not read {config_file}: {exc.strerror}") from None
    except yaml.YAMLError as exc:
        raise SettingsError(f"{config_file} is not valid YAML: {exc}") from None
    if content is not None and not isinstance(content, dict):
        raise SettingsError(f"{config_file} must hold sections such as model: and engine:")


def _check_environment() -> None:
    """Refuse a misspelt section: pydantic-settings itself reads only names that it knows."""
    for name in os.environ:
        section, nested, _ = name.removeprefix(ENV_PREFIX).partition("__")
        if name.startswith(ENV_PREFIX) and nested and section.lower() not in Settings.model_fields:
            known = ", ".join(Settings.model_fields)
            raise SettingsError(f"{name}: unknown section {section.lower()}, known are {known}")


def readable_errors(error: ValidationError) -> str:
    """A line for each wrong key, which it starts with."""
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown key"
        lines.append(f"{key}: {message}" if key else message)
    return "\n".join(lines)
