"""The program `paceline serve` as a child: a process that a scheduler has started also serves the job.

The child ignores SIGTERM, and so do the servers, which inherit this: schedulers send the signal to all processes at
once, and the servers must receive what the workers push before they leave. The parent decides when the child ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from ...files import read_regular
from .program import end_with_parent, execute, main_of

__all__ = ["Announcement", "Serving", "announce", "finished"]

POLL_INTERVAL_S = 0.05


class Announcement(msgspec.Struct, frozen=True):
    """How processes join a run.

    Attributes:
        address: address of the coordinator, for example "tls:10.0.0.1:29600".
        run_dir: the run directory, on the machine that serves the run.
        secret_file: the file that contains the secret, if this is a new one.
        failure: why there is no run to join; "" if there is one.
    """

    address: str
    run_dir: str
    secret_file: str = ""
    failure: str = ""


def announce(descriptor: int, announcement: Announcement) -> None:
    """Tell the parent of this process how processes join the run."""
    with open(descriptor, "wb") as target:
        target.write(msgspec.json.encode(announcement))


class Serving:
    """A context manager that starts `paceline serve`, and ends it.

    Args:
        arguments: options of the command.
        environment: variables that are added to the environment.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._source, sink = os.pipe()
        parent = os.getpid()

        def prepare() -> None:
            end_with_parent(parent)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        try:
            self._program = execute(
                [*main_of("paceline.cli"), "serve", *arguments, f"--announce={sink}"],
                stdin=subprocess.DEVNULL,
                environment={**os.environ, **environment},
                pass_fds=[sink],
                preexec_fn=prepare,
            )
        finally:
            os.close(sink)

    def __enter__(self) -> Serving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the run if it is still in progress, and wait until its results are saved, or a signal comes.

        The program does not wait for ever: it gives up servers that are silent.
        """
        self.interrupt()
        try:
            self._program.wait()
        except BaseException:
            self._program.kill()
            self._program.wait()
            raise

    def announced(self) -> Announcement | None:
        """Wait until the run can be joined. Return None if it could not be started; the program has said why."""
        with open(self._source, "rb") as source:
            data = source.read()
        return msgspec.json.decode(data, type=Announcement) if data else None

    def interrupt(self) -> None:
        """Let the run end now, as Ctrl-C does."""
        if self._program.poll() is None:
            self._program.send_signal(signal.SIGINT)

    def wait(self, deadline_s: Callable[[], float]) -> int:
        """Wait for the end of the run, and return the exit code of the program.

        Args:
            deadline_s: function that is called repeatedly, and returns the time on the monotonic clock at which the
                run is interrupted.
        """
        while self._program.poll() is None and time.monotonic() < deadline_s():
            time.sleep(POLL_INTERVAL_S)
        self.interrupt()
        return self._program.wait()


def finished(run_dir: str) -> bool:
    """Return True if a run has ended because its workers have finished, and not because they were asked to leave."""
    try:
        summary = json.loads(read_regular(Path(run_dir, "summary.json")))
    except (OSError, ValueError):
        return False
    return summary["ended"] == "finished" and not summary["left"]
