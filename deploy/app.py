"""Composition: from settings to a Serve application.

`build` is what `serve run` and `serve deploy` call (see serve.yaml), `build_application` what the
command line calls.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource
from ray.serve import Application

from cluster.config import (
    ClusterConfig,
    IngressConfig,
    PromptConfig,
    ReplicaConfig,
    SchedulerConfig,
)
from deploy.profiles import NO_PROFILE, find_profile
from deploy.settings import PlannerSection, Settings, SettingsError
from kv_tier.redis.config import RedisTierConfig
from planner import (
    STATIC_POLICIES,
    AutoRule,
    BudgetBand,
    BudgetPlanner,
    BudgetPlannerConfig,
    CacheSmithConfig,
    DemandCurves,
    Deviation,
    PolicyConfig,
    QueueLimits,
    ServingProfile,
    Signal,
    SlackPlannerConfig,
)
from replicas.config import EngineConfig
from replicas.interface import RagEngine

APP_NAME = "cachesmith"
ENGINE_BUILDER = "deploy.app:build_engine"


class AppArgs(Settings):
    """The settings as `args:` of a Serve config. Read from there alone, not from an environment."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def build(args: AppArgs) -> Application:
    """The application for Ray's own `serve` command line, which has its own host and port."""
    return build_application(args, app_name=APP_NAME)


def build_application(
    settings: Settings, *, app_name: str = APP_NAME, engine_builder: str = ENGINE_BUILDER
) -> Application:
    """The application, bound. Needs a running Ray, to see how many nodes and whether GPUs."""
    import ray

    from cluster.deployments import cluster_app

    has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    num_nodes = sum(node["Alive"] for node in ray.nodes()) if ray.is_initialized() else 1
    return cluster_app(
        cluster_config(
            settings,
            app_name=app_name,
            has_gpus=has_gpus,
            num_nodes=num_nodes,
            engine_builder=engine_builder,
        )
    )


def cluster_config(
    settings: Settings,
    *,
    app_name: str = APP_NAME,
    has_gpus: bool = False,
    num_nodes: int = 1,
    engine_builder: str = ENGINE_BUILDER,
) -> ClusterConfig:
    """Settings taken apart into what each part of the cluster reads.

    num_nodes: those that the ingresses are spread over
    """
    engine, replicas, scheduler = settings.engine, settings.replicas, settings.scheduler
    profile, token = profile_of(settings), settings.http.admin_token
    per_rank = replicas.gpus_per_rank
    if per_rank is None:
        per_rank = 1.0 if has_gpus else 0.0
    scheduler_config = SchedulerConfig(
        policy=policy_config(settings),
        planner=planner_config(settings.planner),
        demand=profile.demand if profile is not None else None,
        gather_ms=scheduler.gather_ms,
        max_wait_ms=scheduler.max_wait_ms,
    )
    check_signal(scheduler_config)
    return ClusterConfig(
        app_name=app_name,
        ingress=IngressConfig(
            model=settings.model.name_or_dir,
            model_name=settings.served_name,
            scheduler=scheduler_config,
            prompt=PromptConfig(**settings.prompt.model_dump()),
            max_model_len=settings.model.max_model_len,
            default_ttft_slo_ms=scheduler.default_ttft_slo_ms,
            default_max_tokens=scheduler.default_max_tokens,
            redis=settings.kv_tier.redis.config(),
            resolve_model="deploy.models:resolve_model",
            admin_token=token.get_secret_value() if token is not None else None,
        ),
        replica=ReplicaConfig(
            builder=engine_builder, engine=replace(engine_config(settings), profile=profile)
        ),
        num_replicas=replicas.num,
        cpus_per_replica=replicas.cpus_per_replica,
        gpus_per_replica=per_rank * engine.tensor_parallel_size,
        max_ongoing_per_replica=replicas.max_ongoing_requests or 4 * engine.max_num_seqs,
        num_ingresses=settings.http.ingress_replicas,
        max_ingresses_per_node=math.ceil(settings.http.ingress_replicas / num_nodes),
        graceful_shutdown_s=replicas.graceful_shutdown_s,
    )


def planner_config(planner: PlannerSection) -> BudgetPlannerConfig:
    return BudgetPlannerConfig(
        signal=None if planner.signal == "best" else Signal(planner.signal),
        deviation=Deviation(planner.deviation),
        resolve=planner.resolve,
        band=BudgetBand(floor=planner.floor, saturation=planner.saturation),
        reserve=planner.reserve,
    )


def policy_config(settings: Settings) -> PolicyConfig:
    """The scheduling policy with its limits, and what it runs where it does not plan."""
    planner, scheduler = planner_config(settings.planner), settings.scheduler
    static = STATIC_POLICIES[scheduler.static_config]
    return PolicyConfig(
        name=scheduler.policy,
        rules=CacheSmithConfig(
            limits=QueueLimits(
                max_batch_requests=scheduler.max_batch_requests,
                max_batch_tokens=scheduler.max_batch_tokens,
                max_waiting=scheduler.max_waiting,
            ),
            refuse_hopeless=scheduler.refuse_hopeless,
            reserve=planner.reserve,
        ),
        static=static,
        slack=SlackPlannerConfig(
            signal=static.signal,
            warmup_depth=static.warmup_depth,
            probe_len=static.probe_len,
            deviation=planner.deviation,
            resolve=planner.resolve,
            band=planner.band,
            reserve=planner.reserve,
        ),
    )


def profile_of(settings: Settings) -> ServingProfile | None:
    """The profile of the settings or that comes with the model, without its samples.

    Raises SettingsError for a file that is no profile.
    """
    given = settings.planner.profile
    if given == NO_PROFILE:
        return None
    path = Path(given).expanduser() if given else find_profile(settings.model.name_or_dir)
    if path is None:
        return None
    try:
        return ServingProfile.load(path).without_samples()
    except OSError as exc:
        raise SettingsError(f"planner.profile: can not read {path}: {exc.strerror}") from None
    except ValueError as exc:
        raise SettingsError(f"planner.profile: {exc}") from None


def check_signal(config: SchedulerConfig) -> None:
    """Refuse a signal that the profile knows nothing of. Raises SettingsError."""
    if config.demand is None:
        return
    try:
        BudgetPlanner(config.planner, DemandCurves(config.demand))
    except ValueError as exc:
        raise SettingsError(f"planner.signal: {exc}") from None


def engine_config(settings: Settings) -> EngineConfig:
    """Raises SettingsError for settings of several sections that do not go together."""
    if settings.engine.load_bandwidth_mb_s is not None and settings.kv_tier.redis.url is not None:
        raise SettingsError(
            "engine.load_bandwidth_mb_s: emulates a link where there is none; with Redis, set "
            "kv_tier.redis.limit_gb_per_s"
        )
    engine, host = settings.engine, settings.kv_tier.host
    kv_cache = engine.kv_cache_memory_bytes
    return EngineConfig(
        model_dir=settings.model.name_or_dir,
        model_name=settings.served_name,
        dtype=settings.model.dtype,
        tensor_parallel_size=engine.tensor_parallel_size,
        max_model_len=settings.model.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        kv_cache_memory_bytes=None if kv_cache is None else int(kv_cache),
        cpu_threads=engine.cpu_threads,
        slice_layers=engine.slice_layers,
        batch_hold_ms=engine.batch_hold_ms,
        parking_bytes=int(engine.parking_bytes),
        auto_rule=AutoRule(
            threshold=settings.planner.auto_threshold,
            qci_when_peaked=settings.planner.auto_qci_when == "peaked",
        ),
        load_bandwidth_mb_s=engine.load_bandwidth_mb_s,
        fill_stalls=engine.fill_stalls,
        anchor_text=engine.anchor_text,
        host_tier_dir=str(host.path),
        host_tier_bytes=int(host.capacity_bytes),
        host_tier_watermarks=(host.low_watermark, host.high_watermark),
        host_tier_eviction=host.eviction,
        max_ingest_backlog=engine.max_ingest_backlog,
        redis=redis_config(settings),
        vllm=engine.vllm,
    )


def redis_config(settings: Settings) -> RedisTierConfig | None:
    """What waits to be written can not be evicted from the host tier: a quarter of it at most."""
    config, tier = settings.kv_tier.redis.config(), settings.kv_tier
    if config is None or tier.redis.write_backlog_bytes is not None:
        return config
    return replace(config, write_backlog_bytes=int(tier.host.capacity_bytes) // 4)


def build_engine(config: EngineConfig) -> RagEngine:
    """Called in the replica's process: finds the model on its node, then makes the engine."""
    from deploy.models import resolve_model
    from replicas.vllm_engine import VllmEngine

    return VllmEngine(replace(config, model_dir=str(resolve_model(config.model_dir))))


def check_host_tier(settings: Settings, model_dir: Path) -> None:
    """Refuse a host tier that can not hold one chunk of this model. Raises SettingsError."""
    needed = settings.prompt.max_chunk_tokens * kv_bytes_per_token(model_dir, settings.model.dtype)
    if settings.kv_tier.host.capacity_bytes < needed:
        raise SettingsError(
            "kv_tier.host.capacity_bytes: must hold at least one chunk: "
            f"{settings.prompt.max_chunk_tokens} tokens (prompt.max_chunk_tokens) of this model "
            f"need {needed} bytes, got {int(settings.kv_tier.host.capacity_bytes)}"
        )


def kv_bytes_per_token(model_dir: Path, dtype: str) -> int:
    """Size of one token's keys and values in all layers, from the model's config."""
    config = json.loads((model_dir / "config.json").read_text())
    config = config.get("text_config", config)
    num_heads = config.get("num_attention_heads", 1)
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // num_heads
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    wide = "float32" in (dtype, dtype == "auto" and config.get("dtype", config.get("torch_dtype")))
    return 2 * config.get("num_hidden_layers", 0) * num_kv_heads * head_dim * (4 if wide else 2)
