"""Commands that train: `paceline run` and `demo` on this machine, `serve` and `join` on several machines."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer
from msgspec import structs
from rich.table import Table
from rich.text import Text

from .. import VERSION
from ..errors import ConfigurationError, PeerLostError
from ..look.summary import summary_rows
from ..settings import SETTINGS, Settings
from ..settings.checks import RUN, SCHEDULED, SERVE
from ..start.terminal import plain_console, print_sentence
from ..trace.run_dir import REPORT
from ..wire.secure import SECRET, VARIABLE, new_secret, read_secret, take_secret, write_secret
from ..wire.transports import TCP, seen_from
from ..words import counted
from .console import EXIT_NOT_ALL_WELL, interruptible
from .options import (
    AsModule,
    DevicesOption,
    Port,
    RemoteServers,
    RunDir,
    ServedServers,
    ShowAll,
    Workers,
    as_options,
    number_option,
    takes_settings,
    whole_number_option,
)
from .resumable import Resumable

if TYPE_CHECKING:
    from ..run.job import Job
    from ..start.results import RunResult


class RunCommand(Resumable):
    """A command whose last arguments are a script and the script's own arguments.

    The command warns if an argument of the script looks like an option of the command.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)  # the parser empties `args`
        rest = super().parse_args(ctx, args)
        script, arguments = ctx.params["script"], list(ctx.params["arguments"] or ())
        shown = [parameter for parameter in self.params if not getattr(parameter, "hidden", False)]
        options = {name for parameter in shown for name in parameter.opts if name.startswith("-")}
        options.discard("-m")  # after the script, -m is always an option of the script
        strays = _strays(arguments, options)
        # With --resume, the script and its arguments may come from the earlier command.
        last = given[-len(arguments) - 1 :]
        typed = [str(Path(word)) for word in last[:1]] == [str(script)] and last[1:] == arguments
        separated = given[: len(given) - len(arguments) - 1][-1:] == ["--"]
        if strays and typed and not separated:
            names, command = " ".join(strays), f"paceline {ctx.info_name}"
            print_sentence(
                plain_console(stderr=True),
                f"warning: options after {script} are passed to the script: {', '.join(strays)}. Options for "
                f"paceline must come before the script: {command} {names} ... {script}. To silence this warning, "
                f"write -- before the script: {command} -- {script} {names} ...",
            )
        return rest


def _strays(arguments: list[str], options: set[str]) -> list[str]:
    """Return the `options` that occur in `arguments` before any lone --.

    An option may have the form --name, --name=value, -n or -n4.
    """
    named = []
    for argument in arguments[: arguments.index("--")] if "--" in arguments else arguments:
        name = argument.partition("=")[0]
        named.append(name[:2] if name[1:2] != "-" and name[2:].isdigit() else name)
    return [name for name in dict.fromkeys(named) if name in options]


@takes_settings(RUN, before="as_module")
def run(
    script: Annotated[
        Path,
        typer.Argument(help="Python script that uses paceline; with -m, a module.", show_default=False),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script.", show_default=False)
    ] = None,
    workers: Workers = None,
    devices: DevicesOption = None,
    as_module: AsModule = False,
    show_all: ShowAll = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the options, show what would be started, and exit.")
    ] = False,
    observer: Annotated[str, typer.Option("--observer", hidden=True)] = "",  # for `paceline check`
    command: Annotated[str, typer.Option("--command", hidden=True)] = "",  # for `cli.resumable`
    **settings: Unpack[Settings],
) -> None:
    """Run a script in several worker processes. python script.py runs the same script in one process.

    paceline run --workers 4 --servers 2 --sync elastic-bsp:lookahead=15 train.py --epochs 10
    """
    with interruptible("nothing was started"):
        from ..look.show_process import open_outlets
        from ..run.job import describe
        from ..run.job_options import make_job
        from ..run.resuming import require_same_source
        from ..start.processes.devices import assign_devices, shared, with_server_devices

        module = str(script) if as_module else ""
        script = find_script(script, as_module=as_module)
        masked = not settings["torchrun_env"]
        assigned = assign_devices(devices, workers, usual=2, imports=settings["imports"], masked=masked)
        job = make_job(workers=assigned.workers, devices=assigned.devices, dry_run=True, **settings)
        job = with_server_devices(job)
        if job.resumed is not None and not settings["accept_changes"]:
            source = script.read_text(encoding="utf-8", errors="replace")
            note = require_same_source(f"the script {script}", source, Path(job.run_dir), "--accept-changes")
            if note:
                print_sentence(plain_console(stderr=True), f"warning: {note}")
        outlets = open_outlets(settings["dashboard"], settings["tensorboard"], settings["metrics_port"])
    console = plain_console(stderr=True)
    if warning := shared(job.devices):
        print_sentence(console, f"warning: {warning}")
    if dry_run:
        outlets.close()
        words = [sys.executable, *(["-m", module] if module else [str(script)]), *(arguments or [])]
        _print_pairs({**describe(job), "command": shlex.join(words)})
        return
    from ..start.display import announce_run
    from ..start.local import ProcessPlacement
    from ..start.processes.program import importing
    from ..start.processes.spawn import Starter

    announce_run(job, console)
    with interruptible(), outlets, Starter(ProcessPlacement.on_loopback(job).prefixes()) as starter:
        # The launcher and the processes of the run import torch, which takes a second, at the same time.
        with importing():
            from ..start.launch import run_script

        with _summarized():
            result = run_script(
                job,
                script,
                arguments or [],
                console=console,
                starter=starter,
                module=module,
                show_all=show_all,
                observer=shlex.split(observer),
                outlets=outlets,
                command=command,
                force=settings["force"],
            )
    _tell_result(result)


@contextmanager
def _summarized() -> Iterator[None]:
    """If a signal ends the run, print the summary of the run, if there is one."""
    from ..start.processes.interruption import Interrupted, Terminated

    try:
        yield
    except (Interrupted, Terminated) as end:
        if end.summary:
            _print_summary(end.summary)
        raise


def _tell_result(result: RunResult) -> None:
    """Print the summary of a finished run, and where its results are. Exit with code 3 if there were problems."""
    _print_summary(result.summary)
    if Path(result.summary["weights"]).parent == result.run_dir:
        print(f"weights, traces and logs: {result.run_dir}")
    else:
        print(f"weights: {result.summary['weights']}; traces and logs, possibly incomplete: {result.run_dir}")
    if (page := result.run_dir / REPORT).exists():
        print(f"report: {page}")
    if result.problems or result.summary["crashed_workers"]:
        raise typer.Exit(EXIT_NOT_ALL_WELL)


def find_script(script: Path, *, as_module: bool) -> Path:
    """Return the path of a script or module, and let modules next to it be imported (--import may name them).

    Raises:
        ConfigurationError: there is no such script or module.
    """
    from ..run.job_options import require_script

    if as_module:
        sys.path.insert(0, os.getcwd())
        script = _find_module(str(script))
    else:
        sys.path.insert(0, str(script.resolve().parent))
    require_script(script)
    return script


def _find_module(name: str) -> Path:
    """Return the path of the file that `python -m name` would run. No module is imported.

    Raises:
        ConfigurationError: there is no such module.
    """
    top, *parts = [*name.split("."), "__main__"]
    # A package that is installed in editable mode may have a finder of its own.
    spec = next(filter(None, (finder.find_spec(top, None) for finder in sys.meta_path)), None)
    while parts and spec is not None and spec.submodule_search_locations is not None:
        spec = PathFinder.find_spec(parts.pop(0), list(spec.submodule_search_locations))
    if spec is None or spec.origin is None or parts not in ([], ["__main__"]):
        raise ConfigurationError(
            f"the module {name!r} was not found, or is a package without __main__.py; give the name of a module in "
            "the current directory or on the module search path."
        )
    return Path(spec.origin)


def demo(
    seeds: Annotated[
        int,
        whole_number_option(
            "--seeds", least=1, help="Number of random seeds. Each result is the median over the seeds."
        ),
    ] = 1,
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Compare all sync models that allow two servers, and also show delayed pulls and aborts (about 7 "
            "minutes).",
        ),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Compare bsp, bsp with balanced batches, and asp on generated images, which needs no additional "
            "packages (less than a minute).",
        ),
    ] = False,
    run_dir: RunDir = None,
) -> None:
    """Compare four sync models, and bsp with balanced batches, by training on handwritten digits.

    Each model except bsp is trained twice: with the translated learning rate and momentum of bsp, and with its own best
    learning rate and momentum. One of the four workers is three times slower than the others. The demo takes about
    three minutes on two cores and ends with a table and a page that shows the runs side by side.
    """
    from ..lab.demo import EVERY_SETTING, QUICK, QUICK_SETTINGS, SETTINGS, run_demo
    from ..trace.run_dir import require_usable

    if quick and every:
        raise ConfigurationError("--quick and --all exclude each other; use one of them.")
    if run_dir is not None:
        require_usable(run_dir)
    with interruptible():
        run_demo(
            console=plain_console(),
            run_dir=None if run_dir is None else Path(run_dir),
            seeds=tuple(range(seeds)),
            settings=QUICK_SETTINGS if quick else EVERY_SETTING if every else SETTINGS,
            problem=QUICK if quick else None,
        )


def _print_pairs(pairs: dict[str, str]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for key, value in pairs.items():
        table.add_row(Text(key, style="bold"), value)
    console = plain_console()
    console.print(table, soft_wrap=not console.is_terminal)


def _print_summary(summary: dict[str, Any]) -> None:
    rows = summary_rows(summary)
    _print_pairs(rows)
    for finding in summary.get("findings", []):
        if finding not in rows.values():
            print_sentence(plain_console(), finding)


# -- `paceline serve` and `paceline join`: training on several machines --------------------------------------

JoinImports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="In the workers of this machine, import this module, which adds a kind of device to torch. Can be "
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
            help="Number of workers. With MIN:MAX, training begins with MIN workers and pauses while there are fewer, "
            "and more workers may join until there are MAX. With N, training begins with N workers and continues with "
            "at least one.",
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
            help="How long to wait for more workers to join while there are too few. After this time, the run ends, "
            "and its weights are saved. Default: no limit.",
            show_default=False,
            rich_help_panel="Run",
        ),
    ] = None,
    announce_to: Annotated[
        int | None, whole_number_option("--announce", hidden=True)
    ] = None,  # for `start.beside`
    command: Annotated[str, typer.Option("--command", hidden=True)] = "",  # for `start.schedulers`
    **settings: Any,
) -> None:
    """Start a run that machines can join: its coordinator and its servers run on this machine.

    With --remote-servers, some of the servers run on machines that join.

    paceline serve --workers 2:16 --servers 2 --sync elastic-bsp --listen 10.0.0.1 --port 29600
    """
    with interruptible("nothing was started"):
        from ..look.show_process import open_outlets
        from ..run.job_options import make_job
        from ..run.resuming import earlier_run, require_trust
        from ..start.processes.devices import with_server_devices

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
            token = read_secret(file)  # the machines that had joined the run know this secret
        job = with_server_devices(
            structs.replace(job, version=VERSION, token=token or new_secret(), secure=True)
        )
        outlets = open_outlets(settings["dashboard"], settings["tensorboard"], settings["metrics_port"])
    from ..start.local import HostMachine, ProcessPlacement
    from ..start.processes.program import importing

    with importing():  # imports torch
        from ..start.run import start

    console = plain_console(stderr=True)
    placement = ProcessPlacement(listen, (HostMachine(listen),) * job.local_servers, ())
    with interruptible(), outlets, _summarized():
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
    _tell_result(result)


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
            help="Number of workers on this machine. Default: one for each of its accelerators; 1 if there is none.",
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
            "Default: the address from which this machine reaches HOST.",
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
    server_device: Annotated[
        str,
        typer.Option(
            SETTINGS["server_device"].option,
            metavar=SETTINGS["server_device"].metavar,
            help=SETTINGS["server_device"].help,
            rich_help_panel="Servers on this machine",
        ),
    ] = "cpu",
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
            help="Number of times that workers of this machine join again after they were taken out of the run because "
            "they were stopped or could not be reached.",
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
        from ..start.processes.devices import assign_devices, devices_of_servers, shared
        from ..trace.run_dir import require_usable

        place = address_of(address)
        require_processes(script, workers, servers, listen, port, server_device)
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
        # The servers look in the current directory for the modules that --import has named, as the servers of
        # `serve` do.
        sys.path.append(os.getcwd())
        assigned = assign_devices(devices, workers, usual=1, imports=imports or ())
        of_servers = devices_of_servers(server_device, assigned.devices, imports or ())
        if run_dir is not None:
            require_usable(run_dir)
        token = secret_of(secret_file)
    from ..start.join import ServerOffer
    from ..start.join import join as join_run
    from ..start.terminal import StandardStreams

    console = plain_console(stderr=True)
    if warning := shared(assigned.devices):
        print_sentence(console, f"warning: {warning}")
    with interruptible("all processes on this machine have ended"):
        joined = join_run(
            place,
            token,
            [*order, *(arguments or [])],
            version=VERSION,
            workers=assigned.workers,
            devices=assigned.devices,
            imports=imports or (),
            servers=ServerOffer(servers, listen, port, sys.path, of_servers) if servers else None,
            console=console,
            patience_s=wait,
            rejoins=rejoin,
            run_dir=run_dir,
            streams=StandardStreams(show_all=show_all),
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
    """Print how machines join a run, and announce the run. If the secret is new (`is_new`), write it to a file."""
    file = Path(job.run_dir, SECRET)
    known = f"{VARIABLE}=$(cat {shlex.quote(str(file))})" if is_new else f"{VARIABLE}=..."
    if is_new and not file.exists():
        write_secret(job.token, file)
    most = f", and at most {job.workers}" if job.workers > job.least else ""
    brought = f", and {counted(job.remote_servers, 'server')}" if job.remote_servers else ""
    # If the run listens on all addresses, the command has the name of this machine in place of an address.
    place = seen_from(address, f"tls:{socket.gethostname()}:0").removeprefix("tls:")
    least = counted(job.least, "worker")
    print_sentence(plain_console(stderr=True), f"waiting for {least}{most}{brought}; on each machine, run:")
    print(f"  {known} paceline join {place} SCRIPT [ARGUMENTS]", file=sys.stderr, flush=True)
    if job.remote_servers:
        print(
            f"on machines that bring servers ({job.remote_servers} in all), run the same command with "
            "`join --servers N`",
            file=sys.stderr,
            flush=True,
        )
    if announce_to is not None:
        from ..start.beside import Announcement, announce

        secret_file = str(file) if is_new else ""
        announce(announce_to, Announcement(address, job.run_dir, secret_file))


def require_processes(
    script: Path | None, workers: int | None, servers: int, listen: str, port: int, server_device: str
) -> None:
    """Raise `ConfigurationError` unless a machine that joins has something to do, and its options are consistent."""
    if workers == 0 and not servers:
        raise ConfigurationError(
            "workers is 0, so this machine has nothing to do; let it bring a server (--servers 1), or run a worker "
            "(--workers 1)."
        )
    if workers != 0 and script is None:
        raise ConfigurationError(
            "the script is missing: paceline join HOST:PORT SCRIPT. Only a machine without workers (--workers 0) "
            "needs no script."
        )
    of_servers = {"--listen": listen, "--port": port, "--server-device": server_device.removeprefix("cpu")}
    if not servers and (given := " and ".join(name for name, value in of_servers.items() if value)):
        raise ConfigurationError(
            f"only servers on this machine use {given}, but this machine brings no servers; add --servers 1, or omit "
            f"{given}."
        )


def require_own_address(listen: str) -> None:
    """Raise `ConfigurationError` unless this machine can listen on an address. "" stands for any address."""
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


# -- `python -m paceline.join` and `paceline join --slurm`: training in a job that a scheduler has started ---

PROCESSES = "Each process runs one worker, and the first process also runs the coordinator and the servers."

TORCHRUN = f"""Run a script in the processes that torchrun has started. {PROCESSES}

torchrun --nnodes 2 --nproc-per-node 2 -m paceline.join --sync elastic-bsp train.py --epochs 10"""

SLURM = f"""Run a script in the tasks of a Slurm job step. {PROCESSES} --slurm must be the first option.

srun --ntasks 4 paceline join --slurm --sync elastic-bsp train.py --epochs 10"""

HOW_TO_SHARE_SECRET = (
    "Write a secret to a file that only you may read, `(umask 077; openssl rand -hex 32 > paceline-secret)`, copy it "
    f"to all machines, and add --secret-file paceline-secret; or set {VARIABLE} on all machines."
)


def scheduled_join(scheduler: str) -> Callable[..., None]:
    """Return the command that a scheduler runs in each process of a job."""

    @takes_settings(SCHEDULED, before="run_dir")
    def command(
        script: Annotated[
            Path,
            typer.Argument(help="Python script that uses paceline; with -m, a module.", show_default=False),
        ],
        arguments: Annotated[
            list[str] | None, typer.Argument(help="Arguments of the script.", show_default=False)
        ] = None,
        workers: Annotated[
            str | None,
            typer.Option(
                "--workers",
                "-n",
                metavar="N|MIN:MAX",
                help="Number of workers. With MIN:MAX, training begins with MIN workers and pauses while there are "
                "fewer, and more workers may join until there are MAX. With N, training begins with N workers and "
                "continues with at least one. Default: the number of processes that the scheduler has started. Each "
                "process runs one worker.",
                show_default=False,
                rich_help_panel="Run",
            ),
        ] = None,
        listen: Annotated[
            str,
            typer.Option(
                "--listen",
                metavar="ADDRESS",
                help="Address on which the other processes reach the machine of the first process; 0.0.0.0 for all its "
                "addresses. Default: the address to which the scheduler's name for this machine resolves.",
                show_default=False,
                rich_help_panel="Run",
            ),
        ] = "",
        port: Port = 0,
        servers: ServedServers = 1,
        wait: Annotated[
            float,
            number_option(
                "--wait",
                metavar="SECONDS",
                least=0,
                help="How long to wait for the first process if it does not answer, and for more workers to join while "
                "there are too few. After this time, the job fails.",
            ),
        ] = 60.0,
        secret_file: SecretFile = None,
        run_dir: RunDir = None,
        as_module: AsModule = False,
        show_all: ShowAll = False,
        **settings: Any,
    ) -> None:
        with interruptible("nothing was started"):
            from ..run.job_options import make_job
            from ..start.processes.devices import device_of_process
            from ..start.schedulers import ENVIRONMENTS, join_job

            place = ENVIRONMENTS[scheduler](os.environ)
            if (
                settings["server_device"] == "auto"
            ):  # the accelerators of this machine may belong to other processes of the job
                settings["server_device"] = "cpu"
            module = str(script) if as_module else ""
            path = find_script(script, as_module=as_module)
            sys.path.insert(0, os.getcwd())  # --import may name modules in this directory
            workers = workers or str(place.count)
            least, most = worker_range(workers)
            SETTINGS["port"].value(port)
            if place.serves:
                require_own_address(listen)
            # Every process checks the settings, so that each process says what is wrong.
            make_job(
                workers=most,
                least=least,
                joined=True,
                servers=servers,
                transport="tcp",
                dry_run=True,
                **settings,
            )
            token = take_secret(os.environ, secret_file)
            if not token and not (place.alone and place.store):
                raise ConfigurationError(f"the secret of the job is unknown. {HOW_TO_SHARE_SECRET}")
            device = device_of_process(place.local, settings["imports"])
        from ..start.terminal import StandardStreams

        serve = [f"--workers={workers}", f"--wait={wait:g}", f"--servers={servers}", *as_options(settings)]
        with interruptible("all processes that were started here have ended"):
            code = join_job(
                place,
                [*(["module", module] if module else ["script", str(path)]), *(arguments or [])],
                serve,
                listen=listen,
                port=port,
                token=token,
                version=VERSION,
                console=plain_console(stderr=True),
                patience_s=wait,
                run_dir=run_dir,
                streams=StandardStreams(show_all=show_all),
                device=device,
                force=settings["force"],
            )
        raise typer.Exit(code)

    return command
