"""A redis-server on a test host, with a password."""

import secrets
import time
from pathlib import Path

from redis import Redis, RedisError

from deploy.testbed.errors import TestbedError
from deploy.testbed.hosts import Host
from deploy.testbed.processes import Process, kill


class HostRedis:
    """Keeps nothing on disk: stopped and started again, it is empty."""

    def __init__(self, host: Host, port: int, folder: Path) -> None:
        self._host = host
        self._port = port
        self._folder = folder / f"redis-{port}"
        self.password = secrets.token_hex(16)

    @property
    def address(self) -> str:
        return f"{self._host.address}:{self._port}"

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{self.address}/0"

    def start(self, *, timeout_s: float = 30.0) -> None:
        self._folder.mkdir(exist_ok=True)
        # in a file: a command line can be read by everybody
        config = self._folder / "redis.conf"
        config.write_text(
            f"bind {self._host.address}\nport {self._port}\nrequirepass {self.password}\n"
            f'save ""\nappendonly no\ndir {self._folder}\n'
        )
        config.chmod(0o600)
        self._host.spawn("redis-server", str(config), log=self._folder / "redis.log")
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            if time.monotonic() > deadline:
                raise TestbedError(f"no redis-server at {self.address}, see {self._folder}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it at once, with what it held."""
        for process in self._host.processes():
            if self.is_process(process):
                kill(process.pid)

    def is_process(self, process: Process) -> bool:
        return process.title == f"redis-server {self.address}"

    def _answers(self) -> bool:
        client = Redis(host=self._host.address, port=self._port, password=self.password)
        try:
            return bool(client.ping())
        except RedisError:
            return False
        finally:
            client.close()
