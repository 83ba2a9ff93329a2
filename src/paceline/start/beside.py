"""The programs beside a run: `paceline serve` as a child, the digest of traces, simulations, and the display elsewhere.

A process that a scheduler has started also serves the job, in a child. The child ignores SIGTERM, and so do the
servers, which inherit this: schedulers send the signal to all processes at once, and the servers must receive what the
workers push before they leave. The parent decides when the child ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from ..core.auto import Prospect
from ..core.requests import Situation
from ..errors import ConfigurationError
from ..files import read_regular
from ..look.show_process import Listening, Outlets, ServedSocket, ShowOrder
from ..run.job import Job
from ..run.traces import BestEffortFile
from ..trace.recording import EARLIER
from ..wire.secure import without_secret
from .processes.orders import file_of, open_file
from .processes.program import end_with_parent, execute, main_of
from .terminal import plain_console, print_sentence

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


# -- The process that digests the oldest traces of a run and deletes them: see `paceline.trace.digest` ----

LOOK_INTERVAL_S = 1.0
POLL_S = 0.05


class Digester:
    """Starts this process when there is something to digest, and ends it.

    Args:
        job: the configuration of the run.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._earlier = Path(job.run_dir, EARLIER)
        self._process: subprocess.Popen[bytes] | None = None
        self._due_s = 0.0
        self._failure = ""  # why the process cannot be started

    def look(self) -> None:
        """Start the process if a segment is full. This method may be called at any time."""
        if self._process is not None or self._failure or time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + LOOK_INTERVAL_S
        if self._job.traces.kept == "recent" and self._earlier.exists():
            self._start()

    def end(self, hurried: Callable[[], bool]) -> list[str]:
        """End the process. Return what went wrong, as sentences.

        Args:
            hurried: called repeatedly while the process finishes what it is doing. If it returns True, it is killed.
        """
        process = self._process
        if process is None:
            return [self._failure] if self._failure else []
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.close()
        while process.poll() is None:
            if hurried():
                process.kill()
                process.wait()
                return []
            time.sleep(POLL_S)
        with process.stderr:
            said = process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
        if process.returncode == 0:
            return []
        why = said or f"the process has ended with code {process.returncode}"
        return [f"the oldest traces were not deleted, so they may occupy more space than they should: {why}"]

    def _start(self) -> None:
        """Start the process, in a session of its own: Ctrl-C in a terminal must not end it."""
        job = self._job
        shards = [shard for shard, server in enumerate(job.placement.server_of) if server < job.local_servers]
        # Machines that have joined the run keep the records of their workers.
        workers = () if job.joined else range(job.workers)
        try:
            self._process = execute(
                [
                    *main_of("paceline.trace.digest"),
                    job.run_dir,
                    f"--shards={','.join(map(str, shards))}",
                    f"--workers={','.join(map(str, workers))}",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._failure = (
                f"the oldest traces were not deleted, because no process could be started: {error}"
            )


# -- Simulations beside a live run, with which `--sync auto` chooses sync models -----------------------------
#
# Each simulation is a process of its own with a low priority, so that the coordinator never waits for it. A
# thread waits for its results. If it fails, or takes too long, the run simply goes on with its sync model.

log = logging.getLogger("paceline.rehearsal")

TIMEOUT_S = 120.0


class Rehearsals:
    """Starts the simulations of a run, one after another. A context manager that ends them.

    An object is a `run.coordinator.Rehearsal`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False

    def __enter__(self) -> Rehearsals:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over = True
            if self._process is not None:
                self._process.kill()

    def __call__(self, situation: Situation, take: Callable[[Sequence[Prospect]], None]) -> None:
        """Start a simulation, unless another one is in progress. `take` is called with its results."""
        with self._lock:
            if self._over or self._process is not None:
                return
            try:
                self._process = execute(
                    main_of("paceline.sim.rehearse"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                log.warning("a simulation for --sync auto cannot be started: %s", error)
                return
            process = self._process
        data = msgspec.msgpack.encode(situation)
        threading.Thread(
            target=self._await, args=(process, data, take), name="paceline-rehearsal", daemon=True
        ).start()

    def _await(
        self, process: subprocess.Popen[bytes], data: bytes, take: Callable[[Sequence[Prospect]], None]
    ) -> None:
        """Wait for the results of a process, and pass them on."""
        output, errors = b"", b""
        try:
            output, errors = process.communicate(data, TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            errors = f"it took longer than {TIMEOUT_S:g} s".encode()
        finally:
            with self._lock:
                self._process = None
        if process.returncode == 0:
            take(msgspec.msgpack.decode(output, type=list[Prospect]))
        elif not self._over:
            with contextlib.suppress(IndexError):
                errors = errors.strip().splitlines()[-1]
            log.warning("a simulation for --sync auto has failed: %s", errors.decode(errors="replace"))


# -- The process that shows a run elsewhere while it goes on (see `look.show_process`), as the launcher starts it

# Maximum time to wait until everything is written and every open page has been told that the run has ended.
END_TIMEOUT_S = 20.0
LOG = "outlets.log"  # in the run directory, if there is anything to say
PROGRAM = main_of("paceline.look.show_process")


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


def _served(listening: Listening | None) -> ServedSocket | None:
    """Return a socket as the process inherits it."""
    return (
        None if listening is None else ServedSocket(listening.sock.fileno(), listening.host, listening.port)
    )


def _url(listening: Listening) -> str:
    """Return the address of a page, under a name that other machines may know if it is served to them."""
    host = socket.gethostname() if listening.host in ("0.0.0.0", "::") else listening.host
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.port}"
