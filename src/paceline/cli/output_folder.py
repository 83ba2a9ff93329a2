"""Creates the folder into which a command writes pictures and JSON files."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from ..errors import ConfigurationError

__all__ = ["new_folder"]


def new_folder(out: Path | None, what: str) -> Path:
    """Create the output folder and return it.

    Args:
        out: the folder that the user chose, which must be empty or new. None creates a new folder under ./runs.
        what: prefix for the name of a new folder under ./runs.

    Raises:
        ConfigurationError: the folder is not empty or cannot be created.
    """
    if out is None:
        stamp = time.strftime(f"{what}-%Y%m%d-%H%M%S")
        out = next(
            folder
            for number in itertools.count(1)
            if not (folder := Path("runs", stamp if number == 1 else f"{stamp}-{number}")).exists()
        )
    if out.exists() and not out.is_dir():
        raise ConfigurationError(f"{str(out)!r} is a file; choose a folder with --out.")
    if out.exists() and any(out.iterdir()):
        raise ConfigurationError(f"the folder {str(out)!r} is not empty; choose another with --out.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot create the folder {str(out)!r}: {error.strerror}.") from error
    return out
