"""`python -m paceline.join` and `paceline join --slurm`: training in a job that a scheduler has started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import ConfigurationError
from ..launcher.clusters.environments import ENVIRONMENTS
from ..launcher.terminal.output import plain_console
from ..settings import SETTINGS
from ..settings.setting import SCHEDULED
from ..wire.secret import VARIABLE, take_secret
from .console import interruptible
from .join_command import SecretFile, require_own_address, worker_range
from .numbers import number_option
from .options import AsModule, Port, RunDir, ServedServers, ShowAll
from .run_command import find_script
from .setting_options import as_options, takes_settings

__all__ = ["SLURM", "TORCHRUN", "scheduled_join"]

EACH = "Each of them runs one worker, and the first one also runs the coordinator and the servers."

TORCHRUN = f"""Run a script in the processes that torchrun has started. {EACH}

torchrun --nnodes 2 --nproc-per-node 2 -m paceline.join --sync elastic-bsp train.py --epochs 10"""

SLURM = f"""Run a script in the tasks of a Slurm job step. {EACH} --slurm must be the first option.

srun --ntasks 4 paceline join --slurm --sync elastic-bsp train.py --epochs 10"""

HOW = (
    "Write one to a file that only you may read, `(umask 077; openssl rand -hex 32 > paceline-secret)`, copy it to "
    f"all machines, and add --secret-file paceline-secret; or set {VARIABLE} on all machines."
)


def scheduled_join(scheduler: str) -> Callable[..., None]:
    """Return the command that each process of a job runs which this scheduler has started."""

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
                help="Number of workers. With MIN:MAX, training begins with MIN workers and pauses below MIN, and "
                "others may join until there are MAX. With N, training begins with N workers and continues with at "
                "least one. Default: the number of processes that the scheduler has started. Each runs one worker.",
                show_default=False,
                rich_help_panel="Run",
            ),
        ] = None,
        listen: Annotated[
            str,
            typer.Option(
                "--listen",
                metavar="ADDRESS",
                help="Address of the machine of the first process on which the others reach it; 0.0.0.0 for all its "
                "addresses. Default: the one that the scheduler's name of this machine stands for.",
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
                help="How long to wait for the first process if it does not answer, and for others to join while "
                "there are too few workers. Then the job fails.",
            ),
        ] = 60.0,
        secret_file: SecretFile = None,
        run_dir: RunDir = None,
        as_module: AsModule = False,
        show_all: ShowAll = False,
        **settings: Any,
    ) -> None:
        with interruptible("nothing was started"):
            from ..launcher.processes.devices import device_of_process
            from ..runtime.job_options import make_job

            place = ENVIRONMENTS[scheduler](os.environ)
            module = str(script) if as_module else ""
            path = find_script(script, as_module=as_module)
            sys.path.insert(0, os.getcwd())  # --import may name modules in this directory
            workers = workers or str(place.count)
            least, most = worker_range(workers)
            SETTINGS["port"].value(port)
            if place.serves:
                require_own_address(listen)
            # Every process checks the settings, so that all of them say what is wrong.
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
                raise ConfigurationError(f"the secret of the job is unknown. {HOW}")
            device = device_of_process(place.local, settings["imports"])
        from ..launcher.clusters.scheduled import join_job
        from ..launcher.terminal.channels import Streams

        serve = [f"--workers={workers}", f"--wait={wait:g}", f"--servers={servers}", *as_options(settings)]
        with interruptible("all processes that were started here have ended"):
            code = join_job(
                place,
                [*(["module", module] if module else ["script", str(path)]), *(arguments or [])],
                serve,
                listen=listen,
                port=port,
                token=token,
                version=__version__,
                console=plain_console(stderr=True),
                patience_s=wait,
                run_dir=run_dir,
                streams=Streams(show_all=show_all),
                device=device,
                force=settings["force"],
            )
        raise typer.Exit(code)

    return command
