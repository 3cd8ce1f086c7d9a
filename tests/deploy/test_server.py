"""The whole server by its command line, with the fake engine in the replicas."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
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
        for pid in processes_of_session(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
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


def processes_of_session(session_id: int) -> dict[int, str]:
    """What is left of a process and all that it started: command line by process id."""
    left = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat[3]) == session_id and stat[0] != "Z":
                left[int(entry.name)] = command
    return left


def open_listeners(session_id: int) -> set[str]:
    """Which processes of a session listen on more than loopback."""
    found = set()
    for pid, command in processes_of_session(session_id).items():
        for connection in psutil.Process(pid).net_connections(kind="inet"):
            address = connection.laddr.ip if connection.laddr else ""
            if connection.status == "LISTEN" and not address.endswith(("127.0.0.1", "::1")):
                found.add(command.strip())
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_until_a_signal(start: Start, tmp_path: Path, number: int):
    port = free_port()
    server = start(port)
    output = read_until(server, "curl ")
    assert "starting Ray" in output and "fake-model" in output
    url = f"http://127.0.0.1:{port}"
    assert httpx.get(f"{url}/health", timeout=10.0).status_code == 200
    # Serve's own gRPC servers can not be told where to listen: those calls need a token
    assert open_listeners(server.pid) <= {
        "ray::ServeReplica:cachesmith:Replica",
        "ray::ServeReplica:cachesmith:Ingress",
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=chat_body(max_tokens=2), timeout=30.0)
    assert answer.json()["choices"][0]["message"]["content"] == "t0 t1 "
    if number == signal.SIGINT:
        os.killpg(server.pid, number)  # Ctrl-C goes to everything in the terminal
    else:
        server.send_signal(number)
    out, err = server.communicate(timeout=60)
    assert server.returncode == 0, err
    assert "stopped" in out and "Traceback" not in err
    assert processes_of_session(server.pid) == {}
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
    assert processes_of_session(server.pid) == {}
