"""Serve configs from settings and a cluster's state, and `cachesmith deploy` without a cluster."""

import json
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from deploy.app import AppArgs, cluster_config, host_tier_dir, ingresses_per_node
from deploy.cli import main
from deploy.serve_config import (
    application,
    changes,
    shown,
    with_application,
    without_application,
)
from deploy.settings import SettingsError, load_settings

OTHER = {"name": "other", "route_prefix": "/other", "import_path": "a:b", "args": {"x": 1}}


def app_of(name: str = "one", route_prefix: str = "/", **sections: Any) -> dict[str, Any]:
    settings = load_settings(overrides=sections)
    return application(settings, name=name, route_prefix=route_prefix)


def details_of(*apps: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What the cluster says of applications that were put."""
    return {
        "applications": {
            app["name"]: {"route_prefix": app["route_prefix"], "deployed_app_config": app}
            for app in apps
        },
        **more,
    }


def test_autoscaling_takes_the_place_of_the_number():
    replica, ingress = app_of(replicas={"autoscaling": {"max": 5}})["deployments"]
    assert "num_replicas" not in replica
    fixed = app_of(replicas={"num": 5})["deployments"][1]
    assert ingress["max_ongoing_requests"] == fixed["max_ongoing_requests"]


def test_a_certificate_goes_to_serve():
    files = {"ssl_certfile": "/tls/cert.pem", "ssl_keyfile": "/tls/key.pem"}
    settings = load_settings(overrides={"http": files})
    app = application(settings, name="one", route_prefix="/")
    assert app["args"] == {"app_name": "one"}
    config = with_application({}, app, settings)
    assert ServeDeploySchema.model_validate(config).http_options.ssl_keyfile == "/tls/key.pem"
    with pytest.raises(SettingsError, match=r"http\.ssl_certfile: Serve runs with None"):
        with_application({"http_options": {"host": "h", "port": 8000}}, app, settings)


def test_the_arguments_give_the_settings_back_and_leave_counts_to_serve():
    sections = {
        "model": {"name_or_dir": "/models/m", "max_model_len": 512},
        "engine": {"vllm": {"seed": 3}, "parking_bytes": "1MiB", "max_num_seqs": 4},
        "replicas": {"num": 3, "cpus_per_replica": 2.0, "graceful_shutdown_s": 7.0},
        "kv_tier": {"redis": {"url": "redis://:pw@h:1/0", "nodes": ["a:1"]}},
        "http": {"admin_token": "t0ken", "ingress_replicas": 2},
    }
    settings = load_settings(overrides=sections)
    app = application(settings, name="one", route_prefix="/one")
    assert json.loads(json.dumps(app)) == app
    args = AppArgs(**app["args"])
    assert args.app_name == "one" and args.replicas.num == 1
    replicas = args.replicas.model_copy(update={"num": 3, "graceful_shutdown_s": 7.0})
    back = args.model_copy(update={"replicas": replicas}).model_dump(exclude={"app_name"})
    assert back == settings.model_dump()
    wanted = cluster_config(settings)
    replica, ingress = app["deployments"]
    assert replica["num_replicas"] == 3
    assert replica["max_ongoing_requests"] == wanted.max_ongoing_per_replica == 16
    assert replica["graceful_shutdown_timeout_s"] == ingress["graceful_shutdown_timeout_s"] == 7.0
    assert ingress["max_ongoing_requests"] >= settings.scheduler.max_waiting + 3 * 16
    ServeDeploySchema.model_validate(with_application({"applications": {}}, app, settings))


def test_what_stays_at_its_default_is_not_said():
    assert app_of()["args"] == {"app_name": "one"}
    assert app_of(http={"port": 9000}, replicas={"num": 4})["args"] == {"app_name": "one"}


def test_other_applications_and_what_serve_runs_with_stay():
    running = details_of(
        OTHER, proxy_location="HeadOnly", http_options={"host": "1.2.3.4", "port": 80}
    )
    running["applications"]["program"] = {"route_prefix": "/p", "deployed_app_config": None}
    app = app_of()
    config = with_application(running, app, load_settings())
    assert config["applications"] == [OTHER, app]
    assert config["proxy_location"] == "HeadOnly"
    assert config["http_options"] == {"host": "1.2.3.4", "port": 80}
    new = with_application({"applications": {}}, app, load_settings())
    assert new["applications"] == [app] and new["proxy_location"] == "EveryNode"
    assert new["http_options"] == {"host": "127.0.0.1", "port": 8000}
    assert without_application(details_of(OTHER, app), "one")["applications"] == [OTHER]


@pytest.mark.parametrize(
    ("running", "sections", "key"),
    [
        (details_of({**OTHER, "route_prefix": "/"}), {}, "--route-prefix"),
        (details_of({**OTHER, "name": "one"}), {}, "--name"),
        (
            {"applications": {"one": {"route_prefix": "/", "deployed_app_config": None}}},
            {},
            "--name",
        ),
        (details_of(app_of()), {"model": {"name_or_dir": "/other"}}, "model.name_or_dir"),
        (details_of(http_options={"host": "h", "port": 80}), {"http": {"port": 81}}, "http.port"),
    ],
)
def test_what_stands_in_the_way_is_named(running, sections, key):
    settings = load_settings(overrides=sections)
    app = application(settings, name="one", route_prefix="/")
    with pytest.raises(SettingsError) as error:
        with_application(running, app, settings)
    assert str(error.value).startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("running", "reason"),
    [
        (details_of(OTHER), "there are: other"),
        ({"applications": {"one": {"route_prefix": "/", "deployed_app_config": None}}}, "process"),
    ],
)
def test_only_what_was_deployed_is_removed(running, reason):
    with pytest.raises(SettingsError, match=reason):
        without_application(running, "one")


def test_changes_tell_what_restarts_and_no_secret():
    before = app_of(http={"admin_token": "old-secret"}, replicas={"num": 2})
    assert changes(details_of(OTHER), before).is_new
    same = changes(details_of(before), before)
    assert not (same.is_new or same.restarting or same.in_place)
    more = changes(
        details_of(before), app_of(http={"admin_token": "old-secret"}, replicas={"num": 3})
    )
    assert not more.restarting
    assert "Replica.num_replicas: 2 -> 3" in [str(change) for change in more.in_place]
    other = app_of(http={"admin_token": "new-secret"}, scheduler={"gather_ms": 2.0})
    lines = [str(change) for change in changes(details_of(before), other).restarting]
    assert "scheduler.gather_ms: default -> 2.0" in lines
    assert 'http.admin_token: "(hidden)" -> "(hidden)"' in lines
    assert "secret" not in yaml.safe_dump(shown(other)) + "".join(lines)


def test_applications_have_host_tiers_of_their_own_unless_told():
    unset = load_settings()
    assert host_tier_dir(unset) == unset.kv_tier.host.path
    assert host_tier_dir(unset, "two") == unset.kv_tier.host.path.with_name(
        f"{unset.kv_tier.host.path.name}-two"
    )
    given = load_settings(overrides={"kv_tier": {"host": {"directory": "/dev/shm/both"}}})
    assert {str(host_tier_dir(given, name)) for name in ("a", "b")} == {"/dev/shm/both"}
    assert cluster_config(unset, app_name="two").replica.engine.host_tier_dir.endswith("-two")


@pytest.mark.parametrize(
    ("num_ingresses", "num_nodes", "limit"),
    [(1, 4, None), (2, 1, None), (2, 0, None), (2, 2, 1), (3, 2, 2), (2, 8, 1), (5, 2, 3)],
)
def test_the_bound_on_ingresses_leaves_room_for_all(num_ingresses, num_nodes, limit):
    assert ingresses_per_node(num_ingresses, num_nodes) == limit


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--config", "none.yaml"], "none.yaml"),
        (["--replicas", "0"], "replicas.num"),
        (["--name", "a b"], "--name"),
        (["--route-prefix", "qwen"], "--route-prefix"),
        (["--route-prefix", "/qwen/"], "--route-prefix"),
        ([], "http://127.0.0.1:9"),
        (["--remove", "one"], "http://127.0.0.1:9"),
        (["--dry-run"], "http://127.0.0.1:9"),
    ],
)
def test_deploy_says_what_is_wrong(argv, reason, monkeypatch, capsys):
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
    assert main(["deploy", *argv]) == 1
    assert reason in capsys.readouterr().err


def test_later_files_win_key_by_key(tmp_path):
    common, model = tmp_path / "common.yaml", tmp_path / "model.yaml"
    common.write_text("scheduler: {gather_ms: 1.0, max_waiting: 9}\n")
    model.write_text("scheduler: {gather_ms: 2.0}\nmodel: {served_name: m}\n")
    settings = load_settings(config_file=[common, model])
    assert (settings.scheduler.gather_ms, settings.scheduler.max_waiting) == (2.0, 9)
    assert settings.served_name == "m"
    model.write_text("scheduler: {gather: 2.0}\n")
    with pytest.raises(SettingsError, match=r"scheduler\.gather: unknown key"):
        load_settings(config_file=[common, model])
