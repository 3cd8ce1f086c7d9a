"""Settings: where they come from, which wins, and what is refused with which key."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deploy.app import AppArgs, check_host_tier, cluster_config, engine_config, kv_bytes_per_token
from deploy.settings import SettingsError, load_settings
from planner import (
    SCHEDULER_POLICIES,
    STATIC_POLICIES,
    BudgetPlanner,
    DemandCurves,
    Signal,
    build_scheduler,
    built_in_demand,
)
from tests.fakes.byte_tokenizer import write_model_dir
from tests.fakes.profiles import profile


@pytest.fixture
def config_file(tmp_path: Path) -> Any:
    def write(content: Any) -> Path:
        path = tmp_path / "server.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return path

    return write


def test_defaults_serve_the_small_model_on_loopback():
    settings = load_settings()
    assert settings.model.name_or_dir == settings.served_name == "smollm2-135m-instruct"
    assert (settings.http.host, settings.http.port) == ("127.0.0.1", 8000)
    assert settings.kv_tier.host.path.parent == Path("/dev/shm")


def test_the_command_line_wins_over_environment_over_file(config_file, monkeypatch):
    path = config_file({"engine": {"max_num_seqs": 2, "slice_layers": 2, "batch_hold_ms": 2}})
    monkeypatch.setenv("CACHESMITH_ENGINE__MAX_NUM_SEQS", "3")
    monkeypatch.setenv("CACHESMITH_ENGINE__SLICE_LAYERS", "3")
    settings = load_settings(config_file=path, overrides={"engine": {"max_num_seqs": 4}})
    engine = settings.engine
    assert (engine.max_num_seqs, engine.slice_layers, engine.batch_hold_ms) == (4, 3, 2)


def test_sizes_and_nested_values_are_readable(config_file, monkeypatch):
    path = config_file({"kv_tier": {"host": {"capacity_bytes": "2GiB"}}})
    monkeypatch.setenv("CACHESMITH_ENGINE__VLLM", '{"enforce_eager": true}')
    settings = load_settings(config_file=path)
    assert settings.kv_tier.host.capacity_bytes == 2 << 30
    assert engine_config(settings).vllm == {"enforce_eager": True}
    assert engine_config(settings).host_tier_bytes == 2 << 30


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"modle": {}}, "modle"),
        ({"model": {"name": "x"}}, "model.name"),
        ({"kv_tier": {"host": {"size": 1}}}, "kv_tier.host.size"),
        ({"kv_tier": {"redis": {"uri": "x"}}}, "kv_tier.redis.uri"),
        ({"kv_tier": {"redis": {"url": "http://x"}}}, "kv_tier.redis"),
        ({"kv_tier": {"redis": {"url": "redis://x", "mode": "sentinel"}}}, "kv_tier.redis"),
        ({"kv_tier": {"redis": {"ttl_s": 0}}}, "kv_tier.redis.ttl_s"),
        ({"kv_tier": {"disk": {}}}, "kv_tier.disk"),
        ({"kv_tier": {"host": {"high_watermark": 0.5}}}, "kv_tier.host.high_watermark"),
        ({"kv_tier": {"host": {"low_watermark": 0}}}, "kv_tier.host.low_watermark"),
        ({"engine": {"tensor_parallel_size": 0}}, "engine.tensor_parallel_size"),
        ({"engine": {"tensor_parallel_size": "two"}}, "engine.tensor_parallel_size"),
        ({"engine": {"batch_hold_ms": -1}}, "engine.batch_hold_ms"),
        ({"replicas": {"num": 0}}, "replicas.num"),
        ({"replicas": {"cpus_per_replica": 0}}, "replicas.cpus_per_replica"),
        ({"replicas": {"gpus_per_rank": 2}}, "replicas.gpus_per_rank"),
        ({"planner": {"floor": 0.5, "saturation": 0.5}}, "planner.saturation"),
        ({"planner": {"floor": -0.1}}, "planner.floor"),
        ({"planner": {"signal": "luck"}}, "planner.signal"),
        ({"scheduler": {"max_waiting": 0}}, "scheduler.max_waiting"),
        ({"scheduler": {"default_ttft_slo_ms": 0}}, "scheduler.default_ttft_slo_ms"),
        ({"http": {"port": 70000}}, "http.port"),
        ({"http": {"port": 0}}, "http.port"),
        ({"kv_tier": {"host": {"capacity_bytes": 10}}}, "kv_tier.host.capacity_bytes"),
        ({"prompt": {"document_template": "{title}"}}, "prompt.document_template"),
        ({"prompt": {"max_chunk_tokens": 0}}, "prompt.max_chunk_tokens"),
        ({"model": {"dtype": "int4"}}, "model.dtype"),
        ({"model": {"name_or_dir": ""}}, "model.name_or_dir"),
    ],
)
def test_unknown_keys_and_impossible_values_are_named(config_file, content, key):
    with pytest.raises(SettingsError) as error:
        load_settings(config_file=config_file(content))
    assert any(line.startswith(f"{key}: ") for line in str(error.value).splitlines())


def test_wrong_files_are_told_apart(config_file, tmp_path):
    for path, reason in (
        (tmp_path / "none.yaml", "can not read"),
        (config_file("a: [1"), "not valid YAML"),
    ):
        with pytest.raises(SettingsError, match=reason):
            load_settings(config_file=path)
    with pytest.raises(SettingsError, match="sections"):
        load_settings(config_file=config_file("- 1"))
    assert load_settings(config_file=config_file("")) == load_settings()


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("CACHESMITH_HTTP__PORT", "x", "http.port"),
        ("CACHESMITH_HTTP__PROT", "1", "http.prot"),
        ("CACHESMITH_HTPP__PORT", "1", "CACHESMITH_HTPP__PORT"),
    ],
)
def test_wrong_environment(monkeypatch, name, value, key):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=key):
        load_settings()


@pytest.mark.parametrize(
    ("name_or_dir", "served"), [("org/name", "org/name"), ("/models/tiny/", "tiny")]
)
def test_served_names(name_or_dir, served):
    settings = load_settings(overrides={"model": {"name_or_dir": name_or_dir}})
    assert settings.served_name == served


def test_settings_reach_the_parts():
    settings = load_settings(
        overrides={
            "engine": {"tensor_parallel_size": 2, "max_num_seqs": 4},
            "planner": {"signal": "qci", "floor": 0.1},
            "scheduler": {"max_waiting": 9, "default_ttft_slo_ms": 700},
            "replicas": {"num": 3},
        }
    )
    config = cluster_config(settings, has_gpus=True)
    scheduler = config.ingress.scheduler
    assert config.gpus_per_replica == 2 and config.num_replicas == 3
    assert config.max_ongoing_per_replica == 16
    assert scheduler.policy.rules.limits.max_waiting == 9
    assert scheduler.planner.signal is Signal.QCI and scheduler.planner.band.floor == 0.1
    # what the scheduler keeps back is what the planner does
    assert scheduler.policy.rules.reserve == scheduler.planner.reserve > 0
    assert config.ingress.default_ttft_slo_ms == 700
    assert cluster_config(settings, has_gpus=False).gpus_per_replica == 0


def test_the_profile_reaches_planner_and_engine(tmp_path):
    path = tmp_path / "profile.json"
    made = profile(demand=built_in_demand(12, Signal.QCI))
    made.save(path)
    settings = load_settings(overrides={"planner": {"profile": str(path)}})
    config = cluster_config(settings)
    assert config.ingress.scheduler.demand == made.demand
    assert config.replica.engine.profile == made
    wrong = load_settings(overrides={"planner": {"profile": str(path), "signal": "kv_dev"}})
    with pytest.raises(SettingsError, match=r"planner\.signal.*kv_dev"):
        cluster_config(wrong)
    none = load_settings(overrides={"planner": {"profile": "none"}})
    assert cluster_config(none).replica.engine.profile is None
    path.write_text("{}")
    with pytest.raises(SettingsError, match=r"planner\.profile.*fingerprint"):
        cluster_config(settings)


@pytest.mark.parametrize("name", SCHEDULER_POLICIES)
def test_every_scheduling_policy_can_be_set(name):
    settings = load_settings(
        overrides={"scheduler": {"policy": name, "static_config": "cacheblend"}}
    )
    config = cluster_config(settings).ingress.scheduler.for_model(8)
    planner = BudgetPlanner(config.planner, DemandCurves(config.demand))
    build_scheduler(config.policy, planner)
    assert config.policy.static == STATIC_POLICIES["cacheblend"]
    assert config.policy.slack.floor.warmup_depth == 1


def test_a_host_tier_smaller_than_one_chunk_is_refused(tmp_path):
    folder = write_model_dir(tmp_path)
    (folder / "config.json").write_text(
        '{"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9,'
        ' "num_key_value_heads": 3, "dtype": "bfloat16"}'
    )
    assert kv_bytes_per_token(folder, "auto") == 2 * 30 * 3 * 64 * 2
    assert kv_bytes_per_token(folder, "float32") == 2 * 30 * 3 * 64 * 4
    check_host_tier(load_settings(), folder)
    small = load_settings(overrides={"kv_tier": {"host": {"capacity_bytes": "2MiB"}}})
    with pytest.raises(SettingsError, match=r"kv_tier\.host\.capacity_bytes"):
        check_host_tier(small, folder)


def test_serve_args_do_not_read_the_environment(monkeypatch):
    monkeypatch.setenv("CACHESMITH_HTTP__PORT", "9999")
    assert AppArgs.model_validate({"replicas": {"num": 2}}).http.port == 8000
    with pytest.raises(ValidationError, match="extra_forbidden"):
        AppArgs.model_validate({"replica": {}})


def test_the_serve_config_in_the_repository_is_valid():
    path = Path(__file__).resolve().parents[2] / "deploy" / "serve.yaml"
    (app,) = yaml.safe_load(path.read_text())["applications"]
    assert app["import_path"] == "deploy.app:build"
    AppArgs.model_validate(app["args"])


def test_a_template_for_untitled_documents_takes_no_title() -> None:
    with pytest.raises(SettingsError, match=r"prompt\.untitled_template.*title"):
        load_settings(overrides={"prompt": {"untitled_template": "{title}: {text}"}})


def test_the_store_has_an_absolute_folder() -> None:
    with pytest.raises(SettingsError, match=r"kv_tier\.host\.directory.*absolute"):
        load_settings(overrides={"kv_tier": {"host": {"directory": "tier"}}})
    home = load_settings(overrides={"kv_tier": {"host": {"directory": "~/tier"}}})
    assert home.kv_tier.host.path == Path.home() / "tier"


def test_redis_is_off_without_a_url_and_its_password_is_not_shown(config_file):
    settings = load_settings()
    assert settings.kv_tier.redis.config() is None
    assert engine_config(settings).redis is None
    url = "redis://user:secret@cache:6379/2"
    redis = {"url": url, "limit_gb_per_s": 0.5, "encoding": "fp8", "sentinel_password": "hidden"}
    settings = load_settings(config_file=config_file({"kv_tier": {"redis": redis}}))
    config = engine_config(settings).redis
    assert config.url == url and config.encoding == "fp8" and config.sentinel_password == "hidden"
    assert config.limit.bytes_per_ms == 0.5e6
    assert config.write_backlog_bytes == settings.kv_tier.host.capacity_bytes // 4
    for shown in (repr(settings), repr(engine_config(settings)), repr(cluster_config(settings))):
        assert "secret" not in shown and "hidden" not in shown


def test_a_link_is_emulated_with_redis_or_without_it(config_file):
    both = {"kv_tier": {"redis": {"url": "redis://x"}}, "engine": {"load_bandwidth_mb_s": 100}}
    with pytest.raises(SettingsError, match=r"engine\.load_bandwidth_mb_s"):
        engine_config(load_settings(config_file=config_file(both)))


def test_waits_for_stored_kv_are_used_unless_the_settings_say_otherwise(config_file):
    assert engine_config(load_settings()).fill_stalls
    path = config_file({"engine": {"fill_stalls": False}})
    assert not engine_config(load_settings(config_file=path)).fill_stalls


@pytest.mark.parametrize("token", ["", "two words", "ümlaut", "a\tb"])
def test_an_admin_token_that_fits_no_header_is_refused_unshown(config_file, token: str):
    path = config_file({"http": {"admin_token": token}})
    with pytest.raises(SettingsError, match=r"http\.admin_token") as error:
        load_settings(config_file=path)
    assert not token or token not in str(error.value)


def test_the_admin_token_reaches_the_ingress_and_no_text(monkeypatch):
    monkeypatch.setenv("CACHESMITH_HTTP__ADMIN_TOKEN", "let-me-in")
    monkeypatch.setenv("CACHESMITH_ADMIN_TOKEN", "of the command line")
    settings = load_settings()
    config = cluster_config(settings)
    assert config.ingress.admin_token == "let-me-in"
    for shown in (settings, settings.model_dump(), config, config.ingress):
        assert "let-me-in" not in f"{shown} {shown!r}"
    assert "let-me-in" not in settings.model_dump_json()
    assert cluster_config(load_settings(overrides={"http": {"port": 1}})).ingress.admin_token
    monkeypatch.delenv("CACHESMITH_HTTP__ADMIN_TOKEN")
    assert cluster_config(load_settings()).ingress.admin_token is None


def test_serves_own_config_does_not_show_a_wrong_admin_token():
    with pytest.raises(ValidationError) as error:
        AppArgs(http={"admin_token": "wrong secret"})
    assert "wrong secret" not in str(error.value)


def test_a_secret_may_stand_in_a_file_or_in_a_variable(config_file, tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("redis://:let-me-in@cache\n")
    monkeypatch.setenv("SOME_TOKEN", "from-a-variable")
    args = {
        "kv_tier": {"redis": {"url": {"file": str(secret)}}},
        "http": {"admin_token": {"env": "SOME_TOKEN"}},
    }
    # of a Serve config, which Ray shows as it is, and of our own
    for settings in (AppArgs.model_validate(args), load_settings(config_file=config_file(args))):
        config = cluster_config(settings)
        assert config.ingress.redis.url == "redis://:let-me-in@cache"
        assert config.ingress.admin_token == "from-a-variable"
        assert "let-me-in" not in f"{settings!r} {config!r} {settings.model_dump_json()}"
    monkeypatch.setenv("CACHESMITH_HTTP__ADMIN_TOKEN__FILE", str(tmp_path / "token"))
    (tmp_path / "token").write_text("from-a-file")
    assert cluster_config(load_settings()).ingress.admin_token == "from-a-file"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"file": "/nowhere/secret"}, "can not read /nowhere/secret"),
        ({"env": "NOT_THERE"}, "no NOT_THERE"),
        ({"path": "/etc"}, "{file: PATH}"),
        ({"file": "/a", "env": "B"}, "{file: PATH}"),
        ({"file": 5}, "{file: PATH}"),
        ({}, "{file: PATH}"),
    ],
)
def test_a_secret_that_is_not_there_is_named(config_file, value, reason):
    for content, key in (
        ({"http": {"admin_token": value}}, "http.admin_token"),
        ({"kv_tier": {"redis": {"url": value}}}, "kv_tier.redis.url"),
    ):
        with pytest.raises(SettingsError) as error:
            load_settings(config_file=config_file(content))
        assert f"{key}: " in str(error.value) and reason in str(error.value)


def test_a_secret_file_that_fits_no_header_is_refused_unshown(config_file, tmp_path):
    for content in (b"two words", b"\xff\xfe\x00hidden"):
        (tmp_path / "token").write_bytes(content)
        path = config_file({"http": {"admin_token": {"file": str(tmp_path / "token")}}})
        with pytest.raises(SettingsError, match=r"http\.admin_token") as error:
            load_settings(config_file=path)
        assert "two words" not in str(error.value) and "hidden" not in str(error.value)


@pytest.mark.parametrize(
    ("http", "reason"),
    [
        ({"api_keys_file": "keys.yaml"}, "http.api_keys_file: must be an absolute path"),
        ({"ssl_certfile": "/c.pem"}, "http: ssl_certfile and ssl_keyfile go together"),
        ({"ssl_keyfile": "/k.pem"}, "http: ssl_certfile and ssl_keyfile go together"),
        ({"ssl_certfile": "c", "ssl_keyfile": "/k"}, "http.ssl_certfile: must be an absolute path"),
        ({"max_body_bytes": 0}, "http.max_body_bytes"),
    ],
)
def test_wrong_files_and_limits_of_the_endpoint(config_file, http, reason):
    with pytest.raises(SettingsError) as error:
        load_settings(config_file=config_file({"http": http}))
    assert reason in str(error.value)


def test_keys_and_limits_reach_the_ingress():
    http = {"api_keys_file": "~/keys.yaml", "max_body_bytes": "2MiB"}
    ingress = cluster_config(load_settings(overrides={"http": http})).ingress
    assert ingress.api_keys_file == str(Path.home() / "keys.yaml")
    assert ingress.max_body_bytes == 2 << 20
    default = cluster_config(load_settings()).ingress
    assert default.api_keys_file == "" and default.max_body_bytes == 16 << 20


def test_the_number_of_replicas_is_fixed_unless_there_is_a_most():
    fixed = load_settings(overrides={"replicas": {"num": 3}})
    assert cluster_config(fixed).autoscaling is None
    assert (fixed.replicas.most, fixed.replicas.at_start) == (3, 3)
    scaled = load_settings(
        overrides={
            "replicas": {
                "num": 3,
                "graceful_shutdown_s": 40,
                "autoscaling": {"min": 2, "max": 5, "down_after_s": 9, "target_utilisation": 0.5},
            }
        }
    )
    assert (scaled.replicas.most, scaled.replicas.at_start) == (5, 2)
    config = cluster_config(scaled)
    spec = config.autoscaling
    assert spec is not None and spec.policy == "slo" and not config.ingress.may_sleep
    scaling = spec.scaling
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 5)
    assert (scaling.down_after_s, scaling.target_utilisation) == (9.0, 0.5)
    assert config.replica.engine.handover_ms == 10_000.0


def test_sleeping_replicas_are_healthy_only_where_the_number_may_change():
    sleeping = {"scale_to_zero_after_s": 60}
    without_most = load_settings(overrides={"replicas": {"autoscaling": sleeping}})
    assert not cluster_config(without_most).ingress.may_sleep
    settings = load_settings(overrides={"replicas": {"autoscaling": {**sleeping, "max": 2}}})
    assert cluster_config(settings).ingress.may_sleep


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"min": 0}, "min"),
        ({"min": 3, "max": 2}, "max"),
        ({"target_utilisation": 0}, "target_utilisation"),
        ({"down_after_s": float("inf")}, "down_after_s"),
        ({"scale_to_zero_after_s": -1}, "scale_to_zero_after_s"),
        ({"policy": "ongoing", "scale_to_zero_after_s": 5}, "policy"),
        ({"policy": "guess"}, "policy"),
    ],
)
def test_impossible_autoscaling_is_refused_with_its_key(wrong, key):
    with pytest.raises(SettingsError, match=rf"replicas\.autoscaling\.{key}"):
        load_settings(overrides={"replicas": {"autoscaling": wrong}})
