"""Runs MXNet's kvstore, which contains PS-Lite, in an environment of its own: MXNet is not a dependency of Paceline."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import msgspec
import typer

from paceline.errors import ConfigurationError, RunFailedError
from paceline.start.local import HostMachine

INSTALL = "pip install mxnet==1.9.1 'numpy<1.24' 'setuptools<81'"
NEEDED = f"--mxnet PYTHON, the Python of an environment with MXNet ({INSTALL})"
LOOK_S = 0.1  # time between two checks of the processes
SHOWN = 2000  # number of characters of the log that are shown if a process fails

Mxnet = Annotated[
    str | None,
    typer.Option(
        "--mxnet",
        metavar="PYTHON",
        help=f"Compare with MXNet's kvstore (PS-Lite). PYTHON is the Python of an environment with MXNet: {INSTALL}",
        show_default=False,
    ),
]


class KvTask(msgspec.Struct, frozen=True):
    """The task of the workers of a job."""

    mode: str  # "bsp" for dist_sync, "asp" for dist_async
    layers: Sequence[Sequence[int]]  # for each layer, the number of elements of each of its tensors
    lr: float
    warm_up: int
    iterations: int
    compute_s: float = 0.0  # time of a forward and backward pass
    overlap: bool = True


class KvTimes(msgspec.Struct, frozen=True):
    """The median time of an iteration of a worker, with and without the exchange of gradients and weights."""

    whole_s: float
    bare_s: float


def require_mxnet(python: str) -> None:
    """Raise `ConfigurationError` unless this Python can import MXNet."""
    try:
        done = subprocess.run([python, "-c", "import mxnet"], capture_output=True, text=True, check=False)
        reason = (done.stderr.strip() or "no message").splitlines()[-1] if done.returncode else ""
    except OSError as error:
        reason = str(error)
    if reason:
        raise ConfigurationError(
            f"mxnet is {python!r}, which cannot import MXNet: {reason}. Expected {NEEDED}."
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def run_kvstore(
    python: str,
    task: KvTask,
    scheduler: str,
    servers: Sequence[HostMachine],
    workers: Sequence[HostMachine],
    variables: Mapping[str, str] | None = None,
) -> list[KvTimes]:
    """Run a job on these machines, end all of its processes, and return what each worker has measured.

    The scheduler listens on this machine, at the address `scheduler`. MXNet reads `variables` from its environment.

    Raises:
        RunFailedError: a process has failed.
    """
    with socket.create_server((scheduler, 0)) as listener:
        port = listener.getsockname()[1]  # PS-Lite does not choose a free port by itself
    roles = [("worker", each) for each in workers] + [("server", each) for each in servers]
    command = [python, str(Path(__file__).with_name("mxnet_side.py")), msgspec.json.encode(task).decode()]
    with TemporaryFile() as log, ExitStack() as running:
        started = []
        for role, machine in (*roles, ("scheduler", HostMachine(scheduler))):
            env = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "DMLC_PS_ROOT_URI": scheduler,
                "DMLC_PS_ROOT_PORT": str(port),
                "DMLC_NUM_SERVER": str(len(servers)),
                "DMLC_NUM_WORKER": str(len(workers)),
                "DMLC_ROLE": role,
                "DMLC_NODE_HOST": machine.host,
                **(variables or {}),
            }
            output = subprocess.PIPE if role == "worker" else log
            # The process is in a group of its own, so Ctrl-C does not interrupt it: the launcher ends it.
            process = subprocess.Popen(
                [*machine.prefix, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=log,
                env=env,
                process_group=0,
            )
            running.enter_context(process)
            running.callback(_end, process)
            started.append(process)
        measured, waiting = started[: len(workers)], True
        while waiting:
            waiting = any(process.poll() is None for process in measured)
            if codes := [process.returncode for process in started if process.poll()]:
                log.seek(0)
                tail = log.read().decode(errors="replace")[-SHOWN:]
                raise RunFailedError("MXNet", f"a process ended with exit code {codes[0]}", tail)
            time.sleep(LOOK_S)
        return [msgspec.json.decode(each.stdout.read(), type=KvTimes) for each in measured if each.stdout]
