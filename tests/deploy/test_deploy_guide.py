"""docs/deploy.md names commands, options, files and ports that there are."""

import argparse
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from deploy.cli import _parser

REPO = Path(__file__).resolve().parents[2]
GUIDE = (REPO / "docs" / "deploy.md").read_text()
SECTION = (REPO / "README.md").read_text().partition("## On a cluster")[2].partition("\n## ")[0]
CLUSTER_FILES = ("ray_config.yaml", "deploy/onpremise.yaml")

OTHERS = {".", "curl", "df", "docker", "export", "git", "kubectl", "rm", "sudo", "tail"}


def commands(text: str) -> Iterator[list[str]]:
    """Words of every command in code blocks, in command-like code spans, and quoted in those."""
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    # a JSON body goes over many lines
    lines = [
        line.strip()
        for block in blocks
        for line in re.sub(r"'\{.*?\}'", "X", block, flags=re.DOTALL).splitlines()
    ]
    rest = re.sub(r"```\n.*?```", "", text, flags=re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest)]
    programs = (
        r"(\.venv/bin/|scripts/|deploy/kubernetes/secrets|cachesmith |ray |serve |python |kubectl )"
    )
    lines += [span for span in spans if re.match(programs, span)]
    for line in lines:
        yield from split(line)


def split(line: str) -> Iterator[list[str]]:
    words = shlex.split(line, comments=True)
    if not words:
        return
    yield words
    if words[:2] in (["ray", "exec"], [".venv/bin/ray", "exec"]):
        for part in words[3].split(";"):
            yield from split(part)


def program(words: list[str]) -> str:
    return words[0].removeprefix(".venv/bin/")


def click_options(command: click.Command) -> set[str]:
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)}


def check_options(words: list[str], known: set[str]) -> None:
    unknown = [w for w in words if w.startswith("-") and w.partition("=")[0] not in known]
    assert unknown == [], words


def check(words: list[str]) -> None:
    """Raises AssertionError for a command, option or file that there is not."""
    name = program(words)
    if name == "cachesmith":
        check_cachesmith(words)
    elif name in ("ray", "serve"):
        check_click(name, words)
    elif name == "python":
        assert words[1] == "-m", words
        assert words[2] == "pip" or importlib.util.find_spec(words[2]), words
    elif "/" in name:
        assert (REPO / name).is_file(), words
    else:
        assert name in OTHERS, words
    for word in words:
        if re.fullmatch(r"(deploy|scripts)/[\w./-]+|ray_config\.yaml", word):
            assert (REPO / word).exists(), words


def check_line(line: str) -> None:
    for words in split(line):
        check(words)


def check_cachesmith(words: list[str]) -> None:
    parsers = next(a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert words[1] in parsers.choices, words
    parser = parsers.choices[words[1]]
    if words[1] == "cache":
        parts = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = parts.choices[words[2]]
    check_options(words[2:], set(parser._option_string_actions))


def check_click(name: str, words: list[str]) -> None:
    from ray.scripts.scripts import cli as ray_cli
    from ray.serve.scripts import cli as serve_cli

    cli = {"ray": ray_cli, "serve": serve_cli}[name]
    if len(words) == 1:
        return
    assert words[1] in cli.commands, words
    check_options(words[2:], click_options(cli.commands[words[1]]))


@pytest.mark.parametrize("text", [GUIDE, SECTION], ids=["guide", "readme"])
def test_every_command_is_there(text):
    found = list(commands(text))
    assert {"cachesmith", "ray", "kubectl"} <= {program(words) for words in found}
    for words in found:
        check(words)


@pytest.mark.parametrize(
    "line",
    [
        "cachesmith sreve",
        "cachesmith serve --confg FILE",
        "cachesmith cache stat",
        ".venv/bin/ray upp ray_config.yaml",
        ".venv/bin/ray exec ray_config.yaml 'serve stats'",
        "ray up deploy/onpremises.yaml",
        "python -m deploy.size",
        "scripts/instal.sh",
        "hellm install",
    ],
)
def test_a_wrong_command_is_found(line):
    with pytest.raises((AssertionError, KeyError)):
        check_line(line)


def test_every_file_is_there():
    named = set(re.findall(r"\b(?:deploy|scripts|benchmarks|tests)/[\w./-]*\w\b", GUIDE))
    assert "deploy/kubernetes/kustomization.yaml" in named
    assert [name for name in sorted(named) if not (REPO / name).exists()] == []


@pytest.mark.parametrize("name", CLUSTER_FILES)
def test_ray_start_has_the_options_that_the_cluster_files_give_it(name):
    from ray.scripts.scripts import cli

    text = re.sub(r"\s+", " ", (REPO / name).read_text())
    options = {
        option
        for start in re.findall(r"ray start (.*?--disable-usage-stats)", text)
        for option in re.findall(r"--[\w-]+", start)
    }
    assert {"--redis-password", "--dashboard-host", "--address"} <= options
    assert options <= click_options(cli.commands["start"])


@pytest.mark.parametrize("name", [*CLUSTER_FILES, "scripts/head_redis.sh"])
def test_every_port_is_documented(name):
    text = (REPO / name).read_text()
    used = set(re.findall(r"port[= ](\d{4,5})\b|_port=(\d{4,5})\b|RAY_HEAD_IP:(\d+)", text))
    ports = {port for groups in used for port in groups if port}
    assert len(ports) >= 2
    (table,) = re.findall(r"^\| port \|.*?\n\n", GUIDE, re.DOTALL | re.MULTILINE)
    documented = {
        p for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for p in row.split(", ")
    }
    assert ports <= documented
