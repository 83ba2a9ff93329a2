"""Emulated machines that can be switched off: each has its own network, processes, mounts, shared memory and name.

`benchmarks.overlap.namespaces` emulates the network. The first process of a machine only waits until the launcher
closes a pipe. Further programs enter the namespaces of this process. When this first process is killed, or ends because
the launcher has ended, the kernel ends all processes of the machine immediately.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from paceline.errors import ConfigurationError
from paceline.start.local import HostMachine

from ..overlap.namespaces import NetworkLink, network, why_not

__all__ = ["Machine", "machines", "require_machines"]

# The names of all machines are in the file /etc/hosts of each machine, as the programs of a cluster expect.
BOOT = 'hostname "$1" && mount --bind "$2" /etc/hosts && touch "$3" && exec cat'
UNSHARE = ["unshare", "--mount", "--ipc", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
NAMESPACES = ["--mount", "--ipc", "--uts", "--pid", "--net"]
BOOT_S = 20.0


class Machine:
    """An emulated machine. Creating the object switches the machine on.

    Args:
        host: its address, and the command that enters its network.
        name: its name.
        folder: directory that contains the file `hosts`.
    """

    def __init__(self, host: HostMachine, name: str, folder: Path) -> None:
        self.address = host.host
        self.name = name
        self._prefix, self._folder = host.prefix, folder
        self._sent_bytes = 0
        self.switch_on()

    def switch_on(self) -> None:
        """Start the first process of the machine."""
        booted = self._folder / f"booted-{self.name}"
        booted.unlink(missing_ok=True)
        boot = ["sh", "-c", BOOT, "sh", self.name, str(self._folder / "hosts"), str(booted)]
        self._holder = subprocess.Popen(
            [*self._prefix, *UNSHARE, *boot],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )
        deadline_s = time.monotonic() + BOOT_S
        while not booted.exists():
            if self._holder.poll() is not None or time.monotonic() > deadline_s:
                raise ConfigurationError(f"the emulated machine {self.name!r} did not start.")
            time.sleep(0.01)
        holder = self._holder.pid
        self._first = int(Path(f"/proc/{holder}/task/{holder}/children").read_text().split()[0])

    def start(self, *command: str, env: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a program on the machine, in a directory of its own. The returned process ends when the program
        ends."""
        enter = ["nsenter", f"--target={self._first}", f"--wd={self._folder}", *NAMESPACES, "--"]
        return subprocess.Popen(
            [*enter, *command],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
        )

    def switch_off(self) -> None:
        """End all processes of the machine immediately."""
        self.sent_bytes()
        self._holder.kill()
        self._holder.communicate()

    def sent_bytes(self) -> int:
        """Return the number of bytes that the machine's network interface has sent since the interface was made."""
        with contextlib.suppress(OSError):  # the machine is off
            lines = Path(f"/proc/{self._first}/net/dev").read_text().splitlines()
            [counters] = [line.split()[1:] for line in lines if line.strip().startswith("eth0:")]
            self._sent_bytes = int(counters[8])
        return self._sent_bytes


def require_machines() -> None:
    """Raise `ConfigurationError` if this process cannot emulate machines."""
    needed = ("unshare", "nsenter", "hostname", "mount")
    lacking = [why_not(), *(f"the command {name!r}" for name in needed if shutil.which(name) is None)]
    if lacking := [each for each in lacking if each]:
        raise ConfigurationError(f"emulating machines needs {' and '.join(lacking)}.")


@contextlib.contextmanager
def machines(count: int, link: NetworkLink) -> Iterator[list[Machine]]:
    """Emulate machines with one link each, and remove them when the context exits."""
    with network(count, link) as emulated, TemporaryDirectory() as folder:
        names = [f"machine{index}" for index in range(count)]
        hosts = [f"{host.host} {name}" for host, name in zip(emulated.machines, names, strict=True)]
        Path(folder, "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts]) + "\n")
        made: list[Machine] = []
        try:
            for host, name in zip(emulated.machines, names, strict=True):
                made.append(Machine(host, name, Path(folder)))
            yield made
        finally:
            for machine in made:
                machine.switch_off()
