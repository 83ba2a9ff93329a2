"""Runs that `paceline serve` has started, which the programs of a test join on the loopback interface."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

from paceline.wire.secure import new_secret, write_secret

from .live import await_that, start_program

# Trains for some epochs, with a pause after each step until the file "enough" exists.
SCRIPT = """
import os
import sys
import time
from pathlib import Path
import torch
import paceline

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for epoch in paceline.epochs(int(sys.argv[1])):
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        Path(f"stepped-{os.getpid()}").touch()
        if len(sys.argv) > 2 and not Path("enough").exists():
            time.sleep(float(sys.argv[2]))
print(f"worker {paceline.worker_index()} has finished")
"""

# Each process trains until the file "enough" exists.
ENDLESS_SCRIPT = f"""
{SCRIPT.rpartition("        if len(sys.argv)")[0]}
        time.sleep(0.01)
        if Path("enough").exists():
            break
    else:
        continue
    break
print(f"worker {{paceline.worker_index()}} has finished")
"""


def trained() -> int:
    """Return the number of processes that have trained."""
    return len(list(Path().glob("stepped-*")))


def await_training(processes: int) -> None:
    """Wait until this number of processes has trained."""
    await_that(lambda: trained() == processes, f"{processes} processes train")


def enough() -> None:
    """Let the scripts go on without pauses, or end."""
    Path("enough").touch()


class Served:
    """A run that `paceline serve` has started in the current directory.

    Args:
        options: options of the command.
        secret: the secret that the command finds in its environment; "" if it makes a new one.
        program: the program, if another one does the same.
    """

    def __init__(self, *options: str, secret: str = "", program: Sequence[str] = ("-m", "paceline")) -> None:
        resumes = "--resume" in options
        where = () if resumes else ("--run-dir", "run")
        if not resumes:
            Path("train.py").write_text(SCRIPT)
        self._messages = open("serve.log", "w+")  # noqa: SIM115 - closed by `summary`
        self.program = start_program(*program, "serve", *where, *options, stderr=self._messages)
        await_that(lambda: "paceline join" in self.messages, "serve says how to join")
        [self.address] = re.findall(r"paceline join (\S+) ", self.messages)
        self.port = self.address.rpartition(":")[2]
        self.secret = secret or Path("run", "secret").read_text().strip()

    @property
    def messages(self) -> str:
        """What the program has written to standard error."""
        return Path("serve.log").read_text()

    def join(
        self,
        *arguments: str,
        secret: str | None = None,
        options: Sequence[str] = (),
        address: str = "",
        prefix: Sequence[str] = (),
        stderr: int | IO[str] = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start `paceline join`, perhaps in another network namespace."""
        os.environ["PACELINE_SECRET"] = self.secret if secret is None else secret
        command = ["-m", "paceline", "join", *options, address or self.address, "train.py", *arguments]
        try:
            return start_program(*command, prefix=prefix, stderr=stderr)
        finally:
            del os.environ["PACELINE_SECRET"]

    def wrong_secret(self) -> str:
        """Return the name of a file with the secret of another run."""
        write_secret(new_secret(), Path("wrong"))
        return "wrong"

    def failure(self, code: int = 1) -> str:
        """Wait until the run has failed with this exit code, and return its messages."""
        self.program.communicate(timeout=120)
        self._messages.close()
        assert self.program.returncode == code
        return self.messages

    def summary(self) -> dict[str, object]:
        """Wait until the run has finished, and return its summary."""
        stdout, _ = self.program.communicate(timeout=120)
        self._messages.close()
        assert self.program.returncode == 0, self.messages + stdout
        found: dict[str, object] = json.loads(Path("run", "summary.json").read_text())
        return found


def output(program: subprocess.Popen[str], timeout_s: float = 120.0) -> tuple[int, str, str]:
    """Wait for a program, and return its exit code and its output."""
    stdout, stderr = program.communicate(timeout=timeout_s)
    return program.returncode, stdout, stderr


@pytest.fixture
def two_machines() -> Iterator[dict[str, list[str]]]:
    """Two machines, of docs/how-to/several-machines.md: address -> the command that runs a program there."""
    names = {f"10.0.0.{number}": f"paceline-doc-{os.getpid()}-{number}" for number in (1, 2)}
    one, other = names.values()

    def do(command: str) -> None:
        subprocess.run(command.split(), check=True)

    try:
        for name in names.values():
            do(f"ip netns add {name}")
            do(f"ip -n {name} link set lo up")
        do(f"ip -n {one} link add eth0 type veth peer name eth0 netns {other}")
        for address, name in names.items():
            do(f"ip -n {name} addr add {address}/24 dev eth0")
            do(f"ip -n {name} link set eth0 up")
        yield {address: ["ip", "netns", "exec", name] for address, name in names.items()}
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], check=False)
