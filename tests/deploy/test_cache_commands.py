"""`cachesmith cache` against a server's answers, and against Redis itself."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from deploy import cache_access, cache_commands
from deploy.cache_access import TOKEN_VARIABLE
from deploy.cache_tables import size, table
from deploy.cli import main
from deploy.settings import load_settings
from tests.kv_tier.redis.servers import RedisServer
from tests.replicas.cache_cases import NodeStore, chunk_id

TOKEN = "let-me-in"
HOST = {
    "capacity_bytes": 1 << 30, "used_bytes": 3 << 20, "largest_free_bytes": 1 << 29,
    "num_entries": 1234, "num_leases": 1, "num_reservations": 0, "num_retired": 0, "num_owners": 2,
    "hits": 30, "misses": 10, "collisions": 1, "evictions": 4, "refused": 5,
}  # fmt: skip
REDIS = {
    "counts": {"lookup_hits": 9, "bytes_read": 1 << 20, "writes_failed": 2, "writes_dropped": 1},
    "misses": {"absent": 4, "deadline": 0}, "bytes_per_ms": 2.5e6, "latency_ms": 0.51,
    "backlog_bytes": 2048, "num_backlog": 1, "nodes_unavailable": ["redis-7"],
    "breaker_openings": 5,
}  # fmt: skip
ENTRY = {
    "id": "e58cd0", "object": "chunk", "key": "ab" * 32, "num_tokens": 2048, "nbytes": 5 << 20,
    "recompute_ms": 81.25, "uses": 3, "num_leases": 0, "ttl_s": None, "is_whole": True,
    "node": "node-1",
}  # fmt: skip
REPORT: dict[str, Any] = {
    "num_checked": 7, "damaged": [], "num_removed": 0, "index_problems": [],
}  # fmt: skip


class Handler(http.server.BaseHTTPRequestHandler):
    """A server with a token, a node and a Redis tier. `asked` has what it was asked for.

    A verification is answered with `verified`, once `may_answer` is set.
    """

    asked: list[tuple[str, str, dict[str, list[str]], Any]]
    verified: dict[str, Any]
    may_answer: threading.Event

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        self.asked.append((self.command, parts.path, parse_qs(parts.query), body))
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            return self._error(401, "missing_admin_token", "this needs a token")
        match self.command, parts.path:
            case "GET", "/v1/cache":
                now = {"tier": "host", "num_checked": 3, "num_entries": 7}
                nodes = {"node-1": {"host": HOST, "verifying": now}}
                keys = {"num_chunks": 2, "num_tokens": 40, "num_keys": 8, "nbytes": 4096}
                redis = {"replicas": {"r1": REDIS}, "keys": keys}
                self._answer({"object": "cache", "nodes": nodes, "redis": redis})
            case "GET", "/v1/cache/chunks":
                tier = parse_qs(parts.query)["tier"][0]
                data = [ENTRY, {**ENTRY, "id": None, "num_leases": 1}]
                if tier == "redis":
                    data = [{**ENTRY, "ttl_s": 60.0, "is_whole": False, "node": None}]
                self._answer({"object": "list", "tier": tier, "has_more": True, "data": data})
            case "DELETE", "/v1/chunks/e58cd0":
                self._answer({"id": "e58cd0", "object": "chunk", "deleted": True})
            case "DELETE", "/v1/cache":
                cleared = {"nodes": {"node-1": 12}, "redis": {"num_keys": 34}}
                self._answer({"object": "cache", "deleted": True, **cleared})
            case "POST", "/v1/cache/verify":
                assert self.may_answer.wait(10.0)
                self._answer(self.verified)
            case _:
                self._error(404, "chunk_not_found", "no such chunk")

    def log_message(self, *_: object) -> None: ...

    def _error(self, status: int, code: str, message: str) -> None:
        self._answer({"error": {"message": message, "code": code}}, status)

    def _answer(self, body: object, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    Handler.asked = []
    Handler.verified = verified("sound", REPORT)
    Handler.may_answer = threading.Event()
    Handler.may_answer.set()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def verified(status: str, report: dict[str, Any]) -> dict[str, Any]:
    nodes = {"node-1": report}
    return {"object": "cache.verification", "status": status, "nodes": nodes, "redis": None}


@pytest.mark.parametrize("command", [[], ["stats"], ["ls"], ["rm"], ["clear"], ["verify"]])
def test_help_is_complete(command: list[str], capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["cache", *command, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text and f"cachesmith cache {' '.join(command)}".strip() in text
    if command:
        assert "exit codes:" in text
        for option in (
            "--url",
            "--token",
            "--json",
            "--redis",
            "--key-prefix",
            "--mode",
            "--nodes",
        ):
            assert option in text


@pytest.mark.parametrize(
    "argv", [[], ["fly"], ["rm"], ["ls", "--tier", "all"], ["ls", "--limit", "0"]]
)
def test_wrong_arguments_exit_with_usage(argv: list[str], capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["cache", *argv])
    assert exit_.value.code == 2
    assert "usage: cachesmith cache" in capsys.readouterr().err


def test_stats(url: str, capsys):
    assert main(["cache", "stats", "--url", url, "--redis-keys"]) == 0
    out = capsys.readouterr().out
    for word in ("3.0 MiB", "1.0 GiB", "512.0 MiB", "1,234", "75%", "2.50", "0.51", "2.0 KiB"):
        assert word in out
    assert "r1 misses: absent 4\n" in out and "r1 asks nobody at: redis-7" in out
    assert "node node-1: a verification runs, host, 3 of 7 entries" in out
    assert Handler.asked[-1][2] == {"redis_keys": ["true"]}


def test_stats_as_json(url: str, capsys):
    assert main(["cache", "stats", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"]["node-1"]["host"] == HOST


def test_ls(url: str, capsys):
    assert main(["cache", "ls", "--url", url, "--limit", "2"]) == 0
    out = capsys.readouterr().out
    assert "e58cd0" in out and "2,048" in out and "5.0 MiB" in out and "81.2" in out
    assert "(key abababababab)" in out and "there are more" in out
    assert Handler.asked[-1][2] == {"tier": ["host"], "limit": ["2"]}
    assert main(["cache", "ls", "--url", url, "--tier", "redis"]) == 0
    out = capsys.readouterr().out
    assert "layers missing" in out and "60" in out


def test_rm(url: str, capsys):
    assert main(["cache", "rm", "e58cd0", "--url", url]) == 0
    assert "e58cd0 is removed" in capsys.readouterr().out
    assert main(["cache", "rm", "a/b c", "--url", url]) == 1
    assert "no chunk 'a/b c'" in capsys.readouterr().err
    assert Handler.asked[-1][1] == "/v1/chunks/a%2Fb%20c"
    assert main(["cache", "rm", "e58cd0", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deleted"] is True


def test_clear_asks_first(url: str, capsys, monkeypatch: pytest.MonkeyPatch):
    assert main(["cache", "clear", "--url", url]) == 1
    assert "--yes" in capsys.readouterr().err
    for answer, code in (("n\n", 1), ("\n", 1), ("y\n", 0)):
        Handler.asked.clear()
        monkeypatch.setattr("sys.stdin", _Terminal(answer))
        assert main(["cache", "clear", "--url", url, "--tier", "host"]) == code
        assert len(Handler.asked) == (code == 0)
    assert Handler.asked[0][2] == {"tier": ["host"]}
    captured = capsys.readouterr()
    assert "every host tier" in captured.err and "nothing was removed" in captured.err
    assert "12 entries removed" in captured.out and "34 keys removed" in captured.out
    assert main(["cache", "clear", "--url", url, "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deleted"] is True
    assert Handler.asked[-1][2] == {"tier": ["all"]}


class _Terminal:
    """Somebody who answers."""

    def __init__(self, line: str) -> None:
        self._line = line

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self._line


def test_verify_says_what_it_found(url: str, capsys):
    assert main(["cache", "verify", "--url", url]) == 0
    assert "7 entries checked, 0 damaged" in capsys.readouterr().out
    assert Handler.asked[-1][3] == {"tier": "all", "repair": False}
    damaged = [{"id": "e58cd0", "key": "ab" * 32, "reason": "corrupt", "layer": 5}]
    damaged += [{"id": None, "key": "cd" * 32, "reason": "corrupt", "layer": None}] * 30
    report = {**REPORT, "damaged": damaged, "index_problems": ["a free extent is lost"]}
    Handler.verified = verified("damaged", report)
    assert main(["cache", "verify", "--url", url]) == cache_commands.DAMAGED
    out = capsys.readouterr().out
    assert "31 damaged, 0 removed" in out and "layer 5" in out and "header" in out
    assert "a free extent is lost" in out and "and 11 more" in out
    Handler.verified = verified("repaired", {**report, "num_removed": 31})
    assert main(["cache", "verify", "--url", url, "--repair", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "repaired"
    assert Handler.asked[-1][3] == {"tier": "all", "repair": True}


def test_verify_says_how_far_it_is(url: str, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_access, "_POLL_S", 0.01)
    Handler.may_answer.clear()
    access = cache_access.ServerCache(url, TOKEN)
    lines: list[str] = []

    def progress(line: str) -> None:
        lines.append(line)
        Handler.may_answer.set()

    assert access.verify("host", repair=False, progress=progress)["status"] == "sound"
    assert "node node-1: 3 of 7 checked" in lines


def test_the_token(url: str, capsys, monkeypatch: pytest.MonkeyPatch):
    assert load_settings().http.admin_token is None  # the variable is no setting
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert main(["cache", "stats", "--url", url]) == 1
    error = capsys.readouterr().err
    assert "401" in error and "--token" in error and TOKEN_VARIABLE in error
    assert main(["cache", "stats", "--url", url, "--token", TOKEN]) == 0
    assert main(["cache", "stats", "--url", url, "--token", "wrong-one"]) == 1
    assert "wrong-one" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer"),
        (["--url", "x", "--redis", "redis://a"], "not both"),
        (["--redis", "http://a"], "redis://"),
        (["--redis", "redis://user:secret@a:xx"], "can not be parsed"),
        (["--redis", "redis://user:secret/x@a"], "can not be parsed"),
        (["--redis", "redis://a?no_such=option"], "option in the URL"),
        (["--redis", "redis://a", "--mode", "sentinel"], "nodes"),
        (["--redis", "redis://a", "--key-prefix", "a*"], "key_prefix"),
        (["--redis", "redis://user:secret@127.0.0.1:9"], "Redis at 127.0.0.1:9"),
    ],
)
def test_what_can_not_be_asked(argv: list[str], word: str, capsys):
    assert main(["cache", "stats", *argv]) == 1
    error = capsys.readouterr().err
    assert word in error and "secret" not in error


def test_redis_alone_has_no_host_tier(capsys):
    assert main(["cache", "ls", "--tier", "host", "--redis", "redis://a"]) == 1
    assert "--url" in capsys.readouterr().err


def test_tables_and_sizes():
    assert list(table(["a", "number"], [["x", "1"], ["longer", "1,000"]])) == [
        "a       number",
        "x            1",
        "longer   1,000",
    ]
    assert [size(n) for n in (0, 1023, 1024, 3 << 30, 5 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "3.0 GiB", "5.0 TiB",
    ]  # fmt: skip


@pytest.mark.redis
def test_redis_itself(tmp_path: Path, capsys):
    with RedisServer(tmp_path / "redis") as server:
        store = NodeStore(tmp_path / "arena", server.url)
        store.put_in_redis(1, 2, 3)
        redis = ["--redis", server.url]

        def run(*argv: str) -> tuple[int, str]:
            code = main(["cache", *argv, *redis])
            return code, capsys.readouterr().out

        code, out = run("stats", "--json")
        assert code == 0 and json.loads(out)["redis"]["keys"]["num_chunks"] == 3
        assert "below the prefix in Redis" in run("stats")[1]
        code, out = run("ls")
        assert code == 0 and all(chunk_id(chunk) in out for chunk in (1, 2, 3))
        assert run("rm", chunk_id(1))[0] == 0 and run("rm", chunk_id(1))[0] == 1
        assert run("verify")[0] == 0
        store.damage_in_redis(2)
        code, out = run("verify")
        assert code == cache_commands.DAMAGED and "corrupt" in out
        assert run("verify", "--repair")[0] == 0
        assert store.in_redis([1, 2, 3]) == {3}
        server.client().set("cart:1", "x")
        code, out = run("clear", "--yes")
        assert code == 0 and "keys removed" in out
        assert store.in_redis([1, 2, 3]) == set() and server.client().get("cart:1") == b"x"
        assert "nothing is stored" in run("ls")[1]
        store.close()
