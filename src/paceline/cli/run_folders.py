"""Folders that contain runs, given where a run is expected."""

from __future__ import annotations

import shlex
from pathlib import Path

from ..errors import ConfigurationError

__all__ = ["require_no_folder_of_runs"]

MOST_NAMED = 5  # number of runs that a message names


def require_no_folder_of_runs(folder: Path, command: str, or_else: str = "") -> None:
    """Raise `ConfigurationError` if a folder is no run, but contains runs. The error names some of them.

    Args:
        folder: the folder.
        command: the command to which the folder was given.
        or_else: what else the command accepts.
    """
    from ..report.run_reading import holds_run

    if not folder.is_dir() or holds_run(folder):
        return
    runs = [each for each in folder.iterdir() if each.is_dir() and holds_run(each)]
    if not runs:
        return
    runs.sort(key=lambda each: each.stat().st_mtime, reverse=True)
    named = ", ".join(map(str, runs[:MOST_NAMED]))
    more = f" and {len(runs) - MOST_NAMED} more" if len(runs) > MOST_NAMED else ""
    raise ConfigurationError(
        f"{str(folder)!r} is not a run, but contains runs; name one of {named}{more}, newest first{or_else}: "
        f"paceline {command} {shlex.quote(str(runs[0]))}"
    )
