"""Ways to reach Redis: password, ACL user, TLS, Unix socket, database, Sentinel."""

import ipaddress
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kv_tier.redis import Count, Miss, RedisTier
from tests.kv_tier.redis.cases import (
    Arena,
    counted,
    fetch,
    lookup,
    misses,
    open_tier,
    write,
)
from tests.kv_tier.redis.servers import RedisServer, eventually, free_port

pytestmark = pytest.mark.redis


def works(tier: RedisTier, arena: Arena) -> bool:
    write(tier, arena, 1)
    if lookup(tier, 1) == [None]:
        return False
    place = arena.place(1)
    return fetch(tier, [place]).chunks[0].is_complete and arena.entry(place).is_intact(2)


def test_password(folder: Path, arena: Arena) -> None:
    with RedisServer(folder, "--requirepass", "s:e@cret") as server:
        with open_tier(f"redis://:s%3Ae%40cret@{server.address}", arena) as tier:
            assert works(tier, arena)
        for wrong in ("", ":wrong@"):
            with open_tier(f"redis://{wrong}{server.address}", arena) as tier:
                assert lookup(tier, 1) == [None]
                # Without a password the connection stands, and every command is refused.
                assert set(misses(tier)) <= {Miss.CONNECTION, Miss.SERVER}


def add_user(server: RedisServer, rights: str) -> str:
    """Returns the URL of a user with these rights."""
    words = ["on", ">pw", "~cachesmith:*", *rights.split()]
    server.client().execute_command("ACL", "SETUSER", "user", *words)
    return f"redis://user:pw@{server.address}"


@pytest.mark.parametrize(("database", "rights"), [("", ""), ("/3", "+select")])
def test_an_acl_user_with_no_more_rights_than_it_needs(
    server: RedisServer, arena: Arena, database: str, rights: str
) -> None:
    url = add_user(server, f"+get +set +exists +unlink +ping {rights}")
    with open_tier(url + database, arena) as tier:
        assert works(tier, arena)


def test_a_user_that_may_only_read(server: RedisServer, arena: Arena) -> None:
    with open_tier(server.url, arena) as tier:
        write(tier, arena, 1)
    with open_tier(add_user(server, "+get +exists +ping"), arena) as tier:
        write(tier, arena, 2)
        assert [one is None for one in lookup(tier, 1, 2)] == [False, True]
        assert fetch(tier, [arena.place(1)]).chunks[0].is_complete
        assert counted(tier, Count.WRITES_REFUSED) == 1


def test_unix_socket(server: RedisServer, arena: Arena) -> None:
    with open_tier(f"unix://{server.socket_path}", arena) as tier:
        assert works(tier, arena)


def test_a_database_and_a_prefix_of_its_own(server: RedisServer, arena: Arena) -> None:
    with open_tier(f"{server.url}/3", arena, key_prefix="team:a") as tier:
        assert works(tier, arena)
    names = server.client(db=3).keys("*")
    assert names and all(name.startswith(b"team:a:v1:{") for name in names)
    assert server.client().dbsize() == 0
    with open_tier(f"{server.url}/3", arena, key_prefix="team:b") as tier:
        assert lookup(tier, 1) == [None]


def test_time_to_live(server: RedisServer, arena: Arena) -> None:
    with open_tier(server.url, arena, ttl_s=600.0) as tier:
        assert works(tier, arena)
    client = server.client()
    assert all(0 < client.ttl(name) <= 600 for name in client.keys("*"))
    client.flushall()
    with open_tier(server.url, arena, ttl_s=0.001) as tier:
        write(tier, arena, 1)
        eventually(lambda: client.dbsize() == 0)
        assert lookup(tier, 1) == [None]
        assert set(misses(tier)) == {Miss.ABSENT}


@pytest.fixture
def certificate(folder: Path) -> Path:
    """Of 127.0.0.1, signed by itself; its key is beside it."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "cert.pem"
    path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    path.with_name("key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return path


@pytest.fixture
def tls_address(folder: Path, certificate: Path) -> Iterator[str]:
    port = free_port()
    options = ["--tls-port", str(port), "--tls-auth-clients", "no", "--requirepass", "pw"]
    options += ["--tls-cert-file", str(certificate), "--tls-ca-cert-file", str(certificate)]
    options += ["--tls-key-file", str(certificate.with_name("key.pem"))]
    with RedisServer(folder, *options):
        yield f"127.0.0.1:{port}"


def test_tls(tls_address: str, certificate: Path, arena: Arena) -> None:
    url = f"rediss://:pw@{tls_address}?ssl_ca_certs={certificate}"
    with open_tier(url, arena) as tier:
        assert works(tier, arena)


def test_tls_to_a_cluster(folder: Path, certificate: Path, arena: Arena) -> None:
    port = free_port(below=55_000)
    options = ["--tls-port", str(port), "--tls-auth-clients", "no", "--tls-cluster", "yes"]
    options += ["--tls-cert-file", str(certificate), "--tls-ca-cert-file", str(certificate)]
    options += ["--tls-key-file", str(certificate.with_name("key.pem"))]
    options += ["--cluster-enabled", "yes", "--cluster-announce-ip", "127.0.0.1"]
    with RedisServer(folder, *options, port=free_port(below=55_000)) as server:
        server.client().execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        eventually(lambda: b"state:ok" in server.client().execute_command("CLUSTER", "INFO"))
        url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}"
        with open_tier(url, arena, mode="cluster") as tier:
            assert works(tier, arena)


def test_tls_with_a_certificate_that_is_not_trusted(tls_address: str, arena: Arena) -> None:
    with open_tier(f"rediss://:pw@{tls_address}", arena) as tier:
        assert lookup(tier, 1) == [None]
        assert set(misses(tier)) == {Miss.CONNECTION}


@pytest.fixture
def sentinel(folder: Path) -> Iterator[tuple[RedisServer, RedisServer, str]]:
    """A master, its replica, and the address of a Sentinel that watches them."""
    with ExitStack() as stack:
        at_once = ["--repl-diskless-sync-delay", "0"]
        master = stack.enter_context(RedisServer(folder / "a", *at_once))
        follows = ["--replicaof", f"127.0.0.1 {master.port}", *at_once]
        replica = stack.enter_context(RedisServer(folder / "b", *follows))
        eventually(lambda: replica.client().info("replication")["master_link_status"] == "up")
        port = free_port()
        (folder / "s").mkdir()
        settings = folder / "s" / "sentinel.conf"
        settings.write_text(
            f"sentinel monitor Chunks 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds Chunks 300\n"
            "sentinel failover-timeout Chunks 2000\n"
        )
        watcher = RedisServer(folder / "s", port=port)
        stack.enter_context(watcher.as_sentinel(settings))
        eventually(lambda: watcher.client().sentinel_slaves("Chunks"))
        yield master, replica, watcher.address


def test_sentinel_finds_the_master_again(
    sentinel: tuple[RedisServer, RedisServer, str], arena: Arena
) -> None:
    master, replica, address = sentinel
    with open_tier("redis://Chunks", arena, mode="sentinel", nodes=(address,)) as tier:
        assert works(tier, arena)
        assert master.client().dbsize() > 0
        eventually(lambda: replica.client().dbsize() == master.client().dbsize())
        master.kill()
        eventually(lambda: lookup(tier, 1) != [None])
        assert replica.client().info("replication")["role"] == "master"
        write(tier, arena, 2)
        assert lookup(tier, 2) != [None]


def test_no_sentinel_knows_the_service(
    sentinel: tuple[RedisServer, RedisServer, str], arena: Arena
) -> None:
    _, _, address = sentinel
    with open_tier("redis://others", arena, mode="sentinel", nodes=(address,)) as tier:
        assert lookup(tier, 1) == [None]
        assert set(misses(tier)) == {Miss.CONNECTION}
