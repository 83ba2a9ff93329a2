"""The lock on a run directory, which the launcher of a run holds from its start to its end.

A lock is a file `.lock-N` in the run directory. The file names the process that holds the lock. A launcher that starts
a run in the directory creates the file with the next number. Only one process can create this file, even on network
file systems. Files with lower numbers are removed afterwards. So the numbers only grow, and a lock that another
process has taken meanwhile is never considered free. At the end of a run, the file stays and says that the lock is
free.

This module alone decides whether the holder of a lock is alive:

- A process on the same kernel and in the same process namespace is visible, so its state is known without waiting. So a
  run can be resumed immediately after its launcher was killed.
- Any other process is judged by its heartbeats: every few seconds, it updates the time of its lock file. After three
  missed heartbeats, it counts as dead. The clock of the file server measures the time: the times of two files in the
  directory are compared, so the clocks of different machines do not matter. If this clock has been set back, a process
  that waits for a heartbeat goes by its own clock.

Every second, the holder checks whether another process has taken its lock (`--force`, or after missed heartbeats). If
so, the holder ends immediately and writes nothing more, because its files would mix with those of the other run.

At the end of this module: the states of processes, and the file by which users find a run in progress.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

import msgspec

from ..errors import ConfigurationError, PacelineError, PeerLostError
from ..files import read_regular

log = logging.getLogger("paceline.run")

Life = Literal["alive", "dead", "unseen"]
"""The known state of a process: "unseen" if it is on another machine, or in another process namespace."""

LOCK = ".lock-"
NAME = re.compile(rf"{re.escape(LOCK)}(\d+)")
PROBE = ".clock-"

HEARTBEAT_S = 5.0
MOST_MISSED = 3
"""Number of missed heartbeats after which a process that cannot be seen counts as dead."""

LOOK_INTERVAL_S = 1.0  # maximum time after which a holder notices that its lock was taken
POLL_INTERVAL_S = 0.25
FORCED_S = 60.0  # time within which a run must end after its lock was taken by force


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds a lock, or has published the address of a run.

    Attributes:
        machine: name of the machine of the process.
        boot: identifier of the boot of the machine's kernel. It is equal in all containers on one machine.
        namespace: number of the process namespace of the process.
        process: the process, with its id in this namespace.
        token: text that distinguishes this lock from all other locks.
        heartbeat_s: time between two heartbeats, in seconds.
        free: True if the process has given the lock back.
    """

    machine: str
    boot: str
    namespace: int
    process: RunningProcess
    token: str = ""
    heartbeat_s: float = HEARTBEAT_S
    free: bool = False

    @classmethod
    def here(cls) -> Holder:
        """Return a description of this process."""
        return cls(
            machine=socket.gethostname(),
            boot=_boot(),
            namespace=_namespace(),
            process=RunningProcess.this(),
            token=secrets.token_hex(8),
            heartbeat_s=HEARTBEAT_S,
        )

    @property
    def words(self) -> str:
        """The process and its machine, as part of a sentence."""
        return f"process {self.process.process_id} on {self.machine}"


def life_of(holder: Holder) -> Life:
    """Return "alive" or "dead" for a process that this process can see, else "unseen"."""
    here = (_boot(), _namespace())
    if not all(here) or here != (holder.boot, holder.namespace) or not _sees_its_namespace():
        return "unseen"
    try:
        if holder.process.state() != "gone":
            return "alive"
        os.kill(holder.process.process_id, 0)
    except ProcessLookupError:
        return "dead"
    except PermissionError:  # the process belongs to another user, and /proc may hide it or its state
        return "dead" if os.access(f"/proc/{holder.process.process_id}/stat", os.R_OK) else "unseen"
    return "dead"  # a zombie, or a later process with the same id


class _Lock(NamedTuple):
    """A lock as described by its file: the path, the number, and the process that has written the file.

    `holder` is None if the file cannot be read, for example because it has just been created.
    """

    path: Path
    number: int
    holder: Holder | None

    @property
    def life(self) -> Life:
        if self.holder is None:
            return "unseen"
        return "dead" if self.holder.free else life_of(self.holder)

    @property
    def words(self) -> str:
        return "a process that cannot be named" if self.holder is None else self.holder.words

    @property
    def patience_s(self) -> float:
        return MOST_MISSED * (HEARTBEAT_S if self.holder is None else self.holder.heartbeat_s)


def is_lock(name: str) -> bool:
    """Return True if a file with this name belongs to the lock of its run directory. The file may vanish soon."""
    return name.startswith((LOCK, PROBE))


def newest_lock(run_dir: Path) -> int:
    """Return the number of the newest lock in a run directory; 0 if there is none."""
    return max((lock.number for lock in _locks(run_dir)), default=0)


def is_held(run_dir: Path) -> bool:
    """Return True if a living process holds a run directory, without waiting.

    A process that cannot be seen counts as alive until three of its heartbeats are missing. If the time since its last
    heartbeat is unknown, the process also counts as alive.
    """
    for lock in _locks(run_dir):
        life = lock.life
        if life == "unseen":
            with _Clock(run_dir) as clock:
                silent_s = clock.age_s(lock.path)
            life = "dead" if silent_s is not None and silent_s > lock.patience_s else "alive"
        if life == "alive":
            return True
    return False


def silence_s(run_dir: Path) -> float | None:
    """Return the time since the newest heartbeat in a run directory, by the clock of its file server.

    None if this time is unknown, because there is no lock, or the directory is not writable.
    """
    with _Clock(run_dir) as clock:
        ages = [age_s for lock in _locks(run_dir) if (age_s := clock.age_s(lock.path)) is not None]
    return min(ages, default=None)


def await_free(
    run_dir: Path,
    *,
    tell: Callable[[str], object] | None = None,
    look: Callable[[], object] = lambda: None,
    others_than: str = "",
) -> None:
    """Make sure that no living process holds a run directory.

    If the holder cannot be seen, this takes up to the time of three heartbeats.

    Args:
        run_dir: the run directory.
        tell: function that is called with a sentence if the caller must wait. Default: a warning is logged.
        look: function that is called repeatedly while the caller waits. If it raises an exception, the waiting ends.
        others_than: token of a lock that is ignored.

    Raises:
        ConfigurationError: a living process holds the directory.
    """
    for lock in _locks(run_dir):
        if lock.holder is not None and lock.holder.token == others_than:
            continue
        life = lock.life
        if life == "unseen":
            life = _await_sign_of_life(run_dir, lock, tell or _warn, look)
        if life == "alive":
            raise ConfigurationError(
                f"the run in {run_dir} is still in progress: {lock.words} holds the directory; wait until the run "
                "has ended, or end it with Ctrl-C. --force (force=True) ends it from here, and what it has done "
                "since its newest checkpoint is lost."
            )


class RunLock:
    """The lock of this process on a run directory, returned by `take`. As a context manager, it is released on exit.

    Attributes:
        number: number of the lock.
        token: text that distinguishes this lock from all other locks.
        lost: a message that another process has taken the lock, so that the run of this process must end immediately;
            "" if no process has taken the lock.
    """

    def __init__(self, run_dir: Path, number: int, holder: Holder, *, own: bool) -> None:
        self.number, self.token, self.lost = number, holder.token, ""
        self._run_dir, self._path = run_dir, run_dir / f"{LOCK}{number}"
        self._holder, self._own = holder, own
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="paceline run lock", daemon=True)

    @classmethod
    def take(
        cls,
        run_dir: Path,
        *,
        force: bool = False,
        after: int | None = None,
        token: str = "",
        tell: Callable[[str], object] | None = None,
        look: Callable[[], object] = lambda: None,
    ) -> RunLock:
        """Take the lock on a run directory. If several processes call this at the same time, only one gets the lock.

        Args:
            run_dir: the run directory, which exists.
            force: True to take the lock even from a living process. This call then waits for the end of that process's
                run.
            after: number of the newest lock when the caller decided how the run goes on; None if the caller decides
                later.
            token: token of a lock that this process shares, because the holder of the lock has started this process;
                "" for none.
            tell: function that is called with a sentence if the caller must wait, or if another run is made to end.
                Default: a warning is logged.
            look: function that is called repeatedly while the caller waits. If it raises an exception, the waiting
                ends.

        Raises:
            ConfigurationError: a living process has the lock, another run has begun meanwhile, or the directory
                cannot be written.
        """
        tell = tell or _warn
        for each in _locks(run_dir):
            if token and each.holder is not None and each.holder.token == token and not each.holder.free:
                lock = cls(run_dir, each.number, each.holder, own=False)
                lock._thread.start()
                return lock
        holder = Holder.here()
        while True:
            _refresh(run_dir)
            before = _locks(run_dir)
            if not force:
                await_free(run_dir, tell=tell, look=look)
                if _locks(run_dir) != before:
                    continue
            number = before[0].number + 1 if before else 1
            path = run_dir / f"{LOCK}{number}"
            if not _create(path, holder):
                continue
            if newest_lock(run_dir) <= number:
                break
            _remove(path)
        lock = cls(run_dir, number, holder, own=True)
        lock._thread.start()
        try:
            if after is not None and number != after + 1:
                raise ConfigurationError(
                    f"another process has gone on with the run in {run_dir} meanwhile, and has ended; start the "
                    "command again, so that the run goes on from its newest checkpoint."
                )
            if force:
                lock._await_others(before, tell, look)
        except BaseException:
            lock.release()
            raise
        for each in before:
            _remove(each.path)
        return lock

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def look(self) -> str:
        """Check whether another process has taken the lock, and return `lost`."""
        if self.lost:
            return self.lost
        try:
            locks = _locks(self._run_dir)
        except OSError:  # the directory is gone, or cannot be read; no other process is known to have it
            return ""
        others = [each for each in locks if each.holder is None or each.holder.token != self.token]
        mine = len(others) < len(locks)
        newer = [each for each in others if each.number > self.number or not mine]
        if newer:
            self.lost = (
                f"{newer[0].words} has taken the directory {self._run_dir} (--force, or because this process had "
                "given no sign of life), and goes on with the run. The processes of this run were killed, and "
                "nothing more was written there"
            )
        elif not mine and self._own and self._run_dir.is_dir():
            with contextlib.suppress(OSError, ConfigurationError):
                _create(self._path, self._holder)
        return self.lost

    def release(self) -> None:
        """Give the lock back. The file stays, and says that the lock is free."""
        if self._ended.is_set():
            return
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._own:
            place = self._path.with_name(f"{self._path.name}.{self.token}")
            with contextlib.suppress(OSError):
                if self._path.exists():
                    place.write_bytes(msgspec.json.encode(msgspec.structs.replace(self._holder, free=True)))
                    place.replace(self._path)
            _remove(place)  # if the disk is full

    def _beat(self) -> None:
        due_s = 0.0
        while not self._ended.is_set():
            self.look()
            if (now_s := time.monotonic()) >= due_s:
                due_s = now_s + self._holder.heartbeat_s
                _refresh(self._run_dir)
                with contextlib.suppress(OSError):
                    os.utime(self._path)  # without an explicit time, the file server uses its own clock
            self._ended.wait(LOOK_INTERVAL_S)

    def _await_others(
        self, before: list[_Lock], tell: Callable[[str], object], look: Callable[[], object]
    ) -> None:
        """Wait for the end of all runs whose locks this lock replaces."""
        held = [each for each in before if each.life != "dead"]
        for each in held:
            tell(
                f"--force: the run of {each.words} in {self._run_dir} is told to end. It saves no weights, and what "
                "it has done since its newest checkpoint is lost."
            )
        deadline_s = time.monotonic() + FORCED_S
        for each in held:
            while (now := _lock_at(each.path)).life != "dead":
                if (
                    now.life == "unseen"
                    and _await_sign_of_life(self._run_dir, now, lambda words: None, look) == "dead"
                ):
                    break
                look()
                if self.look():
                    raise ConfigurationError(f"{self.lost}.")
                if time.monotonic() > deadline_s:
                    raise ConfigurationError(
                        f"{each.words} was told to end {FORCED_S:.0f} s ago, but still runs; kill it there with "
                        f"kill -9 {each.holder.process.process_id if each.holder else 'PROCESS'}, and try again."
                    )
                time.sleep(POLL_INTERVAL_S)


class _Clock:
    """The clock of the file server of a directory, read from the time of a temporary file. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{PROBE}{secrets.token_hex(6)}"

    def __enter__(self) -> _Clock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _remove(self._path)

    def age_s(self, path: Path) -> float | None:
        """Return the time since a file in the directory was changed; None if this time is unknown."""
        try:
            self._path.touch()
            os.utime(self._path)
            return _changed_s(self._path) - _changed_s(path)
        except OSError:
            return None


def _await_sign_of_life(
    run_dir: Path, lock: _Lock, tell: Callable[[str], object], look: Callable[[], object]
) -> Life:
    """Return whether a process that cannot be seen gives a sign of life. This takes up to three heartbeats."""
    with _Clock(run_dir) as clock:
        first_s, age_s = _changed(lock.path), clock.age_s(lock.path)
        if age_s is None and lock.path.exists():
            raise ConfigurationError(
                f"the run directory {run_dir} cannot be written, so Paceline cannot find out whether {lock.words}, "
                "which holds the directory, is alive; make the directory writable."
            )
        if age_s is None or age_s > lock.patience_s:
            return "dead"
        tell(
            f"The run in {run_dir} is held by {lock.words}, which cannot be seen from here. Waiting for up to "
            f"{lock.patience_s:.0f} s for a sign of life."
        )
        until_s = time.monotonic() + lock.patience_s
        while True:
            look()
            time.sleep(POLL_INTERVAL_S)
            if _changed(lock.path) != first_s:
                life = _lock_at(lock.path).life
                return "alive" if life == "unseen" else life
            age_s = clock.age_s(lock.path)
            if age_s is None or age_s > lock.patience_s or time.monotonic() > until_s:
                tell(f"No sign of life of {lock.words} during three heartbeats, so the run goes on here.")
                return "dead"


def _create(path: Path, holder: Holder) -> bool:
    """Create a lock with its content, and return True; return False if the file already exists.

    Raises:
        ConfigurationError: the directory cannot be written.
    """
    content = msgspec.json.encode(holder)
    place = path.with_name(f"{path.name}.{holder.token}")
    try:
        try:
            place.write_bytes(content)
            os.link(place, path)
        except FileExistsError:
            # On a network file system, the answer to a successful link may be lost; the repeated request then fails.
            return place.stat().st_nlink == 2
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV):
                raise
            return _create_without_links(path, content)
        finally:
            _remove(place)
    except OSError as error:
        raise ConfigurationError(
            f"the run directory {path.parent} cannot be written: {error.strerror}. Choose another one: in Python "
            "with run_dir, on the command line with --run-dir."
        ) from error
    return True


def _create_without_links(path: Path, content: bytes) -> bool:
    """Create a lock on a file system without hard links. Until the file is written, the holder cannot be named."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with open(descriptor, "wb") as file:
        file.write(content)
    return True


def _locks(run_dir: Path) -> list[_Lock]:
    """Return the locks in a directory, the newest first."""
    try:
        names = os.listdir(run_dir)
    except FileNotFoundError:
        return []
    found = [_lock_at(run_dir / name) for name in names if NAME.fullmatch(name)]
    return sorted((each for each in found if each.path.exists()), key=lambda each: -each.number)


def _lock_at(path: Path) -> _Lock:
    found = NAME.fullmatch(path.name)
    assert found is not None
    holder = None
    try:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            holder = msgspec.json.decode(read_regular(path), type=Holder)
    except FileNotFoundError:  # the file has just been replaced by a newer lock
        gone = RunningProcess(0, 0)
        holder = Holder(machine="", boot="", namespace=0, process=gone, free=True)
    except OSError:
        pass
    return _Lock(path, int(found[1]), holder)


def _changed(path: Path) -> float | None:
    try:
        return _changed_s(path)
    except OSError:
        return None


def _changed_s(path: Path) -> float:
    """Return the time at which a file was changed.

    The file is opened, because this makes a network file system ask its server for the time.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _refresh(folder: Path) -> None:
    """Change a directory, so that a network file system no longer uses the entries that it has cached."""
    path = folder / f"{PROBE}{secrets.token_hex(6)}"
    with contextlib.suppress(OSError):
        path.touch()
    _remove(path)


def _warn(words: str) -> None:
    log.warning("%s", words)


def _boot() -> str:
    """Return the identifier of the boot of the kernel; "" if the kernel does not report it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> int:
    """Return the number of the process namespace of this process; 0 if the kernel does not report it."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _sees_its_namespace() -> bool:
    """Return True if /proc shows the processes of the namespace of this process."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


# -- The states of processes as the kernel reports them, for the heartbeats of an agent ----------------------
#
# A process is named by its id and its start time. The kernel may give the id of an ended process to a new process.
# The start time, which is read together with the state, distinguishes the two processes.

State = Literal["running", "stopped", "traced", "gone"]
"""The state of a process: "stopped" by a signal, "traced" if a debugger has stopped it, or "gone" if it has ended."""

STATES: dict[str, State] = {"T": "stopped", "t": "traced", "Z": "gone", "X": "gone", "x": "gone"}
"""The states that the kernel names with these letters. All other letters mean that a process runs or sleeps."""

START_TIME = 22 - 3  # index of the start time in the fields of /proc/PID/stat that follow the name


class RunningProcess(msgspec.Struct, frozen=True):
    """A process that was running when this object was made.

    Attributes:
        process_id: the id of the process.
        started: its start time, in units of the kernel since the machine was booted.

    Example:
        >>> import os
        >>> RunningProcess.of(os.getpid()).state()
        'running'
    """

    process_id: int
    started: int

    @classmethod
    def of(cls, process_id: int) -> RunningProcess | None:
        """Return the process that has this id now; None if there is none.

        The caller must know that the id still belongs to the intended process, for example because the process is a
        child that has not been reaped.
        """
        fields = _fields(process_id)
        return None if fields is None else cls(process_id, int(fields[START_TIME]))

    @classmethod
    def this(cls) -> RunningProcess:
        """Return this process. In /proc, the process may have a different id, if /proc shows another namespace."""
        fields = _fields("self")
        assert fields is not None
        return cls(os.getpid(), int(fields[START_TIME]))

    def state(self) -> State:
        """Return the state of the process. A process that has ended but has not been reaped is "gone".

        The state is read from the main thread, because signals and debuggers stop all threads of a process.
        """
        fields = _fields(self.process_id)
        if fields is None or int(fields[START_TIME]) != self.started:
            return "gone"
        return STATES.get(fields[0], "running")


def _fields(process_id: int | str) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name, which may contain spaces; None if there is no process."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


# -- The file that a run leaves in its directory while it is in progress, so that its user can watch the run
#
# The file contains the address and the secret of the run, so only its owner may read it. The file also names the
# launcher's process: if the launcher is killed, the file remains, and readers notice that the launcher has ended.
# Readers on another machine or in another process namespace cannot see the launcher. Such readers use only the
# launcher's heartbeats.

FILE_NAME = "running.json"
RUNS = Path("runs")
"""The folder in which runs make their directories by default."""

ENDS = {"finished": "has finished", "interrupted": "was interrupted", "failed": "has failed"}
"""Ending of a run in its summary -> a clause that describes the ending."""


class _Summary(msgspec.Struct):
    """The part of `summary.json` that is used here."""

    ended: str = ""


def ending_of(run_dir: Path) -> str | None:
    """Return how a run has ended according to its summary, such as "finished"; None if there is no summary."""
    try:
        return msgspec.json.decode(read_regular(run_dir / "summary.json"), type=_Summary).ended
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


class RunInProgress(msgspec.Struct, frozen=True):
    """The addresses and the secret with which a run in progress is reached.

    Attributes:
        address: address of the coordinator. See `paceline.wire.transports`.
        token: the secret of the run.
        launcher: the process of the launcher.
        dashboard: address of the dashboard for a browser; "" if there is none.
    """

    address: str
    token: str
    launcher: Holder
    dashboard: str = ""

    @property
    def seen(self) -> bool:
        """True if this process can see the launcher's process."""
        return life_of(self.launcher) != "unseen"


@contextlib.contextmanager
def published(run_dir: Path, address: str, token: str, dashboard: str = "") -> Iterator[None]:
    """Return a context in which the directory of this process's run contains the file `running.json`.

    If the file is not writable, a warning is logged.

    Args:
        run_dir: the directory of the run.
        address: address of the coordinator.
        token: the secret of the run.
        dashboard: see `RunInProgress`.
    """
    file = run_dir / FILE_NAME
    try:
        _write(file, RunInProgress(address, token, Holder.here(), dashboard))
    except OSError as error:
        log.warning("`paceline status` will not find the run, because %s cannot be written: %s", file, error)
    try:
        yield
    finally:
        try:
            # If another run has taken the directory, the file may be the file of that run.
            if (found := _run_at(run_dir)) is not None and found.token == token:
                file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed: %s", file, error)


def run_in(run_dir: Path) -> RunInProgress:
    """Return how to reach the run in a directory. If the result is not `seen`, the run may already have ended.

    Raises:
        ConfigurationError: the directory is not a run directory, or the run belongs to another user.
        PeerLostError: the run has ended, or has been cut off: its launcher was killed.
    """
    if not run_dir.is_dir():
        raise ConfigurationError(
            f"there is no directory {run_dir}; name the directory of a run, such as runs/NAME."
        )
    try:
        found = _run_at(run_dir)
    except PermissionError:
        raise ConfigurationError(
            f"the run in {run_dir} belongs to another user; only the user who has started a run can watch it."
        ) from None
    if found is None:
        raise _absence(run_dir)
    if life_of(found.launcher) == "dead":
        command = "serve" if found.address.startswith("tls:") else "run"
        raise PeerLostError(
            f"the run in {run_dir} was cut off: its launcher, process {found.launcher.process.process_id}, has ended "
            "without saving its results. If the run has written a checkpoint, go on from it: "
            f"{shlex.join(['paceline', command, '--resume', str(run_dir)])}"
        )
    return found


def unreachable(run_dir: Path, found: RunInProgress) -> PacelineError:
    """Return the error about a run whose launcher can be neither seen nor reached from here."""
    quiet_s, launcher = silence_s(run_dir), found.launcher
    if quiet_s is not None and quiet_s <= MOST_MISSED * launcher.heartbeat_s:
        return ConfigurationError(
            f"the run in {run_dir} is in progress: its launcher, {launcher.words}, has just given a sign of life, "
            "but cannot be reached from here. Call `paceline status` on that machine, and in the launcher's container "
            "if there is one."
        )
    last = "" if quiet_s is None else f" Its last sign of life was {quiet_s:.0f} s ago."
    return PeerLostError(
        f"whether the run in {run_dir} is in progress cannot be told from here: its launcher, {launcher.words}, can "
        f"be neither seen nor reached.{last} Call `paceline status` on that machine"
    )


def newest_run(folder: Path = RUNS) -> Path:
    """Return the directory of the newest run in progress in a folder.

    Raises:
        ConfigurationError: no run is in progress in the folder.
        PeerLostError: no run is in progress in the folder, and the newest run has been cut off.
    """
    cut_off: dict[Path, PeerLostError] = {}
    unseen: list[Path] = []
    for file in sorted(folder.glob(f"*/{FILE_NAME}"), key=_written_s, reverse=True):
        try:
            found = run_in(file.parent)
        except PeerLostError as error:
            cut_off[file.parent] = error
        except ConfigurationError:
            continue  # the run belongs to another user
        else:
            if found.seen:
                return file.parent
            unseen.append(file.parent)
    if unseen:
        return unseen[0]
    newest = max(folder.glob("*"), key=_written_s, default=None)
    if newest in cut_off:
        raise cut_off[newest]
    raise ConfigurationError(
        f"no run is in progress in ./{folder}; name the directory of a run (paceline status runs/NAME), or the "
        "address that `paceline serve` has printed."
    )


def _write(file: Path, content: RunInProgress) -> None:
    """Write the file atomically, so that no process reads an incomplete file.

    Other users are never permitted to read it.
    """
    new = file.with_name(f".{FILE_NAME}-{secrets.token_hex(4)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as target:
            target.write(msgspec.json.encode(content))
        new.replace(file)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _run_at(run_dir: Path) -> RunInProgress | None:
    """Return the content of the file; None if there is no such file, or if its content is not valid."""
    try:
        return msgspec.json.decode(read_regular(run_dir / FILE_NAME), type=RunInProgress)
    except PermissionError:
        raise
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _absence(run_dir: Path) -> PacelineError:
    """Return the error that says why a directory contains no run in progress."""
    if (ended := ending_of(run_dir)) is not None:
        return PeerLostError(f"the run in {run_dir} {ENDS.get(ended, 'has ended')}; its results are there")
    if (run_dir / "run.json").exists() or any(run_dir.glob("trace-*.jsonl")):
        return PeerLostError(f"the run in {run_dir} has ended without a summary; its logs are there")
    return ConfigurationError(
        f"{run_dir} is not the directory of a run; name one that `paceline run` has made, such as runs/NAME."
    )


def _written_s(file: Path) -> float:
    """Return the time at which a file or directory was changed; 0 if it has just been removed."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
