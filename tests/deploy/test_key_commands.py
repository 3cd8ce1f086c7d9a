"""`cachesmith keys`: what it writes is what an ingress lets in."""

from pathlib import Path

import pytest

from cluster.access import KeyRing
from cluster.key_file import KeyFile
from deploy.cli import main


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def test_a_new_key_is_shown_once_and_lets_in(path: Path, capsys):
    assert main(["keys", "add", "--file", str(path), "--tenant", "team-a"]) == 0
    first = capsys.readouterr().out.strip()
    ring = KeyRing(path)
    assert main(["keys", "add", "--file", str(path), "--tenant", "team-a", "--name", "new"]) == 0
    second = capsys.readouterr().out.strip()
    assert first != second and first not in path.read_text() and second not in path.read_text()
    tenants = [ring.tenant_of(key.encode()) for key in (first, second)]
    assert tenants[0] is not None and tenants[0] == tenants[1]
    assert main(["keys", "list", "--file", str(path)]) == 0
    listed = capsys.readouterr().out
    assert "team-a  tenant team-a" in listed and "new  tenant team-a" in listed
    assert first not in listed and KeyFile.load(path).tenant_secret not in listed
    assert main(["keys", "remove", "--file", str(path), "--name", "team-a"]) == 0
    assert ring.tenant_of(first.encode()) is None
    assert ring.tenant_of(second.encode()) == tenants[1]


def test_what_can_not_be_done_changes_nothing(path: Path, tmp_path: Path, capsys):
    add = ["keys", "add", "--file", str(path), "--tenant"]
    assert main(["keys", "list", "--file", str(path)]) == 1
    assert main([*add, "two words"]) == 1 and not path.exists()
    assert main([*add, "team-a"]) == 0
    before = path.read_text()
    capsys.readouterr()
    for argv, reason in (
        ([*add, "team-a"], "--name"),
        ([*add, "team-b", "--name", "team-a"], "already"),
        (["keys", "remove", "--file", str(path), "--name", "x"], "no key x"),
        (["keys", "add", "--file", str(tmp_path / "no" / "k"), "--tenant", "t"], "can not write"),
    ):
        assert main(argv) == 1
        out = capsys.readouterr()
        assert reason in out.err and "cs-" not in out.out
    assert path.read_text() == before
    path.write_text(before + "  junk")
    assert main([*add, "team-b"]) == 1  # and it is not replaced by a new one
    assert path.read_text() == before + "  junk"


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        main(["keys", "--help"])
    assert "cachesmith keys add --file" in capsys.readouterr().out
