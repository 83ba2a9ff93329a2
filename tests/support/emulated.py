"""Emulated machines: each has a network, processes, mounts and shared memory that no other one can reach.

`machines` connects them as `benchmarks.overlap.namespaces` does. The files are those of this machine, so machines can
exchange files, as on a cluster with a shared directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.overlap.namespaces import NAMESPACES, NetworkLink, network, why_not

from .live import TITLE, start_program, started

__all__ = ["Machine", "machines", "why_not_emulated"]

# The shell is the first process of the machine, as an init process is: it collects the processes whose parents have
# ended, and a signal that a program does not handle ends the program.
INIT = (
    "unshare",
    "--mount",
    "--ipc",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "sh",
    "-c",
    '"$@"; exit $?',
    "sh",
)


def why_not_emulated() -> str:
    """Return what this process lacks to emulate machines, or "" if it lacks nothing."""
    return why_not() or ("" if shutil.which("unshare") else "the command 'unshare'")


class Machine:
    """An emulated machine. It has one program, which may have been started by an earlier one with the same name.

    Attributes:
        name: name of the machine.
        address: the IP address of the machine.
        log: the file with the messages of its program.
        program: the process outside of the machine that ends with its program; None before the start.
    """

    def __init__(self, address: str, namespace: str, log: Path) -> None:
        self.address = address
        self.name = log.stem
        self.log = log
        self.program: subprocess.Popen[str] | None = None
        self._lost_power = False
        self._namespace = namespace
        self._inode = Path(NAMESPACES, namespace).stat().st_ino

    def start(self, *arguments: str) -> None:
        """Start a program of Python on the machine."""
        with self.log.open("a") as log:
            self.program = start_program(
                *arguments, stderr=log, prefix=("ip", "netns", "exec", self._namespace, *INIT)
            )

    def processes(self, mark: str) -> dict[str, int]:
        """Return the machine's living processes: "worker 1", "server 0", "fork server", "init", "program" -> id."""
        found: dict[str, int] = {}
        for folder in started(mark):
            with contextlib.suppress(OSError):  # it has ended
                if Path(folder, "ns", "net").stat().st_ino != self._inode:
                    continue
                words = Path(folder, "cmdline").read_bytes().decode().split("\0")
                title = TITLE.match(words[0])
                if title is not None:
                    name = title[1]
                elif words[0] == "sh":
                    name = "init"
                elif words[1:3] == ["-m", "paceline"]:
                    name = "program"
                else:
                    continue
                # The children of a process have its command line until they change it. They are younger.
                found.setdefault(name, int(folder.name))
        return found

    def set_link(self, state: str) -> None:
        """Set the machine's link "up" or "down". A link that is down loses every packet."""
        subprocess.run(["ip", "-n", self._namespace, "link", "set", "eth0", state], check=True)

    def lose_power(self, mark: str) -> None:
        """End all processes at once, without a packet that says so."""
        self._lost_power = True
        self.set_link("down")
        if (init := self.processes(mark).get("init")) is not None:
            os.kill(init, signal.SIGKILL)

    def wait(self, timeout_s: float) -> int:
        """Wait for the end of the program, and return its exit code: 128 + n if signal n has ended it."""
        assert self.program is not None
        self.program.communicate(timeout=timeout_s)
        # Some versions of unshare end with 1 when the first process of the machine is killed.
        code = -signal.SIGKILL if self._lost_power else self.program.returncode
        return code if code >= 0 else 128 - code

    @property
    def ended(self) -> bool:
        """True if the program has ended."""
        return self.program is not None and self.program.poll() is not None

    @property
    def said(self) -> str:
        """The messages of the program."""
        return self.log.read_text() if self.log.exists() else ""


@contextlib.contextmanager
def machines(count: int, link: NetworkLink | None = None) -> Iterator[list[Machine]]:
    """Emulate some machines, with links of 1 Gbit/s by default. On exit, all their processes are ended."""
    with network(count, link or NetworkLink()) as emulated:
        made = [
            Machine(machine.host, machine.prefix[-1], Path(f"machine-{index}.log"))
            for index, machine in enumerate(emulated.machines)
        ]
        try:
            yield made
        finally:
            for machine in made:
                if machine.program is not None:
                    machine.program.kill()  # --kill-child ends the others
                    machine.program.communicate()
