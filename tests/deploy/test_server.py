"""The whole server by its command line, with the fake engine in the replicas."""

import os
import signal
import ssl
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from cluster.key_file import ApiKey, KeyFile, key_hash, new_key
from deploy.local_ray import private_folder
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
        """env: beside this process's"""
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


ASK_RAY = """
import sys
from ray._raylet import GcsClient
print(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None))
"""


def ask_ray(address: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """What another process gets of a Ray. env: beside this process's, which has the token"""
    argv = [sys.executable, "-c", ASK_RAY, address]
    return subprocess.run(
        argv, env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )


def gcs_address(session_id: int) -> str:
    """Of the Ray that a process of the session started."""
    commands = processes_of_session(session_id)
    (pid,) = [pid for pid, command in commands.items() if "/gcs_server " in command]
    connections = psutil.Process(pid).net_connections(kind="inet")
    (port,) = {c.laddr.port for c in connections if c.status == "LISTEN"}
    return f"127.0.0.1:{port}"


def test_tenants_are_parted_and_secrets_stay_where_they_are(start: Start, tmp_path: Path):
    """Over HTTPS, with keys, an admin token and a Redis with a password."""
    keys, home, port = tmp_path / "keys.yaml", tmp_path / "home", free_port()
    key, other, newer, wrong = (new_key() for _ in range(4))
    tenants = {key: "team-a", other: "team-b"}
    file = KeyFile()
    save_keys(file, keys, tenants)
    token = tmp_path / "token"
    token.write_text("an-admin-token\n")
    certificate, private_key = write_certificate(tmp_path)
    home.mkdir()
    with tempfile.TemporaryDirectory(prefix="cs-") as ray_folder:  # sockets need a short path
        server = start(
            port,
            HOME=str(home),
            RAY_TMPDIR=ray_folder,
            CACHESMITH_HTTP__API_KEYS_FILE=str(keys),
            CACHESMITH_HTTP__ADMIN_TOKEN__FILE=str(token),
            CACHESMITH_HTTP__SSL_CERTFILE=str(certificate),
            CACHESMITH_HTTP__SSL_KEYFILE=str(private_key),
            CACHESMITH_KV_TIER__REDIS__URL="redis://:redis-password@127.0.0.1:1/0",
        )
        shown = read_until(server, "curl ")
        url = f"https://127.0.0.1:{port}"
        assert url in shown
        context = ssl.create_default_context(cafile=certificate)
        with httpx.Client(base_url=url, verify=context, timeout=30.0) as client:
            assert client.get("/health").json() == {"status": "ok"}
            assert client.post("/v1/chat/completions", json=chat_body()).status_code == 401
            assert refused(client, wrong) == 401 and refused(client, "an-admin-token") == 403
            assert num_missed(client, key) > 0 and num_missed(client, key) == 0
            assert num_missed(client, other) > 0
            save_keys(file, keys, {newer: "team-a"})
            assert num_missed(client, newer) == 0
            assert refused(client, key) == refused(client, other) == 401
            long = (b"x" * (1 << 20) for _ in range(17))  # of a length that nothing announces
            bearer = {"Authorization": f"Bearer {newer}"}
            answer = client.post("/v1/chat/completions", content=long, headers=bearer)
            assert answer.status_code == 413
            admin = {"Authorization": "Bearer an-admin-token"}
            shown += client.get("/v1/cache", headers=admin).text
            shown += client.get("/metrics", headers=bearer).text
        address = gcs_address(server.pid)
        assert ask_ray(address).returncode == 0
        stranger = ask_ray(address, RAY_AUTH_TOKEN="0" * 64)
        assert stranger.returncode != 0 and "Unauthenticated" in stranger.stderr
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=120)
        assert server.returncode == 0, err
        logs = [path for path in Path(ray_folder).rglob("*") if path.is_file()]
        assert any("Ingress" in path.name for path in logs)
        shown += out + err + "".join(path.read_text(errors="replace") for path in logs)
    for secret in (*tenants, newer, wrong, file.tenant_secret, "an-admin-token", "redis-password"):
        assert secret not in shown
    assert list(home.rglob("auth_token")) == []  # it would turn authentication on for later Rays


def save_keys(file: KeyFile, path: Path, tenants: dict[str, str]) -> None:
    """Replace its keys; `tenants` by key."""
    made = (
        ApiKey(name=f"{tenant}-{index}", tenant=tenant, sha256=key_hash(key.encode()))
        for index, (key, tenant) in enumerate(tenants.items())
    )
    file.with_keys(tuple(made)).save(path)


def num_missed(client: httpx.Client, key: str) -> int:
    """Tokens of always the same document that were not stored, asked with the openai client."""
    answer = openai.OpenAI(
        base_url=f"{client.base_url}/v1", api_key=key, http_client=client, max_retries=0
    ).chat.completions.create(
        model="fake-model",
        messages=[{"role": "user", "content": "Why?"}],
        max_tokens=2,
        extra_body={"documents": ["a passage of several words"]},
    )
    assert answer.model_extra is not None
    return int(answer.model_extra["cachesmith"]["num_miss_tokens"])


def refused(client: httpx.Client, key: str) -> int:
    with pytest.raises(openai.APIStatusError) as error:
        num_missed(client, key)
    return error.value.status_code


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """Of 127.0.0.1, signed by itself: (certificate, private key)."""
    private_key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cachesmith tests")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), False
        )
        .sign(private_key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "private-key.pem"
    paths[0].write_bytes(certificate.public_bytes(Encoding.PEM))
    paths[1].write_bytes(
        private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    return paths


def test_rays_folder_is_closed_to_others_and_no_strangers(tmp_path: Path):
    before = os.umask(0)
    try:
        folder = private_folder(tmp_path)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder.chmod(0o755)
        assert stat.S_IMODE(private_folder(tmp_path).stat().st_mode) == 0o700
    finally:
        os.umask(before)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="RAY_TMPDIR"):
        private_folder(tmp_path)
