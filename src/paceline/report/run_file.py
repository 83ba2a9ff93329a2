"""`run.json` in a run directory: the settings of a run, and how it can be repeated.

The launcher writes this file when the run begins, so that even a run whose launcher was killed has a report.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..files import write_json
from .run_report import Setting

__all__ = ["RunFile", "read_run_file", "write_run_file"]

FORMAT = 1
NAME = "run.json"


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `run.json`.

    Attributes:
        format: version of the format of this file.
        version: version of Paceline.
        begun_at: date and time at which the run began, in ISO 8601 with the offset from UTC.
        command: the command line that repeats the run, quoted for a shell; "" if there is none, as in a notebook.
        folder: the current directory in which it was called.
        program: what each worker ran, as in `Order.arguments`; () if machines that join the run choose it.
        settings: all settings, with the names of their options.
        sync: the sync model or schedule, in the notation of the command line.
        workers: number of workers; if machines can join, the largest number.
        servers: number of servers.
        shards: number of shards.
        joined: True if machines join the run. They keep the records of their workers.
        emulated: how unequal machines are emulated; "" if they are not.
    """

    format: int = FORMAT
    version: str
    begun_at: str
    command: str
    folder: str
    program: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    sync: str
    workers: int
    servers: int
    shards: int
    joined: bool = False
    emulated: str = ""


def write_run_file(file: RunFile, run_dir: Path) -> None:
    """Write `run.json`.

    Raises:
        OSError: the file cannot be written.
    """
    write_json(run_dir / NAME, file)


def read_run_file(run_dir: Path) -> RunFile | None:
    """Return the content of `run.json`; None if there is no such file, as in simulations and runs of older versions.

    Raises:
        msgspec.DecodeError: the file has another content.
        OSError: the file cannot be read.
    """
    try:
        return msgspec.json.decode((run_dir / NAME).read_bytes(), type=RunFile)
    except FileNotFoundError:
        return None
