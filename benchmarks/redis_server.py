"""A redis-server of a benchmark's own: on a free loopback port, in a temporary folder."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_installed() -> bool:
    return shutil.which("redis-server") is not None


@contextmanager
def own_redis() -> Iterator[dict[str, str]]:
    """URLs by kind of link, `tcp` and `unix`. The server keeps nothing on disk and ends with it."""
    with tempfile.TemporaryDirectory(prefix="cs-bench-") as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        path = Path(folder) / "redis.sock"
        options = ["--port", str(port), "--bind", "127.0.0.1", "--unixsocket", str(path)]
        options += ["--save", "", "--dir", folder]
        with subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL) as process:
            try:
                while not path.is_socket():
                    if process.poll() is not None:
                        raise SystemExit("redis-server did not start")
                    time.sleep(0.01)
                yield {"tcp": f"redis://127.0.0.1:{port}", "unix": f"unix://{path}"}
            finally:
                process.kill()
