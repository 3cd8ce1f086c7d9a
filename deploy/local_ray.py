"""A Ray that belongs to one server: on loopback, and closed to the machine's other users."""

import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path


def prepare_environment() -> None:
    """Set what Ray reads when it is imported; call it before. What the user has set stands.

    Without the first, Ray listens on every interface, whatever address `ray.init` is given: on
    Linux it replaces 127.0.0.1 by the machine's own address. The replicas' gRPC servers of Serve
    still listen everywhere, so calls need a token, known to this process and its children alone
    (`ray.init` by itself would write one to a file, and later Rays would find it there).
    """
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_TMPDIR" not in os.environ:
        os.environ["RAY_TMPDIR"] = str(private_folder())


def private_folder(parent: Path | None = None) -> Path:
    """Where Ray's sockets and logs go: Ray lets every user write to the folders that it makes, so
    that what is above them must be closed.

    Raises PermissionError where somebody else made it first.
    """
    # a short name: the path of a socket has 107 bytes at most
    folder = (parent or Path(tempfile.gettempdir())) / f"cs-ray-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} is not this user's folder: remove it or set RAY_TMPDIR")
    folder.chmod(0o700)
    return folder


def free_port() -> int:
    """One of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
