"""The reference pages say what the code does: every key, default, field, code and metric."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from cluster.api import ApiFront, create_api
from cluster.api_types import ChatCompletionRequest, CompletionRequest, IngestRequest
from cluster.gateway import Served
from cluster.metrics import ServerMetrics
from cluster.openai_format import cachesmith_field
from deploy.settings import ENV_PREFIX, Settings, load_settings
from planner import (
    MonotonicClock,
    policy_names,
)
from tests.fakes.records import prefill_result, request_plan

REPO = Path(__file__).resolve().parents[2]
SETTINGS = (REPO / "docs" / "settings.md").read_text()
API = (REPO / "docs" / "api.md").read_text()
METRICS = (REPO / "docs" / "metrics.md").read_text()


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)


def documented_defaults() -> dict[str, Any]:
    """Key → default, from the tables' first two columns."""
    rows = re.findall(r"^\| `([a-z_.]+)` \| `(.*?)` \|", SETTINGS, re.MULTILINE)
    return {key: yaml.safe_load(default) for key, default in rows}


def setting_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from setting_keys(info.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_setting_is_documented_and_no_other():
    assert sorted(documented_defaults()) == sorted(setting_keys(Settings))


def test_the_documented_defaults_are_the_codes():
    overrides: dict[str, Any] = {}
    for key, default in documented_defaults().items():
        *sections, name = key.split(".")
        section = overrides
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = default
    documented, real = load_settings(overrides=overrides), load_settings()
    assert documented.model_dump() == real.model_dump()


def test_the_example_file_is_valid_and_changes_something(tmp_path):
    (example,) = re.findall(r"```yaml\n(.*?)```", SETTINGS, re.DOTALL)
    path = tmp_path / "server.yaml"
    path.write_text(example)
    settings = load_settings(config_file=path)
    assert settings.served_name == "llama-3.1-8b"
    assert settings.model_dump() != load_settings().model_dump()


def test_the_environment_examples_are_valid(monkeypatch):
    examples = re.findall(rf"^({ENV_PREFIX}\w+)=(.*)$", SETTINGS, re.MULTILINE)
    assert len(examples) >= 3
    for name, value in examples:
        monkeypatch.setenv(name, value.strip("'"))
    settings = load_settings()
    assert settings.engine.max_num_seqs == 32
    assert settings.kv_tier.host.capacity_bytes == 8 << 30
    assert settings.engine.vllm == {"gpu_memory_utilization": 0.8}


def request_fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Paths of all fields, with `[]` for lists: `messages[].content[].text`."""
    for name, info in model.model_fields.items():
        yield prefix + name
        for nested, mark in nested_models(info.annotation, ""):
            yield from request_fields(nested, f"{prefix}{name}{mark}.")


def nested_models(annotation: Any, mark: str) -> Iterator[tuple[type[BaseModel], str]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, mark
    mark += "[]" if get_origin(annotation) is list else ""
    for argument in get_args(annotation):
        yield from nested_models(argument, mark)


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest, IngestRequest])
def test_every_request_field_is_documented(model):
    fields = list(request_fields(model))
    assert "documents[].text" in fields
    assert [field for field in fields if f"`{field}`" not in API] == []


def test_every_endpoint_is_documented():
    app = create_api(cast(ApiFront, None), MonotonicClock(), version="0")
    endpoints = [
        f"{method} {route.path}"
        for route in app.routes
        for method in sorted(getattr(route, "methods", ()))
        if method != "HEAD" and "oauth2" not in route.path
    ]
    assert "POST /v1/chat/completions" in endpoints
    assert [endpoint for endpoint in endpoints if f"`{endpoint}`" not in API] == []


def test_every_field_of_the_answers_report_is_documented():
    plan, result = request_plan(), prefill_result()
    served = Served(
        result=result,
        plan=plan,
        queue_ms=1.0,
        ttft_ms=1.0,
        ttft_slo_ms=1.0,
        replica_id="r",
        wants_timeline=True,
    )
    (section,) = re.findall(r"### `cachesmith`: what was done\n(.*?)\n### ", API, re.DOTALL)
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    documented = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(documented) == sorted(cachesmith_field(served))


def test_every_error_code_and_policy_is_documented():
    sources = [path.read_text() for path in (REPO / "cluster").glob("*.py")]
    codes = {code for source in sources for code in re.findall(r'code="(\w+)"', source)}
    assert "queue_full" in codes
    assert [code for code in sorted(codes) if f"`{code}`" not in API] == []
    assert [name for name in policy_names() if f"| `{name}` |" not in API] == []


def test_every_metric_is_documented_and_no_other():
    families = list(ServerMetrics().registry.collect())
    names = {f.name + ("_total" if f.type == "counter" else "") for f in families}
    documented = re.findall(r"^\| `(cachesmith_\w+)` \|", METRICS, re.MULTILINE)
    assert sorted(documented) == sorted(names)
    used = {re.sub(r"_(bucket|sum|count)$", "", n) for n in re.findall(r"cachesmith_\w+", METRICS)}
    assert used == names
