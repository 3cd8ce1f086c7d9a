"""Test hosts on one machine: namespaces joined by a bridge, each with a sshd.

A host has its own network, mounts, processes, host name and IPC, and its own home, /tmp and
/dev/shm. The machine itself has the bridge's first address, so that it can reach all hosts.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from deploy.testbed.errors import TestbedError
from deploy.testbed.processes import Process, children_of, kill, namespace_of, processes_in
from deploy.testbed.slots import HOST_INIT, Slot

SOURCE_ROOT = Path(__file__).resolve().parents[2]  # what the hosts must import from
_KEPT = (Path(sys.prefix), Path(sys.base_prefix), SOURCE_ROOT)  # also below $HOME and /tmp
_PROGRAMS = {
    "ip": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "rsync": "rsync",
    "redis-server": "redis-server",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
_OWN_PROCESSES = (HOST_INIT.name, "sshd")  # of a host on which nothing runs

_SSHD_CONFIG = """\
ListenAddress {address}:22
HostKey {shared}/host_key
AuthorizedKeysFile {shared}/key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
PidFile none
MaxStartups 100
MaxSessions 100
SetEnv PATH={bin}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
"""


def check_prerequisites() -> None:
    """Raises TestbedError with everything that is missing."""
    missing = []
    if os.geteuid() != 0:
        missing.append("root: namespaces and a bridge can not be made without")
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    for program, package in _PROGRAMS.items():
        if shutil.which(program, path=path) is None:
            missing.append(f"{program}, from the package {package}")
    if missing:
        raise TestbedError("the testbed needs\n" + "\n".join(f"  {line}" for line in missing))


class Host:
    """One of them. Number 1 is the head."""

    def __init__(self, slot: Slot, number: int) -> None:
        self.number = number
        self.address = slot.address(number)
        self.name = f"h{number}"
        self.folder = slot.folder / self.name
        self._slot = slot
        self._outer: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None

    @property
    def is_up(self) -> bool:
        return self._pid is not None and self._outer is not None and self._outer.poll() is None

    @property
    def ssh_key(self) -> Path:
        return self._slot.folder / "shared" / "key"

    def connect(self) -> None:
        """Lay the cable: namespace, link, address, and the route that Ray finds its address by."""
        namespace, link = self._slot.namespace(self.number), self._slot.link(self.number)
        prefix = self._slot.network.prefixlen
        for words in (
            f"netns add {namespace}",
            f"link add {link} type veth peer name eth0 netns {namespace}",
            f"link set {link} master {self._slot.bridge} up",
            f"-n {namespace} link set lo up",
            f"-n {namespace} addr add {self.address}/{prefix} dev eth0",
            f"-n {namespace} link set eth0 up",
            f"-n {namespace} route add default via {self._slot.gateway}",
        ):
            _ip(words)

    def start(self) -> None:
        """Switch it on; `is_ready` once it can be reached.

        Call it on the main thread: the host ends with the thread that started it, so that none
        outlives a run that is killed.
        """
        shared = self.ssh_key.parent
        self.folder.mkdir(exist_ok=True)
        (self.folder / "ready").unlink(missing_ok=True)
        (self.folder / "sshd_config").write_text(
            _SSHD_CONFIG.format(address=self.address, shared=shared, bin=Path(sys.prefix) / "bin")
        )
        command = ["ip", "netns", "exec", self._slot.namespace(self.number)]
        command += ["setpriv", "--pdeathsig", "KILL"]
        command += ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        command += ["bash", str(HOST_INIT)]
        command += [str(self.folder), self.name, self.address, *map(str, _KEPT)]
        with (self.folder / "init.log").open("ab") as log:
            self._outer = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )

    @property
    def is_ready(self) -> bool:
        """Raises TestbedError when it failed to start."""
        assert self._outer is not None
        if self._outer.poll() is not None:
            raise TestbedError(f"{self.name} did not start: {self._log()}")
        if not (self.folder / "ready").exists():
            return False
        (self._pid,) = children_of(self._outer.pid)
        return True

    def crash(self) -> None:
        """Power off: all its processes are gone at once."""
        if self._pid is not None:
            kill(self._pid)
            self._pid = None
        if self._outer is not None:
            self._outer.wait(timeout=60)

    def cut(self) -> None:
        """Pull the cable: nobody is told, packets are lost."""
        _ip(f"link set {self._slot.link(self.number)} down")

    def rejoin(self) -> None:
        _ip(f"link set {self._slot.link(self.number)} up")

    def command(self, words: list[str], env: Mapping[str, str]) -> list[str]:
        """The words of a command that runs on this host, with a login's environment and `env`."""
        if self._pid is None:
            raise TestbedError(f"{self.name} is down")
        bin_path = f"{Path(sys.prefix) / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin"
        variables = {"PATH": bin_path, "HOME": str(Path.home()), "LANG": "C.UTF-8", **env}
        given = [f"{name}={value}" for name, value in variables.items()]
        entering = ["nsenter", "-t", str(self._pid), "-n", "-m", "-p", "-u", "-i", "--wd=/"]
        return [*entering, "env", "-i", *given, *words]

    def run(
        self, *words: str, env: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; its status is the caller's to judge."""
        return subprocess.run(
            self.command(list(words), env or {}),
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def spawn(self, *words: str, log: Path) -> None:
        """Start a server that lives as long as the host."""
        with log.open("ab") as output:
            subprocess.Popen(
                self.command(list(words), {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def processes(self) -> list[Process]:
        """All but those that make it a host."""
        if self._pid is None:
            return []
        return [
            process
            for process in processes_in(namespace_of(self._pid))
            if not any(name in process.title for name in _OWN_PROCESSES)
        ]

    def path(self, inside: str) -> Path:
        """Where a file of its home or its /tmp lies on the machine."""
        return self.folder / "files" / inside.removeprefix("/")

    def _log(self) -> str:
        return (self.folder / "init.log").read_text(errors="replace").strip()


@contextmanager
def running_hosts(slot: Slot, number: int) -> Iterator[list[Host]]:
    """Hosts 1 to `number`, all up. At the end nothing of them is left but their files."""
    _make_shared_files(slot.folder / "shared")
    _ip(f"link add {slot.bridge} type bridge")
    _ip(f"addr add {slot.gateway}/{slot.network.prefixlen} dev {slot.bridge}")
    _ip(f"link set {slot.bridge} up")
    hosts = [Host(slot, index) for index in range(1, number + 1)]
    try:
        for host in hosts:
            host.connect()
            host.start()
        wait_ready(hosts)
        yield hosts
    finally:
        for host in hosts:
            host.crash()


def wait_ready(hosts: list[Host], *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not all(host.is_ready for host in hosts):
        if time.monotonic() > deadline:
            raise TestbedError(f"the hosts were not up within {timeout_s:.0f} s")
        time.sleep(0.05)


def _make_shared_files(folder: Path) -> None:
    folder.mkdir()
    # names that can not be resolved must fail at once: Ray asks for those of clouds
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    for name in ("key", "host_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
        )


def _ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], check=False, capture_output=True, text=True)
    if done.returncode:
        raise TestbedError(f"ip {words}: {done.stderr.strip()}")
