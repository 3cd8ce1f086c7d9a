"""From settings to an application of a Serve config, and what the config changes on a cluster.

Serve restarts every replica whose `args` change. Counts and limits therefore go into `deployments`,
which Serve changes in place.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, SecretStr

from cluster.deployments import max_ongoing_per_ingress
from deploy.app import max_ongoing_per_replica
from deploy.settings import Settings, SettingsError

IMPORT_PATH = "deploy.app:build"
PROXY_LOCATION = "EveryNode"
APP_NAME = "app_name"  # the key of `args` that our applications have

# settings that Serve takes beside `args`
_IN_PLACE = {
    "replicas": ("num", "max_ongoing_requests", "graceful_shutdown_s", "max_surge"),
    "http": ("host", "port", "ssl_certfile", "ssl_keyfile"),
}
_HIDDEN = "(hidden)"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """key: a dotted path, as in the settings; before, after: None where it is not set"""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.after)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationChanges:
    """What a config does to an application that may be there."""

    is_new: bool
    restarting: tuple[Change, ...]
    in_place: tuple[Change, ...]


def application(
    settings: Settings, *, name: str, route_prefix: str, import_path: str = IMPORT_PATH
) -> Json:
    """The application's entry in a Serve config. Holds secrets in clear, as Serve needs them."""
    # what is not said follows the defaults of the version that is installed on the cluster
    args = json.loads(json.dumps(settings.model_dump(exclude_defaults=True), default=_revealed))
    for section, keys in _IN_PLACE.items():
        for key in keys:
            args.get(section, {}).pop(key, None)
        if args.get(section) == {}:
            del args[section]
    replicas, max_ongoing = settings.replicas, max_ongoing_per_replica(settings)
    shutdown = {"graceful_shutdown_timeout_s": replicas.graceful_shutdown_s}
    max_calls = max_ongoing_per_ingress(
        max_waiting=settings.scheduler.max_waiting,
        num_replicas=replicas.most,
        max_ongoing_per_replica=max_ongoing,
    )
    return {
        "name": name,
        "route_prefix": route_prefix,
        "import_path": import_path,
        "args": {APP_NAME: name, **args},
        "deployments": [
            {
                "name": "Replica",
                # else the application says how it is sized
                **({"num_replicas": replicas.num} if replicas.autoscaling.max is None else {}),
                "max_ongoing_requests": max_ongoing,
                "max_surge_percent": round(100 * replicas.max_surge),
                **shutdown,
            },
            {"name": "Ingress", "max_ongoing_requests": max_calls, **shutdown},
        ],
    }


def with_application(details: Json, app: Json, settings: Settings) -> Json:
    """The cluster's Serve config with this application new or changed, and all others as they are.

    details: what `GET /api/serve/applications/` says
    Raises SettingsError where Serve, or another application, stands in the way.
    """
    name, route = app["name"], app["route_prefix"]
    running = details.get("applications", {})
    for other, found in running.items():
        if other != name and found["route_prefix"] == route:
            raise SettingsError(
                f"--route-prefix: {route} is that of the application {other}; give another"
            )
    if name in running:
        mine = running[name].get("deployed_app_config")
        if mine is None:
            raise SettingsError(f"--name: {name} is run by a program, such as `cachesmith serve`")
        if mine["import_path"] != app["import_path"]:
            raise SettingsError(
                f"--name: {name} is another kind of application, {mine['import_path']}"
            )
        before = mine.get("args", {}).get("model", {}).get("name_or_dir")
        after = app["args"].get("model", {}).get("name_or_dir")
        if before != after:
            # while replicas are replaced, ingresses and replicas of both meet: one model's tokens
            # would reach the other
            raise SettingsError(
                f"model.name_or_dir: {name} serves {_shown(before)}; deploy another model under "
                "another --name and --route-prefix, or --remove this application first"
            )
    http = {key: getattr(settings.http, key) for key in _IN_PLACE["http"]}
    found_http = details.get("http_options")
    for key, wanted in http.items():
        is_asked = wanted != getattr(type(settings.http)(), key)
        if found_http is not None and is_asked and found_http.get(key) != wanted:
            raise SettingsError(
                f"http.{key}: Serve runs with {found_http.get(key)!r}, which can not be changed "
                f"while applications run; got {wanted!r}"
            )
    given = {key: value for key, value in http.items() if value is not None}
    return _config(details, [*_others(details, name), app], given)


def without_application(details: Json, name: str) -> Json:
    """The cluster's Serve config without this application.

    Raises SettingsError if it is not there, or not of the config.
    """
    found = details.get("applications", {}).get(name)
    if found is None:
        names = ", ".join(sorted(details.get("applications", {}))) or "none"
        raise SettingsError(f"--remove: there is no application {name}; there are: {names}")
    if found.get("deployed_app_config") is None:
        raise SettingsError(f"--remove: {name} was not deployed; end the process that runs it")
    return _config(details, _others(details, name), {})


def changes(details: Json, app: Json) -> ApplicationChanges:
    """What putting `app` changes. Secrets are not shown."""
    found = details.get("applications", {}).get(app["name"], {}).get("deployed_app_config")
    before, after = found or {}, app
    restarting, in_place = [], []
    for key in ("import_path", "args"):
        restarting += _differences(key, before.get(key), after.get(key))
    in_place += _differences("route_prefix", before.get("route_prefix"), after["route_prefix"])
    in_place += _differences(
        "deployments", _by_name(before.get("deployments", [])), _by_name(after["deployments"])
    )
    return ApplicationChanges(
        is_new=found is None, restarting=tuple(restarting), in_place=tuple(in_place)
    )


def shown(app: Json) -> Json:
    """The application without its secrets."""
    return {**app, "args": _masked(app["args"], frozenset(_secret_keys(Settings)))}


def _config(details: Json, applications: list[Json], http: Json) -> Json:
    config = {
        "proxy_location": details.get("proxy_location") or PROXY_LOCATION,
        "http_options": details.get("http_options") or http,
        "applications": applications,
    }
    for key in ("grpc_options", "target_capacity"):
        if details.get(key) is not None:
            config[key] = details[key]
    return config


def _others(details: Json, name: str) -> list[Json]:
    """As they were put. Those that a program runs are not of the config, and Serve leaves them."""
    return [
        found["deployed_app_config"]
        for other, found in details.get("applications", {}).items()
        if other != name and found.get("deployed_app_config") is not None
    ]


def _differences(key: str, before: Any, after: Any) -> Iterator[Change]:
    if isinstance(before or {}, Mapping) and isinstance(after or {}, Mapping):
        old, new = before or {}, after or {}
        for part in sorted({*old, *new}):
            yield from _differences(f"{key}.{part}", old.get(part), new.get(part))
    elif before != after:
        name = key.removeprefix("args.").removeprefix("deployments.")
        is_secret = name in set(_secret_keys(Settings))
        values = [_HIDDEN if is_secret and v is not None else v for v in (before, after)]
        yield Change(key=name, before=values[0], after=values[1])


def _by_name(deployments: list[Json]) -> Json:
    return {d["name"]: {k: v for k, v in d.items() if k != "name"} for d in deployments}


def _secret_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _secret_keys(info.annotation, f"{prefix}{name}.")
        elif "SecretStr" in str(info.annotation):
            yield f"{prefix}{name}"


def _masked(values: Json, secrets: frozenset[str], prefix: str = "") -> Json:
    return {
        key: _HIDDEN
        if f"{prefix}{key}" in secrets
        else _masked(value, secrets, f"{prefix}{key}.")
        if isinstance(value, dict)
        else value
        for key, value in values.items()
    }


def _revealed(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    raise TypeError(f"no setting can be a {type(value).__name__}")


def _shown(value: Any) -> str:
    return "default" if value is None else json.dumps(value)
