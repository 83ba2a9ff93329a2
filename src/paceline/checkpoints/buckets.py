"""Copies checkpoints to and from object storage, such as a bucket, with the file systems of `fsspec`.

A bucket has no directories that can be renamed. So the manifest is copied last, and a copy is whole if it has a
manifest. The first file of a copy names the lineage: a run, and the runs that have resumed this run (see `manifest`).
Several runs may share a bucket, as they may share a directory: a run never looks outside of the folder of its lineage,
and removes only checkpoints that name its lineage.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import fsspec
import msgspec
from fsspec.core import url_to_fs

from ..errors import CheckpointError, ConfigurationError, first_line
from ..files import open_regular
from .manifest import (
    DRAFT,
    MANIFEST,
    DraftMark,
    carries,
    identity_of,
    lineages_in,
    manifest_of,
    name_of,
    number_of,
    read_manifest,
)
from .reading import Checkpoint, NewestCheckpoint
from .writing import mark_new, remove, remove_drafts

PIECE_BYTES = 4 * 2**20
"""Number of bytes that are copied at a time."""


class LineageThere(NamedTuple):
    """A lineage that has checkpoints in a bucket or a directory.

    Attributes:
        name: the identity of the lineage; "" for checkpoints of earlier versions, which name no lineage.
        numbers: the numbers of the complete checkpoints, in ascending order.
        origin: the checkpoint with which this lineage has begun, if that checkpoint is of another lineage; else "". See
            `origin_of`.
        run: the content of `run.json` in the newest checkpoint; b"" if there is no such file.
    """

    name: str
    numbers: tuple[int, ...]
    origin: str
    run: bytes

    def is_continued_by(self, other: LineageThere) -> bool:
        """Return True if another lineage has begun with the newest checkpoint of this lineage."""
        path = PurePosixPath(other.origin)
        name = "" if str(path.parent) == "." else str(path.parent)
        number = number_of(path.name)
        return bool(other.origin) and name == self.name and number is not None and number >= max(self.numbers)


def require_bucket(url: str) -> None:
    """Check that a bucket can be read.

    Raises:
        ConfigurationError: there is no file system for this URL, or the bucket cannot be read.
    """
    try:
        with _explained(f"the checkpoint directory {url} cannot be read"):
            system, root = _open(url)
            _names_at(system, root)
    except CheckpointError as error:
        raise ConfigurationError(
            f"{error}. Check the name and the credentials, or give the path of a directory instead."
        ) from error


def upload(
    checkpoint: Path, url: str, keep: int = 3, pause: Callable[[float], bool] = lambda took_s: False
) -> None:
    """Copy a complete checkpoint to the folder of its lineage in a bucket, and remove the oldest copies in this folder.

    Args:
        checkpoint: directory of the checkpoint.
        url: the URL of the bucket for the checkpoints of the run, for example "s3://bucket/run".
        keep: number of checkpoints to keep in the bucket.
        pause: function that is called after each piece with the time that the piece has taken, in seconds. It may wait,
            to leave the link to training, and returns True to give up.

    Raises:
        ConfigurationError: there is no file system for this URL.
        CheckpointError: the checkpoint cannot be copied. Earlier copies are unchanged.
    """
    manifest = read_manifest(checkpoint)
    lineage = manifest.lineage
    with _explained(f"{checkpoint} cannot be copied to {url}"):
        system, root = _open(url)
        folder = PurePosixPath(root, lineage)
        target = folder / checkpoint.name
        mark = str(target / DRAFT)
        system.makedirs(str(target), exist_ok=True)
        system.pipe_file(mark, msgspec.json.encode(DraftMark(lineage, secrets.token_hex(16))))
        for name in [*manifest.files, MANIFEST]:
            place = target / name
            system.makedirs(str(place.parent), exist_ok=True)
            _copy(checkpoint / name, system, str(place), pause)
        system.rm_file(mark)
        own = [
            number for number in _numbers_at(system, str(folder)) if _carries(system, folder, number, lineage)
        ]
        complete = _complete_at(system, folder)
        whole = [number for number in own if number in complete]
        oldest = min(whole[-max(keep, 1) :], default=0)
        for number in own:
            if number < oldest:
                _remove(system, folder / name_of(number))


def _copy(file: Path, system: Any, place: str, pause: Callable[[float], bool]) -> None:
    with open_regular(file) as source, system.open(place, "wb") as target:
        while piece := source.read(PIECE_BYTES):
            began_s = time.monotonic()
            target.write(piece)
            if pause(time.monotonic() - began_s):
                raise CheckpointError("the run has ended")


def _carries(system: Any, folder: PurePosixPath, number: int, lineage: str) -> bool:
    """Return True if a copy names this lineage. A run may remove only such copies."""
    for name in (DRAFT, MANIFEST):
        path = str(folder / name_of(number) / name)
        if system.exists(path):
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                found = msgspec.json.decode(system.cat_file(path), type=dict)
                return bool(lineage) and found.get("lineage") == lineage
            return False
    return False


def _remove(system: Any, copy: PurePosixPath) -> None:
    """Remove a copy.

    The files that name the lineage are removed last. So if the removal is interrupted, a later call can complete the
    removal.
    """
    for path in system.find(str(copy)):
        if PurePosixPath(path) not in (copy / MANIFEST, copy / DRAFT):
            system.rm_file(path)
    system.rm(str(copy), recursive=True)


def newest_from(
    url: str,
    directory: Path,
    lineage: str = "",
    *,
    after: int = 0,
    until: int | None = None,
    use: Callable[[Checkpoint], object] = lambda checkpoint: None,
) -> NewestCheckpoint:
    """Copy the newest whole checkpoint of a lineage from a bucket.

    Args:
        url: the URL of the bucket with the checkpoints of the run.
        directory: directory of all checkpoints of the run on this machine. The folder of the lineage is created in this
            directory if necessary.
        lineage: the identity of the lineage; "" for checkpoints of earlier versions, which name no lineage.
        after: number of a checkpoint. Only newer checkpoints are considered, for example because this machine has the
            older checkpoints.
        until: number of the newest checkpoint that may be used; None for no limit.
        use: see `reading.newest_whole`.

    Raises:
        ConfigurationError: there is no file system for this URL.
        CheckpointError: the bucket cannot be read, or the files cannot be written on this machine.
    """
    faults = []
    with _explained(f"checkpoints cannot be copied from {url}"):
        system, root = _open(url)
        there, here = PurePosixPath(root, lineage), directory / lineage
        # In a bucket of an earlier version, folders that are not checkpoints may also have numbers as names, such as
        # folders of Slurm jobs.
        numbers = _numbers_at(system, str(there)) if lineage else _complete_at(system, there)
        for number in reversed(numbers):
            if until is not None and number > until:
                continue
            if number <= after:
                break
            try:
                found = _fetch(system, there, number, here, use)
            except CheckpointError as error:
                faults.append(f"Checkpoint {number} in {url} is not used: {error}.")
            else:
                return NewestCheckpoint(found, tuple(faults), numbers[-1])
    return NewestCheckpoint(None, tuple(faults), numbers[-1] if numbers else 0)


def _fetch(
    system: Any, folder: PurePosixPath, number: int, here: Path, use: Callable[[Checkpoint], object]
) -> Checkpoint:
    """Copy a checkpoint to a folder on this machine.

    Raises:
        CheckpointError: the checkpoint is not whole.
    """
    lineage, there = identity_of(here), folder / name_of(number)
    if not system.exists(str(there / MANIFEST)):
        raise CheckpointError(f"{MANIFEST} cannot be read: the checkpoint has not been copied completely")
    data = system.cat_file(str(there / MANIFEST))
    manifest = manifest_of(data, lineage)
    here.mkdir(parents=True, exist_ok=True)
    remove_drafts(here)
    begun = mark_new(here, DraftMark(lineage, secrets.token_hex(16)))
    try:
        (begun / "workers").mkdir()
        (begun / MANIFEST).write_bytes(data)
        for name in manifest.files:
            if not system.exists(str(there / name)):
                raise CheckpointError(f"{name} cannot be read: it is not in the bucket")
            system.get_file(str(there / name), str(begun / name))
        found = Checkpoint(begun)
        found.require_number(number)
        use(found)
        path = here / there.name
        if path.exists():  # the checkpoint at this path is damaged: an intact checkpoint would have been used
            if carries(path, lineage):
                remove(path)
            else:
                path.rename(path.with_name(f"{path.name}.damaged-{secrets.token_hex(4)}"))
        begun.rename(path)
        (path / DRAFT).unlink()
    except BaseException:
        with contextlib.suppress(OSError):
            remove(begun)
        raise
    return Checkpoint(path, checked=False)


def lineages_at(place: str) -> Sequence[LineageThere]:
    """Return the lineages that have complete checkpoints in a bucket or a directory. Files are not checked.

    Args:
        place: URL of the bucket, or name of the directory.

    Raises:
        ConfigurationError: there is no file system for this URL.
        CheckpointError: the bucket cannot be read.
    """
    with _explained(f"{place} cannot be read"):
        system, root = _open(place if "://" in place else f"file://{Path(place).absolute()}")
        found = list(_lineages(system, root))
    return found


def _lineages(system: Any, root: str) -> Iterator[LineageThere]:
    for name in lineages_in(_names_at(system, root)):
        folder = PurePosixPath(root, name)
        if numbers := _complete_at(system, folder):
            newest = folder / name_of(numbers[-1])
            said: Mapping[str, Any] = {}
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                said = msgspec.json.decode(system.cat_file(str(newest / MANIFEST)), type=dict)
            run = newest / "run.json"
            described = system.cat_file(str(run)) if system.exists(str(run)) else b""
            yield LineageThere(name, tuple(numbers), str(said.get("origin") or ""), described)


@contextlib.contextmanager
def _explained(words: str) -> Iterator[None]:
    """Turn an exception of a file system into a `CheckpointError` whose message begins with these words.

    A `ConfigurationError` is passed on unchanged.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:  # each file system has its own exceptions
        raise CheckpointError(f"{words}: {first_line(error)}") from error


def _open(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    try:
        system, root = url_to_fs(url)
    except ImportError as error:
        raise ConfigurationError(f"the checkpoint directory {url} needs another package: {error}.") from error
    except ValueError as error:
        raise ConfigurationError(
            f"the checkpoint directory {url} has no file system: {error}; give a path, or a URL that fsspec knows, "
            "for example s3://bucket/run or gs://bucket/run."
        ) from error
    return system, root


def _complete_at(system: Any, folder: PurePosixPath) -> list[int]:
    """Return the numbers of those copies in a folder that have a manifest, in ascending order."""
    numbers = _numbers_at(system, str(folder))
    return [number for number in numbers if system.exists(str(folder / name_of(number) / MANIFEST))]


def _names_at(system: Any, root: str) -> list[str]:
    """Return the names of the files and folders in a folder of a bucket."""
    system.invalidate_cache()
    if not system.exists(root):
        return []
    return [PurePosixPath(path).name for path in system.ls(root, detail=False)]


def _numbers_at(system: Any, folder: str) -> list[int]:
    """Return the numbers of the checkpoints in a folder of a bucket, in ascending order."""
    numbers = (number_of(name) for name in _names_at(system, folder))
    return sorted(number for number in numbers if number is not None)
