"""The registry of all benchmarks, and the command line of `python -m benchmarks`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

from paceline.cli.console import run_app

from .harness import command_of

NAMES = (
    "transport overlap links codecs step slicing sync zipline simulator guard look unequal what-if advice auto data "
    "coordinator startup late-join checkpoints ray-startup accelerator peers"
)
BENCHMARKS = {name: name.replace("-", "_") for name in NAMES.split()} | {
    "overlap": "overlap.measurement",
    "peers": "peers.measurement",
}
"""Name of a benchmark -> the module whose function `measure` is declared as a benchmark."""


class _SpacedLists(TyperCommand):
    """A command whose list options also accept spaces between values: `--sizes 1 25` means `--sizes 1,25`.

    The command must not have positional arguments.
    """

    LISTS = ("--sizes", "--workers", "--systems")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        joined: list[str] = []
        for arg in args:
            if len(joined) >= 2 and joined[-2] in self.LISTS and not arg.startswith("-"):
                joined[-1] += f",{arg}"
            else:
                joined.append(arg)
        return super().parse_args(ctx, joined)


def app_of(names: Iterable[str] = BENCHMARKS) -> typer.Typer:
    """Return a command line with these benchmarks. Only the modules of these benchmarks are imported."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        help="Measure how fast Paceline is on this machine. Run the benchmarks on an otherwise idle machine.",
    )
    app.callback()(lambda: None)  # without it, typer would not accept the name of the only command
    for name in names:
        measure = import_module(f"benchmarks.{BENCHMARKS[name]}").measure
        app.command(name, cls=_SpacedLists)(command_of(name, measure))
    return app


def main() -> None:
    """Run the command line."""
    named = [name for name in sys.argv[1:2] if name in BENCHMARKS]
    run_app(app_of(named or BENCHMARKS))
