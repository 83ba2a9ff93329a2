"""The options of the commands.

This module reads the values of options, makes options from the settings of a run, and contains the options that several
commands share.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..errors import ConfigurationError
from ..settings import SETTINGS
from ..settings.table import TYPES


def whole_number_option(
    name: str, *names: str, least: int | None = None, most: int | None = None, **settings: Any
) -> Any:
    """Return an option whose value is a whole number.

    Args:
        name: name of the option, for example --workers.
        names: other names of the option.
        least: smallest value; None if the library checks the value.
        most: largest value; None for no limit.
        settings: other arguments for `typer.Option`.
    """
    return _option(name, *names, read=whole_number, what="a whole number", least=least, most=most, **settings)


def number_option(name: str, *names: str, least: float | None = None, **settings: Any) -> Any:
    """Return an option whose value is a number with or without a fraction. See `whole_number_option`."""
    return _option(name, *names, read=float, what="a number", least=least, most=None, **settings)


def _option(
    name: str,
    *names: str,
    read: Callable[[str], float],
    what: str,
    least: float | None,
    most: float | None,
    **settings: Any,
) -> Any:
    bounds = "" if least is None else f" >= {least:g}" if most is None else f" from {least:g} to {most:g}"

    def refusal(shown: str) -> ConfigurationError:
        key = name.removeprefix("--").replace("-", "_")  # as the library names it
        return ConfigurationError(f"{key} is {shown}, expected {what}{bounds}.")

    def parse(given: str | float) -> float:
        if not isinstance(given, str):
            return given  # the default value
        try:
            value = read(given)
        except ValueError:
            raise refusal(repr(given)) from None
        if (least is not None and not value >= least) or (most is not None and not value <= most):
            raise refusal(f"{value}")
        return value

    return typer.Option(name, *names, parser=parse, **{"metavar": "N", **settings})


def whole_number(text: str) -> int:
    """Return the integer that a text stands for. Unlike `int`, accept only digits and a sign."""
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(text)
    return int(text)


# -- Options whose value may be left out, such as --dashboard. The library for the command line does not support them

PORT = re.compile(r"(\S+:)?[0-9]+")

OPTIONAL = {"--dashboard": PORT}
"""Option -> pattern of its value. In a command with a script, the word after the option is its value if it matches the
pattern. Otherwise, the option has no value, and the word may be the script."""


class OptionalValues(TyperCommand):
    """A command that accepts an option of `OPTIONAL` without a value, and takes the value to be ""."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self.completed(ctx, args))

    def completed(self, ctx: Any, args: Sequence[str]) -> list[str]:
        """Return the arguments of this command, with a value for each option of `OPTIONAL`."""
        valued = {
            name
            for parameter in self.params
            if parameter.param_type_name == "option" and not getattr(parameter, "is_flag", False)
            for name in parameter.opts
        }
        return completed(args, valued, mixed=ctx.allow_interspersed_args)


def completed(args: Sequence[str], valued: Collection[str], *, mixed: bool = False) -> list[str]:
    """Return the arguments, with a value for each option of `OPTIONAL`.

    Args:
        args: the arguments.
        valued: the names of all options that have values.
        mixed: True if options may also follow other arguments; False if the first other argument is the script, so that
            everything after it belongs to the script.

    >>> completed(["-n", "4", "--dashboard", "train.py", "--dashboard"], ["-n", "--dashboard"])
    ['-n', '4', '--dashboard=', 'train.py', '--dashboard']
    >>> completed(["--dashboard", "0.0.0.0:8000", "train.py"], ["--dashboard"])
    ['--dashboard=0.0.0.0:8000', 'train.py']
    """
    done: list[str] = []
    left = list(args)
    while left:
        word = left.pop(0)
        if word in OPTIONAL:
            is_value = left and (
                OPTIONAL[word].fullmatch(left[0]) if not mixed else not left[0].startswith("-")
            )
            done.append(f"{word}={left.pop(0) if is_value else ''}")
            continue
        done.append(word)
        if word == "--" or not (word.startswith("-") or mixed):
            break
        if word in valued and left:
            done.append(left.pop(0))
    return [*done, *left]


# -- The options of the settings of a run, which are made from the table of settings -------------------------
#
# A command takes these options as `**settings`, and passes them on to `make_job` in the same way. The options
# accept any value. The table checks the values, so that a wrong value is rejected with the same message as in
# Python.

Command = Callable[..., None]


def _lenient(read: Callable[[str], float]) -> Callable[[Any], Any]:
    """Return a function that reads a number, and returns anything else as it is, such as the default value."""

    def read_or_return(given: Any) -> Any:
        try:
            return read(given) if isinstance(given, str) else given
        except ValueError:
            return given

    return read_or_return


NUMBERS: dict[Any, Callable[[str], float]] = {
    int: whole_number,
    int | None: whole_number,
    float: float,
    float | None: float,
}
"""Type of a setting -> the function that reads its option."""

READ_AS = {bool: bool, Sequence[str]: list[str]}
"""Type of a setting -> the type of its option. All other options are texts or numbers."""


def option_of(name: str) -> Any:
    """Return the option of a setting, as an annotation."""
    row, kind = SETTINGS[name], TYPES[name]
    more: dict[str, Any] = {}
    if kind in NUMBERS:
        more = {"parser": _lenient(NUMBERS[kind]), "metavar": "N"}
    if kind == Sequence[str]:
        more = {"show_default": False}
    if row.metavar:
        more["metavar"] = row.metavar
    return typer.Option(row.option, help=row.help, rich_help_panel=row.panel, **more)


def takes_settings(name: str, *, before: str) -> Callable[[Command], Command]:
    """Return a decorator which gives a command an option for each of its settings, in place of `**settings`.

    If the command itself has a parameter with the name of a setting, this parameter replaces the option.

    Args:
        name: name of the command in `Setting.commands`.
        before: the parameter that the options precede in the help text.
    """

    def decorate(command: Command) -> Command:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]
        names = [parameter.name for parameter in own]
        options = [
            inspect.Parameter(
                row.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=row.default,
                annotation=Annotated[READ_AS.get(TYPES[row.name], str | None), option_of(row.name)],
            )
            for row in SETTINGS.values()
            if name in row.commands and row.name not in names
        ]
        place = names.index(before)
        parameters = [*own[:place], *options, *own[place:]]

        @functools.wraps(command)
        def with_settings(**values: Any) -> None:
            command(**values)

        with_settings.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_settings.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_settings

    return decorate


def as_options(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings as they are written on a command line, except those that have their default value."""
    words = []
    for name, value in settings.items():
        row = SETTINGS[name]
        if TYPES[name] == Sequence[str]:
            words += [f"{row.option}={each}" for each in value]
        elif value is True:
            words.append(row.option)
        elif value != row.default:
            words.append(f"{row.option}={value}")
    return words


# -- The command-line options that several commands share, apart from those of the table of settings ---------

Workers = Annotated[
    int | None,
    whole_number_option(
        "--workers",
        "-n",
        least=1,
        help="Number of workers. Default: one for each accelerator of this machine; 2 if there is none.",
        show_default=False,
        rich_help_panel="Run",
    ),
]
DevicesOption = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="auto|DEVICE,...",
        help="Devices of the workers, one worker for each: cuda:0,cuda:1,cpu. A device may occur several times, and "
        "a single device is used by all --workers. Default: auto, all accelerators of the kind that torch chooses, or "
        "the CPU if there is none.",
        show_default=False,
        rich_help_panel="Run",
    ),
]
ServedServers = Annotated[
    int,
    whole_number_option(
        "--servers",
        least=1,
        help="Number of servers. Each server holds one or more shards of the parameters (see --shards).",
        rich_help_panel="Run",
    ),
]
RemoteServers = Annotated[
    int,
    whole_number_option(
        "--remote-servers",
        least=0,
        metavar="M",
        help="Number of the --servers that other machines bring (paceline join --servers K), so that their links "
        "share the traffic. The other servers, at least one, run on this machine.",
        rich_help_panel="Run",
    ),
]
Trusted = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Import the modules that the run directory lists, even if you did not start the run, or started it with "
        "another home directory.",
    ),
]
ModelImports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Import this module, which defines your own synchronization models. The module may be in the current "
        "directory. Can be repeated.",
        show_default=False,
    ),
]
Port = Annotated[int, option_of("port")]
RunDir = Annotated[str | None, option_of("run_dir")]
AsModule = Annotated[
    bool,
    typer.Option(
        "-m",
        help="Run a module, as python -m does: give its name (package.module) instead of the script.",
        show_default=False,
        rich_help_panel="Run",
    ),
]
ShowAll = Annotated[
    bool,
    typer.Option(
        "--show-all",
        help="Show the output of all workers and servers, each line with the name of its process. No process has "
        "a terminal. Default: show the output of worker 0.",
        show_default=False,
        rich_help_panel="Run",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Directory for pictures and JSON files. Default: a new directory under ./runs.",
        show_default=False,
    ),
]
_CHANGES = "What if"
ChangedWorkers = Annotated[
    int | None,
    whole_number_option(
        "--workers",
        least=1,
        help="Simulate this number of workers. The additional workers are copies of the recorded "
        "workers, in turn; their times are resampled from the recorded times.",
        show_default=False,
        rich_help_panel=_CHANGES,
    ),
]
ChangedServers = Annotated[
    int | None,
    whole_number_option(
        "--servers",
        least=1,
        help="Simulate this number of servers.",
        show_default=False,
        rich_help_panel=_CHANGES,
    ),
]
ChangedBandwidth = Annotated[
    str | None,
    typer.Option(
        "--bandwidth",
        metavar="RATE",
        help="Simulate this bandwidth of each machine, for example 1gbit or '100 MB/s'.",
        show_default=False,
        rich_help_panel=_CHANGES,
    ),
]
ChangedSlow = Annotated[
    str | None,
    typer.Option(
        "--slow",
        metavar="WORKER:FACTOR,...",
        help="Multiply the compute times of some workers: 3:2 if worker 3 takes twice as long.",
        show_default=False,
        rich_help_panel=_CHANGES,
    ),
]
RecordedBandwidth = Annotated[
    str | None,
    typer.Option(
        "--recorded-bandwidth",
        metavar="RATE",
        help="Bandwidth of each machine in the recorded run. If given, the transfers of this run are simulated, "
        "instead of counting as latency.",
        show_default=False,
        rich_help_panel=_CHANGES,
    ),
]
SimulatedWire = Annotated[
    str | None,
    typer.Option(
        "--wire",
        metavar=SETTINGS["wire"].metavar,
        help="Simulate this format of float32 gradients and weights, as for paceline run. Default: the format "
        "of the recorded run, else float32.",
        show_default=False,
        rich_help_panel=_CHANGES,
    ),
]
