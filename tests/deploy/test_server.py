"""The whole server by its command line, with the fake engine in the replicas."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.harness import chat_body, free_port
from tests.fakes.byte_tokenizer import write_model_dir

pytestmark = pytest.mark.ray

REPO = Path(__file__).resolve().parents[2]
BUILDER = "tests.fakes.fake_engine:build_for_server"
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`cachesmith serve` as a process in a session of its own."""
    write_model_dir(tmp_path / "fake-model")
    processes: list[subprocess.Popen[str]] = []

    def run(port: int, **env: str) -> "subprocess.Popen[str]":
        argv = ["serve", "--model", str(tmp_path / "fake-model"), "--port", str(port)]
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", *argv, "--engine-builder", BUILDER],
            env={
                **os.environ,
                "PYTHONPATH": str(REPO),
                "CACHESMITH_KV_TIER__HOST__DIRECTORY": str(tmp_path / "tier"),
                **env,
            },
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def read_until(process: "subprocess.Popen[str]", text: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(
        f"ended without {text!r}: {seen}\n{process.stderr and process.stderr.read()}"
    )


def processes_of_session(session_id: int) -> list[str]:
    """Command lines of what is left of a process and all that it started."""
    left = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat[3]) == session_id and stat[0] != "Z":
                left.append(command)
    return left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_until_a_signal(start: Start, tmp_path: Path, number: int):
    port = free_port()
    server = start(port)
    output = read_until(server, "curl ")
    assert "starting Ray" in output and "fake-model" in output
    url = f"http://127.0.0.1:{port}"
    assert httpx.get(f"{url}/health", timeout=10.0).status_code == 200
    answer = httpx.post(f"{url}/v1/chat/completions", json=chat_body(max_tokens=2), timeout=30.0)
    assert answer.json()["choices"][0]["message"]["content"] == "t0 t1 "
    os.killpg(server.pid, number)  # as Ctrl-C does: to everything in the terminal
    out, err = server.communicate(timeout=60)
    assert server.returncode == 0, err
    assert "stopped" in out and "Traceback" not in err
    assert processes_of_session(server.pid) == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_a_replica_that_can_not_start_is_shown(start: Start, tmp_path: Path):
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "broken").touch()
    started = time.monotonic()
    server = start(free_port())
    _, err = server.communicate(timeout=120)
    assert server.returncode == 1
    assert "the fake engine is told to be broken" in err
    assert time.monotonic() - started < 90
    assert processes_of_session(server.pid) == []
