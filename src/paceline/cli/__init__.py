"""The command-line interface: `paceline run`, `serve`, `join`, `status` and the other commands.

The commands parse options, call the library and print results. Exit codes:

- 0: success.
- 1: a run failed, and the traceback of the process that failed is printed once; `check` has found a mistake; or
  `replay` has found a decision that differs.
- 2: invalid input. An error message is printed to standard error before any process is started.
- 3: the run finished, but a worker crashed or some results could not be saved in the run directory; or some runs of a
  study have failed.
- 130: the command was interrupted by Ctrl-C, and all processes have ended.
- 143, 129 or 131: the command was terminated by SIGTERM, SIGHUP or SIGQUIT, and all processes have ended.

Read first: `run`, whose options come from `options`.

Imports from `errors`, `files`, `trust`, `words`, `sync`, `core`, `trace`, `wire`, `settings`, `run`, `look`,
`sim`, `start`, `lab` and `studies`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import VERSION
from ..errors import unknown_name
from ..start.terminal import plain_console
from .console import load_named_models, run_app
from .options import ModelImports
from .report import replay, report, status
from .resumable import Resumable
from .run import SLURM, RunCommand, demo, join, run, scheduled_join, serve
from .simulate import advise, simulate
from .study import check, study

__all__ = ["app", "main"]


class Commands(TyperGroup):
    """The commands. `join --slurm` is a separate command: it has other options than `join`, and takes no address."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[:2] == ["join", "--slurm"]:
            args = ["join --slurm", *args[2:]]
        if args[0] not in self.commands:
            raise unknown_name(
                "command", args[0], [n for n, each in self.commands.items() if not each.hidden]
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Data-parallel PyTorch training on machines of unequal speed.",
)


def main() -> None:
    """Run the command line."""
    run_app(app)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {VERSION}")
        raise typer.Exit


@app.callback()
def _paceline(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def sync(
    name: Annotated[
        str | None, typer.Argument(help="Synchronization model to describe.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--list", help="List all models with their parameters.")] = False,
    imports: ModelImports = None,
) -> None:
    """List the synchronization models, or describe one of them.

    paceline sync pssp
    """
    from ..look.models import ModelsTable, describe, page_text, pages

    load_named_models(name or "", imports)
    if name is None or every:
        plain_console().print(ModelsTable(pages()), highlight=False, crop=False)
    else:
        plain_console().print(page_text(describe(name)), highlight=False, crop=False)


def _help(command: Callable[..., None]) -> str:
    """Return the docstring of a command with each paragraph on one line, so that it wraps at the terminal's width."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


# The help text lists the commands in the order below. Arguments after the script's name belong to the script.
for with_script in (run, check):
    app.command(
        cls=RunCommand,
        help=_help(with_script),
        context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    )(with_script)
app.command(cls=Resumable, help=_help(serve))(serve)
for name, text, joining in (
    ("join", _help(join), join),
    ("join --slurm", SLURM, scheduled_join("slurm")),
):
    app.command(
        name,
        cls=RunCommand,
        help=text,
        hidden=name != "join",
        context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    )(joining)
for command in (status, report, demo, simulate, advise, study, replay, sync):
    app.command(help=_help(command))(command)
