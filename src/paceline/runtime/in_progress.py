"""The file that a run leaves in its directory while it is in progress, so that its user can watch the run.

The file contains the address and the secret of the run, so only its owner may read it. It also names the process of
the launcher: if the launcher is killed, the file remains, and readers notice that this process has ended. If they
cannot see it, because it is on another machine or in another process namespace, they say no more than its heartbeats
tell (see `run_lock`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..errors import ConfigurationError, PacelineError, PeerLostError
from ..files import read_regular
from .run_lock import MOST_MISSED, Holder, life_of, silence_s

__all__ = ["FILE_NAME", "RunInProgress", "newest_run", "published", "run_in", "unreachable"]

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
        launcher: the process of its launcher.
        dashboard: address of its dashboard for a browser; "" if there is none.
    """

    address: str
    token: str
    launcher: Holder
    dashboard: str = ""

    @property
    def seen(self) -> bool:
        """True if this process can see that of the launcher."""
        return life_of(self.launcher) != "unseen"


@contextlib.contextmanager
def published(run_dir: Path, address: str, token: str, dashboard: str = "") -> Iterator[None]:
    """Return a context in which a run of this process has its file. If the file cannot be written, a warning says so.

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
            # A run that has taken the directory from this one has a file of its own.
            if (found := _read(run_dir)) is not None and found.token == token:
                file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed: %s", file, error)


def run_in(run_dir: Path) -> RunInProgress:
    """Return how to reach the run in a directory. Whether the run is in progress is unknown if it is not `seen`.

    Raises:
        ConfigurationError: the directory is not that of a run, or the run is that of another user.
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
    if life_of(found.launcher) == "dead":
        raise PeerLostError(
            f"the run in {run_dir} was cut off: its launcher, process {found.launcher.process.process_id}, has ended "
            "without saving its results"
        )
    return found


def unreachable(run_dir: Path, found: RunInProgress) -> PacelineError:
    """Return the error that says what is known of a run whose launcher can be neither seen nor reached from here."""
    quiet_s, launcher = silence_s(run_dir), found.launcher
    if quiet_s is not None and quiet_s <= MOST_MISSED * launcher.heartbeat_s:
        return ConfigurationError(
            f"the run in {run_dir} is in progress: its launcher, {launcher.words}, has just given a sign of life, "
            "but cannot be reached from here. Call status there, in the same container if it runs in one."
        )
    last = "" if quiet_s is None else f" Its last sign of life was {quiet_s:.0f} s ago."
    return PeerLostError(
        f"whether the run in {run_dir} is in progress cannot be told from here: its launcher, {launcher.words}, can "
        f"be neither seen nor reached.{last} Call status there"
    )


def newest_run(folder: Path = RUNS) -> Path:
    """Return the directory of the newest run in progress in a folder.

    Raises:
        ConfigurationError: no run is in progress there.
        PeerLostError: the same, and the newest run has been cut off.
    """
    cut_off: dict[Path, PeerLostError] = {}
    unseen: list[Path] = []
    for file in sorted(folder.glob(f"*/{FILE_NAME}"), key=_written_s, reverse=True):
        try:
            found = run_in(file.parent)
        except PeerLostError as error:
            cut_off[file.parent] = error
        except ConfigurationError:
            continue  # the run is that of another user
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
        return msgspec.json.decode(read_regular(run_dir / FILE_NAME), type=RunInProgress)
    except PermissionError:
        raise
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _absence(run_dir: Path) -> PacelineError:
    """Return the error that says why a directory contains no run in progress."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        summary = msgspec.json.decode(read_regular(run_dir / "summary.json"), type=_Summary)
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
