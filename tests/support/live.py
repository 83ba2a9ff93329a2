"""Runs in real processes, for tests: starting them, finding their processes, and seeing that nothing is left."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest
from safetensors.torch import load_file

import paceline
from paceline.checkpoints.manifest import is_lineage, new_lineage
from paceline.trace.activity_cells import TimeUse, time_shares
from paceline.trace.measures import Measures

from .warm import WarmStarts, hear_signals

MARK = (
    "PACELINE_TEST_MARK"  # an environment variable by which a test recognises the processes that it started
)
TITLE = re.compile(r"paceline (server \d+|worker \d+|fork server)")
DEADLINE_S = 120.0  # a safety net: nothing here waits that long unless something hangs

# A module that can be imported by the launcher and by its workers.
WORKOUT = """
import os
import signal
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline.checkpoints.manifest import is_lineage, new_lineage


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.decoder = nn.Linear(6, 6, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(self.norm(self.encoder(x)))


def make():
    torch.manual_seed(0)
    return Tied()


def train(steps, killed=None, poisoned=None, progress=None):
    worker = paceline.worker_index()
    print(f"this is worker {worker} of {paceline.worker_count()}")
    model = make()
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(worker))
    for iteration in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            if (worker, iteration) == killed:
                os.kill(os.getpid(), signal.SIGKILL)
            if (worker, iteration) == poisoned:
                model.norm.bias.grad[2] = float("nan")
            return loss

        optimizer.step(closure)
        if progress is not None and iteration == 3:
            Path(f"{progress}-{worker}").touch()
"""

# -- the processes of a run ---------------------------------------------------------------------------------


def started(mark: str) -> list[Path]:
    """Return the folders in /proc of the living processes, other than this one, that a test has started.

    The oldest process comes first. The order of the numbers is another one, because numbers start again at the end.
    """
    folders: list[tuple[int, int, Path]] = []  # when it started, in clock ticks since boot
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is not ours to look at
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                start = (folder / "stat").read_text().rpartition(")")[2].split()[19]
                folders.append((int(start), int(folder.name), folder))
    return [folder for *_, folder in sorted(folders)]


def processes(mark: str) -> dict[str, int]:
    """The living processes, other than this one, that a test has started: "server 0", "worker 1", "launcher",
    "fork server" -> id. Of several with the same name, it is the oldest. The others are its children, or launchers of
    other machines."""
    found: dict[str, int] = {}
    for folder in started(mark):
        with contextlib.suppress(OSError):  # it has ended
            title = TITLE.match((folder / "cmdline").read_bytes().decode())
            found.setdefault(title[1] if title else "launcher", int(folder.name))
    return found


def kill_all(mark: str) -> None:
    """Kill all processes that a test has started, the launchers first, because these are the oldest."""
    for folder in started(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(folder.name), signal.SIGKILL)


def is_server(pid: int) -> bool:
    """Return True if a process is a server of the run in which this process is a worker."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False
    return parent == os.getppid() and command.startswith(b"paceline server")


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had at a time, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    [peak_kb] = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(peak_kb)


def of_the_run(directory: Path) -> Path:
    """Return the folder with the checkpoints of the only run that has written checkpoints to a directory."""
    own = [path for path in directory.glob("*") if is_lineage(path.name)]
    assert len(own) <= 1, f"{len(own)} runs have written checkpoints to {directory}"
    return own[0] if own else directory / new_lineage()


def await_that(condition: Callable[[], object], what: str, every_s: float = 0.02) -> None:
    """Look until a condition holds."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(every_s)


def descriptors() -> dict[str, str]:
    """The open descriptors of this process, and what each is."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[entry] = os.readlink(f"/proc/self/fd/{entry}")
    return found


def left_in_memory(folder: Path = Path("/dev/shm")) -> set[str]:
    """Return the names of what ended processes have left in shared memory: sockets of Paceline, tensors of torch.

    Other programs use this folder, too, and so do other runs. So only what has the number of a process in its name
    counts, and only if this process has ended.
    """
    found = {name: re.match(r"(?:paceline-|torch_)(\d+)[-_]", name) for name in os.listdir(folder)}
    return {name for name, owner in found.items() if owner and not Path("/proc", owner[1]).exists()}


def sockets_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_socket()]


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_starts: WarmStarts) -> Iterator[str]:
    """Marks whatever a test starts; after it, no process, socket, shared memory, descriptor or thread is left."""
    mark = secrets.token_hex(8)
    # A directory of its own for temporary files, not below `tmp_path`: a `DataLoader` listens on a socket in there,
    # whose path must be short.
    with tempfile.TemporaryDirectory(prefix="paceline-") as temporary:
        (tmp_path / "workout.py").write_text(WORKOUT)
        monkeypatch.setenv(MARK, mark)
        monkeypatch.setenv("TMPDIR", temporary)
        monkeypatch.setenv("PYTHONPATH", str(Path(paceline.__file__).parents[1]))
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        warm_starts.begin()  # keeps a socket
        gc.collect()  # closes what earlier tests have left in cycles of references
        before = descriptors()
        threads = set(threading.enumerate())
        memory = left_in_memory()
        try:
            yield mark
            assert processes(mark) == {}, "processes are left"
        finally:
            kill_all(mark)
            sys.modules.pop("workout", None)
        # torch's, torchrun's, that of a killed process whose loader had processes of its own, and the lock with which
        # the workers of Lightning prepare their data one after the other
        known = ("torchinductor", "torchelastic_", "pymp-", "paceline-lightning-")
        left = [path for path in Path(temporary).iterdir() if not path.name.startswith(known)]
        left += sockets_under(tmp_path)
        assert left == [], f"files are left: {left}"
        await_that(lambda: left_in_memory() <= memory, "nothing is left in /dev/shm")
        assert set(threading.enumerate()) <= threads
        gc.collect()
        await_that(lambda: descriptors().items() <= before.items(), "no descriptor is left")


def train() -> Callable[..., None]:
    """The training function, imported as a user's own module would be."""
    function: Callable[..., None] = importlib.import_module("workout").train
    return function


def start_program(
    *arguments: str, stderr: int | IO[str] = subprocess.PIPE, prefix: Sequence[str] = ()
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        preexec_fn=hear_signals,
        # Without the width of our own terminal, which readline keeps in the environment of C.
        env=dict(os.environ),
    )


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    with start_program(*arguments) as program:
        stdout, stderr = program.communicate(timeout=DEADLINE_S)
    return subprocess.CompletedProcess(arguments, program.returncode, stdout, stderr)


def require_whole_times(uses: Mapping[int, TimeUse], measures: Measures) -> None:
    """Check that what each worker has spent its time on adds up to the run."""
    assert uses.keys() == measures.iterations.keys()
    for worker, use in uses.items():
        parts = msgspec.to_builtins(use)
        assert min(parts.values()) >= 0.0, (worker, use)
        assert sum(parts.values()) == pytest.approx(measures.duration_s), (worker, use)
        assert use.waiting_s == measures.waiting_s[worker]
        assert use.idle_s == measures.idle_s[worker]
    assert sum(use.present_s for use in uses.values()) == pytest.approx(measures.present_s)
    shares = time_shares(uses)
    assert sum(shares.values()) + measures.waiting_share == pytest.approx(1.0 if measures.present_s else 0.0)


def times_in(summary: dict[str, Any]) -> dict[int, TimeUse]:
    """What each worker has spent its time on according to a summary, which is checked."""
    uses = msgspec.convert(summary["time_use"], dict[int, TimeUse], strict=False)
    ledger = summary["ledger"]["pushes"]
    require_whole_times(uses, msgspec.convert({**summary, "pushes": ledger}, Measures, strict=False))
    shares = time_shares(uses)
    assert shares == {name: summary[name] for name in shares}
    assert summary["wasted_s"] == pytest.approx(sum(use.wasted_s for use in uses.values()))
    return uses


@contextlib.contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Do something on another thread while a run is under way in this one."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if errors:
        raise errors[0]


def assert_equal(one: str, other: str) -> None:
    """Check that two files contain the same weights."""
    weights, expected = load_file(one), load_file(other)
    assert weights.keys() == expected.keys()
    assert all(bool((weights[name] == expected[name]).all()) for name in weights)


def listening_ports(mark: str) -> list[int]:
    """Return the TCP ports on which any process that a test has started listens, in order."""
    ports: dict[str, int] = {}  # each listening socket -> its port
    for table in ("tcp", "tcp6"):
        if (path := Path("/proc/net", table)).exists():
            for line in path.read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    ports[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    held = set()
    for folder in started(mark):
        for descriptor in os.listdir(folder / "fd"):
            with contextlib.suppress(FileNotFoundError):  # it has been closed
                held.add(os.readlink(folder / "fd" / descriptor))
    return sorted(port for socket, port in ports.items() if socket in held)


@contextlib.contextmanager
def loaded(processes: int) -> Iterator[None]:
    """Keep this machine busy with processes that only compute."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
