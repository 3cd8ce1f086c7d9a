"""The key file: what it takes, what it tells when it is wrong, and how it is replaced."""

import hashlib
import stat
from pathlib import Path

import pytest
import yaml

from cluster.key_file import ApiKey, KeyFile, KeyFileError, key_hash, new_key
from cluster.tenants import Tenant

SECRET = "5e" * 32


def entry(name: str, *, tenant: str = "t", sha256: str | None = None) -> dict[str, str]:
    return {"name": name, "tenant": tenant, "sha256": sha256 or key_hash(name.encode())}


def test_a_saved_file_is_read_again_and_is_for_its_owner_alone(tmp_path: Path):
    path = tmp_path / "keys.yaml"
    file = KeyFile().with_keys((ApiKey(**entry("a")), ApiKey(**entry("b"))))
    file.save(path)
    assert KeyFile.load(path) == file
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)  # for a group that serves
    before = path.stat().st_ino
    file.with_keys(()).save(path)
    assert KeyFile.load(path).tenant_secret == file.tenant_secret
    assert KeyFile.load(path).keys == ()
    # another file under the name: nobody reads a half one
    assert path.stat().st_ino != before and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["keys.yaml"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("a: [1", "not valid YAML"),
        ("- 1", "must hold tenant_secret"),
        ("", "must hold tenant_secret"),
        ({"keys": []}, "must hold tenant_secret"),
        ({"tenant_secret": SECRET[2:], "keys": []}, "tenant_secret"),
        ({"tenant_secret": SECRET, "keys": [entry("a"), entry("a", sha256="0" * 64)]}, "same name"),
        ({"tenant_secret": SECRET, "keys": [entry("a"), {**entry("a"), "name": "b"}]}, "same sha"),
        ({"tenant_secret": SECRET, "keys": [{**entry("a"), "sha256": SECRET[1:]}]}, "0.sha256"),
        ({"tenant_secret": SECRET, "keys": [entry("a b")]}, "0.name"),
        ({"tenant_secret": SECRET, "keys": [entry("a", tenant="")]}, "0.tenant"),
        ({"tenant_secret": SECRET, "keys": [{**entry("a"), "key": SECRET}]}, "0.key"),
        ({"tenant_secret": SECRET, "version": 2}, "version"),
    ],
)
def test_a_wrong_file_is_refused_without_its_contents(tmp_path: Path, content, reason: str):
    path = tmp_path / "keys.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(KeyFileError, match=reason) as error:
        KeyFile.load(path)
    assert SECRET[2:] not in str(error.value) and str(path) in str(error.value)
    with pytest.raises(KeyFileError, match="can not read"):
        KeyFile.load(tmp_path / "none.yaml")


def test_keys_are_random_and_kept_as_plain_sha256():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100 and min(map(len, keys)) >= 40
    assert all(key.startswith("cs-") and key.isascii() for key in keys)
    assert key_hash(b"cs-x") == hashlib.sha256(b"cs-x").hexdigest()
    assert SECRET not in repr(KeyFile(tenant_secret=SECRET))


def test_salts_and_ids_are_a_tenants_own():
    one = Tenant(name="one", secret=bytes.fromhex(SECRET))
    again = Tenant(name="one", secret=bytes.fromhex(SECRET))
    others = [
        Tenant(name="two", secret=bytes.fromhex(SECRET)),
        Tenant(name="one", secret=bytes.fromhex("5f" * 32)),
    ]
    assert one.cache_salt("s") == again.cache_salt("s") != one.cache_salt("")
    assert one.content_id(again.chunk_id("c0de")) == "c0de"
    for other in others:
        # neither its own salt, nor a salt that looks like another tenant's, leads there
        reachable = {
            other.cache_salt(s) for s in ("", "s", one.cache_salt(""), one.cache_salt("s"))
        }
        assert reachable.isdisjoint({one.cache_salt(""), one.cache_salt("s")})
        assert one.content_id(other.chunk_id("c0de")) is None
    for forged in (
        "c0de",
        "c0de-",
        "",
        "-",
        "c0de-" + "0" * 32,
        one.chunk_id("c0de") + "0",
        "\ud800",
    ):
        assert one.content_id(forged) is None
    assert SECRET not in repr(one)
    with pytest.raises(ValueError, match="32 bytes"):
        Tenant(name="one", secret=b"short")


def test_the_derivation_does_not_change_between_versions():
    """Otherwise every tenant's store would be lost with an update."""
    tenant = Tenant(name="team-a", secret=bytes(range(32)))
    assert tenant.cache_salt("x") == (
        "db96af35d96bdc529353ac176bf8d1fc6793e3ce2787b3709a128d568d9a5e30"
    )
    assert tenant.chunk_id("ab") == "ab-0488033bd50cfb4753fa10c64de4a819"
