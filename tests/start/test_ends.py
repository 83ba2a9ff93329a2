"""How runs in real processes end: who is killed, stopped or interrupted when, what is left, and what is said.

Each test starts `paceline run` as a user would, and lets one thing go wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

import paceline
from paceline.errors import ConfigurationError
from paceline.sync import Conditions
from paceline.trace import read_run
from paceline.trace.measures import measure
from tests.support.live import DEADLINE_S, await_that, processes, run_program, start_program, times_in
from tests.support.marks import chaos

pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("mark"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
]

# What a script does is in `act(worker, iteration)`, which is called in the middle of each iteration, and in
# `last(worker)`, when its worker has done its work.
SCRIPT = """
import ctypes, os, shutil, signal, subprocess, sys, time
from pathlib import Path

import torch

import paceline

STEPS, SIZE = 12, 6
run_dir = Path("run")
worker = paceline.worker_index()


def parent_of(process):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def process_of(name):
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes()
                parent = parent_of(folder.name)
            except OSError:
                continue
            if parent == os.getppid() and command.startswith(f"paceline {name} of".encode()):
                return int(folder.name)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(SIZE, SIZE)
        self.second = torch.nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def act(worker, iteration):
    pass


def last(worker):
    pass


def make():
    torch.manual_seed(0)
    return Net()

#MORE

model = make()
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
x = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(worker))
for iteration in range(STEPS):

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        act(worker, iteration)
        return loss

    optimizer.step(closure)
last(worker)
"""

RUN = ("-P", "-m", "paceline", "run", "--workers", "2", "--servers", "1", "--run-dir", "run")


def write_script(more: str, path: str = "train.py") -> str:
    Path(path).write_text(SCRIPT.replace("#MORE", more))
    return path


def run(more: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script with these changes to its end."""
    return run_program(*RUN, *options, write_script(more))


@contextlib.contextmanager
def running(more: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The same, while it runs. What it prints on standard error goes to the file `said`."""
    with open("said", "w") as said:
        program = start_program(*RUN, *options, write_script(more), stderr=said)
    try:
        yield program
    finally:
        program.kill()
        program.communicate()


def said() -> str:
    return Path("said").read_text()


def summary() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("run/summary.json").read_text())
    return found


def weights(path: str | Path = "run/weights.safetensors") -> list[str]:
    return sorted(safetensors.torch.load_file(path))


ALONE = ("--workers", "1")  # where a second one would only take time
PACE = ("--pace", "0.06,0.06")  # so that it is known how long iterations take

# The script reaches no step in this worker, as if its imports took long.
SLOW_IMPORT = "if worker == {worker}:\n    time.sleep(60)"

NAMES = ["first.bias", "first.weight", "second.bias", "second.weight"]


# -- nobody waits for the dead -------------------------------------------------------------------------------


def test_a_worker_that_is_killed_during_its_imports_is_lost_and_the_others_train(mark: str) -> None:
    with running(SLOW_IMPORT.format(worker=1)) as program:
        await_that(lambda: "worker 1" in processes(mark), "worker 1 is there")
        os.kill(processes(mark)["worker 1"], signal.SIGKILL)
        program.communicate(timeout=DEADLINE_S)

    assert program.returncode == 0, said()
    assert summary()["lost_workers"] == [1]
    assert summary()["losses"] == {"1": "it was terminated by signal SIGKILL"}
    assert summary()["iterations"] == {"0": 12}
    assert "worker 1 was lost: it was terminated by signal SIGKILL" in said()


@pytest.mark.chaos
def test_the_error_says_how_a_worker_was_lost_before_the_run_could_begin(mark: str) -> None:
    """The worker registers, and is killed before it sends the initial weights."""
    kill = """
from paceline.run.worker import WorkerSession
WorkerSession.initialize = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = run(kill, *ALONE)
    assert ended.returncode == 1
    assert "worker 0 failed: it was lost before it had sent the initial weights" in ended.stderr
    assert "worker 0: it was terminated by signal SIGKILL" in ended.stderr


@pytest.mark.chaos
def test_a_run_whose_only_worker_is_killed_during_its_imports_ends(mark: str) -> None:
    with running(SLOW_IMPORT.format(worker=0), *ALONE) as program:
        await_that(lambda: "worker 0" in processes(mark), "worker 0 is there")
        os.kill(processes(mark)["worker 0"], signal.SIGSEGV)
        program.communicate(timeout=DEADLINE_S)

    assert program.returncode == 1
    assert "every worker was lost\n  worker 0: it was terminated by signal SIGSEGV" in said()


# Worker 1 never ends its first computation.
ENDLESS = """
def act(worker, iteration):
    if worker == 1:
        time.sleep(2.0)  # the other one has pushed by then
        Path("stuck").touch()
        {then}
"""

# No pull is answered before the run ends.
NEVER = ("--sync", "naive-waiting:delay_s=1000")


@pytest.mark.chaos
def test_the_times_of_a_run_that_is_interrupted_add_up_and_who_waited_has_waited() -> None:
    with running(ENDLESS.format(then="time.sleep(60.0)"), *NEVER) as program:
        await_that(lambda: Path("stuck").exists(), "worker 0 waits")
        program.send_signal(signal.SIGINT)
        program.communicate(timeout=DEADLINE_S)

    assert program.returncode == 130, said()
    uses = times_in(summary())
    assert uses[0].waiting_s > 0.0
    assert uses[1].waiting_s == 0.0
    assert uses[1].wasted_s > 0.0
    assert summary()["iterations"] == {"0": 1, "1": 0}


@pytest.mark.thorough
def test_the_times_of_a_run_with_a_worker_that_was_lost_add_up() -> None:
    ended = run(ENDLESS.format(then="os.kill(os.getpid(), signal.SIGKILL)"), "--sync", "bsp")

    assert ended.returncode == 0, ended.stderr
    uses = times_in(summary())
    assert uses[0].waiting_s > 0.0
    assert uses[1].wasted_s > 0.0
    assert summary()["wasted_s"] == uses[1].wasted_s
    assert (uses[0].absent_s, uses[1].idle_s) == (0.0, 0.0)


@pytest.mark.chaos
def test_in_a_run_that_fails_who_waited_has_waited() -> None:
    ended = run(ENDLESS.format(then="raise ValueError"), *NEVER)

    assert ended.returncode == 1
    *shards, _ = read_run(Path("run"))
    measures = measure(shards)
    assert measures.waiting_s[0] > 0.0
    assert measures.waiting_s[1] == 0.0
    assert measures.waiting_share == pytest.approx(measures.waiting_s[0] / measures.present_s)


FORKS = {
    "with Python": "os.fork()",
    "unnoticed by Python": "ctypes.CDLL(None).fork()",  # so that the child keeps all that it has inherited
}


@pytest.mark.parametrize(
    ("how", "transport"),
    [
        ("unnoticed by Python", "shm"),
        *chaos(("with Python", "tcp"), ("unnoticed by Python", "tcp"), ("with Python", "shm")),
    ],
)
@pytest.mark.thorough
def test_a_worker_whose_child_holds_its_connections_is_lost_when_it_is_killed(
    how: str, transport: str, mark: str
) -> None:
    child = f"""
def act(worker, iteration):
    if (worker, iteration) == (1, 4):
        child = {FORKS[how]}
        if child == 0:
            os.setsid()  # out of the worker's process group, or it would end with it
            signal.pause()
        Path("child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
"""
    try:
        ended = run(child, "--transport", transport)
    finally:
        os.kill(int(Path("child").read_text()), signal.SIGKILL)
    await_that(lambda: not processes(mark), "the child has ended")

    assert ended.returncode == 0, ended.stderr
    assert summary()["lost_workers"] == [1]
    assert summary()["iterations"] == {"0": 12, "1": 4}


def test_a_forked_child_inherits_no_connection_and_no_log() -> None:
    ended = run("""
def act(worker, iteration):
    if (worker, iteration) == (1, 4):
        child = os.fork()
        if child == 0:
            held = []
            for number in os.listdir("/proc/self/fd"):
                try:
                    held.append(os.readlink(f"/proc/self/fd/{number}"))
                except FileNotFoundError:
                    pass  # of the listing itself
            Path("held").write_text("\\n".join(held))
            os._exit(0)
        os.waitpid(child, 0)
""")

    assert ended.returncode == 0, ended.stderr
    held = Path("held").read_text()
    assert "pipe:" in held  # its standard output
    assert not [word for word in ("socket:", "eventpoll", "pagemap", ".jsonl") if word in held]


@pytest.mark.chaos
def test_what_a_killed_worker_has_started_ends_with_it(mark: str) -> None:
    ended = run("""
def act(worker, iteration):
    if (worker, iteration) == (1, 4):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10**6)"])
        os.kill(os.getpid(), signal.SIGKILL)
""")

    assert ended.returncode == 0, ended.stderr
    assert summary()["lost_workers"] == [1]
    assert processes(mark) == {}


@pytest.mark.chaos
def test_a_worker_that_leaves_without_a_word_is_lost() -> None:
    ended = run("""
def act(worker, iteration):
    if (worker, iteration) == (1, 4):
        os._exit(0)
""")

    assert ended.returncode == 0, ended.stderr
    assert summary()["losses"] == {"1": "it ended with exit code 0"}


# -- the silent are named ------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_stopped_worker_is_named_and_comes_back(mark: str) -> None:
    stop = """
def act(worker, iteration):
    if (worker, iteration) == (1, 6):
        os.kill(os.getpid(), signal.SIGSTOP)
"""
    with running(stop, *PACE) as program:
        await_that(lambda: "which has sent nothing for" in said(), "worker 1 is named")
        process = processes(mark)["worker 1"]
        assert re.search(
            r"It last reported in iteration \d \(its iterations usually take 0\.\d+ s\)\.", said()
        )
        assert "Worker 0 is waiting for it." in said()
        assert f"Process {process} of worker 1 is stopped." in said()
        assert f"Run 'kill -CONT {process}' to resume the process" in said()
        assert "--stall-timeout" in said()
        os.kill(process, signal.SIGCONT)
        program.communicate(timeout=DEADLINE_S)

    assert "worker 1 responds again" in said()
    assert program.returncode == 0
    assert summary()["lost_workers"] == []


@pytest.mark.chaos
def test_a_stopped_server_is_named_and_comes_back(mark: str) -> None:
    stop = """
def act(worker, iteration):
    if (worker, iteration) == (1, 6):
        os.kill(process_of("server 0"), signal.SIGSTOP)
"""
    with running(stop, *PACE) as program:
        await_that(lambda: "waiting for server 0" in said(), "server 0 is named")
        process = processes(mark)["server 0"]
        assert f"Process {process} of server 0 is stopped." in said()
        os.kill(process, signal.SIGCONT)
        program.communicate(timeout=DEADLINE_S)

    assert "server 0 responds again" in said()
    assert program.returncode == 0, said()


SILENT = {
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "asleep": "time.sleep(1e9)",
    "in a dead lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
}


@pytest.mark.parametrize("how", ["asleep", *chaos("stopped", "in a dead lock")])
def test_a_silent_worker_is_ended_after_the_stall_timeout_and_the_others_go_on(how: str) -> None:
    silent = f"""
def act(worker, iteration):
    if (worker, iteration) == (1, 6):
        {SILENT[how]}
"""
    ended = run(silent, "--stall-timeout", "4")

    assert ended.returncode == 0, ended.stderr
    assert "The run is waiting for worker 1, which has sent nothing for" in ended.stderr
    assert "Worker 0 is waiting for it." in ended.stderr
    assert summary()["lost_workers"] == [1]
    [loss] = summary()["losses"].values()
    assert re.fullmatch(
        r"it was terminated by signal SIGKILL: it had sent nothing for \d+ s \(--stall-timeout\)", loss
    )
    assert summary()["iterations"] == {"0": 12, "1": 6}


@pytest.mark.chaos
def test_a_silent_server_is_ended_after_the_stall_timeout_and_the_run_fails_with_its_weights() -> None:
    ended = run(
        """
def act(worker, iteration):
    if (worker, iteration) == (1, 6):
        os.kill(process_of("server 0"), signal.SIGSTOP)
""",
        *("--stall-timeout", "4"),
    )

    assert ended.returncode == 1
    assert "error: server 0 failed: it was terminated by signal SIGKILL: it had sent nothing" in ended.stderr
    note = (
        "the run could not go on by itself, because it had not written a checkpoint yet (--checkpoint-every)"
    )
    assert note in " ".join(ended.stderr.split())
    assert weights() == NAMES


@pytest.mark.chaos
def test_a_worker_that_is_stopped_before_its_first_step_is_ended_after_the_stall_timeout() -> None:
    ended = run(
        """
if worker == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
""",
        *("--stall-timeout", "4"),
    )

    assert ended.returncode == 0, ended.stderr
    assert summary()["lost_workers"] == [1]
    assert "It has not begun to train yet" in ended.stderr


# -- the weights survive -------------------------------------------------------------------------------------


def where_they_are(ended: subprocess.CompletedProcess[str]) -> Path:
    """Where the weights were saved instead, as the run said."""
    match = re.search(r"the weights were saved to (\S+) instead", ended.stderr)
    assert match is not None, ended.stderr
    return Path(match[1])


@pytest.mark.parametrize("transport", chaos("shm", "tcp"))
def test_weights_are_saved_elsewhere_if_the_run_directory_was_deleted(transport: str) -> None:
    ended = run(
        """
def act(worker, iteration):
    if (worker, iteration) == (0, 6):
        shutil.rmtree(run_dir)
""",
        *ALONE,
        "--transport",
        transport,
    )

    assert ended.returncode == 3, ended.stderr
    assert weights(where_they_are(ended)) == NAMES
    assert not Path("run").exists()
    assert "Traceback" not in ended.stderr
    where_they_are(ended).unlink()
    where_they_are(ended).parent.rmdir()


@contextlib.contextmanager
def small_disk(size_kib: int) -> Iterator[None]:
    """The directory `run` on a file system of its own, of that size."""
    Path("run").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", "run"], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"this system does not let a file system be mounted: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", "run"], check=True)


@pytest.mark.thorough
def test_a_limit_on_the_size_of_files_is_named_and_is_no_bug() -> None:
    limited = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (40960, 40960)); "
    limited += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    ended = run_program("-c", limited, *RUN, *ALONE, "--transport", "shm", write_script(""))
    assert ended.returncode == 1
    assert "but files may have at most 40.0 KiB here (ulimit -f)" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
    assert "bug" not in ended.stderr


def test_a_disk_that_is_full_in_mid_run_costs_logs_and_traces_alone() -> None:
    with small_disk(64):
        ended = run(
            """
STEPS = 200

def act(worker, iteration):
    if (worker, iteration) == (0, 6):
        with open("run/filler", "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError:
                pass
    if iteration > 10:
        print("a line of some length, which the full disk has no room for" * 10)
""",
            *ALONE,
        )

    assert ended.returncode == 3, ended.stderr
    assert weights(where_they_are(ended)) == NAMES
    assert "trace-shard-0.jsonl cannot be written and is incomplete: No space left on device" in ended.stderr
    assert "worker-0.jsonl cannot be written and is incomplete: No space left on device" in ended.stderr
    assert "summary.json cannot be written" in ended.stderr
    assert "Traceback" not in ended.stderr
    where_they_are(ended).unlink()
    where_they_are(ended).parent.rmdir()


@pytest.mark.chaos
def test_weights_are_saved_elsewhere_if_the_disk_has_no_room_for_them_alone() -> None:
    with small_disk(512):
        ended = run("SIZE = 400")

        assert ended.returncode == 3, ended.stderr
        assert sorted(path.name for path in Path("run").iterdir() if "weights" in path.name) == []
        assert summary()["iterations"] == {"0": 12, "1": 12}
        assert summary()["weights"] == str(where_they_are(ended))
    assert weights(where_they_are(ended)) == NAMES
    assert "No space left on device" in ended.stderr
    where_they_are(ended).unlink()
    where_they_are(ended).parent.rmdir()


END = """
STEPS = 6

def last(worker):
    if worker == 0:
        Path("run/trained").touch()
        while len(list(Path("run").glob("left-*"))) < paceline.worker_count() - 1:
            time.sleep(0.01)
        os.kill(process_of("server 1"), signal.{signal})
    else:
        Path(f"run/left-{{worker}}").touch()
"""


@pytest.mark.parametrize("name", ["SIGKILL", *chaos("SIGSTOP")])
def test_over_shared_memory_all_weights_survive_a_server_that_fails_at_the_end(name: str) -> None:
    ended = run(END.format(signal=name), "--servers", "2", "--transport", "shm")

    assert ended.returncode in (1, 3), ended.stderr  # the last worker was there still, or not any more
    assert weights() == NAMES
    assert "server 1" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("name", chaos("SIGSTOP", "SIGKILL"))
def test_over_tcp_the_other_slices_survive_a_server_that_fails_at_the_end(name: str) -> None:
    ended = run(END.format(signal=name), "--servers", "2", "--transport", "tcp")

    assert ended.returncode == 1, ended.stderr
    assert weights("run/weights-partial.safetensors") == ["first.bias", "first.weight"]
    assert "the saved weights are incomplete; missing: second.weight, second.bias" in ended.stderr
    assert "server 1" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.chaos
def test_buffers_that_went_with_their_server_are_named_as_missing() -> None:
    ended = run(
        """
class Net(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("heard", torch.zeros(3))
"""
        + END.format(signal="SIGKILL").replace("server 1", "server 0")
    )

    assert ended.returncode == 1, ended.stderr
    assert weights("run/weights-partial.safetensors") == NAMES
    assert "missing: seen, heard" in ended.stderr


@pytest.mark.thorough
def test_the_weights_of_a_run_that_fails_are_kept() -> None:
    ended = run("""
def act(worker, iteration):
    if (worker, iteration) == (1, 6):
        raise ValueError("the labels are missing\\nin three files")
""")

    assert ended.returncode == 1
    assert "error: worker 1 failed: ValueError: the labels are missing\n" in ended.stderr
    note = "the weights at the time of the failure were saved to run/weights.safetensors"
    assert note in ended.stderr.replace(f"{Path.cwd()}/", "")
    assert weights() == NAMES


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), *chaos(("SIGINT", 130), ("SIGHUP", 129))])
def test_a_signal_to_the_launcher_in_the_last_second_costs_no_weights(
    name: str, code: int, mark: str
) -> None:
    ended = run(
        f"""
def last(worker):
    if worker == 0:
        os.kill(parent_of(os.getppid()), signal.{name})  # the parent is the fork server
""",
        *ALONE,
    )

    assert ended.returncode == code, ended.stderr
    assert weights() == NAMES
    assert processes(mark) == {}
    assert ended.stderr.splitlines()[-1].endswith("ed: all processes of the run have ended")
    assert "Traceback" not in ended.stderr
    assert summary()["ended"] == "interrupted"
    times_in(summary())
    assert ["ended", "interrupted"] in [line.split() for line in ended.stdout.splitlines()]


CAUGHT = """
def last(worker):
    if worker < {interrupted}:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        except KeyboardInterrupt:
            print("stopping early")
"""


def test_scripts_that_catch_sigint_and_end_have_been_interrupted() -> None:
    ended = run(CAUGHT.format(interrupted=2))

    assert ended.returncode == 130, ended.stderr
    words = "interrupted: the scripts of all workers were interrupted by SIGINT, and have ended"
    assert ended.stderr.splitlines()[-1] == words
    assert summary()["ended"] == "interrupted"
    assert weights() == NAMES


@pytest.mark.thorough
def test_a_script_that_catches_sigint_and_ends_is_named_if_the_others_are_done() -> None:
    ended = run(CAUGHT.format(interrupted=1))

    assert ended.returncode == 3, ended.stderr
    assert "the script was interrupted by SIGINT, and ended early: worker 0" in ended.stderr
    assert summary()["ended"] == "finished"
    assert weights() == NAMES


@pytest.mark.chaos
def test_ctrl_c_while_the_weights_are_saved_costs_no_weights() -> None:
    Path("launch.py").write_text("""
import os, signal, sys

import paceline.start.run as engine
from paceline.cli import main

save = engine.save_weights

def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    return save(*arguments)

engine.save_weights = interrupted
main()
""")
    ended = run_program("launch.py", *RUN[3:], write_script(""))

    assert ended.returncode == 130, ended.stderr
    assert weights() == NAMES


# -- the cause is what is named ------------------------------------------------------------------------------


def test_a_server_that_dies_of_an_error_is_named_with_its_own_traceback() -> None:
    Path("rules.py").write_text("""
import atexit, time

count = 0

def fatal(state):
    global count
    count += 1
    if count > 10:
        atexit.register(time.sleep, 2)  # it takes long to end, as processes do that have much to clean up
        raise GeneratorExit("a fault in the server")  # no Exception, which would be the condition's own fault
    return True
""")
    ended = run("", "--sync", "conditions:pull=rules:fatal", "--workers", "2")

    assert ended.returncode == 1
    assert ended.stderr.startswith("error: server 0 failed: GeneratorExit: a fault in the server\n") or (
        "\nerror: server 0 failed: GeneratorExit: a fault in the server\n" in ended.stderr
    )
    assert 'rules.py", line 11, in fatal' in ended.stderr
    assert ended.stderr.count("Traceback (most recent call last)") == 1
    assert weights() == NAMES


@pytest.mark.parametrize(
    ("name", "code"), [("SIGSEGV", 3), *chaos(("SIGTERM", 0), ("SIGABRT", 3), ("SIGKILL", 0))]
)
def test_a_crash_is_told_from_a_preemption(name: str, code: int) -> None:
    ended = run(f"""
def act(worker, iteration):
    if (worker, iteration) == (1, 6):
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.{name})
""")

    assert ended.returncode == code, ended.stderr
    assert f"worker 1 was lost: it was terminated by signal {name}" in ended.stderr
    assert summary()["crashed_workers"] == ([1] if code else [])
    log = Path("run/worker-1.log").read_text()
    assert ("Fatal Python error: Segmentation fault" in log) == (name == "SIGSEGV")
    assert name != "SIGSEGV" or re.search(r'train\.py", line \d+ in act', log), log


@pytest.mark.chaos
def test_a_script_that_exits_with_a_text_shows_it() -> None:
    ended = run("sys.exit('no data in /somewhere')", *ALONE)

    assert ended.returncode == 1
    assert "failed: the script ended with exit code 1: no data in /somewhere" in ended.stderr


@pytest.mark.thorough
def test_a_failed_run_names_its_directory_and_the_log_to_read() -> None:
    ended = run("os._exit(7)", *ALONE)

    assert ended.returncode == 1
    match = re.search(r"worker (\d) failed: it ended with exit code 7", ended.stderr)
    assert match is not None, ended.stderr
    assert f"the output of worker {match[1]} is in {Path.cwd()}/run/worker-{match[1]}.log" in ended.stderr


@pytest.mark.thorough
def test_the_log_of_a_worker_that_crashed_shows_where() -> None:
    ended = run("def crash():\n    ctypes.string_at(0)\ncrash()", *ALONE)

    assert ended.returncode != 0
    assert "worker 0: it was terminated by signal SIGSEGV" in ended.stderr
    log = Path("run/worker-0.log").read_text()
    assert "Fatal Python error: Segmentation fault" in log
    assert re.search(r'train\.py", line \d+ in crash', log), log


def test_a_run_that_is_refused_leaves_no_directory() -> None:
    lock = threading.Lock()

    def closed(state: object) -> bool:
        return lock is not None

    with pytest.raises(ConfigurationError, match="cannot be sent to the servers"):
        paceline.launch(print, workers=1, sync=Conditions(pull=closed), progress=False)
    assert not Path("runs").exists()


# -- the launcher ends ---------------------------------------------------------------------------------------

STUCK = """
import os, sys, time

if sys.argv[0].endswith("boot.py"):
    time.sleep(10**6)  # a child is in its imports for as long as it takes to look
raise ImportError
"""


@pytest.mark.chaos
def test_children_that_are_still_importing_end_with_their_launcher(mark: str, tmp_path: Path) -> None:
    early = tmp_path / "early"
    early.mkdir()
    (early / "numpy.py").write_text(STUCK.replace("raise ImportError", REAL_NUMPY))
    before = os.environ["PYTHONPATH"]
    os.environ["PYTHONPATH"] = f"{early}:{before}"
    try:
        with running("") as program:
            await_that(lambda: "fork server" in processes(mark), "the fork server is there")
            program.kill()
            program.communicate(timeout=DEADLINE_S)
            await_that(lambda: not processes(mark), "all processes have ended with their launcher")
    finally:
        os.environ["PYTHONPATH"] = before


REAL_NUMPY = """
import sys
sys.path.remove(os.path.dirname(__file__))
del sys.modules["numpy"]
import numpy
"""


@pytest.mark.thorough
def test_nothing_is_imported_from_the_current_directory() -> None:
    Path("elsewhere").mkdir()
    Path("cloudpickle.py").write_text("raise SystemExit('the wrong cloudpickle')")
    ended = run_program(*RUN, *ALONE, write_script("", "elsewhere/train.py"))

    assert ended.returncode == 0, ended.stderr


DEAF = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
STEPS = 10**9

def act(worker, iteration):
    if iteration == 5:
        Path(f"deaf-{worker}").touch()
"""


def test_a_second_ctrl_c_hurries_the_end_and_leaves_nothing(mark: str) -> None:
    with running(DEAF) as program:
        for worker in range(2):
            await_that(Path(f"deaf-{worker}").exists, f"worker {worker} trains")
        program.send_signal(signal.SIGINT)
        time.sleep(0.2)
        program.send_signal(signal.SIGINT)
        program.send_signal(signal.SIGINT)
        program.communicate(timeout=DEADLINE_S)
        assert processes(mark) == {}

    assert program.returncode == 130
    assert said().splitlines()[-1] == "interrupted: all processes of the run have ended"
    assert "Traceback" not in said()
