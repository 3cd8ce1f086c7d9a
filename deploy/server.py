"""A whole server as a context: Ray, Serve and the application, up and gone again."""

import io
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from deploy.local_ray import prepare_environment
from deploy.models import ModelUnavailableError, resolve_model
from deploy.profiles import NO_PROFILE, describe, find_profile
from deploy.settings import Settings, SettingsError

Progress = Callable[[str], None]

_POLL_S = 0.25
_REPORT_EVERY_S = 10.0
_OBJECT_STORE_BYTES = 256 * 1024 * 1024  # requests and tokens only: KV does not go through Ray


class ServerError(Exception):
    """The server can not run. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    url: str
    model_name: str
    model_dir: Path


@contextmanager
def running_server(
    settings: Settings,
    *,
    progress: Progress = print,
    ray_address: str | None = None,
    log_to_driver: bool = False,
    engine_builder: str | None = None,
) -> Iterator[RunningServer]:
    """Serve until the block ends.

    Without `ray_address` a Ray of its own is started on loopback and stopped again; with it, the
    application joins that cluster and leaves it running. `engine_builder` ("module:function" of
    an EngineConfig) is for tests. Raises ServerError, or SettingsError for what the model rules
    out.
    """
    check_port(settings.http.host, settings.http.port)
    if ray_address is None:
        _check_key_file(settings)
    model_dir = _resolve(settings, progress)
    owns_ray = ray_address is None
    if owns_ray:
        try:
            prepare_environment()  # before anything below imports Ray
        except OSError as exc:
            raise ServerError(f"Ray can not have a folder: {exc}") from None
    from deploy.app import check_host_tier

    settings = _with_profile(settings, model_dir, progress)
    if owns_ray:
        settings = _for_this_machine(settings, model_dir)
    check_host_tier(settings, model_dir)
    _tell_redis(settings, progress)
    progress("starting Ray" if owns_ray else f"joining Ray at {ray_address}")
    started = time.monotonic()
    try:
        _start_ray(settings, ray_address, log_to_driver)
        _deploy(settings, progress, engine_builder)
        scheme = "http" if settings.http.ssl_certfile is None else "https"
        url = f"{scheme}://{_client_host(settings.http.host)}:{settings.http.port}"
        _wait_until_healthy(url, progress)
        progress(f"ready after {time.monotonic() - started:.0f} s")
        yield RunningServer(url=url, model_name=settings.served_name, model_dir=model_dir)
    finally:
        progress("stopping")
        _stop(owns_ray=owns_ray)
        if owns_ray and not settings.kv_tier.host.keep_on_exit:
            _remove_host_tier(settings.kv_tier.host.path, progress)


def check_port(host: str, port: int) -> None:
    """Raises ServerError if nobody could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise ServerError(
                f"http.port: can not listen on {host}:{port}: {exc.strerror}; "
                "choose another with --port"
            ) from None


def _check_key_file(settings: Settings) -> None:
    """Raises SettingsError for a file that every ingress would refuse."""
    from cluster.key_file import KeyFile, KeyFileError

    if settings.http.api_keys_file is None:
        return
    try:
        KeyFile.load(Path(settings.http.api_keys_file))
    except KeyFileError as exc:
        raise SettingsError(f"http.api_keys_file: {exc}") from None


def _for_this_machine(settings: Settings, model_dir: Path) -> Settings:
    """The settings where all replicas run here: the model that was found, the cores shared out.

    In a cluster every node finds the model for itself, and says how many cores it has.
    """
    found = {"name_or_dir": str(model_dir), "served_name": settings.served_name}
    ranks = settings.replicas.most * settings.engine.tensor_parallel_size
    threads = settings.engine.cpu_threads or max(1, len(os.sched_getaffinity(0)) // ranks)
    return settings.model_copy(
        update={
            "model": settings.model.model_copy(update=found),
            "engine": settings.engine.model_copy(update={"cpu_threads": threads}),
        }
    )


def _with_profile(settings: Settings, model_dir: Path, progress: Progress) -> Settings:
    """The settings with the profile named that comes with the model, before its name is a folder.

    Raises SettingsError for a file that is no profile, or one of another model.
    """
    from deploy.app import profile_of
    from kv_tier.keys import model_fingerprint

    profile = profile_of(settings)
    if profile is not None:
        try:
            profile.check_model(model_fingerprint(model_dir))
        except ValueError as exc:
            path = settings.planner.profile or find_profile(settings.model.name_or_dir)
            raise SettingsError(f"planner.profile: {path}: {exc}") from None
    progress(describe(profile))
    found = settings.planner.profile or find_profile(settings.model.name_or_dir) or NO_PROFILE
    planner = settings.planner.model_copy(update={"profile": str(found)})
    return settings.model_copy(update={"planner": planner})


def _tell_redis(settings: Settings, progress: Progress) -> None:
    """Whether Redis answers. If it does not, everything works without it until it does."""
    config = settings.kv_tier.redis.config()
    if config is None:
        return
    from replicas.cache_types import CacheError
    from replicas.redis_admin import RedisAdmin

    try:
        RedisAdmin(config).ping()
    except CacheError as exc:
        progress(f"kv_tier.redis: {exc}; serving without it until it answers")
    else:
        progress("Redis answers: chunks are shared through it")


def _resolve(settings: Settings, progress: Progress) -> Path:
    try:
        return resolve_model(settings.model.name_or_dir, progress=progress).resolve()
    except ModelUnavailableError as exc:
        raise ServerError(f"model.name_or_dir: {exc}") from exc


def _start_ray(settings: Settings, ray_address: str | None, log_to_driver: bool) -> None:
    import ray
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    http = settings.http.model_dump(include={"host", "port", "ssl_certfile", "ssl_keyfile"})
    if ray_address is not None:
        ray.init(address=ray_address, log_to_driver=log_to_driver, configure_logging=False)
        serve.start(http_options=http, proxy_location="EveryNode")
        return
    # CPUs are only Ray's book-keeping here: enough for all that is asked for
    cpus = settings.replicas.most * settings.replicas.cpus_per_replica
    cpus += settings.http.ingress_replicas
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, math.ceil(cpus) + 1),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=log_to_driver,
        logging_level=logging.WARNING,
        _node_ip_address="127.0.0.1",
    )
    serve.start(
        http_options=http, proxy_location="HeadOnly", logging_config={"log_level": "WARNING"}
    )


def _deploy(settings: Settings, progress: Progress, engine_builder: str | None) -> None:
    """Hand the application to Serve and wait until it runs."""
    from ray import serve

    from deploy.app import APP_NAME, ENGINE_BUILDER, build_application
    from deploy.application_status import failure_of, progress_of

    builder = engine_builder or ENGINE_BUILDER
    application = build_application(settings, engine_builder=builder)
    target = serve.RunTarget(target=application, name=APP_NAME, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)
    progress(
        f"starting {settings.replicas.at_start} replica(s) of {settings.served_name}, "
        f"tensor parallel {settings.engine.tensor_parallel_size}"
    )
    started = reported = time.monotonic()
    while True:
        overview = serve.status().applications.get(APP_NAME)
        status = overview.status.value if overview else "NOT_STARTED"
        if status == "RUNNING":
            return
        if overview is not None and status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise ServerError(f"the application failed to start\n{failure_of(overview)}")
        now = time.monotonic()
        if now - reported > _REPORT_EVERY_S and overview is not None:
            reported = now
            progress(f"  {now - started:.0f} s: {progress_of(overview)}")
        time.sleep(_POLL_S)


def _wait_until_healthy(url: str, progress: Progress, *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    reason = "no answer"
    while time.monotonic() < deadline:
        try:
            # the certificate need not name the address that this process uses, and nothing is sent
            response = httpx.get(f"{url}/health", timeout=5.0, verify=False)
            if response.status_code == 200:
                return
            reason = response.text
        except httpx.HTTPError as exc:
            reason = str(exc)
        time.sleep(_POLL_S)
    raise ServerError(f"{url}/health did not become ready: {reason}")


def _stop(*, owns_ray: bool) -> None:
    """Undo as much as was done. Nothing here may hide the error that led here."""
    import ray

    if not ray.is_initialized():
        return
    head = ray.get_runtime_context().gcs_address
    # Serve ends its controller in the middle of a call, which Ray then reports as a failure
    with redirect_stdout(io.StringIO()):
        cleaning = threading.Thread(target=_remove_application, args=(owns_ray,), daemon=True)
        cleaning.start()
        # a signal to all processes (systemd sends one) ends Ray too: its calls would then hang
        while cleaning.is_alive() and _listens(head):
            cleaning.join(_POLL_S)
        ray.shutdown()


def _remove_application(owns_ray: bool) -> None:
    from ray import serve

    from cluster import scheduler_actor
    from cluster.config import scheduler_address
    from deploy.app import APP_NAME

    with suppress(Exception):
        serve.delete(APP_NAME)
    with suppress(Exception):
        scheduler_actor.stop(scheduler_address(APP_NAME))
    if owns_ray:
        with suppress(Exception):
            serve.shutdown()


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError:
        return False
    return True


def _remove_host_tier(directory: Path, progress: Progress, *, patience_s: float = 10.0) -> None:
    """Remove the chunk store; the engines' processes may need a moment to be gone."""
    from kv_tier import ArenaInUseError, ArenaUnavailableError, HostTier

    deadline = time.monotonic() + patience_s
    while True:
        try:
            HostTier.destroy(directory)
            return
        except ArenaInUseError as exc:
            if time.monotonic() > deadline:
                progress(f"the chunk store stays: {exc}")
                return
        except (OSError, ArenaUnavailableError) as exc:
            progress(f"the chunk store in {directory} could not be removed: {exc}")
            return
        time.sleep(_POLL_S)


def _client_host(host: str) -> str:
    """Where a client on this machine reaches a server that listens on `host`."""
    if host == "0.0.0.0":
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
