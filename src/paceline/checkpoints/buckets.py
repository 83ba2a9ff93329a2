"""Copies checkpoints to and from object storage, such as a bucket, by the file systems of `fsspec`.

A bucket has no directories that can be renamed. So a copy is whole once its manifest is there, which is copied last.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from ..errors import CheckpointError, ConfigurationError, first_line
from .directory import NAME, PARTIAL, name_of
from .manifest import MANIFEST, files_in
from .reading import Checkpoint, Found

__all__ = ["newest_from", "require_bucket", "upload"]

PIECE_BYTES = 4 * 2**20
"""Number of bytes that are copied at a time."""


def require_bucket(url: str) -> None:
    """Check that a bucket can be read.

    Raises:
        ConfigurationError: there is no file system for this URL, or the bucket cannot be read.
    """
    system, root = _open(url)
    try:
        _numbers_at(system, root)
    except Exception as error:  # each file system has its own exceptions
        raise ConfigurationError(
            f"the checkpoint directory {url} cannot be read: {first_line(error)}. Check the name and the "
            "credentials, or give a path."
        ) from error


def upload(
    checkpoint: Path, url: str, keep: int = 3, pause: Callable[[float], bool] = lambda took_s: False
) -> None:
    """Copy a complete checkpoint to a bucket, and remove the oldest copies there.

    Args:
        checkpoint: directory of the checkpoint.
        url: where the checkpoints of the run are, for example "s3://bucket/run".
        keep: number of checkpoints to keep there.
        pause: called after each piece with the time that it has taken, in seconds. It may wait, so that others have
            the link for themselves, and returns True to give up.

    Raises:
        ConfigurationError: there is no file system for this URL.
        CheckpointError: the checkpoint cannot be copied. Earlier copies are unchanged.
    """
    system, root = _open(url)
    target = PurePosixPath(root, checkpoint.name)
    files = sorted(files_in(checkpoint), key=lambda file: file.name == MANIFEST)
    try:
        for file in files:
            place = target / file.relative_to(checkpoint)
            system.makedirs(str(place.parent), exist_ok=True)
            _copy(file, system, str(place), pause)
        for number in _numbers_at(system, root)[: -max(keep, 1)]:
            system.rm(str(PurePosixPath(root, name_of(number))), recursive=True)
    except Exception as error:  # each file system has its own exceptions
        raise CheckpointError(f"{checkpoint} cannot be copied to {url}: {first_line(error)}") from error


def _copy(file: Path, system: Any, place: str, pause: Callable[[float], bool]) -> None:
    with file.open("rb") as source, system.open(place, "wb") as target:
        while piece := source.read(PIECE_BYTES):
            began_s = time.monotonic()
            target.write(piece)
            if pause(time.monotonic() - began_s):
                raise CheckpointError("the run has ended")


def newest_from(url: str, directory: Path, after: int = 0) -> Found:
    """Copy the newest whole checkpoint from a bucket.

    Args:
        url: where the checkpoints of the run are.
        directory: directory of all checkpoints of the run on this machine. It is created if necessary.
        after: number of the newest checkpoint that is not needed, for example because this machine has it.

    Raises:
        ConfigurationError: there is no file system for this URL.
        CheckpointError: the bucket cannot be read.
    """
    system, root = _open(url)
    faults = []
    try:
        for number in reversed(_numbers_at(system, root)):
            if number <= after:
                break
            path = directory / name_of(number)
            partial = directory / (path.name + PARTIAL)
            directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            system.get(str(PurePosixPath(root, path.name)), str(partial), recursive=True)
            try:
                Checkpoint(partial)
            except CheckpointError as error:
                shutil.rmtree(partial)
                faults.append(f"Checkpoint {number} in {url} is not used: {error}.")
                continue
            shutil.rmtree(path, ignore_errors=True)
            return Found(Checkpoint(partial.rename(path)), tuple(faults))
    except Exception as error:  # each file system has its own exceptions
        raise CheckpointError(f"checkpoints cannot be copied from {url}: {first_line(error)}") from error
    return Found(None, tuple(faults))


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


def _numbers_at(system: Any, root: str) -> list[int]:
    """Return the numbers of the checkpoints in a bucket, in ascending order."""
    system.invalidate_cache()
    if not system.exists(root):
        return []
    names = [PurePosixPath(path).name for path in system.ls(root, detail=False)]
    return sorted(int(name) for name in names if NAME.fullmatch(name))
