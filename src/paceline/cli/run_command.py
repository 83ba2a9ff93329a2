"""`paceline run` and `paceline demo`: training in several processes."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer
from rich.table import Table
from rich.text import Text

from ..errors import ConfigurationError
from ..launcher.live_run.reporting import REPORT
from ..launcher.terminal.output import plain_console, print_sentence
from ..report.summary import summary_rows
from ..settings import Settings
from ..settings.setting import RUN
from .console import EXIT_NOT_ALL_WELL, interruptible
from .numbers import whole_number_option
from .options import AsModule, DevicesOption, RunDir, ShowAll, Workers
from .resumable import Resumable
from .setting_options import takes_settings

if TYPE_CHECKING:
    from ..launcher.live_run.run_results import RunResult

__all__ = ["RunCommand", "demo", "find_script", "report", "run"]


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
        options.discard("-m")  # it means nothing after the script
        strays = _strays(arguments, options)
        separated = given[: len(given) - len(arguments) - 1][-1:] == ["--"]
        if strays and not separated:
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
        from ..launcher.processes.devices import assign_devices, shared
        from ..outlets.wanted import open_outlets
        from ..runtime.job_description import describe
        from ..runtime.job_options import make_job
        from ..runtime.resuming import require_same_source

        module = str(script) if as_module else ""
        script = find_script(script, as_module=as_module)
        masked = not settings["torchrun_env"]
        assigned = assign_devices(devices, workers, usual=2, imports=settings["imports"], masked=masked)
        job = make_job(workers=assigned.workers, devices=assigned.devices, dry_run=True, **settings)
        if job.resumed is not None and not settings["accept_changes"]:
            source = script.read_text(errors="replace")
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
        _print_pairs({**describe(job), "command": " ".join(words)})
        return
    from ..launcher.live_run.local import Placement
    from ..launcher.processes.interruption import Interrupted, Terminated
    from ..launcher.processes.program import importing
    from ..launcher.processes.starting import Starter
    from ..launcher.terminal.run_display import announce

    announce(job, console)
    with interruptible(), outlets, Starter(Placement.on_loopback(job).prefixes()) as starter:
        # The launcher and the processes of the run import torch, which takes a second, at the same time.
        with importing():
            from ..launcher.launch import run_script

        try:
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
        except (Interrupted, Terminated) as end:
            if end.summary:
                _print_summary(end.summary)
            raise
    report(result)


def report(result: RunResult) -> None:
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
    from ..runtime.job_options import require_script

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
    locations: list[str] | None = None
    spec = None
    for part in [*name.split("."), "__main__"]:
        spec = PathFinder.find_spec(part, locations)
        if spec is None or spec.submodule_search_locations is None:
            break
        locations = list(spec.submodule_search_locations)
    if spec is None or spec.origin is None or part not in (name.rpartition(".")[2], "__main__"):
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
    run_dir: RunDir = None,
) -> None:
    """Compare four sync models, and bsp with balanced batches, by training on handwritten digits.

    Each model has the learning rate and momentum of bsp, translated, and in another run its own best ones. One of the
    four workers is three times slower than the others. The demo takes about three minutes on two cores and ends with
    a table and a picture.
    """
    from ..demo.settings import EVERY_SETTING, SETTINGS
    from ..demo.trials import run_demo
    from ..trace.run_dir import require_usable

    if run_dir is not None:
        require_usable(run_dir)
    with interruptible():
        run_demo(
            console=plain_console(),
            run_dir=None if run_dir is None else Path(run_dir),
            seeds=tuple(range(seeds)),
            settings=EVERY_SETTING if every else SETTINGS,
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
