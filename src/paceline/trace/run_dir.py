"""The directory of a run, live or simulated: whether it can be used, and its creation."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..errors import ConfigurationError
from ..files import read_regular

__all__ = ["make_run_dir", "require_usable", "set_aside"]

BEFORE = "before"
"""The folder in a run directory with what the run has written before it was resumed."""


def require_usable(path: str | os.PathLike[str]) -> None:
    """Raise `ConfigurationError` if a run directory cannot be written or already contains a run.

    This function does not create the directory.
    """
    if not os.fspath(path):
        raise ConfigurationError(
            "the name of the run directory is empty; give a name, or omit this option to create a new directory."
        )
    run_dir = Path(path).absolute()
    if _has_ended(run_dir / "summary.json") or any(run_dir.glob("trace-*.jsonl")):
        raise ConfigurationError(f"the run directory {path} already contains a run; choose another.")
    nearest = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigurationError(f"the run directory {path} cannot be written; choose another one.")


def _has_ended(summary: Path) -> bool:
    """Return True if there is a summary, unless it is that of a run that has ended before training began."""
    try:
        ended: dict[str, object] = msgspec.json.decode(read_regular(summary), type=dict)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    measured = "duration_s" in ended or ended.get("traces") == "off"
    return ended.get("ended") not in ("failed", "interrupted") or measured


def set_aside(run_dir: Path, name: str, stays: Callable[[str], bool]) -> Path:
    """Move what a run has written to its directory into a new folder in it, because the run begins again there.

    Args:
        run_dir: the directory of the run.
        name: name of the folder in `before`. A number is added if there is such a folder.
        stays: returns True if the file or the folder with a name stays.

    Returns:
        The folder.

    Raises:
        ConfigurationError: the directory cannot be written.
    """
    folder = run_dir / BEFORE / name
    for number in itertools.count(2):
        if not folder.exists():
            break
        folder = folder.with_name(f"{name}-{number}")
    try:
        folder.mkdir(parents=True)
        for path in sorted(run_dir.iterdir()):
            if path.name != BEFORE and not stays(path.name):
                path.rename(folder / path.name)
    except OSError as error:
        raise ConfigurationError(
            f"the run directory {run_dir} cannot be written: {error.strerror}. Free space there, or allow writing."
        ) from error
    return folder


def make_run_dir(path: str | os.PathLike[str] | None) -> Path:
    """Create and return the run directory: `path`, or a new directory in ./runs, named after the date and time."""
    try:
        if path is not None:
            run_dir = Path(path).absolute()
            run_dir.mkdir(parents=True, exist_ok=True)
            probe = run_dir / f".writable-{secrets.token_hex(4)}"
            probe.touch()
            probe.unlink()
            return run_dir
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for number in itertools.count(1):
            run_dir = Path("runs", stamp if number == 1 else f"{stamp}-{number}").absolute()
            with contextlib.suppress(FileExistsError):
                run_dir.mkdir(parents=True)
                break
        return run_dir
    except OSError as error:
        raise ConfigurationError(
            f"the run directory {path or 'runs'} cannot be written: {error.strerror}. Choose another one: in "
            "Python with run_dir, on the command line with --run-dir."
        ) from error
