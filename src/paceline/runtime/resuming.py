"""What a run that resumes an earlier one begins with: the newest whole checkpoint in the directory of that run."""

from __future__ import annotations

import contextlib
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from ..core.protocol.job_cut import JobCut
from ..errors import CheckpointError, ConfigurationError
from ..files import Unfinished
from ..report.run_file import NAME, RunFile, read_run_file
from ..settings.checks import is_bucket
from ..trace.run_dir import require_usable
from .in_progress import RUNS
from .job import CHECKPOINTS, Resumed
from .run_lock import await_free, newest_lock

if TYPE_CHECKING:
    from ..checkpoints.reading import Found  # imports torch

__all__ = [
    "can_resume",
    "cut_of",
    "described",
    "earlier_run",
    "fetch_run",
    "find_resumed",
    "has_finished",
    "keep_source",
    "newest_checkpoint",
    "require_same_source",
]

SOURCE = "script.py"
"""Name of the copy of the script, or of the training function, in a run directory."""


def described(run_dir: Path) -> dict[str, bytes]:
    """Return the files of a run directory without which a checkpoint is not resumed, as far as they can be read."""
    found = {}
    for name in (NAME, SOURCE):
        with contextlib.suppress(OSError):
            found[name] = (run_dir / name).read_bytes()
    return found


def fetch_run(bucket: str, run_dir: str | None, *, force: bool = False) -> Path:
    """Copy what is needed to resume a run from the bucket with its checkpoints, and return its directory here.

    Args:
        bucket: the URL of the bucket.
        run_dir: the directory of the run on this machine; None for one in ./runs with the last name in the URL.
        force: see `earlier_run`.

    Raises:
        ConfigurationError: the bucket cannot be read or has no whole checkpoint, or the directory is that of another
            run or of a run that is in progress.
    """
    if run_dir:
        require_usable(run_dir)
    folder = Path(run_dir or RUNS / PurePosixPath(bucket).name)
    if (folder / NAME).exists() and earlier_run(folder, force=force).value_of("--checkpoint-dir") != bucket:
        raise ConfigurationError(
            f"resume is {bucket!r}, but {folder} is the directory of a run with other checkpoints; name another "
            "directory with run_dir (--run-dir)."
        )
    found = newest_checkpoint(bucket, folder / CHECKPOINTS)
    if found.checkpoint is None:
        why = " ".join(found.faults) or "Name the URL that was given as --checkpoint-dir."
        raise ConfigurationError(f"resume is {bucket!r}, but there is no whole checkpoint. {why}")
    for name, content in described(found.checkpoint.path).items():
        with Unfinished(folder / name) as place:
            place.write_bytes(content)
    return folder


def earlier_run(run_dir: Path, *, force: bool = False) -> RunFile:
    """Return the description of the run that is to be resumed.

    If nothing tells whether the run is still in progress, this takes the time of three heartbeats. See `run_lock`.

    Args:
        run_dir: the directory of the run.
        force: True if the run may be in progress, and is ended if it is.

    Raises:
        ConfigurationError: the directory contains no run, or the run is still in progress.
    """
    if not run_dir.is_dir():
        raise ConfigurationError(
            f"resume is {str(run_dir)!r}, but there is no such directory; name the directory of a run, such as "
            "runs/NAME."
        )
    try:
        file = read_run_file(run_dir)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(
            f"the run in {run_dir} cannot be resumed: run.json cannot be read: {error}."
        ) from None
    if file is None:
        raise ConfigurationError(
            f"resume is {str(run_dir)!r}, which is not the directory of a run; name a directory that a run has made, "
            "such as runs/NAME."
        )
    if not force:
        await_free(run_dir)
    return file


def find_resumed(earlier: RunFile, run_dir: Path, checkpoint_dir: str | None) -> Resumed:
    """Return the checkpoint with which a run begins that resumes another one.

    Args:
        earlier: the description of the run that is resumed.
        run_dir: its directory.
        checkpoint_dir: directory of its checkpoints, or another one for the next ones, or the URL of a bucket; None
            for the usual one. A newer checkpoint in a bucket is copied to the usual directory.

    Raises:
        ConfigurationError: there is no whole checkpoint, or a bucket cannot be read.
    """
    usual, lock = str(run_dir / CHECKPOINTS), newest_lock(run_dir)
    places = dict.fromkeys(filter(None, [checkpoint_dir, earlier.value_of("--checkpoint-dir") or usual]))
    faults: list[str] = []
    for place in places:
        found = newest_checkpoint(place, Path(usual))
        if found.checkpoint is not None:
            return Resumed(str(found.checkpoint.path), found.faults, lock)
        faults += found.faults
    every = earlier.value_of("--checkpoint-every") or "off"
    why = " ".join(faults) or f"It had --checkpoint-every {every}."
    raise ConfigurationError(
        f"the run in {run_dir} cannot be resumed, because there is no whole checkpoint in {' or '.join(places)}. "
        f"{why} Start the run again without --resume."
    )


def newest_checkpoint(place: str, usual: Path) -> Found:
    """Return the newest whole checkpoint of a run.

    Args:
        place: directory of its checkpoints, or the URL of a bucket.
        usual: directory to which a newer checkpoint in a bucket is copied.

    Raises:
        ConfigurationError: a bucket cannot be read.
    """
    from ..checkpoints.buckets import newest_from  # imports torch
    from ..checkpoints.reading import Found, newest_whole

    if not is_bucket(place):
        return newest_whole(Path(place))
    here = newest_whole(usual)
    number = 0 if here.checkpoint is None else here.checkpoint.manifest.number
    try:
        there = newest_from(place, usual, after=number)
    except CheckpointError as error:
        if here.checkpoint is None:
            raise ConfigurationError(f"{error}. Try again, or give --checkpoint-dir another place.") from None
        return Found(here.checkpoint, (*here.faults, f"Newer checkpoints are not used: {error}."))
    return Found(there.checkpoint or here.checkpoint, (*there.faults, *here.faults))


def can_resume(run_dir: Path, *, force: bool = False) -> bool:
    """Return True if a directory has a whole checkpoint of a run that has not finished.

    Also True if the run is still in progress: --resume says so, and refuses.

    Args:
        run_dir: the directory.
        force: see `earlier_run`.
    """
    try:
        if not force:
            await_free(run_dir)
    except ConfigurationError:
        return True
    try:
        find_resumed(earlier_run(run_dir, force=True), run_dir, None)
    except ConfigurationError:
        return False
    return not has_finished(run_dir)


def has_finished(run_dir: Path) -> bool:
    """Return True if the scripts of a run have come to their ends."""
    try:
        summary = msgspec.json.decode((run_dir / "summary.json").read_bytes(), type=_Summary)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return summary.ended == "finished"


class _Summary(msgspec.Struct):
    """The part of `summary.json` that is used here."""

    ended: str = ""


def cut_of(resumed: Resumed) -> JobCut:
    """Return the state of the job in a checkpoint.

    Raises:
        ConfigurationError: this version of Paceline cannot read it.
    """
    path = Path(resumed.path, "job.json")
    try:
        return msgspec.json.decode(path.read_bytes(), type=JobCut)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error}. Resume the run with the version of Paceline that has begun it."
        ) from None


def keep_source(source: str, run_dir: Path) -> None:
    """Write the source of a run's script or training function to its directory, with which a later one is compared.

    Raises:
        OSError: it cannot be written.
    """
    with Unfinished(run_dir / SOURCE) as place:
        place.write_text(source)


def require_same_source(name: str, source: str, run_dir: Path, accept: str) -> str:
    """Require that a script or a training function has not changed since a run began.

    Args:
        name: what it is called in messages.
        source: its source; "" if it is unknown.
        run_dir: the directory of the run.
        accept: how a user accepts changes.

    Returns:
        Why this cannot be known, as a sentence; "" if nothing has changed.

    Raises:
        ConfigurationError: it has changed. The message states the first difference.
    """
    if not source:
        return f"{name} is not compared with that of the run before, because its source cannot be read."
    try:
        before = (run_dir / SOURCE).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return f"{name} is not compared with that of the run before, because {run_dir} does not contain its source."
    for number, (old, new) in enumerate(zip_longest(before, source.splitlines()), start=1):
        if old != new:
            raise ConfigurationError(
                f"{name} has changed since the run began: line {number} {_was(old)}, and {_is(new)}. Restore it, or "
                f"add {accept} to resume with it as it is."
            )
    return ""


def _was(line: str | None) -> str:
    return "did not exist" if line is None else f"was {line.strip()!r}"


def _is(line: str | None) -> str:
    return "does not exist now" if line is None else f"is {line.strip()!r}"
