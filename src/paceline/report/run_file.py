"""`run.json` in a run directory: the settings of a run, and how it can be repeated.

The launcher writes this file when the run begins, so that even a run whose launcher was killed has a report. It is
signed (see `paceline.trust`), because a run that is resumed does what is written here.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..files import read_regular, write_json
from ..trust import SIGNATURE, is_signed, signature_of
from .run_report import Setting
from .words import counted

__all__ = ["NAME", "Resumption", "RunFile", "parse_run_file", "read_run_file", "write_run_file"]

FORMAT = 1
NAME = "run.json"


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """An interruption of a run, after which it has gone on from a checkpoint.

    Attributes:
        why: why the run was interrupted, as a sentence; "" if a user has resumed it.
        begun_at: date and time at which it went on, in ISO 8601 with the offset from UTC.
        checkpoint: the directory of the checkpoint.
        updates: number of updates that the job had made at the checkpoint.
        samples: number of samples that they include, as far as it is known.
        elapsed_s: time for which the job had run at the checkpoint, in seconds.
        lost_updates: number of updates that the run had made after the checkpoint; None if it is unknown.
        lost_samples: number of samples that they include; None if it is unknown.
        lost_s: time between the checkpoint and the end, in seconds; None if it is unknown.
        changes: the settings that were changed, such as "--workers 3 -> 2".
        faults: a sentence for each newer checkpoint, which says why it is not used.
    """

    why: str = ""
    begun_at: str
    checkpoint: str
    updates: int
    samples: int
    elapsed_s: float
    lost_updates: int | None = None
    lost_samples: int | None = None
    lost_s: float | None = None
    changes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """What happened, in sentences."""
        name = Path(self.checkpoint).name
        if self.lost_updates is None:
            lost = "What the run had done after it is lost; its traces do not say how much this is."
        elif not self.lost_updates:
            lost = "The traces show nothing after it."
        else:
            lost = (
                f"What the run had done after it is lost: {counted(self.lost_updates, 'update')}, "
                f"{counted(self.lost_samples or 0, 'sample')} and {self.lost_s or 0.0:.1f} s."
            )
        said = [
            self.why,
            *self.faults,
            f"The run goes on from checkpoint {name} (update {self.updates}). {lost}",
        ]
        if self.changes:
            said.append(f"Changed: {', '.join(self.changes)}.")
        return " ".join(filter(None, said))


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `run.json`.

    Attributes:
        format: version of the format of this file.
        version: version of Paceline.
        begun_at: date and time at which the run began, in ISO 8601 with the offset from UTC.
        run_dir: the directory of the run when it began, by which a copy of the directory is recognized.
        lineage: the identity of the run and of those that have resumed it in its directory, which its checkpoints
            carry; "" in runs of earlier versions. See `paceline.checkpoints.directory`.
        origin: the directory of the checkpoint of another lineage with which this one has begun; "" for none.
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
        resumptions: the interruptions of the run, in order.
        signature: the signature of the user who has started the run. `read_run_file` returns "" for that of others.
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
    resumptions: tuple[Resumption, ...] = ()
    run_dir: str = ""
    lineage: str = ""
    origin: str = ""
    signature: str = ""

    def value_of(self, option: str) -> str:
        """Return the value of a setting, given the name of its option; "" if the setting is not here."""
        return next((setting.value for setting in self.settings if setting.name == option), "")


def write_run_file(file: RunFile, run_dir: Path, *, sign: bool = True) -> None:
    """Write `run.json`.

    Args:
        file: its content.
        run_dir: the directory of the run.
        sign: True to sign it as the work of this user.

    Raises:
        OSError: the file cannot be written.
    """
    content = msgspec.to_builtins(file)
    write_json(run_dir / NAME, {**content, SIGNATURE: signature_of(content) if sign else ""})


def read_run_file(run_dir: Path) -> RunFile | None:
    """Return the content of `run.json`; None if there is no such file, as in simulations and runs of older versions.

    Raises:
        msgspec.DecodeError: the file has another content.
        OSError: the file cannot be read.
    """
    try:
        data = read_regular(run_dir / NAME)
    except FileNotFoundError:
        return None
    return parse_run_file(data)


def parse_run_file(data: bytes) -> RunFile:
    """Return the content of `run.json`, given its bytes.

    Raises:
        msgspec.DecodeError: the file has another content.
    """
    file = msgspec.json.decode(data, type=RunFile)
    return file if is_signed(msgspec.json.decode(data)) else msgspec.structs.replace(file, signature="")
