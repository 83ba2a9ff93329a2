"""The file that a run leaves in its directory while it is in progress, so that its user can watch the run.

The file contains the address and the secret of the run, so only its owner may read it. It names the process of the
launcher by its id and its start time: if the launcher is killed, the file remains, and readers notice that this
process has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..errors import ConfigurationError, PacelineError, PeerLostError
from .process_states import RunningProcess

__all__ = ["FILE_NAME", "RunInProgress", "newest_run", "published", "run_in"]

log = logging.getLogger("paceline.run")

FILE_NAME = "running.json"
RUNS = Path("runs")
"""The folder in which runs make their directories by default."""


ENDS = {"finished": "has finished", "interrupted": "was interrupted", "failed": "has failed"}
"""How a run has ended according to its summary, as a clause."""


class _Summary(msgspec.Struct):
    """The part of `summary.json` that is used here."""

    ended: str = ""


class RunInProgress(msgspec.Struct, frozen=True):
    """How to reach a run in progress.

    Attributes:
        address: address of the coordinator. See `paceline.wire.addresses`.
        token: the secret of the run.
        machine: name of the machine on which its launcher runs.
        process: the process of its launcher.
        dashboard: address of its dashboard for a browser; "" if there is none.
    """

    address: str
    token: str
    machine: str
    process: RunningProcess
    dashboard: str = ""


@contextlib.contextmanager
def published(run_dir: Path, address: str, token: str, dashboard: str = "") -> Iterator[None]:
    """Return a context in which a run of this process has its file. If the file cannot be written, a warning says so.

    Args:
        run_dir: the directory of the run.
        address: address of the coordinator.
        token: the secret of the run.
        dashboard: see `RunInProgress`.
    """
    process = RunningProcess.of(os.getpid())
    assert process is not None
    file = run_dir / FILE_NAME
    try:
        _write(file, RunInProgress(address, token, socket.gethostname(), process, dashboard))
    except OSError as error:
        log.warning("`paceline status` will not find the run, because %s cannot be written: %s", file, error)
    try:
        yield
    finally:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed: %s", file, error)


def run_in(run_dir: Path) -> RunInProgress:
    """Return how to reach the run in a directory.

    Raises:
        ConfigurationError: the directory is not that of a run, or the run is that of another machine or user.
        PeerLostError: the run has ended, or has been cut off: its launcher was killed.
    """
    if not run_dir.is_dir():
        raise ConfigurationError(
            f"there is no directory {run_dir}; name the directory of a run, such as runs/NAME."
        )
    try:
        found = _read(run_dir)
    except PermissionError:
        raise ConfigurationError(
            f"the run in {run_dir} belongs to another user; only the user who has started a run can watch it."
        ) from None
    if found is None:
        raise _absence(run_dir)
    if found.machine != socket.gethostname():
        raise ConfigurationError(
            f"the run in {run_dir} was started on the machine {found.machine}; call status there."
        )
    if found.process.state() == "gone":
        raise PeerLostError(
            f"the run in {run_dir} was cut off: its launcher, process {found.process.process_id}, has ended without "
            "saving its results"
        )
    return found


def newest_run(folder: Path = RUNS) -> Path:
    """Return the directory of the newest run in progress in a folder.

    Raises:
        ConfigurationError: no run is in progress there.
        PeerLostError: the same, and the newest run has been cut off.
    """
    cut_off: dict[Path, PeerLostError] = {}
    for file in sorted(folder.glob(f"*/{FILE_NAME}"), key=_written_s, reverse=True):
        try:
            run_in(file.parent)
        except PeerLostError as error:
            cut_off[file.parent] = error
        except ConfigurationError:
            continue  # the run is that of another machine or user
        else:
            return file.parent
    newest = max(folder.glob("*"), key=_written_s, default=None)
    if newest in cut_off:
        raise cut_off[newest]
    raise ConfigurationError(
        f"no run is in progress in ./{folder}; name the directory of a run (paceline status runs/NAME), or the "
        "address that `paceline serve` has printed."
    )


def _write(file: Path, content: RunInProgress) -> None:
    """Write the file at once, so that nobody reads a part of it, and so that other users never may read it."""
    new = file.with_name(f".{FILE_NAME}-{secrets.token_hex(4)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as target:
            target.write(msgspec.json.encode(content))
        new.replace(file)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _read(run_dir: Path) -> RunInProgress | None:
    """Return the content of the file; None if there is none, or if it is not such a file."""
    try:
        return msgspec.json.decode((run_dir / FILE_NAME).read_bytes(), type=RunInProgress)
    except (FileNotFoundError, IsADirectoryError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _absence(run_dir: Path) -> PacelineError:
    """Return the error that says why a directory contains no run in progress."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        summary = msgspec.json.decode((run_dir / "summary.json").read_bytes(), type=_Summary)
        return PeerLostError(
            f"the run in {run_dir} {ENDS.get(summary.ended, 'has ended')}; its results are there"
        )
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
