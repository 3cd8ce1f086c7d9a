"""The files under deploy/ and `ray_config.yaml` are what their readers take. Nothing is started.

Ray's own checks for cluster files and Serve configs, ours for settings, Kubernetes' published
schemas for manifests. KubeRay's are not to be had as a package: see kuberay_schema.py.
"""

import copy
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from pydantic import ByteSize, TypeAdapter, ValidationError

from deploy.settings import ENV_PREFIX, Settings, SettingsError, load_settings
from tests.deploy.kuberay_schema import KUBERNETES_VERSION, ray_service_validator

REPO = Path(__file__).resolve().parents[2]
KUBERNETES = REPO / "deploy" / "kubernetes"
CLUSTER_FILES = ["ray_config.yaml", "deploy/onpremise.yaml"]
SETTINGS_FILES = [
    "deploy/examples/qwen3-32b-tp2.yaml",
    "deploy/one_machine.yaml",
    "deploy/kubernetes/settings.yaml",
]
MANIFESTS = sorted(path.name for path in KUBERNETES.glob("*.yaml"))
NOT_MANIFESTS = {"kustomization.yaml", "settings.yaml"}


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)


def load(name: str) -> Any:
    return yaml.safe_load((REPO / name).read_text())


def objects() -> Iterator[dict[str, Any]]:
    """All Kubernetes objects of the manifests."""
    for name in MANIFESTS:
        if name not in NOT_MANIFESTS:
            yield from yaml.safe_load_all((KUBERNETES / name).read_text())


def named(manifest: dict[str, Any]) -> str:
    return str(manifest["metadata"]["name"])


def only(kind: str, name: str | None = None) -> dict[str, Any]:
    (found,) = (o for o in objects() if o["kind"] == kind and name in (None, named(o)))
    return found


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every (path, value) below."""
    yield path, node
    if isinstance(node, dict):
        for key, value in node.items():
            yield from walk(value, f"{path}.{key}")
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from walk(value, f"{path}[{i}]")


def num_bytes(quantity: str) -> int:
    return int(TypeAdapter(ByteSize).validate_python(quantity.replace("Gi", "GiB")))


# --- Ray's cluster launcher ----------------------------------------------------------------------


def check_cluster_file(config: dict[str, Any]) -> None:
    """As `ray up` does, and against the schema that Ray publishes. Raises ValidationError."""
    import ray.autoscaler
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(copy.deepcopy(config)))
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(config, schema)


@pytest.mark.parametrize("name", CLUSTER_FILES)
def test_ray_takes_the_cluster_file(name):
    check_cluster_file(load(name))


@pytest.mark.parametrize("name", CLUSTER_FILES)
@pytest.mark.parametrize("key", ["setup_comands", "auth.ssh_usr"])
def test_ray_refuses_a_wrong_key(name, key):
    config = load(name)
    section, _, nested = key.rpartition(".")
    (config[section] if section else config)[nested] = ["true"]
    with pytest.raises(jsonschema.ValidationError, match=nested):
        check_cluster_file(config)


def test_the_machines_stand_once_in_the_onpremise_file():
    config = load("deploy/onpremise.yaml")
    metadata, provider = config["metadata"], config["provider"]
    assert (provider["head_ip"], provider["worker_ips"]) == (metadata["head"], metadata["workers"])
    assert metadata["clone"] in config["setup_commands"]
    assert metadata["redis"] in config["head_setup_commands"]


# --- settings and Serve configs ------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS_FILES)
def test_settings_files_are_valid(name):
    settings = load_settings(config_file=REPO / name)
    assert settings.served_name == "qwen3-32b"
    assert settings.engine.tensor_parallel_size == 2
    assert settings.replicas.num * settings.engine.tensor_parallel_size % 8 == 0


@pytest.mark.parametrize("name", SETTINGS_FILES)
def test_a_wrong_key_in_a_settings_file_is_refused(name, tmp_path):
    content = load(name)
    content["kv_tier"]["host"]["capacity"] = "1GiB"
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(SettingsError, match=r"kv_tier\.host\.capacity: unknown key"):
        load_settings(config_file=path)


def kubernetes_serve_config() -> dict[str, Any]:
    return yaml.safe_load(only("RayService")["spec"]["serveConfigV2"])


@pytest.mark.parametrize("source", [lambda: load("deploy/serve.yaml"), kubernetes_serve_config])
def test_serve_takes_the_config(source):
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

    config = source()
    ServeDeploySchema.model_validate(config)
    (application,) = config["applications"]
    # Serve lets unknown keys pass
    assert set(config) <= set(ServeDeploySchema.model_fields)
    assert set(application) <= set(ServeApplicationSchema.model_fields)
    del application["import_path"]
    with pytest.raises(ValidationError, match="import_path"):
        ServeDeploySchema.model_validate(config)


def test_the_applications_arguments_are_what_their_builder_takes():
    from deploy.app import AppArgs, FileArgs

    (application,) = load("deploy/serve.yaml")["applications"]
    assert application["import_path"] == "deploy.app:build"
    AppArgs(**application["args"])
    (application,) = kubernetes_serve_config()["applications"]
    assert application["import_path"] == "deploy.app:build_from_file"
    FileArgs(**application["args"])
    with pytest.raises(ValidationError, match="config"):
        FileArgs(**{**application["args"], "config": {}})


def test_an_application_from_a_file_has_the_environments_secrets(monkeypatch):
    from deploy.app import FileArgs, build_from_file

    monkeypatch.setenv("CACHESMITH_KV_TIER__REDIS__URL", "redis://:secret@redis-kv:6379/0")
    monkeypatch.setenv("CACHESMITH_HTTP__ADMIN_TOKEN", "admins-only")
    application = build_from_file(FileArgs(config_file=KUBERNETES / "settings.yaml"))
    ingress, *_ = application._bound_deployment.init_args
    assert (ingress.model, ingress.admin_token) == ("/models/qwen3-32b", "admins-only")
    assert ingress.redis.url == "redis://:secret@redis-kv:6379/0"


# --- Kubernetes ----------------------------------------------------------------------------------


def check_object(manifest: dict[str, Any]) -> None:
    """Raises jsonschema's ValidationError for unknown, missing and wrong fields."""
    if manifest["kind"] == "RayService":
        ray_service_validator().validate(manifest)
    else:
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("manifest", list(objects()), ids=lambda o: f"{o['kind']} {named(o)}")
def test_kubernetes_takes_the_manifest(manifest):
    check_object(manifest)


@pytest.mark.parametrize(
    ("kind", "path", "wrong"),
    [
        ("Namespace", "metadata", "label"),
        ("StatefulSet", "spec.template.spec", "container"),
        ("NetworkPolicy", "spec", "ingres"),
        ("Job", "spec.template.spec", "restartPolicies"),
        ("RayService", "spec", "serveConfigV3"),
        ("RayService", "spec.rayClusterConfig.gcsFaultToleranceOptions", "redisAdress"),
        ("RayService", "spec.rayClusterConfig.headGroupSpec.template.spec", "volume"),
    ],
)
def test_a_wrong_key_in_a_manifest_is_refused(kind, path, wrong):
    manifest = next(o for o in objects() if o["kind"] == kind)
    node = manifest
    for key in path.split("."):
        node = node[key]
    node[wrong] = "x"
    with pytest.raises(jsonschema.ValidationError, match=wrong):
        check_object(manifest)


def test_kustomize_takes_every_manifest_and_the_settings():
    kustomization = load("deploy/kubernetes/kustomization.yaml")
    assert sorted(kustomization["resources"]) == sorted(set(MANIFESTS) - NOT_MANIFESTS)
    (generated,) = kustomization["configMapGenerator"]
    assert generated["files"] == ["settings.yaml"]
    (image,) = kustomization["images"]
    images = {value for path, value in walk(list(objects())) if path.endswith(".image")}
    assert images == {image["name"], "redis:7.2-alpine"}
    assert named(only("Namespace")) == kustomization["namespace"]


def pods() -> dict[str, dict[str, Any]]:
    """Pod specs of the RayService, by role."""
    cluster = only("RayService")["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    return {
        "head": cluster["headGroupSpec"]["template"]["spec"],
        "worker": workers["template"]["spec"],
    }


def test_pods_find_their_settings_model_and_redis():
    (application,) = kubernetes_serve_config()["applications"]
    settings = load_settings(config_file=KUBERNETES / "settings.yaml")
    services = {named(o) for o in objects() if o["kind"] == "Service"}
    for pod in pods().values():
        (container,) = pod["containers"]
        mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        assert application["args"]["config_file"] == f"{mounts['settings']}/settings.yaml"
        assert settings.model.name_or_dir.startswith(f"{mounts['models']}/")
        env = {entry["name"]: entry for entry in container["env"]}
        url = env["CACHESMITH_KV_TIER__REDIS__URL"]["value"]
        assert re.fullmatch(r"redis://:\$\(KV_REDIS_PASSWORD\)@([\w-]+):6379/0", url)[1] in services
        volumes = {v["name"]: v for v in pod["volumes"]}
        assert volumes["settings"]["configMap"]["name"] == "cachesmith-settings"
        assert volumes["models"]["persistentVolumeClaim"]["claimName"] == "models"
    (fetched,) = only("Job")["spec"]["template"]["spec"]["containers"][0]["args"]
    (awaited,) = pods()["worker"]["initContainers"][0]["args"]
    folder = settings.model.name_or_dir
    assert f"--local-dir {folder}\ntouch {folder}/complete" in fetched
    assert f"[ -e {folder}/complete ]" in awaited
    redis = only("RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert redis["redisAddress"].partition(":")[0] in services


def test_a_workers_memory_holds_the_chunk_store():
    settings = load_settings(config_file=KUBERNETES / "settings.yaml")
    (workers,) = only("RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    (container,) = pod["containers"]
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    shared = next(v["emptyDir"] for v in pod["volumes"] if v["name"] == "shared-memory")
    used = settings.kv_tier.host.capacity_bytes + int(
        workers["rayStartParams"]["object-store-memory"]
    )
    assert used < num_bytes(shared["sizeLimit"]) < num_bytes(limits["memory"])
    num_gpus = settings.replicas.num * settings.engine.tensor_parallel_size
    assert limits["nvidia.com/gpu"] == requests["nvidia.com/gpu"] == str(num_gpus)
    assert settings.replicas.num * settings.replicas.cpus_per_replica < int(requests["cpu"])
    assert pod["terminationGracePeriodSeconds"] > settings.replicas.graceful_shutdown_s


def test_the_chunks_redis_may_evict_and_rays_may_not():
    conf = only("ConfigMap", "redis")["data"]
    assert "maxmemory-policy noeviction" in conf["gcs.conf"]
    assert "appendonly yes" in conf["gcs.conf"]
    assert "maxmemory-policy allkeys-lru" in conf["kv.conf"]
    limit = only("StatefulSet", "redis-kv")["spec"]["template"]["spec"]["containers"][0]
    (maxmemory,) = re.findall(r"^maxmemory (\d+)gb$", conf["kv.conf"], re.MULTILINE)
    assert int(maxmemory) << 30 < num_bytes(limit["resources"]["limits"]["memory"])


# --- secrets -------------------------------------------------------------------------------------


def secret_keys() -> set[tuple[str, str]]:
    """(Secret, key) that pods need."""
    needed = set()
    for path, value in walk(list(objects())):
        if path.endswith(".secretKeyRef") and not value.get("optional"):
            needed.add((value["name"], value["key"]))
        if path.endswith(".authOptions"):
            needed.add((value["secretName"], "auth_token"))
    return needed


def test_the_script_makes_every_secret_that_is_needed():
    script = (KUBERNETES / "secrets.sh").read_text()
    made = set(re.findall(r"^make_secret (\S+) (\S+)$", script, re.MULTILINE))
    assert made == secret_keys()


def deployed_files() -> list[Path]:
    return [
        REPO / "ray_config.yaml",
        *(path for path in (REPO / "deploy").rglob("*.yaml")),
        *KUBERNETES.glob("*.sh"),
        REPO / "scripts" / "head_redis.sh",
    ]


# A value beside such a name, in YAML, in a shell or in a URL, unless it is a reference.
LITERAL = re.compile(
    r"""(?: (?:password|token|secret|requirepass|api_key)["']? \s*[:=]\s* | \brequirepass\s+ )
        ["']?(?![$%{&*~/<\s"'|>]|token\b|cachesmith-)[\w+/=-]{6,}
        | rediss?://[^\s$@/]*:[^\s$@]+@""",
    re.VERBOSE | re.IGNORECASE,
)


def literal_secrets(text: str) -> list[str]:
    code = [line.partition(" #")[0] for line in text.splitlines() if line.strip()[:1] != "#"]
    return [line.strip() for line in code if LITERAL.search(line)]


@pytest.mark.parametrize("path", deployed_files(), ids=lambda p: str(p.relative_to(REPO)))
def test_no_file_holds_a_secret(path):
    assert literal_secrets(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "redis-password: 5241590000000000",
        "requirepass hunter22",
        'export REDIS_PASSWORD="c0ffee00"',
        "url: redis://:c0ffee@10.0.0.1:6379/0",
        "admin_token: 0123456789abcdef",
    ],
)
def test_a_secret_would_be_found(line):
    assert literal_secrets(line) == [line]


def test_no_manifest_is_a_secret_and_pods_can_do_little():
    assert "Secret" not in {o["kind"] for o in objects()}
    containers = [
        container
        for path, value in walk(list(objects()))
        if path.endswith((".containers", ".initContainers"))
        for container in value
    ]
    assert len(containers) == 6
    for container in containers:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}


def test_the_example_settings_hold_no_secret_and_listen_on_loopback():
    for name in SETTINGS_FILES:
        settings: Settings = load_settings(config_file=REPO / name)
        assert (settings.kv_tier.redis.url, settings.http.admin_token) == (None, None)
        assert settings.http.host == "127.0.0.1"
