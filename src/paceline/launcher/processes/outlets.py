"""The process that shows a run elsewhere while it goes on (see `paceline.outlets`), as the launcher starts it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
from pathlib import Path

import msgspec

from ...errors import ConfigurationError
from ...outlets.show_orders import Served, ShowOrder
from ...outlets.wanted import Listening, Outlets
from ...runtime.best_effort import BestEffortFile
from ...runtime.job import Job
from ...wire.secret import without_secret
from ..terminal.output import plain_console, print_sentence
from .orders import file_of, open_file
from .program import execute, main_of

__all__ = ["Showing"]

# Maximum time to wait until everything is written and every open page has been told that the run has ended.
END_TIMEOUT_S = 20.0
LOG = "outlets.log"  # in the run directory, if there is anything to say
PROGRAM = main_of("paceline.outlets.show_process")


class Showing:
    """A context manager that starts the process. When the context ends, the process shows the end of the run.

    Enter it when the run directory exists, and leave it when all files there are complete. Without an outlet, nothing
    is started.

    Args:
        outlets: where the run is shown. Their sockets are closed here as soon as the process has them.
        job: the configuration of the run.
        address: address of the coordinator.

    Attributes:
        page: address of the live page, with its token; "" if there is none.
    """

    def __init__(self, outlets: Outlets, job: Job, address: str) -> None:
        self._outlets = outlets
        self._process: subprocess.Popen[bytes] | None = None
        token = secrets.token_urlsafe(24)
        self._order = ShowOrder(
            run_dir=job.run_dir,
            address=address,
            secret=job.token,
            dashboard=_served(outlets.dashboard),
            token=token,
            metrics=_served(outlets.metrics),
            tensorboard=outlets.tensorboard and os.path.join(outlets.tensorboard, Path(job.run_dir).name),
        )
        self.page = "" if outlets.dashboard is None else f"{_url(outlets.dashboard)}/?token={token}"

    def __enter__(self) -> Showing:
        if not self._outlets:
            return self
        self._errors = file_of(b"")
        served = (self._order.dashboard, self._order.metrics)
        try:
            self._process = execute(
                PROGRAM,
                bufsize=0,
                environment={**without_secret(os.environ), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[each.descriptor for each in served if each is not None],
                # In its own process group, the process does not receive Ctrl-C. In a session of its own, its low
                # priority would mean nothing beside the processes of the run: the kernel shares out time by session.
                process_group=0,
            )
        except OSError as error:
            raise ConfigurationError(f"the process that shows the run cannot be started: {error}") from error
        finally:
            self._outlets.close()
        self._tell(msgspec.json.encode(self._order) + b"\n")
        if self.page:
            _say(f"dashboard: {self.page}")
        if self._outlets.metrics is not None:
            _say(f"metrics: {_url(self._outlets.metrics)}/metrics")
        if self._outlets.tensorboard:
            _say(f"TensorBoard: tensorboard --logdir {self._outlets.tensorboard}")
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is None:
            return
        self._tell(b"\n", last=True)
        try:
            process.wait(END_TIMEOUT_S)
        except KeyboardInterrupt:
            pass  # the run has ended, so Ctrl-C ends this wait only
        except subprocess.TimeoutExpired:
            _say(
                f"note: the process that shows the run did not end within {END_TIMEOUT_S:g} s, and was killed"
            )
        finally:
            process.kill()
            exit_code = process.wait()
        with open_file(self._errors) as errors:
            text = errors.read().decode(errors="replace")
        if exit_code > 0:
            last = text.strip().rpartition("\n")[2]
            _say(f"note: {last or f'the process that shows the run has exited with code {exit_code}'}")
        if text:
            log = BestEffortFile(Path(self._order.run_dir, LOG), _say)
            log.write(text.encode())
            log.close()

    def _tell(self, line: bytes, *, last: bool = False) -> None:
        """Send a line to the process. If it has ended, this is noticed later."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line)
        if last:
            self._process.stdin.close()


def _say(sentence: str) -> None:
    """Tell the user a sentence, even if no progress is shown: the user has asked for an outlet."""
    print_sentence(plain_console(stderr=True), sentence)


def _served(listening: Listening | None) -> Served | None:
    """Return a socket as the process inherits it."""
    return None if listening is None else Served(listening.sock.fileno(), listening.host, listening.port)


def _url(listening: Listening) -> str:
    """Return the address of a page, under a name that other machines may know if it is served to them."""
    host = socket.gethostname() if listening.host in ("0.0.0.0", "::") else listening.host
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.port}"
