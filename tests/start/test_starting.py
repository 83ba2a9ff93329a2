"""How processes start: forked by a fork server or executed, they find the same, and they end with their run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import paceline
from paceline.errors import RunFailedError
from paceline.run.job_options import make_job
from paceline.shard.optimizers import UNTRACED
from paceline.start.display import announce_run
from paceline.start.local import HostMachine, ProcessPlacement
from paceline.start.processes import spawn as starting
from paceline.start.processes.fork_server import EXIT_THREADS
from paceline.start.processes.orders import Descriptors
from tests.support.live import await_that, meanwhile, processes, run_program

pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("mark"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
]

# Each worker writes down what a script can find out about its process.
LOOK = """
import gc, json, os, random, resource, signal, sys, threading

import numpy as np
import torch

import paceline


def words(path):
    with open(path) as file:
        return file.read()


def kind_of(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").split(":")[0]
    except OSError:
        return None  # it was used for the listing


def look():
    same = {
        "argv": sys.argv,
        "path": [path for path in sys.path if path],
        "main": __name__,
        "title": words("/proc/self/cmdline").rstrip("\\0"),
        "variables": sorted(os.environ),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "leads its group": os.getpgid(0) == os.getpid(),
        "signals": {s.name: str(getattr(signal.getsignal(s), "__qualname__", signal.getsignal(s)))
                    for s in signal.valid_signals() if s in list(signal.Signals)},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "input": os.readlink("/proc/self/fd/0"),
        "standard streams": [str(s) for s in (sys.stdin, sys.stdout, sys.stderr)],
        "buffering": [(s.line_buffering, s.write_through) for s in (sys.stdin, sys.stdout, sys.stderr)],
        "directory": os.getcwd(),
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "compute threads": torch.get_num_threads(),
        "collects garbage": gc.isenabled(),
        "descriptors": sorted(filter(None, map(kind_of, os.listdir("/proc/self/fd")))),
        "dynamo": "torch._dynamo" in sys.modules,
    }
    seeds = [random.getrandbits(64), int(np.random.randint(2**62)), torch.initial_seed(), torch.rand(1).item()]
    return {"same": same, "seeds": seeds}


found = look()
model = torch.nn.Linear(2, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
found["same"]["dynamo after steps"] = "torch._dynamo" in sys.modules
with open(f"found-{paceline.worker_index()}.json", "w") as file:
    json.dump(found, file)
"""

RUN = ("-m", "paceline", "run", "--workers", "2", "--servers", "1", "--run-dir", "run")


def found() -> list[dict[str, Any]]:
    return [json.loads(Path(f"found-{worker}.json").read_text()) for worker in range(2)]


@pytest.mark.thorough
def test_a_forked_worker_finds_what_an_executed_one_finds(tmp_path: Path) -> None:
    Path("train.py").write_text(LOOK)
    forked = run_program(*RUN, "train.py", "--rate", "3")
    assert forked.returncode == 0, forked.stderr
    by_fork = found()
    os.environ["PYTHONPATH"] += f":{tmp_path}/late"
    Path("late").mkdir()
    Path("late/sitecustomize.py").write_text(THREAD)
    shutil.rmtree("run")
    executed = run_program(*RUN, "train.py", "--rate", "3")
    assert executed.returncode == 0, executed.stderr
    by_exec = found()

    assert "train.py" in by_fork[0]["same"]["argv"][0]
    assert not by_fork[0]["same"]["dynamo after steps"]
    for worker in range(2):
        assert by_fork[worker]["same"]["title"] == f"paceline worker {worker} of run"
        by_exec[worker]["same"]["path"].remove(f"{tmp_path}/late")
        assert by_fork[worker]["same"] == by_exec[worker]["same"]
    assert "a module has started threads" in executed.stderr
    assert "a module has started threads" not in forked.stderr
    seeds = [seed for run in (by_fork, by_exec) for worker in run for seed in worker["seeds"]]
    assert len(set(seeds)) == len(seeds)


# A module that is imported when Python starts, and starts a thread that does not end before a fork.
THREAD = """
import sys, threading, time
if sys.orig_argv[-1] == "fork server":
    threading.Thread(target=time.sleep, args=(10**6,), daemon=True).start()
"""


LEAVE = """
import atexit, threading, time

import torch

import paceline

import left

threading.Thread(target=lambda: (time.sleep(0.5), print("the thread has ended"))).start()
atexit.register(print, "atexit")
model = torch.nn.Linear(2, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(4, 2)).sum().backward()
optimizer.step()
cycle = [open(f"cycle-{paceline.worker_index()}", "w")]
cycle[0].write("kept")
cycle.append(cycle)
del cycle
"""

LEFT = """
import paceline


class Noisy:
    def __init__(self, name):
        self.name = name

    def __del__(self):
        print("finalized", self.name)


file = open(f"left-{paceline.worker_index()}", "w")
file.write("kept")
one, other = Noisy("one"), Noisy("other")
other.itself = other
"""


@pytest.mark.usefixtures("plain_starts")
def test_a_forked_process_ends_like_a_program(tmp_path: Path) -> None:
    Path("left.py").write_text(LEFT)
    Path("train.py").write_text(LEAVE)
    ended = run_program(*RUN, "train.py")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[:2] == ["the thread has ended", "atexit"]
    assert sorted(lines[2:4]) == ["finalized one", "finalized other"]
    for name in ("left", "cycle"):
        assert [Path(f"{name}-{worker}").read_text() for worker in range(2)] == ["kept", "kept"]


@pytest.mark.chaos
def test_threads_that_end_before_a_fork_are_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # OpenBLAS, which NumPy loads, starts threads
    Path("train.py").write_text(LOOK)
    ended = run_program(*RUN, "train.py")
    assert ended.returncode == 0, ended.stderr
    alone = run_program("-c", "import torch; print(torch.get_num_threads())")
    assert [worker["same"]["compute threads"] for worker in found()] == [int(alone.stdout)] * 2
    assert "a module has started threads" not in ended.stderr


def wait_for_ever(started: str) -> None:
    Path(f"{started}-{paceline.worker_index()}").touch()
    signal.pause()


@pytest.mark.usefixtures("plain_starts")
def test_a_run_whose_fork_server_is_killed_ends_and_leaves_nothing(mark: str, tmp_path: Path) -> None:
    started = tmp_path / "started"

    def kill() -> None:
        for worker in range(2):
            await_that(Path(f"{started}-{worker}").exists, f"worker {worker} runs")
        os.kill(processes(mark)["fork server"], signal.SIGKILL)

    with pytest.raises(RunFailedError, match=r"SIGKILL"), meanwhile(kill):
        paceline.launch(wait_for_ever, args=(str(started),), workers=2, servers=1, progress=False)
    assert processes(mark) == {}


def test_a_system_that_cannot_fork_executes_each_process(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "can_fork", lambda: False)
    result = paceline.launch(one_step, workers=2, servers=1, progress=False)
    assert result.summary["updates"] == 1
    assert processes(mark) == {}


def one_step() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()


def test_a_fork_server_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "torch.py").write_text("raise ImportError('this torch is broken')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/early:{os.environ['PYTHONPATH']}")
    with pytest.raises(RunFailedError, match="exit code 1") as raised:
        paceline.launch(one_step, workers=1, servers=1, progress=False)
    assert "this torch is broken" in raised.value.traceback


def test_a_process_that_cannot_be_started_ends_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(self: starting.Child) -> None:
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(starting.Child, "_execute", execute)
    server: Any = SimpleNamespace(fork=lambda *order: None, await_end=lambda: EXIT_THREADS)
    order: Any = SimpleNamespace(title="worker 0")
    source, sink = os.pipe()
    with open(source, "rb") as log:
        child = starting.Child((), {}, order, Descriptors(sink, sink, sink, sink), server)
        child.await_start()
        os.close(sink)
        assert log.read() == b"worker 0 cannot be started: too many processes\n"
    assert child.await_end() > 0


def test_a_run_does_not_wait_for_a_process_that_its_fork_server_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(starting, "send_order", refuse)
    with pytest.raises(RunFailedError, match="exit code 1") as raised:
        paceline.launch(one_step, workers=1, servers=1, progress=False)
    assert "cannot be started: [Errno 24] Too many open files" in raised.value.traceback


COMPILED = """
import sys

import torch

from paceline.shard.optimizers import make_optimizer

make_optimizer("SGD", ({"lr": 0.1},), [[torch.zeros(1)]])  # as the process that serves a run does for a checkpoint
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules


@torch.compile(backend="eager")
def loss(x):
    optimizer.zero_grad()
    return model(x).sum()


for _ in range(2):
    loss(torch.ones(1, 2)).backward()
assert model.weight.grad.tolist() == [[1, 1], [1, 1]]
assert "torch._dynamo" in sys.modules
"""


@pytest.mark.thorough
def test_optimizers_do_without_dynamo_until_it_is_there() -> None:
    ended = run_program("-c", COMPILED)  # executed: a forked program would do without it in any case
    assert ended.returncode == 0, ended.stderr


def test_torch_still_looks_for_the_untraced_version_there() -> None:
    # If this fails after an update of torch, `defer_dynamo` has no effect, and each process starts a second later.
    assert UNTRACED in torch.optim.Optimizer.add_param_group.__code__.co_consts


def note(folder: str) -> None:
    names = ["MACHINE", "PACELINE_PARENT"]
    Path(folder, str(paceline.worker_index())).write_text(
        json.dumps([os.environ.get(name) for name in names])
    )
    one_step()


@pytest.mark.thorough
def test_each_kind_of_machine_has_its_own_fork_server(mark: str, tmp_path: Path) -> None:
    here, there = HostMachine(), HostMachine(prefix=("env", "MACHINE=there"))
    paceline.launch(
        note,
        args=(str(tmp_path),),
        workers=3,
        servers=1,
        transport="tcp",
        placement=ProcessPlacement("127.0.0.1", servers=(here,), workers=(there, here, there)),
        progress=False,
    )
    assert [json.loads((tmp_path / str(worker)).read_text()) for worker in range(3)] == [
        ["there", None],
        [None, None],
        ["there", None],
    ]


def test_a_terminal_is_told_at_once_what_is_being_started() -> None:
    told = StringIO()
    job = make_job(workers=4, servers=1, dry_run=True)
    announce_run(job, Console(file=told, force_terminal=True, width=80))
    announce_run(job, Console(file=told, force_terminal=False, width=80))
    assert told.getvalue() == "starting 4 workers and 1 server, bsp\n"


BEFORE_TORCH = """
import sys

import paceline.cli
from paceline.start.processes import fork_server, spawn

found = []


def begin(starter, prefixes):
    found.append("torch" in sys.modules)
    raise SystemExit


spawn.Starter.__init__ = begin
sys.argv[1:] = ["run", "train.py"]
try:
    paceline.cli.main()
except SystemExit:
    assert found == [False], found
"""


def test_the_processes_of_a_run_start_to_import_torch_before_the_launcher_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import paceline, mytorchoptimizers\n")
    ended = run_program("-c", BEFORE_TORCH)
    assert (ended.returncode, ended.stderr) == (0, "")
