"""The directory of a run's checkpoints. A checkpoint is named by its number, with a suffix until it is complete."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["NAME", "PARTIAL", "name_of", "numbers_in", "sync"]

NAME = re.compile(r"\d{6,}")
PARTIAL = ".partial"
"""End of the name of a checkpoint that is not complete."""


def name_of(number: int) -> str:
    """Return the name of a checkpoint's directory: "000012" for 12."""
    return f"{number:06d}"


def numbers_in(directory: Path, suffix: str = "") -> list[int]:
    """Return the numbers of the checkpoints in a directory, in ascending order; [] if there is no such directory.

    Args:
        directory: the directory.
        suffix: end of the names: "" for complete checkpoints, ".partial" for those that are not.
    """
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    stems = [name.removesuffix(suffix) for name in names if name.endswith(suffix)]
    return sorted(int(stem) for stem in stems if NAME.fullmatch(stem))


def sync(path: Path) -> None:
    """Wait until a file or the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
