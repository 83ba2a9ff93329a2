"""The description of a run in `run.json`: its settings, and the command that repeats it."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from ... import __version__
from ...core.oversight.guard import guard_mode
from ...report.run_file import RunFile
from ...report.run_report import Setting
from ...runtime.job import Job
from ...settings import SETTINGS
from ...wire.addresses import best_transport

__all__ = ["command_line", "description_of"]

# An argument whose value is replaced, because it may be a secret, such as --api-key=... or --hf-token ...
SECRET = re.compile(r"^--?([\w-]*[-_])?(password|passwd|secret|api[-_]?key|access[-_]?key|token)(=|$)", re.I)
HIDDEN = "..."

FIRST = ["batch", "split", "pace", "slowdown", "jitter", "hyperparameters", "guard", "traces", "on_nan"]
"""The settings for which people look first."""


def description_of(job: Job, program: Sequence[str], command: str = "") -> RunFile:
    """Return the description of a run that begins now.

    Args:
        job: the configuration of the run.
        program: what each worker runs, as in `Order.arguments`.
        command: the command line that repeats the run. Default: that of this process.
    """
    return RunFile(
        version=__version__,
        begun_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=_without_run_dir(command or command_line(), Path(job.run_dir)),
        folder=os.getcwd(),
        program=tuple(_without_secrets(program)),
        settings=tuple(_settings(job)),
        sync=job.sync,
        workers=job.workers,
        servers=job.servers,
        shards=job.shards,
        joined=job.joined,
        emulated=job.emulated,
        run_dir=str(Path(job.run_dir).absolute()),
        lineage=job.lineage,
        origin=job.origin,
    )


def command_line(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> str:
    """Return the command line of this process, as a user would repeat it; "" if it would not repeat the run.

    Args:
        arguments: the interpreter and its arguments. Default: those of this process.
        environment: the environment variables, which tell how a scheduler has started the process.

    >>> command_line(["/usr/bin/python3", "/opt/bin/paceline", "run", "--run-dir", "my runs/1", "train.py"])
    "paceline run --run-dir 'my runs/1' train.py"
    >>> command_line(["/usr/bin/python3", "-u", "train.py", "--api-key", "123"])
    'python3 -u train.py --api-key ...'
    >>> command_line(["/usr/bin/python3", "-m", "ipykernel_launcher", "-f", "kernel.json"])
    ''
    >>> sizes = {"GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "4"}
    >>> command_line(["/usr/bin/python3", "-u", "-m", "paceline.join", "train.py"], sizes)
    'torchrun --nnodes=1 --nproc-per-node=4 -m paceline.join train.py'
    """
    interpreter, *words = sys.orig_argv if arguments is None else arguments
    if "paceline.join" in words:
        nodes, local = environment.get("GROUP_WORLD_SIZE"), environment.get("LOCAL_WORLD_SIZE")
        sizes = [f"--nnodes={nodes}", f"--nproc-per-node={local}"] if nodes and local else []
        words = ["torchrun", *sizes, "-m", *words[words.index("paceline.join") :]]
    elif words[:2] == ["-m", "paceline"]:
        words = ["paceline", *words[2:]]
    elif words and Path(words[0]).name == "paceline":
        words[0] = "paceline"
    elif not words or words[0] == "-c" or words[:2] == ["-m", "ipykernel_launcher"]:
        return ""
    else:
        words = [Path(interpreter).name, *words]
    if words[:3] == ["paceline", "join", "--slurm"]:
        words = ["srun", *words]
    return shlex.join(_without_secrets(words))


def _without_run_dir(command: str, run_dir: Path) -> str:
    """Return a command line without the name of the run directory, because another run must not use it again."""
    words = shlex.split(command)
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        following = 1 if value else 2
        value = value or "".join(words[place + 1 : place + 2])
        if name == "--run-dir" and Path(value).absolute() == run_dir.absolute():
            return shlex.join(words[:place] + words[place + following :])
    return command


def _without_secrets(words: Sequence[str]) -> list[str]:
    """Return the arguments without the values of those that may be secrets."""
    shown = []
    hide = False
    for word in words:
        found = SECRET.match(word)
        shown.append(HIDDEN if hide else word[: found.end()] + HIDDEN * (found[3] == "=") if found else word)
        hide = found is not None and not found[3] and not hide
    return shown


def _settings(job: Job) -> list[Setting]:
    """Return the settings of a run in the order in which people look for them."""
    workers = f"{job.least}:{job.workers}" if job.least < job.workers else str(job.workers)
    rows: list[tuple[str, str, str | None]] = [
        ("--sync", job.sync, "bsp"),
        ("--workers", workers, None),
        *([("--devices", job.devices_setting, None)] if job.devices_setting else []),
        ("--servers", str(job.servers), None),
        ("--remote-servers", str(job.remote_servers), "0"),
    ]
    usual = {
        "shards": str(job.servers),
        "guard": guard_mode(None, translated=job.translated),
        "transport": job.transport if job.joined else best_transport().name,
    }
    told = {name for name, _, _ in rows}
    for name in dict.fromkeys([*FIRST, *SETTINGS]):
        row = SETTINGS[name]
        if row.reported and row.field and row.option not in told:
            default = "" if row.default is None else row.written(row.value(row.default))
            rows.append((row.option, row.written(getattr(job, row.field)), usual.get(name, default)))
    return [Setting(name, value, value == default) for name, value, default in rows]
