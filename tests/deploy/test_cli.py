"""The command line: help, wrong arguments, and talking to a server that is not there."""

import http.server
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import benchmarks
from deploy.cli import main
from deploy.client import KEY_VARIABLE
from deploy.server import ServerError, check_port


@pytest.mark.parametrize("command", [[], ["serve"], ["deploy"], ["ingest"], ["status"], ["bench"]])
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert "example" in text and f"cachesmith {' '.join(command)}".strip() in text


@pytest.mark.parametrize(
    "argv", [[], ["fly"], ["serve", "--tp", "x"], ["ingest"], ["bench"], ["bench", "x"]]
)
def test_wrong_arguments_exit_with_usage(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert "usage: cachesmith" in capsys.readouterr().err


def test_bench_lists_what_there_is_with_its_question(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    text = capsys.readouterr().out
    folder = Path(benchmarks.__file__).parent
    for path in folder.glob("bench_*.py"):
        name = path.stem.removeprefix("bench_").replace("_", "-")
        question = path.read_text().splitlines()[0].strip('"')
        assert re.search(rf"^  {name} +{re.escape(question)}$", text, re.MULTILINE)


def test_bench_hands_over_its_arguments(monkeypatch, capsys):
    taken: list[list[str]] = []
    monkeypatch.setattr("benchmarks.bench_decode_gap.main", taken.append)
    assert main(["bench", "decode-gap", "--rounds", "2", "--help"]) == 0
    assert taken == [["--rounds", "2", "--help"]]
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "prefill", "--policies", "fly"])
    assert exit_.value.code == 2
    assert "usage: cachesmith bench prefill" in capsys.readouterr().err


def test_bench_says_when_the_model_is_not_there(tmp_path, capsys):
    assert main(["bench", "prefill", "--model", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["--tp", "0"], "engine.tensor_parallel_size"),
        (["--replicas", "-1"], "replicas.num"),
        (["--port", "70000"], "http.port"),
        (["--config", "no-such-file.yaml"], "no-such-file.yaml"),
    ],
)
def test_serve_refuses_before_it_starts_anything(argv, key, capsys):
    assert main(["serve", *argv]) == 1
    assert key in capsys.readouterr().err


def test_serve_says_when_the_port_is_taken(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
        with pytest.raises(ServerError, match=str(port)):
            check_port("127.0.0.1", port)
    error = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in error and "--port" in error


def test_serve_says_when_the_model_is_not_there(tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert main(["serve", "--model", str(empty), "--port", str(port)]) == 1
    assert "config.json" in capsys.readouterr().err


def test_status_and_ingest_without_a_server(tmp_path, capsys):
    url = "http://127.0.0.1:9"
    assert main(["status", "--url", url]) == 1
    assert url in capsys.readouterr().err
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('"one"\n')
    assert main(["ingest", "--file", str(corpus), "--url", url]) == 1
    assert url in capsys.readouterr().err


def test_ingest_names_the_line_that_is_wrong(tmp_path, capsys):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('"one"\n\n{"text": \n')
    assert main(["ingest", "--file", str(corpus)]) == 1
    assert "line 3" in capsys.readouterr().err
    assert main(["ingest", "--file", str(tmp_path / "none")]) == 1


class _Handler(http.server.BaseHTTPRequestHandler):
    """Just enough of a server for `ingest` and `status`, open or with the key `cs-good`."""

    needs_key = False

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self._is_known():
            return self._answer({"error": {"message": "no key"}}, status=401)
        if self.path == "/v1/chat/completions":
            report = {
                "policy": body["cachesmith"]["policy"],
                "signal": "qci",
                "warmup_depth": 2,
                "probe_len": 3,
                "coverage": 0.25,
                "expected_ms": 4.0,
                "compute_ms": 4.5,
                "ttft_ms": 5.0,
                "slo_ttft_ms": 9.0,
                "explanation": "no other plan was worth more",
            }
            if body["cachesmith"]["timeline"] and not body["stream"]:
                report["timeline"] = {"traceEvents": [{"ph": "X", "name": "patch"}]}
            return self._answer({"cachesmith": report})
        data = [
            {"status": "failed" if document == "bad" else "stored", "num_tokens": 2}
            for document in body["documents"]
        ]
        self._answer({"data": data})

    def do_GET(self) -> None:
        if not self._is_known():
            return self._answer({"status": "ok"})
        replica = {
            "replica": "r1",
            "num_running": 2,
            "num_resident_chunks": 3,
            "num_ingest_backlog": 0,
            "reuse_refusal": None,
            "cost_source": "profile",
            "cost_drift": 1.25,
        }
        self._answer({"status": "ok", "model": "m", "num_waiting": 1, "replicas": [replica]})

    def log_message(self, *_: object) -> None: ...

    def _is_known(self) -> bool:
        return not self.needs_key or self.headers["authorization"] == "Bearer cs-good"

    def _answer(self, body: object, *, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_ingest_counts_and_status_shows(url: str, tmp_path: Path, capsys):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(f'"document {i}"\n' for i in range(10)))
    assert main(["ingest", "--file", str(corpus), "--url", url]) == 0
    out = capsys.readouterr().out
    assert "10 of 10 documents" in out and "20 tokens" in out and "10 stored" in out
    corpus.write_text('"bad"\n"good"\n')
    assert main(["ingest", "--file", str(corpus), "--url", url]) == 1
    assert main(["status", "--url", url]) == 0
    out = capsys.readouterr().out
    assert "replica r1: 2 running" in out and "costs: profile, prefills now take 1.25x" in out


def test_trace_saves_the_timeline_of_a_request(url: str, tmp_path: Path, capsys):
    body = {"messages": [], "stream": True, "cachesmith": {"policy": "cacheblend"}}
    request, output = tmp_path / "ask.json", tmp_path / "trace.json"
    request.write_text(json.dumps(body))
    argv = ["trace", "--request", str(request), "--output", str(output), "--url", url]
    assert main(argv) == 0
    assert json.loads(output.read_text())["traceEvents"][0]["name"] == "patch"
    out = capsys.readouterr().out
    assert "cacheblend" in out and "ttft_ms" in out and str(output) in out
    assert main([*argv[:4], str(tmp_path / "no" / "folder.json"), *argv[5:]]) == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"cachesmith": 5}'])
def test_trace_names_the_file_that_is_wrong(text: str, tmp_path: Path, capsys):
    request = tmp_path / "ask.json"
    request.write_text(text)
    assert main(["trace", "--request", str(request)]) == 1
    assert "ask.json" in capsys.readouterr().err
    assert main(["trace", "--request", str(tmp_path / "none.json")]) == 1


def test_explain_tells_of_a_running_servers_batch(url: str, tmp_path: Path, capsys):
    request = tmp_path / "ask.json"
    request.write_text('{"messages": [], "cachesmith": {"policy": "adaptive"}}')
    assert main(["explain", "--request", str(request), "--url", url]) == 0
    out = capsys.readouterr().out
    assert "no other plan was worth more" in out and "qci w=2 p=3 r=0.250" in out
    request.write_text("[]")
    assert main(["explain", "--request", str(request), "--url", url]) == 1
    assert "ask.json" in capsys.readouterr().err


def test_commands_send_a_key_that_is_given_or_in_the_environment(
    url: str, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.setattr(_Handler, "needs_key", True)
    request, corpus = tmp_path / "ask.json", tmp_path / "corpus.jsonl"
    request.write_text('{"messages": [], "cachesmith": {"policy": "adaptive"}}')
    corpus.write_text('"one"\n')
    commands = [
        ["ingest", "--file", str(corpus)],
        ["trace", "--request", str(request), "--output", str(tmp_path / "trace.json")],
        ["explain", "--request", str(request)],
    ]
    for command in commands:
        assert main([*command, "--url", url]) == 1
        assert "401" in capsys.readouterr().err
        assert main([*command, "--url", url, "--api-key", "cs-bad"]) == 1
        out = capsys.readouterr()
        assert "401" in out.err and "cs-bad" not in out.out + out.err
        assert main([*command, "--url", url, "--api-key", "cs-good"]) == 0
    assert main(["status", "--url", url]) == 0
    assert "to an API key alone" in capsys.readouterr().out
    monkeypatch.setenv(KEY_VARIABLE, "cs-good\n")  # as a file's contents come
    for command in (*commands, ["status"]):
        assert main([*command, "--url", url]) == 0
    assert "replica r1" in capsys.readouterr().out


def test_serve_refuses_a_key_file_that_no_ingress_would_take(tmp_path: Path, monkeypatch, capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    keys = tmp_path / "keys.yaml"
    monkeypatch.setenv("CACHESMITH_HTTP__API_KEYS_FILE", str(keys))
    assert main(["serve", "--port", port]) == 1
    assert "http.api_keys_file: can not read" in capsys.readouterr().err
    keys.write_text("keys: []")
    assert main(["serve", "--port", port]) == 1
    assert "tenant_secret" in capsys.readouterr().err
