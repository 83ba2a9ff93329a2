"""The states of real processes, as an agent reports them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from msgspec import structs

from paceline.core.liveness import LOOK_S, Heartbeats, Liveness, Removal
from paceline.core.messages import ProcessState
from paceline.run.run_lock import RunningProcess, State
from paceline.sync.ticks import in_ticks

pytestmark = pytest.mark.processes

PATIENCE_S = 30.0
PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT = 17, 0x4206, 0x4207

# A name with a space and parentheses, which /proc/PID/stat contains as it is.
SLEEPER = "open('/proc/self/comm', 'w').write('a) Z (b'); print(flush=True); import time; time.sleep(600)"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def watched(process: subprocess.Popen[bytes]) -> RunningProcess:
    found = RunningProcess.of(process.pid)
    assert found is not None
    return found


def await_state(process: RunningProcess, expected: State) -> None:
    """Wait for a state: the kernel stops a process a little after the signal has been sent."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (state := process.state()) != expected:
        assert time.monotonic() < deadline_s, f"the process is {state}, expected {expected}"
        time.sleep(0.005)


def test_a_process_is_stopped_and_continues(child: subprocess.Popen[bytes]) -> None:
    process = watched(child)
    await_state(process, "running")
    child.send_signal(signal.SIGSTOP)
    await_state(process, "stopped")
    child.send_signal(signal.SIGCONT)
    await_state(process, "running")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_is_gone_when_it_has_ended_and_when_it_has_been_reaped(
    child: subprocess.Popen[bytes], number: int
) -> None:
    process = watched(child)
    child.send_signal(number)
    await_state(process, "gone")
    child.wait()
    assert process.state() == "gone"
    assert RunningProcess.of(child.pid) is None


def test_a_later_process_with_the_same_id_is_not_mistaken_for_the_earlier_one(
    child: subprocess.Popen[bytes],
) -> None:
    process = watched(child)
    earlier = structs.replace(process, started=process.started - 1)
    assert earlier.state() == "gone"
    assert process.state() == "running"


def test_a_process_that_a_debugger_holds_is_traced(child: subprocess.Popen[bytes]) -> None:
    process = watched(child)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(PTRACE_SEIZE, child.pid, None, None) < 0:
        pytest.skip(f"this machine does not permit ptrace: {os.strerror(ctypes.get_errno())}")
    await_state(process, "running")  # a debugger that only watches changes nothing
    assert libc.ptrace(PTRACE_INTERRUPT, child.pid, None, None) == 0
    await_state(process, "traced")
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert libc.ptrace(PTRACE_DETACH, child.pid, None, None) == 0
    await_state(process, "running")


def test_a_stopped_process_is_taken_out_and_the_one_that_continues_is_not() -> None:
    """The agent's and the coordinator's parts together, with real processes and the real clock."""
    with (
        subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.DEVNULL) as first,
        subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.DEVNULL) as second,
    ):
        processes = {0: watched(first), 1: watched(second)}
        heartbeats, liveness = Heartbeats(), Liveness()
        liveness.machine_joined(0, "here", time.monotonic_ns())
        for worker in processes:
            liveness.worker_joined(worker)
            liveness.iterated(worker, in_ticks(0.1))
        first.send_signal(signal.SIGSTOP)
        verdicts: list[Removal] = []
        deadline_s = time.monotonic() + PATIENCE_S
        while not verdicts and time.monotonic() < deadline_s:
            states = [
                ProcessState("worker", worker, process.state()) for worker, process in processes.items()
            ]
            if (heartbeat := heartbeats.due(states, time.monotonic_ns())) is not None:
                liveness.heartbeat(0, heartbeat.states, time.monotonic_ns())
            verdicts = liveness.look(time.monotonic_ns())
            time.sleep(float(LOOK_S))
        first.kill()
        second.kill()
    assert [(verdict.machine, verdict.worker) for verdict in verdicts] == [(0, 0)]
    assert liveness.states() == {1: "running"}
