"""`paceline serve` and `paceline join`: training on several machines."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import structs

from .. import __version__
from ..errors import ConfigurationError, PeerLostError
from ..launcher.terminal.output import plain_console, print_sentence
from ..report.words import counted
from ..settings.setting import SERVE
from ..wire.addresses import seen_from
from ..wire.secret import SECRET, VARIABLE, new_secret, read_secret, take_secret, write_secret
from ..wire.tcp import TCP
from .console import interruptible
from .numbers import number_option, whole_number_option
from .options import (
    AsModule,
    DevicesOption,
    Port,
    RemoteServers,
    RunDir,
    ServedServers,
    ShowAll,
)
from .run_command import find_script, report
from .setting_options import takes_settings

if TYPE_CHECKING:
    from ..runtime.job import Job

__all__ = ["SecretFile", "address_of", "join", "require_own_address", "secret_of", "serve", "worker_range"]


JoinImports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Import this module, which adds a kind of device to torch, in the workers of this machine. Can be "
        "repeated.",
        show_default=False,
    ),
]

SecretFile = Annotated[
    Path | None,
    typer.Option(
        "--secret-file",
        metavar="FILE",
        help="File with the secret of the run, which only you may read. Default: the environment variable "
        "PACELINE_SECRET.",
        show_default=False,
    ),
]


@takes_settings(SERVE, before="wait")
def serve(
    workers: Annotated[
        str,
        typer.Option(
            "--workers",
            "-n",
            metavar="N|MIN:MAX",
            help="Number of workers. With MIN:MAX, training begins with MIN workers and pauses below MIN, and others "
            "may join until there are MAX. With N, training begins with N workers and continues with at least one.",
            rich_help_panel="Run",
        ),
    ] = "2",
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="ADDRESS",
            help="Address of this machine on which the other machines reach it; 0.0.0.0 for all its addresses.",
            rich_help_panel="Run",
        ),
    ] = "127.0.0.1",
    port: Port = 0,
    servers: ServedServers = 1,
    remote_servers: RemoteServers = 0,
    wait: Annotated[
        float | None,
        number_option(
            "--wait",
            metavar="SECONDS",
            least=0,
            help="How long to wait for others to join while there are too few workers. Then the run ends, and its "
            "weights are saved. Default: no limit.",
            show_default=False,
            rich_help_panel="Run",
        ),
    ] = None,
    announce_to: Annotated[
        int | None, whole_number_option("--announce", hidden=True)
    ] = None,  # for `launcher.processes.serving`
    command: Annotated[str, typer.Option("--command", hidden=True)] = "",  # for `launcher.clusters.scheduled`
    **settings: Any,
) -> None:
    """Start a run that machines can join: its coordinator and its servers run on this machine.

    With --remote-servers, some of the servers run on machines that join.

    paceline serve --workers 2:16 --servers 2 --sync elastic-bsp --listen 10.0.0.1 --port 29600
    """
    with interruptible("nothing was started"):
        from ..outlets.wanted import open_outlets
        from ..runtime.job_options import make_job
        from ..runtime.resuming import earlier_run, require_trust

        sys.path.insert(0, os.getcwd())  # --import may name modules in this directory
        least, most = worker_range(workers)
        job = make_job(
            workers=most,
            least=least,
            pause_below=least if ":" in workers else 1,
            joined=True,
            servers=servers,
            remote_servers=remote_servers,
            transport="tcp",
            port=port,
            dry_run=True,
            **settings,
        )
        token = take_secret(os.environ)
        is_new = not token
        if is_new and job.resumed is not None and (file := Path(job.run_dir, SECRET)).exists():
            earlier = earlier_run(Path(job.run_dir), force=True)
            if not settings["trust"]:
                require_trust(earlier, Path(job.run_dir), {"the secret in": str(file)})
            token = read_secret(file)  # the machines that had joined the run know it
        job = structs.replace(job, version=__version__, token=token or new_secret(), secure=True)
        outlets = open_outlets(settings["dashboard"], settings["tensorboard"], settings["metrics_port"])
    from ..launcher.live_run.local import HostMachine, Placement
    from ..launcher.processes.program import importing

    with importing():  # imports torch
        from ..launcher.live_run.run import start

    console = plain_console(stderr=True)
    placement = Placement(listen, (HostMachine(listen),) * job.local_servers, ())
    with interruptible(), outlets:
        result = start(
            job,
            [],
            b"",
            sys.path,
            console=console,
            placement=placement,
            listening=lambda address, job: _tell_how_to_join(address, job, announce_to, is_new=is_new),
            patience_s=wait,
            command=command,
            outlets=outlets,
            force=settings["force"],
        )
    report(result)


def join(
    address: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT", help="Address that `paceline serve` has printed.", show_default=False
        ),
    ],
    script: Annotated[
        Path | None,
        typer.Argument(
            help="Python script that uses paceline; with -m, a module. Not needed with --workers 0.",
            show_default=False,
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script.", show_default=False)
    ] = None,
    workers: Annotated[
        int | None,
        whole_number_option(
            "--workers",
            "-n",
            least=0,
            help="Number of workers on this machine. Default: one for each of its accelerators; 1 if it has none.",
            show_default=False,
        ),
    ] = None,
    devices: DevicesOption = None,
    imports: JoinImports = None,
    servers: Annotated[
        int,
        whole_number_option(
            "--servers",
            metavar="K",
            least=0,
            help="Number of servers that this machine brings to a run that was started with --remote-servers.",
            rich_help_panel="Servers on this machine",
        ),
    ] = 0,
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="ADDRESS",
            help="Address of this machine on which the workers reach its servers; 0.0.0.0 for all its addresses. "
            "Default: the one from which it reaches HOST.",
            show_default=False,
            rich_help_panel="Servers on this machine",
        ),
    ] = "",
    port: Annotated[
        int,
        whole_number_option(
            "--port",
            least=0,
            most=65535,
            help="TCP port of the servers on this machine. 0 means any free port.",
            rich_help_panel="Servers on this machine",
        ),
    ] = 0,
    wait: Annotated[
        float,
        number_option(
            "--wait",
            metavar="SECONDS",
            least=0,
            help="How long to try to reach the address if it does not answer.",
        ),
    ] = 60.0,
    rejoin: Annotated[
        int,
        whole_number_option(
            "--rejoin",
            metavar="N",
            least=0,
            help="How often workers of this machine join again after they were taken out, because they were stopped "
            "or could not be reached.",
        ),
    ] = 10,
    secret_file: SecretFile = None,
    as_module: AsModule = False,
    run_dir: RunDir = None,
    show_all: ShowAll = False,
) -> None:
    """Run workers on this machine that join a run, which `paceline serve` has started on this or another machine.

    paceline join 10.0.0.1:29600 train.py --epochs 10

    With --servers, the machine also brings servers to the run: paceline join --servers 1 10.0.0.1:29600 train.py

    The tasks of a Slurm job need no address: srun paceline join --slurm train.py (see paceline join --slurm --help).
    """
    with interruptible("nothing was started"):
        from ..launcher.processes.devices import assign_devices, shared
        from ..trace.run_dir import require_usable

        place = address_of(address)
        require_processes(script, workers, servers, listen, port)
        require_own_address(listen)
        if str(script).startswith("-"):
            raise ConfigurationError(
                f"{script} follows the address, where the script is expected. Write all options before the address: "
                f"paceline join {script} ... {address} SCRIPT"
            )
        order = []
        if script is not None:
            path = find_script(script, as_module=as_module)
            order = ["module", str(script)] if as_module else ["script", str(path)]
        # The servers look here for the modules that --import has named, as those of `serve` do.
        sys.path.append(os.getcwd())
        assigned = assign_devices(devices, workers, usual=1, imports=imports or ())
        if run_dir is not None:
            require_usable(run_dir)
        token = secret_of(secret_file)
    from ..launcher.clusters.join import ServerOffer
    from ..launcher.clusters.join import join as join_run
    from ..launcher.terminal.channels import Streams

    console = plain_console(stderr=True)
    if warning := shared(assigned.devices):
        print_sentence(console, f"warning: {warning}")
    with interruptible("all processes on this machine have ended"):
        joined = join_run(
            place,
            token,
            [*order, *(arguments or [])],
            version=__version__,
            workers=assigned.workers,
            devices=assigned.devices,
            imports=imports or (),
            servers=ServerOffer(servers, listen, port, sys.path) if servers else None,
            console=console,
            patience_s=wait,
            rejoins=rejoin,
            run_dir=run_dir,
            streams=Streams(show_all=show_all),
        )
    print(f"logs: {joined.run_dir}")
    if not joined.finished:
        raise PeerLostError(f"no worker on this machine has finished its script ({joined.endings})")


def secret_of(file: Path | None) -> str:
    """Return the secret of the run that the user wants to join or to watch."""
    token = take_secret(os.environ, file)
    if not token:
        raise ConfigurationError(
            f"the secret of the run is unknown; set {VARIABLE} to the content of the file that `paceline serve` has "
            "written, or name a copy of this file with --secret-file."
        )
    return token


def _tell_how_to_join(address: str, job: Job, announce_to: int | None, *, is_new: bool) -> None:
    """Print how machines join a run, and announce it. Write its secret to a file if `is_new`."""
    file = Path(job.run_dir, SECRET)
    known = f"{VARIABLE}=$(cat {file})" if is_new else f"{VARIABLE}=..."
    if is_new and not file.exists():
        write_secret(job.token, file)
    most = f", and at most {job.workers}" if job.workers > job.least else ""
    brought = f", and {counted(job.remote_servers, 'server')}" if job.remote_servers else ""
    # If the run listens on all addresses, any name by which the other machines know this one will do.
    place = seen_from(address, f"tls:{socket.gethostname()}:0").removeprefix("tls:")
    least = counted(job.least, "worker")
    print_sentence(plain_console(stderr=True), f"waiting for {least}{most}{brought}; on each machine, run:")
    print(
        f"  {known} paceline join {place} SCRIPT [ARGUMENTS]",
        file=sys.stderr,
        flush=True,
    )
    if job.remote_servers:
        print(
            f"and on machines that bring servers, {job.remote_servers} in all, the same with `join --servers N`",
            file=sys.stderr,
            flush=True,
        )
    if announce_to is not None:
        from ..launcher.processes.serving import Announcement, announce

        secret_file = str(file) if is_new else ""
        announce(announce_to, Announcement(address, job.run_dir, secret_file))


def require_processes(script: Path | None, workers: int | None, servers: int, listen: str, port: int) -> None:
    """Raise `ConfigurationError` unless a machine that joins has something to do, and its options belong together."""
    if workers == 0 and not servers:
        raise ConfigurationError(
            "workers is 0, so this machine has nothing to do; let it bring a server (--servers 1), or run a worker."
        )
    if workers != 0 and script is None:
        raise ConfigurationError(
            "the script is missing: paceline join HOST:PORT SCRIPT. Only a machine without workers (--workers 0) "
            "needs none."
        )
    if (listen or port) and not servers:
        raise ConfigurationError(
            "--listen and --port are for the servers of this machine, and it brings none; add --servers 1, or omit "
            "them."
        )


def require_own_address(listen: str) -> None:
    """Raise `ConfigurationError` unless this machine can listen on an address. "" stands for any."""
    if listen:
        TCP.listen(listen)[0].close()


def worker_range(text: str) -> tuple[int, int]:
    """Return the least and the largest number of workers in "N" or "MIN:MAX"."""
    least, colon, most = text.partition(":")
    if not (least.isdecimal() and (most.isdecimal() if colon else not most)):
        raise ConfigurationError(
            f"workers is {text!r}, expected a number, such as 4, or the least and the largest number, such as 2:16."
        )
    return int(least), int(most or least)


def address_of(text: str) -> str:
    """Return the address "tls:HOST:PORT" of a coordinator."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"the address is {text!r}, expected HOST:PORT, such as 10.0.0.1:29600.")
    return f"tls:{host}:{port}"
