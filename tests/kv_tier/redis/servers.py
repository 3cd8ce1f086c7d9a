"""Redis servers of a test's own: on free loopback ports, in temporary folders, stopped by pid."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
import redis

EXECUTABLE = shutil.which("redis-server")


def free_port(*, below: int = 1 << 16) -> int:
    while True:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port: int = sock.getsockname()[1]
        if port < below:
            return port


def eventually(is_so: Callable[[], object], *, within_s: float = 60.0) -> None:
    """Wait for something that another process or thread does."""
    end_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end_s, "it never came true"
        time.sleep(0.01)


class RedisServer:
    """One redis-server process. It keeps its port when it is started again."""

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        """options: words of the configuration, as on the command line

        Skips the test where there is no redis-server.
        """
        if EXECUTABLE is None:
            pytest.skip("there is no redis-server")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = port or free_port()
        self.options = options
        self.socket_path = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._command = ["--save", "", "--appendonly", "no"]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def url(self) -> str:
        return f"redis://{self.address}"

    def start(self) -> Self:
        assert self._process is None and EXECUTABLE is not None
        words = [*self._command, "--port", str(self.port), "--bind", "127.0.0.1"]
        words += ["--dir", str(self.folder), "--unixsocket", str(self.socket_path)]
        with (self.folder / "redis.log").open("ab") as output:
            self._process = subprocess.Popen(
                [EXECUTABLE, *words, *self.options], stdout=output, stderr=output
            )
        eventually(self._listens)
        return self

    def as_sentinel(self, settings: Path) -> Self:
        """Before it is started. settings: a file, which a Sentinel keeps its state in."""
        self._command = [str(settings), "--sentinel"]
        return self

    def client(self, **options: object) -> redis.Redis:
        return redis.Redis(host="127.0.0.1", port=self.port, **options)  # type: ignore[arg-type]

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """At once. `start` brings it back, empty."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def _listens(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError((self.folder / "redis.log").read_text())
        return self.socket_path.is_socket() and self._answers()

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(1.0)
            try:
                sock.connect(str(self.socket_path))
                sock.sendall(b"PING\r\n")
                return bool(sock.recv(64))  # an error is an answer too
            except OSError:
                return False


@contextmanager
def running_redis() -> Iterator[RedisServer]:
    """In a folder with a short name, as the path of a Unix socket must be."""
    with tempfile.TemporaryDirectory(prefix="cs-redis-") as name, RedisServer(Path(name)) as server:
        yield server
