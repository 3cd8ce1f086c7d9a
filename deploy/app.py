"""Composition: from settings to a Serve application.

`build` is what `serve run` and `serve deploy` call (see serve.yaml), `build_from_file` what
Kubernetes calls, `build_application` the command line.
"""

import json
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource
from ray.serve import Application

from cluster.config import (
    AutoscalingSpec,
    ClusterConfig,
    IngressConfig,
    PromptConfig,
    ReplicaConfig,
    SchedulerConfig,
)
from deploy.profiles import NO_PROFILE, find_profile
from deploy.settings import (
    AutoscalingSection,
    PlannerSection,
    Settings,
    SettingsError,
    load_settings,
)
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
    ScalingConfig,
    ServingProfile,
    Signal,
    SlackPlannerConfig,
)
from replicas.config import EngineConfig
from replicas.interface import RagEngine

APP_NAME = "cachesmith"
ENGINE_BUILDER = "deploy.app:build_engine"
HANDOVER_SHARE = 0.25  # of the graceful shutdown: answers come first, and the engine has to end


class AppArgs(Settings):
    """The settings as `args:` of a Serve config. Read from there alone, not from an environment.

    app_name: must be the `name` of the application, which Serve does not tell its builder
    """

    app_name: str = APP_NAME

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
    return build_application(args, app_name=args.app_name)


class FileArgs(BaseModel):
    """`args:` of a Serve config that names a file instead of holding the settings.

    revision: Serve builds the application anew when its args change, not when the file does
    """

    model_config = ConfigDict(extra="forbid")

    config_file: Path
    revision: str = ""
    app_name: str = APP_NAME


def build_from_file(args: FileArgs) -> Application:
    """The application, from a file and the environment of the node that builds it.

    So that secrets are in neither Serve's config nor the file. Raises SettingsError.
    """
    return build_application(load_settings(config_file=args.config_file), app_name=args.app_name)


def build_application(
    settings: Settings, *, app_name: str = APP_NAME, engine_builder: str = ENGINE_BUILDER
) -> Application:
    """The application, bound. Needs a running Ray, to see how many nodes and whether GPUs."""
    import ray

    from cluster.deployments import cluster_app

    alive = [node for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    nodes = [node["Resources"] for node in alive]
    config = cluster_config(
        settings,
        app_name=app_name,
        has_gpus=any(node.get("GPU", 0) > 0 for node in nodes),
        engine_builder=engine_builder,
    )
    num_nodes = sum(node.get("CPU", 0) >= config.cpus_per_ingress for node in nodes)
    limit = ingresses_per_node(config.num_ingresses, num_nodes)
    return cluster_app(replace(config, max_ingresses_per_node=limit))


def ingresses_per_node(num_ingresses: int, num_nodes: int) -> int | None:
    """The bound that spreads the ingresses over the nodes; None where it would do nothing.

    Serve's own preference for nodes without an ingress is none for the one that takes the place
    of a lost one. num_nodes: those that can hold an ingress.
    """
    if num_ingresses < 2 or num_nodes < 2:
        return None
    return -(-num_ingresses // num_nodes)


def cluster_config(
    settings: Settings,
    *,
    app_name: str = APP_NAME,
    has_gpus: bool = False,
    engine_builder: str = ENGINE_BUILDER,
) -> ClusterConfig:
    """Settings taken apart into what each part of the cluster reads."""
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
            resolve_model="deploy.models:resolve_here",
            admin_token=token.get_secret_value() if token is not None else None,
            api_keys_file=settings.http.api_keys_file or "",
            max_body_bytes=int(settings.http.max_body_bytes),
            may_sleep=replicas.autoscaling.max is not None
            and replicas.autoscaling.scale_to_zero_after_s is not None,
        ),
        replica=ReplicaConfig(
            builder=engine_builder,
            engine=replace(
                engine_config(settings),
                profile=profile,
                host_tier_dir=str(host_tier_dir(settings, app_name)),
            ),
        ),
        num_replicas=replicas.num,
        autoscaling=autoscaling_spec(replicas.autoscaling),
        cpus_per_replica=replicas.cpus_per_replica,
        gpus_per_replica=per_rank * engine.tensor_parallel_size,
        max_ongoing_per_replica=max_ongoing_per_replica(settings),
        max_surge=replicas.max_surge,
        num_ingresses=settings.http.ingress_replicas,
        graceful_shutdown_s=replicas.graceful_shutdown_s,
    )


def autoscaling_spec(autoscaling: AutoscalingSection) -> AutoscalingSpec | None:
    """None: a fixed number."""
    if autoscaling.max is None:
        return None
    return AutoscalingSpec(
        policy=autoscaling.policy,
        scaling=ScalingConfig(
            min_replicas=autoscaling.min,
            max_replicas=autoscaling.max,
            target_utilisation=autoscaling.target_utilisation,
            down_after_s=autoscaling.down_after_s,
            scale_to_zero_after_s=autoscaling.scale_to_zero_after_s,
        ),
        ongoing={"downscale_delay_s": autoscaling.down_after_s},
    )


def max_ongoing_per_replica(settings: Settings) -> int:
    """Requests that Serve sends to one replica at a time."""
    return settings.replicas.max_ongoing_requests or 4 * settings.engine.max_num_seqs


def host_tier_dir(settings: Settings, app_name: str = APP_NAME) -> Path:
    """The folder of the settings, or one for each application.

    Applications may name the same folder if model, dtype and capacity make the same arena of it:
    keys tell the models' weights apart.
    """
    path = settings.kv_tier.host.path
    if settings.kv_tier.host.directory or app_name == APP_NAME:
        return path
    return path.with_name(f"{path.name}-{app_name}")


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
        pin_cores=engine.pin_cores == "auto",
        redis=redis_config(settings),
        handover_ms=1e3 * HANDOVER_SHARE * settings.replicas.graceful_shutdown_s,
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
    from deploy.models import resolve_here
    from replicas.vllm_engine import VllmEngine

    return VllmEngine(replace(config, model_dir=str(resolve_here(config.model_dir))))


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
